# make serve | test | test-real | test-gpu | lint | bench      PYTHON=..., TORCH=..., ARGS="flags of the program"
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: serve test test-real test-gpu lint bench clean FORCE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -qq --disable-pip-version-check
TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
ARGS ?=
# what was chosen once stays, so that `make test` after `make serve TORCH=...` keeps the GPU build
TORCH ?= $(or $(shell cat $(VENV)/.torch 2>/dev/null),$(TORCH_CPU))

serve: $(VENV)/.ready
	@$(BIN)/python -m router.local $(ARGS)

# one thread a test process, two processes; what they start sleeps while it waits instead of spinning.
# Triton's interpreter has to be chosen before Triton is imported, so kernels without a GPU are a run of their own.
test: export OMP_NUM_THREADS := 1
test: export OMP_WAIT_POLICY := PASSIVE
test: $(VENV)/.ready-test
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 tests/ops -m kernels
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-real: $(VENV)/.ready-test
	$(if $(wildcard tests/e2e/vllm.py),@$(BIN)/python -m tests.e2e.vllm)
	@$(BIN)/python -m tests.e2e.installs
	@$(BIN)/python -m pytest --real -m real $(ARGS)

# where there is a GPU: every kernel against its oracle, the engine on its kernels, and the machine code of both
test-gpu: $(VENV)/.ready-test
	@$(BIN)/python -m pytest -q -n 4 -m kernels tests/ops
	@$(BIN)/python -m pytest -q -m "gpu and not kernels" tests $(ARGS)
	@$(BIN)/python -m tests.ops.machine_code $${TRITON_CACHE_DIR:-$$HOME/.triton/cache}

lint: $(VENV)/.ready-test
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench: $(VENV)/.ready
	@$(BIN)/python -m engine.bench $(ARGS)

clean:
	rm -rf $(VENV)

$(VENV)/.ready-test: $(VENV)/.ready
	@echo "installing what the tests need"
	@$(PIP) -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing $(TORCH)"
	@$(PIP) '$(TORCH)' $(if $(findstring +cpu,$(TORCH)),2>$(VENV)/torch.log || $(PIP) '$(TORCH)' --index-url $(TORCH_CPU_INDEX) || { cat $(VENV)/torch.log; rm -f $(VENV)/.torch; exit 1; })
	@echo "installing Longlane's dependencies"
	@$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.torch: FORCE | $(VENV)/.made
	@if [ "$$(cat $@ 2>/dev/null)" != '$(TORCH)' ]; then echo '$(TORCH)' > $@; fi

FORCE:

define FIND_PYTHON
# an environment that somebody made before stays
$(BIN)/python -m pip --version >/dev/null 2>&1 && exit 0
for python in $${PYTHON:-python3 python3.13 python3.12 python3.11}; do
  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
  python=
done
if [ -z "$$python" ]; then
  echo "Longlane needs Python 3.11 or newer: apt install python3, or name one with make PYTHON=/path/to/python3" >&2
  exit 1
fi
if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then
  echo "$$python cannot create environments: apt install python3-venv, or name another with make PYTHON=/path/to/python3" >&2
  exit 1
fi
echo "creating the environment in $(VENV) with $$("$$python" --version), once; this takes some minutes"
"$$python" -m venv --clear $(VENV)
endef
export FIND_PYTHON
export PYTHON

$(VENV)/.made:
	@(eval "$$FIND_PYTHON")
	@touch $@
