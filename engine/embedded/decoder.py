"""Generation with the training model: padded prefill, cached decode, plain torch on any device."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.embedded.delta_rule import CHUNK, recurrent_delta_rule
from engine.embedded.train_model import (
    Packing,
    TrainModel,
    attend,
    convolve,
    delta_gates,
    gated_output,
    split_delta,
)


@dataclass
class DecodeState:
    """What a batch of sequences keeps between steps."""

    lengths: torch.Tensor
    taps: dict[str, torch.Tensor] = field(default_factory=dict)
    """[rows, width - 1, channels]: the last inputs of every convolution"""
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    keys: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)


class Decoder(TrainModel):
    """`prefill`, then `step` once per token; all rows advance together."""

    state: DecodeState
    room: int
    is_prefill: bool

    def prefill(self, prompts: list[list[int]], room: int) -> torch.Tensor:
        """Hidden state of the last prompt token of every row; keeps `room` places for tokens to come."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.weights["embed"].device)
        padded = -(-int(lengths.max()) // CHUNK) * CHUNK
        token_ids = torch.zeros(len(prompts), padded, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            token_ids[row, : len(prompt)] = torch.tensor(prompt)
        positions = torch.arange(padded, device=lengths.device).expand(len(prompts), -1)
        packing = Packing.of(positions, positions < lengths.unsqueeze(1))
        self.state, self.room, self.is_prefill = DecodeState(lengths), padded + room, True
        hidden = self.hidden(token_ids.to(lengths.device), packing)
        return hidden[torch.arange(len(prompts)), lengths - 1]

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [rows] -> hidden [rows, hidden]"""
        self.is_prefill = False
        packing = Packing(self.state.lengths.unsqueeze(1), self.state.lengths, 1)
        hidden = self.hidden(token_ids.unsqueeze(1), packing).squeeze(1)
        self.state.lengths = self.state.lengths + 1
        return hidden

    def delta(self, x, prefix, packing) -> torch.Tensor:
        return self.prefill_delta(x, prefix, packing) if self.is_prefill else self.step_delta(x, prefix)

    def prefill_delta(self, x, prefix, packing) -> torch.Tensor:
        y, final = self.delta_states(x, prefix, packing)
        self.state.states[prefix] = final.view(x.shape[0], -1, *final.shape[-2:])
        self.state.taps[prefix] = self.last_inputs(x, prefix)
        z, norm, out = self.layer(prefix, "z", "delta_norm", "out")
        return self.stages.delta_output(y, x, z, norm, out, self.geometry.eps)

    def last_inputs(self, x, prefix) -> torch.Tensor:
        count = self.geometry.conv_width - 1
        index = self.state.lengths.unsqueeze(1) + torch.arange(-count, 0, device=x.device)
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        inputs = F.linear(x[rows, index.clamp(min=0)], self.weights[f"{prefix}.qkv"])
        return torch.where((index >= 0).unsqueeze(-1), inputs, 0.0)

    def step_delta(self, x, prefix) -> torch.Tensor:
        names = ("qkv", "conv", "a", "b", "A_log", "dt_bias", "z", "delta_norm", "out")
        qkv, conv, a, b, a_log, dt_bias, z, norm, out = self.layer(prefix, *names)
        window = torch.cat([self.state.taps[prefix], F.linear(x, qkv)], dim=1)
        self.state.taps[prefix] = window[:, 1:]
        everywhere = torch.full(window.shape[:2], conv.shape[1], device=x.device)
        q, k, v = split_delta(convolve(window, conv, everywhere)[:, -1], self.geometry)
        log_alpha, beta = delta_gates(F.linear(x[:, 0], a), F.linear(x[:, 0], b), a_log, dt_bias)
        y, self.state.states[prefix] = recurrent_delta_rule(q, k, v, log_alpha, beta, self.state.states[prefix])
        return gated_output(y, F.linear(x[:, 0], z), norm, out, self.geometry.eps).unsqueeze(1)

    def attention(self, x, prefix, packing) -> torch.Tensor:
        if not self.is_prefill:
            return self.step_attention(x, prefix, packing.positions)
        q, k, v, gate = self.attention_inputs(x, prefix, packing.positions)
        self.state.keys[prefix] = F.pad(k, (0, 0, 0, 0, 0, self.room - k.shape[1]))
        self.state.values[prefix] = F.pad(v, (0, 0, 0, 0, 0, self.room - v.shape[1]))
        return self.stages.attention_output(attend(q, k, v, packing), gate, self.weights[f"{prefix}.o"])

    def step_attention(self, x, prefix, positions) -> torch.Tensor:
        q, k, v, gate = self.attention_inputs(x, prefix, positions)
        keys, values = self.state.keys[prefix], self.state.values[prefix]
        rows = torch.arange(x.shape[0], device=x.device)
        keys[rows, positions[:, 0]], values[rows, positions[:, 0]] = k[:, 0], v[:, 0]
        visible = torch.arange(self.room, device=x.device) <= positions
        grouped = q.view(x.shape[0], keys.shape[2], -1, q.shape[-1])
        y = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=visible[:, None, None]
        )
        return self.stages.attention_output(y.reshape(q.shape), gate, self.weights[f"{prefix}.o"])


@torch.inference_mode()
def generate(
    decoder: Decoder, prompts: list[list[int]], max_tokens: int, stops: set[int], temperature: float = 0.0
) -> list[list[int]]:
    """The new tokens of every prompt, the stop token included where one came."""
    hidden = decoder.prefill(prompts, max_tokens)
    device = hidden.device
    stop_ids = torch.tensor(sorted(stops), device=device)
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    drawn = []
    for _ in range(max_tokens):
        token_ids = draw(decoder.logits(hidden), temperature)
        drawn.append(token_ids)
        finished |= torch.isin(token_ids, stop_ids)
        if finished.all():
            break
        hidden = decoder.step(token_ids)
    return [cut_at(row, stops) for row in torch.stack(drawn, dim=1).tolist()]


def draw(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    noise = -torch.empty_like(logits).exponential_().log()
    return (logits / temperature + noise).argmax(-1)


def cut_at(token_ids: list[int], stops: set[int]) -> list[int]:
    for index, token_id in enumerate(token_ids):
        if token_id in stops:
            return token_ids[: index + 1]
    return token_ids


def generate_all(decoder, prompts, max_tokens, stops, temperature=0.0, batch_tokens: int = 400_000) -> list[list[int]]:
    """`generate` over any number of prompts, in batches of similar length."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    results: dict[int, list[int]] = {}
    while order:
        count = max(1, min(len(order), batch_tokens // (len(prompts[order[-1]]) + max_tokens), 512))
        chosen, order = order[-count:], order[:-count]
        outputs = generate(decoder, [prompts[index] for index in chosen], max_tokens, stops, temperature)
        results |= dict(zip(chosen, outputs, strict=True))
    return [results[index] for index in range(len(prompts))]
