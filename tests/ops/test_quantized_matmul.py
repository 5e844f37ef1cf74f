"""quantized_matmul and its grouped form: against their oracles, for rows in any number and order."""

import pytest
import torch
import torch.nn.functional as F

from engine.ops import dequantized_matmul, quantized_matmul
from engine.ops.dequantized_matmul import dequantized_matmul_triton
from engine.ops.quantized_experts import QuantizedExperts
from engine.ops.quantized_grouped import (
    LISTED,
    expert_blocks,
    expert_blocks_kernel,
    quantized_grouped_experts_reference,
    quantized_grouped_experts_triton,
)
from engine.ops.quantized_matmul import (
    MatmulShape,
    down_shape_for,
    in_order_of,
    launch_matmul,
    matmul_shape_for,
    quantized_matmul_kernel,
    quantized_matmul_reference,
    quantized_matmul_triton,
    quantized_mlp_reference,
    quantized_mlp_triton,
)
from engine.ops.quantized_weight import dequantize_weight, quantize_weight
from tests.ops.conftest import assert_matches
from tests.ops.kernels import IS_INTERPRETED, both, needs_kernels
from tests.ops.targets import SHARED_MEMORY, compiled

MATMULS = both(quantized_matmul_reference, quantized_matmul_triton)
MLPS = both(quantized_mlp_reference, quantized_mlp_triton)
GROUPED = both(quantized_grouped_experts_reference, quantized_grouped_experts_triton)
BITS = pytest.mark.parametrize("bits", [4, 8])
# products of bf16 round weights and activations; the interpreter multiplies in fp32
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
SMALL = MatmulShape(16, 32, 4, 2)
# arguments that are multiples of 16; an expert's width of 512 has 8 groups
SIXTEENS = ("x_stride", "y_stride", "outputs", "tiles", "groups")


def matrix(bits, *shape, device):
    return quantize_weight(torch.randn(*shape, device=device) * shape[-1] ** -0.5, bits)[0]


def exact_swiglu(x, gate_up):
    gate, up = (x.double() @ dequantize_weight(gate_up).double().T).chunk(2, dim=-1)
    return F.silu(gate) * up


def close(actual, oracle):
    """Within what bf16 weights cost: 2**-9 a weight, at random."""
    assert torch.isfinite(actual).all()
    assert (actual.double() - oracle).norm() <= (1e-5 if actual.dtype == torch.float32 else 6e-3) * oracle.norm()


@pytest.mark.parametrize("implementation", MATMULS)
@BITS
@pytest.mark.parametrize("rows, outputs, columns", [(1, 16, 64), (19, 50, 128)])
def test_matches_oracle(implementation, bits, rows, outputs, columns, device):
    weight = matrix(bits, outputs, columns, device=device)
    x = torch.randn(rows, columns, device=device, dtype=DTYPE)
    residual = torch.randn(rows, outputs, dtype=DTYPE, device=device)
    exact = x.double() @ dequantize_weight(weight).double().T
    close(implementation(x, [weight], DTYPE), exact)
    close(implementation(x, [weight], DTYPE, residual), exact + residual.double())


@pytest.mark.parametrize("implementation", MATMULS)
def test_matrices_of_other_bits_stand_one_above_the_other(implementation, device):
    weights = [matrix(4, 48, 64, device=device), matrix(8, 6, 64, device=device)]
    x = torch.randn(7, 64, device=device, dtype=DTYPE)
    exact = x.double() @ torch.cat([dequantize_weight(weight) for weight in weights]).double().T
    close(implementation(x, weights, DTYPE), exact)


@pytest.mark.parametrize("implementation", MLPS)
@pytest.mark.parametrize("bits, down_bits", [(4, 4), (8, 4), (4, 8)])
def test_mlp_matches_oracle(implementation, bits, down_bits, device):
    """What lies between the products is written in the order in which the second one reads it."""
    gate_up, down = matrix(bits, 128 * 2, 64, device=device), matrix(down_bits, 80, 128, device=device)
    x, residual = (torch.randn(5, width, device=device, dtype=DTYPE) for width in (64, 80))
    exact = exact_swiglu(x, gate_up) @ dequantize_weight(down).double().T
    close(implementation(x, gate_up, down, DTYPE), exact)
    close(implementation(x, gate_up, down, DTYPE, residual), exact + residual.double())


@pytest.mark.parametrize("implementation", MATMULS)
def test_rows_may_lie_apart(implementation, device):
    weight = matrix(4, 16, 64, device=device)
    wide = torch.randn(3, 192, device=device, dtype=DTYPE)
    part = wide[:, 64:128]
    assert torch.equal(implementation(part, [weight], DTYPE), implementation(part.contiguous(), [weight], DTYPE))


def example(rows, device, num_experts=5, num_chosen=2, shared_bits=8):
    experts = QuantizedExperts(
        gate_up=matrix(4, num_experts, 64 * 2, 64, device=device),
        down=matrix(4, num_experts, 64, 64, device=device),
        shared_gate_up=matrix(shared_bits, 128, 64, device=device),
        shared_down=matrix(shared_bits, 64, 64, device=device),
    )
    chosen = torch.stack([torch.randperm(num_experts, device=device)[:num_chosen] for _ in range(rows)])
    return experts, chosen, torch.rand(rows, num_chosen + 1, device=device)


def naive(x, chosen, weights, experts):
    y = torch.zeros(len(x), experts.down.rows, dtype=torch.float64, device=x.device)
    for r in range(len(x)):
        pairs = [(experts.gate_up[e], experts.down[e]) for e in chosen[r].tolist()]
        pairs.append((experts.shared_gate_up, experts.shared_down))
        for (gate_up, down), weight in zip(pairs, weights[r].double(), strict=True):
            y[r] += weight * (exact_swiglu(x[r : r + 1], gate_up) @ dequantize_weight(down).double().T)[0]
    return y


@pytest.mark.parametrize("implementation", GROUPED)
@pytest.mark.parametrize("rows, shared_bits", [(1, 8), (40, 8), (3, 4)])
def test_experts_match_naive_sum(implementation, rows, shared_bits, device):
    experts, chosen, weights = example(rows, device, shared_bits=shared_bits)
    x = torch.randn(rows, 64, device=device, dtype=DTYPE)
    residual = torch.randn(rows, 64, device=device, dtype=DTYPE)
    exact = naive(x, chosen, weights, experts)
    close(implementation(x, chosen, weights, experts, DTYPE, residual), exact + residual.double())


@needs_kernels
def test_all_rows_choose_one_expert(device):
    experts, chosen, weights = example(40, device)
    chosen[:] = torch.tensor([4, 1], device=device)
    x = torch.randn(40, 64, device=device, dtype=DTYPE)
    actual = quantized_grouped_experts_triton(x, chosen, weights, experts, DTYPE, shape=SMALL)
    close(actual, naive(x, chosen, weights, experts))


@needs_kernels
@pytest.mark.parametrize("rows, block_rows, most", [(1, 16, 5), (7, 2, 5), (64, 16, 5), (64, 16, 2), (1100, 64, 5)])
def test_blocks_cover_every_row_once(rows, block_rows, most, device):
    """most  experts that are chosen at all; more rows than a program looks at together"""
    chosen = torch.stack([torch.randperm(most, device=device)[:2] for _ in range(rows)])
    order, *lists = expert_blocks(chosen, 5, block_rows, 3)
    assert torch.equal(order.long(), chosen.flatten().sort(stable=True).indices)
    for blocks, size in zip(lists, (block_rows, 3), strict=True):
        pieces = [(expert, range(first, min(end, first + size))) for expert, first, end in blocks.tolist()]
        assert sorted(place for _, places in pieces for place in places) == list(range(chosen.numel()))
        for expert, places in pieces:
            assert (chosen.flatten()[order[list(places)].long()] == expert).all()


def test_matches_the_fixed_tolerance_in_fp32():
    weight = matrix(8, 32, 128, device="cpu")
    x = torch.randn(9, 128)
    exact = x.double() @ dequantize_weight(weight).double().T
    assert_matches(quantized_matmul_reference(x, [weight], torch.float32), exact)


def compiled_matmul(capability, shape, is_swiglu, bits=4, sixteens=(), *, is_grouped=True, has_residual=False):
    pointers = {"x": "bf16", "bytes": "i8", "scales": "fp16", "y": "bf16", "residual": "bf16", "order": "i32"}
    types = {f"{name}_ptr": f"*{kind}" for name, kind in (pointers | {"blocks": "i32"}).items()}
    types |= dict.fromkeys(("x_stride", "y_stride", "rows", "outputs", "groups", "tiles"), "i32")
    constants = {
        "BITS": bits, "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "NUM_STAGES": shape.num_stages,
        "IS_SWIGLU": is_swiglu, "HAS_RESIDUAL": has_residual, "IS_GROUPED": is_grouped,
        "GATHERS": 8 if is_swiglu and is_grouped else 0, "SCATTERS": is_grouped and not is_swiglu,
        "HALVES_OUTPUT": is_swiglu, "WAITS": capability == 90, "INTERPRETED": False,
    }  # fmt: skip
    return compiled(quantized_matmul_kernel, capability, types, constants, shape.num_warps, sixteens)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("is_swiglu", [False, True])
@pytest.mark.parametrize("capability", [86, 90])
def test_compiles_within_shared_memory(capability, is_swiglu):
    made = compiled_matmul(capability, matmul_shape_for(divmod(capability, 10), 4096, is_swiglu), is_swiglu)
    assert made.metadata.shared <= SHARED_MEMORY[capability]


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
@BITS
@pytest.mark.parametrize("rows", [8, 64, 4096])
def test_weights_stay_in_registers_until_their_products_have_ended(rows, bits):
    """`compiled` asks so of every kernel; here of all shapes that a Hopper card runs, as both models launch them."""
    large = (9, 0)
    compiled_matmul(90, matmul_shape_for(large, rows, True), True, bits, SIXTEENS)
    compiled_matmul(90, down_shape_for(large, rows), False, bits, SIXTEENS[:-1])
    for is_swiglu, has_residual in ((False, True), (False, False), (True, False)):
        shape = matmul_shape_for(large, rows, is_swiglu, 2048)
        compiled_matmul(90, shape, is_swiglu, bits, SIXTEENS, is_grouped=False, has_residual=has_residual)


@pytest.mark.parametrize("capability, waits", [((8, 6), False), ((9, 0), True), ((10, 0), False)])
def test_they_are_waited_for_on_the_cards_that_read_registers(capability, waits, monkeypatch):
    """Elsewhere it would only take the sums out of where products leave them."""
    launched = []
    kernel = type("Kernel", (), {"__getitem__": lambda _, grid: lambda *_, **options: launched.append(options)})()
    monkeypatch.setattr(quantized_matmul, "quantized_matmul_kernel", kernel)
    monkeypatch.setattr(quantized_matmul, "capability_of", lambda _: capability)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    launch_matmul(x, matrix(4, 16, 64, device="cpu"), torch.empty(3, 16), SMALL)
    assert [options["WAITS"] for options in launched] == [waits]


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("capability", [86, 90])
def test_the_order_of_experts_compiles(capability):
    types = {f"{name}_ptr": "*i32" for name in ("chosen", "order", "blocks", "others")}
    types |= dict.fromkeys(("count", "block_rows", "other_rows"), "i32")
    made = compiled(expert_blocks_kernel, capability, types, {"BLOCK": LISTED}, num_warps=8)
    assert made.metadata.shared <= SHARED_MEMORY[capability]


@needs_kernels
@BITS
@pytest.mark.parametrize("is_swiglu", [False, True])
def test_dequantized_matrices_give_the_same_bits(bits, is_swiglu, device, monkeypatch):
    """In slices of a matrix, the last of them narrow."""
    monkeypatch.setattr(dequantized_matmul, "MOST_BYTES", 2 * 128 * 128)
    outputs, rows = (208, 300) if is_swiglu else (290, 300)
    weight = matrix(bits, outputs * (1 + is_swiglu), 128, device=device)
    x, residual = (torch.randn(rows, width, device=device, dtype=DTYPE) for width in (128, outputs))
    found = torch.empty(2, rows, outputs, device=device, dtype=DTYPE)
    options = {"residual": residual, "is_swiglu": is_swiglu}
    ordered = in_order_of(weight, x).contiguous()
    # 64 outputs: fewer take other matrix instructions, which no shape that is in use does, and round otherwise
    launch_matmul(ordered, weight, found[0], MatmulShape(16, 64, 4, 2), **options)
    dequantized_matmul_triton(ordered, weight, found[1], **options)
    # the interpreter's products depend on where in them a row stands
    assert torch.allclose(*found, rtol=1e-4, atol=1e-4) if IS_INTERPRETED else torch.equal(*found)


@needs_kernels
@pytest.mark.gpu
def test_a_row_has_the_same_bits_beside_any_number_of_others(device):
    """Whether a matrix is decoded on the way or in memory, and in whatever blocks."""
    gate_up, down = matrix(4, 2 * 512, 2048, device=device), matrix(4, 2048, 512, device=device)
    experts, chosen, weights = example(3000, device, num_experts=8)
    x, narrow = (torch.randn(3000, width, device=device, dtype=DTYPE) for width in (2048, 64))
    whole = quantized_mlp_triton(x, gate_up, down, DTYPE), quantized_matmul_triton(x, [gate_up], DTYPE)
    grouped = quantized_grouped_experts_triton(narrow, chosen, weights, experts, DTYPE)
    for rows in (64, 192, 1024, 2048):
        part = x[:rows].clone()
        assert torch.equal(quantized_mlp_triton(part, gate_up, down, DTYPE), whole[0][:rows])
        assert torch.equal(quantized_matmul_triton(part, [gate_up], DTYPE), whole[1][:rows])
        few = quantized_grouped_experts_triton(narrow[:rows], chosen[:rows], weights[:rows], experts, DTYPE)
        assert torch.equal(few, grouped[:rows])


@needs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 200, 512, 1000])
def test_experts_of_real_size_give_a_row_the_same_bits(rows, device):
    """However many rows share an expert, and again when the same is asked twice."""
    hidden, width, num_experts = 2048, 512, 64
    experts = QuantizedExperts(
        gate_up=matrix(4, num_experts, 2 * width, hidden, device=device),
        down=matrix(4, num_experts, hidden, width, device=device),
        shared_gate_up=matrix(4, 2 * width, hidden, device=device),
        shared_down=matrix(4, hidden, width, device=device),
    )
    x = torch.randn(3000, hidden, device=device, dtype=DTYPE)
    weights, chosen = torch.randn(3000, num_experts, device=device).softmax(-1).topk(8)
    weights, chosen = torch.cat([weights, weights[:, :1]], dim=1), chosen.int()

    def first(count):
        parts = (part[:count].contiguous() for part in (x, chosen, weights))
        return quantized_grouped_experts_triton(*parts, experts, DTYPE)

    whole, part = first(3000), first(rows)
    assert torch.isfinite(whole).all() and torch.isfinite(part).all()
    assert torch.equal(first(3000), whole)
    assert torch.equal(part, whole[:rows])


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("capability, is_swiglu", [(90, False), (90, True), (100, False)])
def test_dequantized_products_compile(capability, is_swiglu):
    block_m, block_n, block_k = (getattr(dequantized_matmul, name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    types = {
        f"{name}_desc": f"tensordesc<bf16[{n}, {block_k}]>" for name, n in (("rows", block_m), ("matrix", block_n))
    }
    types |= {"y_ptr": "*bf16", "residual_ptr": "*bf16"}
    types |= dict.fromkeys(("rows", "first", "count", "columns", "y_stride", "residual_stride"), "i32")
    constants = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "TOGETHER": 8,
        "NUM_STAGES": dequantized_matmul.NUM_STAGES, "IS_SWIGLU": is_swiglu, "HAS_RESIDUAL": not is_swiglu,
        "HALVES_OUTPUT": is_swiglu, "INTERPRETED": False,
    }  # fmt: skip
    made = compiled(
        dequantized_matmul.dequantized_matmul_kernel, capability, types, constants, dequantized_matmul.NUM_WARPS
    )
    assert made.metadata.shared <= SHARED_MEMORY[capability]


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantizing_compiles(bits):
    types = {"bytes_ptr": "*i8", "scales_ptr": "*fp16", "target_ptr": "*bf16"}
    types |= dict.fromkeys(("first_tile", "tiles", "groups", "up_tile"), "i32")
    compiled(dequantized_matmul.dequantize_kernel, 90, types, {"BITS": bits, "BLOCK": 4, "IS_SWIGLU": True}, 4)


def test_few_rows_are_spread_over_more_programs():
    large = (9, 0)
    # an output matrix of the 35B: 64 rows took eight programs
    assert matmul_shape_for(large, 64, False, 2048).block_n == 64
    assert matmul_shape_for(large, 512, False, 2048).block_m == 64
    assert matmul_shape_for(large, 8192, False, 2048) == matmul_shape_for(large, 8192, False)
    assert matmul_shape_for((8, 6), 4096, False, 2048) == MatmulShape(64, 128, 4, 3)
