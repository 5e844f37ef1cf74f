"""The assembly that decodes words, run instruction by instruction: the interpreter of kernels takes another path."""

import operator

import numpy as np
import pytest
import torch

from engine.ops.kv_codec_e8 import E8_PLANES_ASM, e8_decode, e8_encode
from engine.ops.kv_codec_int8 import INT8_PLANES_ASM, int8_decode, int8_encode


def permute_bytes(a, b, selector):
    """prmt: byte i of the result is the byte of (b, a) that nibble i of the selector names."""
    source = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], axis=1)
    chosen = [int(selector[0]) >> (4 * i) & 15 for i in range(4)]
    return np.ascontiguousarray(source[:, chosen]).view(np.uint32).ravel()


def logic(a, b, c, table):
    """lop3: bit by bit, entry 4 a + 2 b + c of the table."""
    out = np.zeros_like(a)
    for entry in range(8):
        if int(table[0]) >> entry & 1:
            terms = [x if entry >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def halves(operation):
    return lambda a, b: operation(a.view(np.float16), b.view(np.float16)).view(np.uint32)


INSTRUCTIONS = {
    "mov.b32": lambda a: a.copy(),
    "prmt.b32": permute_bytes,
    "lop3.b32": logic,
    "xor.b32": operator.xor,
    "shl.b32": operator.lshift,
    "shr.u32": operator.rshift,
    "sub.rn.f16x2": halves(operator.sub),
    "mul.rn.f16x2": halves(operator.mul),
}


def run(assembly, inputs, num_outputs):
    """inputs  uint32 arrays in the order of the operands after the outputs"""
    registers = {f"${num_outputs + i}": x for i, x in enumerate(inputs)}

    def value(operand):
        return registers[operand] if operand in registers else np.full_like(inputs[0], int(operand, 0))

    for line in assembly.strip().strip("{}").strip().splitlines():
        name, _, operands = line.strip().rstrip(";").partition(" ")
        if name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        registers[target] = INSTRUCTIONS[name](*map(value, sources))
    return [registers[f"${i}"] for i in range(num_outputs)]


@pytest.mark.parametrize(
    "assembly, encode, decode, fold",
    [(INT8_PLANES_ASM, int8_encode, int8_decode, 4), (E8_PLANES_ASM, e8_encode, e8_decode, 8)],
)
@pytest.mark.parametrize("is_random", [True, False])
def test_planes_are_what_the_decoder_says(assembly, encode, decode, fold, is_random):
    words, scales = encode(torch.randn(300, 256))
    if is_random and fold == 8:
        # every word is a point; of int8, -128 is never written
        words = torch.randint(-(2**31), 2**31, words.shape).to(torch.int32)
    per_word = scales.repeat_interleave(64 // fold, dim=-1)
    pairs = words.reshape(-1, 2).numpy().view(np.uint32)
    scale_pairs = per_word.reshape(-1, 2).contiguous().numpy().view(np.uint32).ravel()
    planes = run(assembly.value, [pairs[:, 0].copy(), pairs[:, 1].copy(), scale_pairs], fold)
    # plane j of a pair holds dimension j of its first word and of its second
    actual = np.stack([plane.view(np.float16).reshape(-1, 2) for plane in planes], axis=-1).reshape(300, 256)
    exact = decode(words, scales, torch.float64)
    assert np.array_equal(actual, exact.half().numpy())
