"""The largest logit of each row, the first of equal ones."""

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, has_dependent_launch, launch_options, next_power_of_2

BLOCK = 2048


def launched(device: torch.device, num_warps: int = 4) -> dict[str, object]:
    """Options of a kernel whose last argument is PDL."""
    return {"PDL": has_dependent_launch(device), **launch_options(device, num_warps)}


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """argmax(l), of equal ones the lowest id; a NaN counts as largest

    logits  [rows, vocab] fp32, a row's numbers beside each other
    return  [rows] int64
    """
    return argmax_triton(logits) if logits.is_cuda else argmax_reference(logits)


def argmax_reference(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def argmax_triton(logits: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    rows, vocab = logits.shape
    programs = cdiv(vocab, block)
    keys = torch.empty(rows, programs, dtype=torch.int64, device=logits.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch = launched(logits.device)
    argmax_kernel[(programs, rows)](logits, keys, logits.stride(0), vocab, BLOCK=block, **launch)
    best_kernel[(rows,)](keys, token_ids, programs, PARTS=next_power_of_2(programs), **launch)
    return token_ids


@triton.jit
def choice_key(score, ids):
    """Larger for a larger score, and for a lower id of equal ones; int64."""
    # both zeros are equal, and a NaN of either sign is the largest
    score = tl.where(score == 0, 0.0, tl.where(score != score, float("nan"), score))
    bits = score.to(tl.int32, bitcast=True)
    code = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (code.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def best_key(score, ids, vocab):
    """Of the ids that there are."""
    return tl.max(tl.where(ids < vocab, choice_key(score, ids), -9223372036854775808), axis=0)


@triton.jit
def argmax_kernel(logits_ptr, keys_ptr, logits_stride, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, mask=ids < vocab, other=float("-inf"))
    tl.store(keys_ptr + row * tl.num_programs(0) + part, best_key(logits, ids, vocab))


@triton.jit
def best_kernel(keys_ptr, token_ids_ptr, programs, PARTS: tl.constexpr, PDL: tl.constexpr):
    """The best of what the programs of a row found."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    keys = tl.load(keys_ptr + row * programs + part, mask=part < programs, other=-9223372036854775808)
    tl.store(token_ids_ptr + row, 0x7FFFFFFF - (tl.max(keys, axis=0) & 0x7FFFFFFF))
