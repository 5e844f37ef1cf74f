"""The differentiable model: packed rows in, hidden states out; parameters in one flat dictionary."""

import math
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F

from engine.embedded import delta_rule
from engine.embedded.geometry import Geometry

FORGET = -60.0


@dataclass
class Packing:
    """Where documents lie in rows: positions [rows, tokens] restart at 0 with every document."""

    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int
    valid: torch.Tensor | None = None
    """[rows, tokens], False on padding after the last token of a row; padding leaves the state as it was."""

    @staticmethod
    def of(positions: torch.Tensor, valid: torch.Tensor | None = None) -> "Packing":
        starts = (positions.flatten() == 0).nonzero().flatten()
        total = torch.tensor([positions.numel()], device=starts.device)
        cu_seqlens = torch.cat([starts, total]).to(torch.int32)
        return Packing(positions, cu_seqlens, int(cu_seqlens.diff().max()), valid)

    def rows(self, count: int) -> "Packing":
        return Packing.of(self.positions[:count])


def create_parameters(geometry: Geometry, seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 parameters by name; experts lie side by side in one matrix, the shared expert last."""
    generator = torch.Generator().manual_seed(seed)
    shrink = 1 / math.sqrt(2 * geometry.layers)

    def normal(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    parameters = {
        "embed": normal(geometry.vocab_size, geometry.hidden),
        "head": normal(geometry.vocab_size, geometry.hidden),
        "norm": torch.zeros(geometry.hidden),
        "mtp.fc": normal(geometry.hidden, 2 * geometry.hidden, scale=0.04),
        "mtp.norm_embedding": torch.zeros(geometry.hidden),
        "mtp.norm_hidden": torch.zeros(geometry.hidden),
        "mtp.norm": torch.zeros(geometry.hidden),
    }
    for layer in range(geometry.layers):
        mixer = attention_parameters if geometry.has_full_attention(layer) else delta_parameters
        parameters |= layer_parameters(f"layers.{layer}", mixer, geometry, normal, shrink)
    return parameters | layer_parameters("mtp.layer", attention_parameters, geometry, normal, shrink)


def layer_parameters(prefix, mixer, geometry, normal, shrink) -> dict[str, torch.Tensor]:
    width, hidden = (geometry.experts + 1) * geometry.expert_width, geometry.hidden
    own = {
        "input_norm": torch.zeros(hidden),
        "post_norm": torch.zeros(hidden),
        "router": normal(geometry.experts, hidden),
        "gate": normal(width, hidden, scale=0.04),
        "up": normal(width, hidden, scale=0.04),
        "down": normal(hidden, width, scale=0.04 * shrink),
        "shared_gate": torch.zeros(1, hidden),
    }
    return {f"{prefix}.{name}": value for name, value in (own | mixer(geometry, normal, shrink)).items()}


def attention_parameters(geometry, normal, shrink) -> dict[str, torch.Tensor]:
    hidden, width = geometry.hidden, geometry.heads * geometry.head_dim
    return {
        "q": normal(2 * width, hidden, scale=0.04),
        "k": normal(geometry.kv_heads * geometry.head_dim, hidden, scale=0.04),
        "v": normal(geometry.kv_heads * geometry.head_dim, hidden, scale=0.04),
        "o": normal(hidden, width, scale=0.04 * shrink),
        "q_norm": torch.zeros(geometry.head_dim),
        "k_norm": torch.zeros(geometry.head_dim),
    }


def delta_parameters(geometry, normal, shrink) -> dict[str, torch.Tensor]:
    heads, hidden = geometry.delta_value_heads, geometry.hidden
    # decay times spread from a few to a few thousand tokens
    step = torch.logspace(-3, -1, heads)
    return {
        "qkv": normal(geometry.conv_dim, hidden, scale=0.04),
        "z": normal(geometry.value_dim, hidden, scale=0.04),
        "a": normal(heads, hidden),
        "b": normal(heads, hidden),
        "conv": normal(geometry.conv_dim, geometry.conv_width, scale=0.3),
        "A_log": torch.zeros(heads),
        "dt_bias": step + torch.log(-torch.expm1(-step)),
        "delta_norm": torch.ones(geometry.delta_head_dim),
        "out": normal(hidden, geometry.value_dim, scale=0.04 * shrink),
    }


def rms1(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(1 + w) x / sqrt(mean(x²) + eps), in fp32."""
    x = x.float()
    return (1 + weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def norm_input(x, weight, like, eps):
    return rms1(x, weight, eps).to(like.dtype)


def convolve(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution and SiLU over [rows, tokens, channels] that does not cross document starts."""
    x, width = x.float(), weight.shape[1]
    y = x * weight[:, -1]
    for back in range(1, width):
        shifted = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        y = y + torch.where(positions.unsqueeze(-1) >= back, shifted, 0.0) * weight[:, -1 - back]
    return F.silu(y)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_gates(a, b, a_log, dt_bias):
    return -a_log.exp() * F.softplus(a.float() + dt_bias), torch.sigmoid(b.float())


def split_delta(mixed: torch.Tensor, geometry: Geometry):
    """q, k, v [..., value heads, head_dim] from the convolved channels; q and k are normalised, q scaled."""
    size = geometry.delta_head_dim
    q, k, v = mixed.split([geometry.key_dim, geometry.key_dim, geometry.value_dim], dim=-1)
    repeat = geometry.delta_value_heads // geometry.delta_key_heads
    q, k = (l2_norm(x.unflatten(-1, (-1, size))).repeat_interleave(repeat, dim=-2) for x in (q, k))
    return q / math.sqrt(size), k, v.unflatten(-1, (-1, size))


def delta_inputs(x, qkv, conv, a, b, a_log, dt_bias, positions, valid, geometry):
    """Everything the chunked rule reads, chunk-major: [chunks, rows, heads, 64, ...]."""
    q, k, v = split_delta(convolve(F.linear(x, qkv), conv, positions), geometry)
    log_alpha, beta = delta_gates(F.linear(x, a), F.linear(x, b), a_log, dt_bias)
    log_alpha = torch.where((positions == 0).unsqueeze(-1), log_alpha + FORGET, log_alpha)
    if valid is not None:
        beta, log_alpha = beta * valid.unsqueeze(-1), log_alpha * valid.unsqueeze(-1)
    wide = (to_chunks(value) for value in (q, k, v))
    return *wide, *(to_chunks(value.unsqueeze(-1)).squeeze(-1) for value in (log_alpha, beta))


def to_chunks(x: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, heads, size] -> [chunks, rows, heads, 64, size]"""
    return x.unflatten(1, (-1, delta_rule.CHUNK)).permute(1, 0, 3, 2, 4).contiguous()


def delta_output(y, x, z, weight, out, eps):
    """Gated norm and output projection; y chunk-major [chunks, rows, heads, 64, size]."""
    y = y.permute(1, 0, 3, 2, 4).flatten(1, 2)
    return gated_output(y, F.linear(x, z), weight, out, eps)


def gated_output(y, z, weight, out, eps):
    y = weight * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    gated = y.flatten(-2) * F.silu(z.float())
    return F.linear(gated.to(out.dtype), out)


def rotate(x: torch.Tensor, positions: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Rotary embedding of the first dims of x [rows, tokens, heads, head_dim], pairs (i, i + half)."""
    half = geometry.rotary // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = positions.unsqueeze(-1).float() * geometry.rope_theta**-exponent
    cosine, sine = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)


def attention_inputs(x, q, k, v, q_norm, k_norm, positions, geometry):
    """q [rows, tokens, heads, size], k and v [rows, tokens, kv_heads, size], gate like q; dtype of x."""
    query, gate = F.linear(x, q).unflatten(-1, (geometry.heads, -1)).chunk(2, dim=-1)
    key, value = (F.linear(x, weight).unflatten(-1, (geometry.kv_heads, -1)) for weight in (k, v))
    query = rotate(rms1(query, q_norm, geometry.eps), positions, geometry)
    key = rotate(rms1(key, k_norm, geometry.eps), positions, geometry)
    return query.to(x.dtype), key.to(x.dtype), value, gate


def attention_output(y, gate, o):
    return F.linear((y * torch.sigmoid(gate)).flatten(-2), o)


def attend(q, k, v, packing: Packing) -> torch.Tensor:
    """Causal attention inside every document."""
    repeat = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(repeat, -2), v.repeat_interleave(repeat, -2)
    return attend_flash(q, k, v, packing) if q.is_cuda and q.dtype != torch.float32 else attend_masked(q, k, v, packing)


def attend_flash(q, k, v, packing: Packing) -> torch.Tensor:
    flat = (x.flatten(0, 1).contiguous() for x in (q, k, v))
    lengths, longest = packing.cu_seqlens, packing.longest
    output = torch.ops.aten._flash_attention_forward(*flat, lengths, lengths, longest, longest, 0.0, True, False)[0]
    return output.view(q.shape)


def attend_masked(q, k, v, packing: Packing) -> torch.Tensor:
    document = (packing.positions == 0).cumsum(-1)
    order = torch.arange(q.shape[1], device=q.device)
    mask = (document.unsqueeze(-1) == document.unsqueeze(-2)) & (order.unsqueeze(-1) >= order)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1)).transpose(1, 2)


def mixture(x, router, gate, up, down, shared_gate, geometry):
    """All experts side by side, weighted by the router; returns the output and the balance loss.

    A dense product over 8 small experts is faster to train than gathering tokens by expert.
    """
    weights, balance = route(x, router, geometry.experts_chosen)
    weights = torch.cat([weights, torch.sigmoid(F.linear(x, shared_gate).float())], dim=-1)
    hidden = F.silu(F.linear(x, gate)) * F.linear(x, up)
    hidden = hidden.unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1).to(x.dtype)
    return F.linear(hidden.flatten(-2), down), balance


def route(x, router, chosen):
    scores = F.linear(x, router).float().softmax(-1)
    top = scores.topk(chosen, dim=-1)
    weights = torch.zeros_like(scores).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    share = (weights > 0).float().flatten(0, -2).mean(0) / chosen
    return weights, scores.shape[-1] * (share * scores.flatten(0, -2).mean(0)).sum()


def token_losses(hidden, head, targets):
    """Cross entropy per token, fp32."""
    return F.cross_entropy(F.linear(hidden, head).flatten(0, -2).float(), targets.flatten(), reduction="none")


def combine_mtp(embedding, hidden, norm_embedding, norm_hidden, fc, eps):
    both = torch.cat([rms1(embedding, norm_embedding, eps), rms1(hidden, norm_hidden, eps)], dim=-1)
    return F.linear(both.to(fc.dtype), fc).float()


@dataclass
class Stages:
    """The pieces of the model that a compiler may fuse, replaceable as a set."""

    norm_input: object = norm_input
    delta_inputs: object = delta_inputs
    interactions: object = delta_rule.interactions
    chunk_updates: object = delta_rule.chunk_updates
    chunk_outputs: object = delta_rule.chunk_outputs
    delta_output: object = delta_output
    attention_inputs: object = attention_inputs
    attention_output: object = attention_output
    mixture: object = mixture
    combine_mtp: object = combine_mtp
    token_losses: object = token_losses
    delta_rule: object = field(default=delta_rule.chunk_delta_rule)

    @staticmethod
    def compiled() -> "Stages":
        names = [piece.name for piece in fields(Stages) if piece.name != "delta_rule"]
        return Stages(**{name: torch.compile(getattr(Stages, name), dynamic=False) for name in names})


class TrainModel:
    """The decoder and its MTP layer over a dictionary of weights (see `working_weights`)."""

    def __init__(self, geometry: Geometry, weights: dict[str, torch.Tensor], stages: Stages | None = None):
        self.geometry, self.weights, self.stages = geometry, weights, stages or Stages()
        self.balance: list[torch.Tensor] = []

    def layer(self, prefix: str, *names: str) -> list[torch.Tensor]:
        return [self.weights[f"{prefix}.{name}"] for name in names]

    def hidden(self, token_ids: torch.Tensor, packing: Packing) -> torch.Tensor:
        """token_ids [rows, tokens], a multiple of 64 -> normed hidden states [rows, tokens, hidden]."""
        self.balance = []
        x = F.embedding(token_ids, self.weights["embed"]).float()
        for layer in range(self.geometry.layers):
            mixer = self.attention if self.geometry.has_full_attention(layer) else self.delta
            x = self.block(x, f"layers.{layer}", mixer, packing)
        return self.stages.norm_input(x, self.weights["norm"], self.weights["head"], self.geometry.eps)

    def block(self, x, prefix, mixer, packing) -> torch.Tensor:
        x = x + mixer(self.normed(x, prefix, "input_norm"), prefix, packing)
        weights = self.layer(prefix, "router", "gate", "up", "down", "shared_gate")
        y, balance = self.stages.mixture(self.normed(x, prefix, "post_norm"), *weights, self.geometry)
        self.balance.append(balance)
        return x + y

    def normed(self, x, prefix, name) -> torch.Tensor:
        return self.stages.norm_input(x, self.weights[f"{prefix}.{name}"], self.weights["head"], self.geometry.eps)

    def delta(self, x, prefix, packing) -> torch.Tensor:
        y, _ = self.delta_states(x, prefix, packing)
        z, norm, out = self.layer(prefix, "z", "delta_norm", "out")
        return self.stages.delta_output(y, x, z, norm, out, self.geometry.eps)

    def delta_states(self, x, prefix, packing):
        weights = self.layer(prefix, "qkv", "conv", "a", "b", "A_log", "dt_bias")
        inputs = self.stages.delta_inputs(x, *weights, packing.positions, packing.valid, self.geometry)
        stages = (self.stages.interactions, self.stages.chunk_updates, self.stages.chunk_outputs)
        return self.stages.delta_rule(*inputs, stages)

    def attention(self, x, prefix, packing) -> torch.Tensor:
        q, k, v, gate = self.attention_inputs(x, prefix, packing.positions)
        return self.stages.attention_output(attend(q, k, v, packing), gate, self.weights[f"{prefix}.o"])

    def attention_inputs(self, x, prefix, positions):
        weights = self.layer(prefix, "q", "k", "v", "q_norm", "k_norm")
        return self.stages.attention_inputs(x, *weights, positions, self.geometry)

    def draft_hidden(self, next_ids, hidden, packing) -> torch.Tensor:
        """MTP over whole rows: token x_{t+1} and hidden h_t at index t -> hidden that proposes x_{t+2}."""
        u = self.draft_input(next_ids, hidden)
        x = self.block(u, "mtp.layer", self.attention, packing)
        return self.stages.norm_input(x, self.weights["mtp.norm"], self.weights["head"], self.geometry.eps)

    def draft_input(self, next_ids, hidden) -> torch.Tensor:
        embedding = F.embedding(next_ids, self.weights["embed"])
        norms = self.layer("mtp", "norm_embedding", "norm_hidden", "fc")
        return self.stages.combine_mtp(embedding, hidden, *norms, self.geometry.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weights["head"]).float()


def is_matrix(name: str, value: torch.Tensor) -> bool:
    return value.dim() == 2 and not name.endswith(".conv")


def is_quantised(name: str, value: torch.Tensor) -> bool:
    """The matrices that the family's FP8 form stores in 8 bits."""
    kept = ("embed", "head", "mtp.fc", ".router", ".shared_gate", ".a", ".b")
    return is_matrix(name, value) and not name.endswith(kept)


def working_weights(parameters: dict[str, torch.Tensor], dtype: torch.dtype, rounds_to_fp8: bool) -> dict:
    """Matrices in `dtype` (through FP8 and straight back where the stored form has it), the rest in fp32."""
    weights = {}
    for name, value in parameters.items():
        if rounds_to_fp8 and is_quantised(name, value):
            value = value + (dequantise(*quantise(value.detach())) - value.detach())
        weights[name] = value.to(dtype) if is_matrix(name, value) else value
    return weights


def quantise(weight: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """weight = e4m3 · scale, one fp32 scale per 128 x 128 block: ([rows, columns], [rows / 128, columns / 128])."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // block, block, columns // block, block)
    scale = (blocks.abs().amax((1, 3)) / 448.0).clamp(min=1e-12)
    scaled = (blocks / scale[:, None, :, None]).clamp(-448.0, 448.0)
    return scaled.view(rows, columns).to(torch.float8_e4m3fn), scale


def dequantise(values: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return values.float() * wide
