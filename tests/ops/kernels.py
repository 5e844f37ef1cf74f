"""Where kernels can run: on a GPU, or on the CPU under the interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS_RUN = torch.cuda.is_available() or IS_INTERPRETED
# conftest.py skips these where kernels do not run; `-m kernels` runs nothing else
needs_kernels = pytest.mark.kernels


def both(reference, kernel):
    """Implementations for parametrize."""
    return [reference, pytest.param(kernel, marks=needs_kernels)]
