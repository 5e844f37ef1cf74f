"""Rows of a plain matrix by their index."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.ops.launch import cdiv, plain_options

# numbers that one program copies
COPIED = 2048


def embedding_rows(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y[r] = W[token_ids[r]]

    token_ids  [rows] int64; on a GPU those beyond the matrix count as its nearest row
    weight     [vocab, columns] contiguous; of a GPU, or in pinned host memory, which is read where it lies
    return     [rows, columns]  on the device of token_ids
    """
    if token_ids.is_cuda:
        return embedding_rows_triton(token_ids, weight)
    return embedding_rows_reference(token_ids, weight)


def embedding_rows_reference(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(token_ids, weight)


def embedding_rows_triton(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert token_ids.is_contiguous() and weight.is_contiguous()
    rows, columns = weight.shape
    y = torch.empty(len(token_ids), columns, dtype=weight.dtype, device=token_ids.device)
    embedding_rows_kernel[(len(token_ids), cdiv(columns, COPIED))](
        token_ids, weight, y, rows, columns, COPIED=COPIED, **plain_options(4, is_fused=True)
    )
    return y


@triton.jit
def embedding_rows_kernel(token_ids_ptr, weight_ptr, y_ptr, rows, columns, COPIED: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    # a row of padding holds anything
    token_id = tl.minimum(tl.maximum(tl.load(token_ids_ptr + place), 0), rows - 1)
    column = tl.program_id(1) * COPIED + tl.arange(0, COPIED)
    mask = column < columns
    row = tl.load(weight_ptr + token_id * columns + column, mask=mask, other=0.0)
    tl.store(y_ptr + place * columns + column, row, mask=mask)
