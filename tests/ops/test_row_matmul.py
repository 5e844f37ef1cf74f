"""row_matmul against its fp64 oracle, and the bits of a row beside others."""

import pytest
import torch

from engine.ops.row_matmul import BLOCK_OUTPUTS, BLOCK_ROWS, row_matmul_kernel, row_matmul_reference, row_matmul_triton
from tests.ops.conftest import assert_matches
from tests.ops.kernels import IS_INTERPRETED, both
from tests.ops.targets import SHARED_MEMORY, compiled

IMPLEMENTATION = pytest.mark.parametrize("implementation", both(row_matmul_reference, row_matmul_triton))


@IMPLEMENTATION
@pytest.mark.parametrize("rows, outputs", [(1, 1), (70, 257)])
def test_matches_its_oracle(implementation, rows, outputs, device):
    x = torch.randn(rows, 192, device=device).bfloat16()[:, :128]
    weight = torch.randn(outputs, 128, device=device).bfloat16()
    assert_matches(implementation(x, weight), x.double() @ weight.double().T)


@IMPLEMENTATION
def test_by_hand(implementation, device):
    x, weight = torch.zeros(2, 2, 64, device=device).bfloat16()
    x[0, 3], x[1, 63], weight[0, 3], weight[1] = 2.0, -1.0, 8.0, 0.5
    assert implementation(x, weight).tolist() == [[16.0, 1.0], [0.0, -0.5]]


@pytest.mark.kernels
def test_a_row_has_the_same_bits_beside_any_number_of_others(device):
    x, weight = (torch.randn(count, 256, device=device).bfloat16() for count in (200, 70))
    together = row_matmul_triton(x, weight)
    for rows in (1, 64, 130):
        assert torch.equal(row_matmul_triton(x[:rows].clone(), weight), together[:rows])


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("capability", [80, 86, 90])
def test_compiles_within_shared_memory(capability):
    types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "y_ptr": "*fp32"}
    types |= dict.fromkeys(("x_stride", "rows", "outputs", "columns"), "i32")
    constants = {"ROWS": BLOCK_ROWS, "OUTPUTS": BLOCK_OUTPUTS, "INTERPRETED": False}
    made = compiled(row_matmul_kernel, capability, types, constants, num_warps=4)
    assert made.metadata.shared <= SHARED_MEMORY[capability]
