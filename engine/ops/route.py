"""Choice of experts for each row."""

import torch


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
