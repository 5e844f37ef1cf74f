"""Choice of experts for each row."""

# ruff: noqa: RUF005 - kernels have no starred expressions

import torch
import triton
import triton.language as tl


def route(logits: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The num_chosen largest of softmax(logits), scaled to sum 1.

    logits  [rows, experts]
    return  expert ids [rows, num_chosen] int64, best first, and weights [rows, num_chosen] in at least fp32
    """
    return route_reference(logits, num_chosen)


def route_reference(logits: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights, experts = torch.softmax(wide, dim=-1).topk(num_chosen, dim=-1)
    return experts, weights / weights.sum(dim=-1, keepdim=True)


@triton.jit
def ordered_keys(logits_ptr, experts, BLOCK: tl.constexpr):
    """A row's logits as integers in the same order, 32 at a time, so that every warp holds all and waits for none."""
    keys = ()
    for i in tl.static_range(BLOCK // 32):
        column = tl.arange(0, 32) + 32 * i
        # past the first cache, which may hold what stood there for another layer
        logits = tl.load(logits_ptr + column, mask=column < experts, other=0.0, cache_modifier=".cg")
        bits = logits.to(tl.float32).to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        keys = keys + (tl.where(column < experts, key, -2147483648),)
    return keys


@triton.jit
def take_largest(keys, BLOCK: tl.constexpr):
    """The expert of the largest key, of equal ones the first, and the keys without it."""
    most = keys[0]
    for i in tl.static_range(1, BLOCK // 32):
        most = tl.maximum(most, keys[i])
    largest = tl.max(most, axis=0)
    place = tl.where(keys[0] == largest, tl.arange(0, 32), BLOCK)
    for i in tl.static_range(1, BLOCK // 32):
        place = tl.minimum(place, tl.where(keys[i] == largest, tl.arange(0, 32) + 32 * i, BLOCK))
    expert = tl.min(place, axis=0)
    left = ()
    for i in tl.static_range(BLOCK // 32):
        left = left + (tl.where(tl.arange(0, 32) + 32 * i == expert, -2147483648, keys[i]),)
    return expert, left


@triton.jit
def choose(logits_ptr, experts, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The ids of the COUNT largest of a row's logits, best first, of equal ones the first."""
    keys = ordered_keys(logits_ptr, experts, BLOCK)
    chosen = ()
    for _ in tl.static_range(COUNT):
        expert, keys = take_largest(keys, BLOCK)
        chosen = chosen + (expert,)
    return chosen


@triton.jit
def choose_at(logits_ptr, experts, slot, BLOCK: tl.constexpr):
    """The id at `slot` of what choose returns."""
    keys = ordered_keys(logits_ptr, experts, BLOCK)
    expert, keys = take_largest(keys, BLOCK)
    for _ in range(slot):
        expert, keys = take_largest(keys, BLOCK)
    return expert


@triton.jit
def chosen_at(chosen, slot, COUNT: tl.constexpr):
    """Which of what choose returned stands at `slot`, a tensor."""
    expert = tl.zeros_like(slot) + chosen[0]
    for i in tl.static_range(1, COUNT):
        expert = tl.where(slot == i, chosen[i], expert)
    return expert
