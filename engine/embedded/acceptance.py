"""How many MTP drafts the target accepts, exactly, on text that the target itself sampled.

Given the sampled token x, the rejection rule accepts the draft that leads to it with chance min(1, q(x) / p(x)); the
expectation over rounds needs no sampling, and a draft counts only if those before it were accepted.
"""

import torch
import torch.nn.functional as F

from engine.embedded.train_model import Packing, TrainModel, rms1

DRAFTS = 3


@torch.inference_mode()
def acceptance(model: TrainModel, token_ids: list[int], begin: int, temperature: float) -> torch.Tensor:
    """[rounds, DRAFTS]: chance that drafts 1, 1..2 and 1..3 are accepted, for every round after index `begin`."""
    length = len(token_ids)
    padded = -(-length // 64) * 64
    ids = torch.tensor([token_ids + [0] * (padded - length)], device=model.weights["embed"].device)
    packing = Packing.of(torch.arange(padded, device=ids.device).unsqueeze(0))
    hidden = model.hidden(ids, packing)
    target = log_probabilities(model, hidden[0], temperature)
    rounds = torch.arange(begin, length - DRAFTS - 1, device=ids.device)
    chances = []
    for depth, drafted in enumerate(draft_chain(model, ids, hidden), 1):
        proposal = log_probabilities(model, drafted[0], temperature)[rounds]
        wanted = ids[0, rounds + depth + 1].unsqueeze(1)
        ratio = proposal.gather(1, wanted) - target[rounds + depth].gather(1, wanted)
        chances.append(ratio.clamp(max=0).exp().squeeze(1))
    return torch.stack(chances, dim=1).cumprod(dim=1)


def log_probabilities(model: TrainModel, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
    return (model.logits(hidden) / temperature).log_softmax(-1)


def draft_chain(model: TrainModel, ids: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Hidden states of drafts 1, 2, 3 of the round at every index.

    Rows of draft 1 come from the target and are what every later row attends to, up to its own round; the rows that
    a round adds for drafts 2 and 3 are seen by that round alone, as with a KV cache that is rewritten after it.
    """
    tokens = torch.arange(ids.shape[1], device=ids.device)
    keys, values, allowed, drafted = [], [], [], []
    for depth in range(1, DRAFTS + 1):
        positions = (tokens + depth - 1).unsqueeze(0)
        x = model.draft_input(torch.roll(ids, -depth, dims=1), hidden)
        normed = model.normed(x, "mtp.layer", "input_norm")
        q, k, v, gate = model.attention_inputs(normed, "mtp.layer", positions)
        keys.append(k)
        values.append(v)
        allowed.append(tokens.unsqueeze(1) >= tokens if depth == 1 else tokens.unsqueeze(1) == tokens)
        y = attend_chain(q, torch.cat(keys, 1), torch.cat(values, 1), torch.cat(allowed, 1))
        x = x + model.stages.attention_output(y, gate, model.weights["mtp.layer.o"])
        weights = model.layer("mtp.layer", "router", "gate", "up", "down", "shared_gate")
        x = x + model.stages.mixture(model.normed(x, "mtp.layer", "post_norm"), *weights, model.geometry)[0]
        hidden = rms1(x, model.weights["mtp.norm"], model.geometry.eps).to(model.weights["head"].dtype)
        drafted.append(hidden)
    return drafted


def attend_chain(q, k, v, allowed) -> torch.Tensor:
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)
