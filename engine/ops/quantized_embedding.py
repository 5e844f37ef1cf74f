"""Rows of a quantised matrix by their index."""

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, has_dependent_launch, launch_options
from engine.ops.quantized_weight import GROUP, TILE_ROWS, QuantizedWeight, dequantize_weight


def quantized_embedding(token_ids: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """y[r] = W[token_ids[r]]

    token_ids  [rows] int64; on a GPU those beyond the matrix count as its nearest row
    weight     of the same device, or in pinned host memory, which a GPU reads where it lies
    return     [rows, columns]  of dtype
    """
    if token_ids.is_cuda:
        return quantized_embedding_triton(token_ids, weight, dtype)
    return quantized_embedding_reference(token_ids, weight, dtype)


def quantized_embedding_reference(token_ids: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    tile, row = token_ids // TILE_ROWS, token_ids % TILE_ROWS
    # a matrix of one tile for each row that is asked for, with that row in every place
    words = weight.words[tile, :, :, row].unsqueeze(-2).expand(*[-1] * 3, TILE_ROWS, -1).contiguous()
    scales = weight.scales[tile, :, row].unsqueeze(-1).expand(-1, -1, TILE_ROWS)
    picked = QuantizedWeight(words, scales, len(token_ids) * TILE_ROWS, weight.bits)
    return dequantize_weight(picked)[::TILE_ROWS].to(dtype)


def quantized_embedding_triton(token_ids: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    assert token_ids.is_contiguous()
    groups = weight.columns // GROUP
    y = torch.empty(len(token_ids), weight.columns, dtype=dtype, device=token_ids.device)
    quantized_embedding_kernel[(len(token_ids), cdiv(groups, 16))](
        token_ids, weight.words.view(torch.int8), weight.scales, y, weight.rows, groups,
        BITS=weight.bits, BLOCK=16, PDL=has_dependent_launch(y.device), **launch_options(y.device, 4),
    )  # fmt: skip
    return y


@triton.jit
def quantized_embedding_kernel(
    token_ids_ptr, bytes_ptr, scales_ptr, y_ptr, rows, groups, BITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64)
    # a row of padding holds anything
    token_id = tl.minimum(tl.maximum(tl.load(token_ids_ptr + place), 0), rows - 1)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, 64)[None, :]
    mask = (group < groups)[:, None]
    tile_group = (token_id // 16) * groups + group
    at = bytes_ptr + tile_group[:, None] * (128 * BITS) + (token_id % 16) * 16
    if BITS == 4:
        byte = tl.load(at + (column // 32) * 256 + column % 16, mask=mask, other=0)
        code = ((byte >> (4 * ((column // 16) % 2)).to(tl.int8)) & 15) - 8
    else:
        code = tl.load(at + (column // 16) * 256 + column % 16, mask=mask, other=0)
    scale = tl.load(scales_ptr + tile_group * 16 + token_id % 16, mask=group < groups, other=0.0)
    y = code.to(tl.float32) * scale.to(tl.float32)[:, None]
    tl.store(y_ptr + (place * groups + group[:, None]) * 64 + column, y.to(y_ptr.dtype.element_ty), mask=mask)
