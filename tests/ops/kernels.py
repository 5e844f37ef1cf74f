"""Where kernels can run: on a GPU, or on the CPU under the interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS_RUN = torch.cuda.is_available() or IS_INTERPRETED
needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason="no GPU, TRITON_INTERPRET unset")


def both(reference, kernel):
    """Implementations for parametrize."""
    return [reference, pytest.param(kernel, marks=needs_kernels)]
