"""Shared oracle check. A failing op is fixed in the op, never here."""

import pytest
import torch

from tests.ops.kernels import KERNELS_RUN

# max relative L2 error against the fp64 oracle, and the largest single error
# allowed as a multiple of the output's rms
TOLERANCE = {torch.bfloat16: (4e-3, 3e-2), torch.float32: (1e-5, 1e-4)}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("kernels") and not KERNELS_RUN:
            item.add_marker(pytest.mark.skip(reason="no GPU, TRITON_INTERPRET unset"))


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poison_empty(monkeypatch):
    """Uninitialised memory reads as NaN, so that what is not written fails."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            out = allocate(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return wrapper

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def assert_matches(actual, oracle):
    assert oracle.dtype == torch.float64
    assert actual.shape == oracle.shape
    assert torch.isfinite(actual).all()
    error = actual.double() - oracle
    rel, worst = TOLERANCE[actual.dtype]
    rms = oracle.square().mean().sqrt()
    assert error.norm() <= rel * oracle.norm(), f"relative L2 {error.norm() / oracle.norm():.2e}"
    assert error.abs().max() <= worst * rms, "gross pointwise error"


def starts_of(num_rows, device):
    """[requests] lengths -> [requests + 1] int32"""
    return torch.tensor([0, *num_rows], device=device).cumsum(0).int()
