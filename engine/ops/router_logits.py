"""The norm before a sparse feed-forward, its rounding for the experts, and the router's logits."""

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, has_dependent_launch, launch_options, next_power_of_2
from engine.ops.quantize_rows import (
    QuantizedRows,
    empty_rows,
    inverse_rms,
    inverse_rms_reference,
    quantize_rms_norm_reference,
    round_normed,
)
from engine.ops.quantized_dot import groups_of, load_where

_OUTPUTS = 4


def router_logits(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, router: torch.Tensor
) -> tuple[QuantizedRows, torch.Tensor]:
    """n = x / sqrt(mean(x**2) + eps) * norm_weight, as quantize_rms_norm rounds it, and router n, n not rounded

    x            [rows, hidden]
    norm_weight  [hidden] fp32
    router       [outputs, hidden]
    return       the rows, and [rows, outputs] in at least fp32; on a GPU no row changes the bits of another
    """
    if x.is_cuda:
        return router_logits_triton(x, norm_weight, eps, router)
    return router_logits_reference(x, norm_weight, eps, router)


def router_logits_reference(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, router: torch.Tensor
) -> tuple[QuantizedRows, torch.Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    logits = (wide * norm_weight.to(wide.dtype)) @ router.to(wide.dtype).T
    return quantize_rms_norm_reference(x, norm_weight, eps), logits * inverse_rms_reference(wide, eps)


def router_logits_triton(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, router: torch.Tensor
) -> tuple[QuantizedRows, torch.Tensor]:
    assert x.is_contiguous() and norm_weight.is_contiguous() and router.is_contiguous()
    (rows, hidden), outputs = x.shape, len(router)
    rounded = empty_rows(rows, hidden, x.device)
    groups = groups_of(hidden)
    logits = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    router_logits_kernel[(cdiv(outputs, _OUTPUTS) + 1, rows)](
        x, norm_weight, router, rounded.values, rounded.scales, rounded.sums, logits, outputs, hidden, eps,
        OUTPUTS=_OUTPUTS, BLOCK=next_power_of_2(groups), EVEN=groups == next_power_of_2(groups),
        PDL=has_dependent_launch(x.device), **launch_options(x.device, 4, 128),
    )  # fmt: skip
    return rounded, logits


@triton.jit
def router_logits_kernel(
    x_ptr, norm_weight_ptr, router_ptr, values_ptr, scales_ptr, sums_ptr, logits_ptr, outputs, hidden, eps,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    x_ptr += row.to(tl.int64) * hidden
    if tl.program_id(0) == 0:
        round_normed(x_ptr, norm_weight_ptr, values_ptr, scales_ptr, sums_ptr, row, hidden, eps, BLOCK, EVEN, PDL)
    else:
        output = (tl.program_id(0) - 1) * OUTPUTS + tl.arange(0, OUTPUTS)
        logits = project(x_ptr, norm_weight_ptr, router_ptr, output, outputs, hidden, eps, BLOCK, EVEN, PDL)
        tl.store(logits_ptr + row * outputs + output, logits, mask=output < outputs)


@triton.jit
def project(
    x_ptr, norm_weight_ptr, router_ptr, output, outputs, hidden, eps,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK * 64)[None, :]
    # an output beyond the last is computed as the last, and not written
    at = tl.minimum(output, outputs - 1)[:, None] * hidden + column
    router = load_where(router_ptr + at, column < hidden, EVEN)
    norm_weight = load_where(norm_weight_ptr + column, column < hidden, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = load_where(x_ptr + column, column < hidden, EVEN).to(tl.float32)
    return tl.sum(router.to(tl.float32) * (x * norm_weight), axis=1) * inverse_rms(x, hidden, eps)
