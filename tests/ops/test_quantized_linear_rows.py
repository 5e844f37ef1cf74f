"""The products that use matrix instructions, without a GPU: what they compile to is run instruction by instruction."""

import numpy as np
import pytest
import torch
import triton

from engine.ops.quantize_rows import quantize_rows_reference
from engine.ops.quantized_dot import num_segments
from engine.ops.quantized_linear import quantized_linear_reference
from engine.ops.quantized_linear_rows import REGISTERS, constants_of, linear_rows_kernel, registers_for
from engine.ops.quantized_weight import quantize_weight
from tests.ops.kernels import IS_INTERPRETED
from tests.ops.ptx import Block
from tests.ops.targets import compiled
from tests.ops.test_compile import POINTERS

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
TYPES = POINTERS | {"residual_ptr": "*fp32", "y_ptr": "*fp32"}
TYPES |= dict.fromkeys(("rows", "outputs", "first_outputs", "groups", "first_tiles"), "i32")


def laid_out(tensors):
    """One memory with all tensors, and where each begins; zero is no address of any."""
    places, end = [], 256
    for tensor in tensors:
        places.append(end)
        end += -(-tensor.nbytes // 256) * 256
    memory = np.zeros(end, np.uint8)
    for place, tensor in zip(places, tensors, strict=True):
        memory[place : place + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memory, places


def run(x, weights, residual):
    first, last = weights[0], weights[-1]
    groups, rows, outputs = x.scales.shape[1], *residual.shape
    segments = num_segments(groups)
    constants = constants_of(rows, weights, segments) | {"HAS_RESIDUAL": True, "PDL": False}
    made = compiled(linear_rows_kernel, 80, TYPES, constants, segments // 2)
    y = torch.full((rows, outputs), torch.nan)
    tensors = [x.values, x.scales, x.sums, first.words, first.scales, last.words, last.scales, residual, y]
    memory, places = laid_out(tensors)
    first_tiles, tiles = len(first.words), sum(len(weight.words) for weight in weights)
    for place in np.ndindex(tiles, triton.cdiv(rows, 8 * constants["BLOCKS"])):
        parameters = [*places, rows, outputs, first.rows, groups, first_tiles, 0, 0]
        Block(made.asm["ptx"], memory, parameters, 16 * segments, place).run()
    return torch.from_numpy(memory[places[-1] : places[-1] + y.nbytes]).view(torch.float32).view(rows, outputs)


@pytest.mark.parametrize(
    "rows, columns, matrices",
    [
        (3, 192, [(16, 4)]),
        (8, 576, [(20, 8)]),
        (5, 1088, [(16, 4), (20, 8)]),
        (9, 192, [(32, 4)]),
        (33, 128, [(16, 8)]),
        (4, 4160, [(16, 4)]),
    ],
)
def test_bits_are_those_of_the_reference(rows, columns, matrices):
    weights = [quantize_weight(torch.randn(outputs, columns), bits)[0] for outputs, bits in matrices]
    x = quantize_rows_reference(torch.randn(rows, columns))
    residual = torch.randn(rows, sum(outputs for outputs, _ in matrices))
    assert torch.equal(run(x, weights, residual), quantized_linear_reference(x, weights, torch.float32, residual))


@pytest.mark.parametrize(
    "segments, programs, expected", [(8, 772, REGISTERS), (16, 128, REGISTERS), (16, 320, None), (16, 1024, None)]
)
def test_registers_leave_room_for_a_second_program_where_there_is_one(segments, programs, expected):
    assert registers_for(segments, programs, processors=132) == expected
