"""Experts and their weights for each row of a prompt, the shared one among them."""

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, plain_options
from engine.ops.route import choose, route_reference


def expert_choice(logits: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What route chooses of all logits but the last, and behind its weights sigmoid(last), that of the shared expert

    logits  [rows, experts + 1]  contiguous
    return  expert ids [rows, num_chosen] int32, best first, and weights [rows, num_chosen + 1] in at least fp32
    """
    if logits.is_cuda:
        return expert_choice_triton(logits, num_chosen)
    return expert_choice_reference(logits, num_chosen)


def expert_choice_reference(logits: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, weights = route_reference(logits[:, :-1], num_chosen)
    return chosen.int(), torch.cat([weights, torch.sigmoid(logits[:, -1:].to(weights.dtype))], dim=-1)


def expert_choice_triton(logits: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits.is_contiguous()
    rows, experts = len(logits), logits.shape[1] - 1
    chosen = torch.empty(rows, num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, num_chosen + 1, dtype=torch.float32, device=logits.device)
    expert_choice_kernel[(rows,)](
        logits, chosen, weights, experts, COUNT=num_chosen, BLOCK=32 * cdiv(experts, 32),
        **plain_options(1, is_fused=True),
    )  # fmt: skip
    return chosen, weights


@triton.jit
def expert_choice_kernel(logits_ptr, chosen_ptr, weights_ptr, experts, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * (experts + 1)
    chosen = choose(logits_ptr, experts, COUNT, BLOCK)
    top = tl.load(logits_ptr + chosen[0]).to(tl.float32)
    total = tl.exp(top - top)
    for j in tl.static_range(1, COUNT):
        total += tl.exp(tl.load(logits_ptr + chosen[j]).to(tl.float32) - top)
    for j in tl.static_range(COUNT):
        share = tl.exp(tl.load(logits_ptr + chosen[j]).to(tl.float32) - top)
        tl.store(chosen_ptr + row * COUNT + j, chosen[j])
        tl.store(weights_ptr + row * (COUNT + 1) + j, share / total)
    shared = tl.sigmoid(tl.load(logits_ptr + experts).to(tl.float32))
    tl.store(weights_ptr + row * (COUNT + 1) + COUNT, shared)
