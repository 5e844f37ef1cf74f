"""Log-probabilities of the chosen token and of the most likely ones."""

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, next_power_of_2
from engine.ops.sample_argmax import choice_key, launched

MAX_TOP = 20
BLOCK = 2048
# of fp32
LOWEST = tl.constexpr(-3.4028234663852886e38)


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int = MAX_TOP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log softmax(l) at the chosen id and at the num_top largest, best first, the lower id of equal ones

    logits     [rows, vocab] fp32, a row's numbers beside each other
    token_ids  [rows] int64
    num_top    up to 32 and to vocab
    return     chosen [rows] fp32, top ids [rows, num_top] int64, top values [rows, num_top] fp32
    """
    if logits.is_cuda:
        return logprobs_triton(logits, token_ids, num_top)
    return logprobs_reference(logits, token_ids, num_top)


def logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    top_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    chosen = log_p.gather(-1, token_ids[:, None])[:, 0]
    return chosen, top_ids, log_p.gather(-1, top_ids)


def logprobs_triton(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert logits.stride(1) == 1 and logits.dtype == torch.float32 and token_ids.is_contiguous()
    (rows, vocab), device = logits.shape, logits.device
    assert num_top <= min(32, vocab)
    programs = cdiv(vocab, block)
    lanes = next_power_of_2(max(num_top, 1))
    keys = torch.empty(rows, programs, lanes, dtype=torch.int64, device=device)
    sums = torch.empty(rows, programs, 2, dtype=torch.float32, device=device)
    chosen = torch.empty(rows, dtype=torch.float32, device=device)
    top_ids = torch.empty(rows, num_top, dtype=torch.int64, device=device)
    top_values = torch.empty(rows, num_top, dtype=torch.float32, device=device)
    launch = {"TOP": num_top, "LANES": lanes, **launched(device)}
    part_top_kernel[(programs, rows)](logits, keys, sums, logits.stride(0), vocab, BLOCK=block, **launch)
    row_top_kernel[(rows,)](
        logits, token_ids, keys, sums, chosen, top_ids, top_values, logits.stride(0), programs,
        PARTS=next_power_of_2(programs), **launch,
    )  # fmt: skip
    return chosen, top_ids, top_values


@triton.jit
def largest_keys(keys, TOP: tl.constexpr, LANES: tl.constexpr):
    """The TOP largest of distinct int64 keys, largest first."""
    lane = tl.arange(0, LANES)
    largest = tl.full([LANES], -9223372036854775808, tl.int64)
    for i in range(0, TOP):
        best = tl.max(keys, axis=0)
        largest = tl.where(lane == i, best, largest)
        keys = tl.where(keys == best, -9223372036854775808, keys)
    return largest


@triton.jit
def part_top_kernel(
    logits_ptr, keys_ptr, sums_ptr, logits_stride, vocab,
    BLOCK: tl.constexpr, TOP: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a program's ids: the largest, and maximum and sum of exp(l - maximum)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, mask=ids < vocab, other=float("-inf"))
    place = row * tl.num_programs(0) + part
    top = tl.max(logits, axis=0)
    tl.store(sums_ptr + place * 2, top)
    # a part without any possible id: its sum is 0
    tl.store(sums_ptr + place * 2 + 1, tl.sum(tl.exp(logits - tl.maximum(top, LOWEST)), axis=0))
    keys = tl.where(ids < vocab, choice_key(logits, ids), -9223372036854775808)
    tl.store(keys_ptr + place * LANES + tl.arange(0, LANES), largest_keys(keys, TOP, LANES))


@triton.jit
def row_top_kernel(
    logits_ptr, token_ids_ptr, keys_ptr, sums_ptr, chosen_ptr, top_ids_ptr, top_values_ptr, logits_stride, programs,
    PARTS: tl.constexpr, TOP: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = sums_ptr + (row * programs + part) * 2
    tops = tl.load(at, mask=part < programs, other=float("-inf"))
    top = tl.max(tops, axis=0)
    sums = tl.load(at + 1, mask=part < programs, other=0.0)
    total = tl.log(tl.sum(sums * tl.exp(tops - tl.maximum(top, LOWEST)), axis=0))
    row_ptr = logits_ptr + row * logits_stride
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row))
    tl.store(chosen_ptr + row, chosen - top - total)
    lane = tl.arange(0, PARTS * LANES)
    keys = tl.load(keys_ptr + row * programs * LANES + lane, mask=lane < programs * LANES, other=-9223372036854775808)
    lane = tl.arange(0, LANES)
    ids = 0x7FFFFFFF - (largest_keys(keys, TOP, LANES) & 0x7FFFFFFF)
    values = tl.load(row_ptr + ids, mask=lane < TOP, other=0.0)
    tl.store(top_ids_ptr + row * TOP + lane, ids, mask=lane < TOP)
    tl.store(top_values_ptr + row * TOP + lane, values - top - total, mask=lane < TOP)
