"""Chooses tokens from logits, for rows of many requests at once.

The token at a position is argmax(log p + noise): p is the request's processed distribution there, and the noise is
Gumbel noise that depends on the request's seed, the position and the token id alone. So a token depends neither on
the rows beside it, nor on the step, nor on whether the row verified a draft or followed the last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.constraint import Constraints, Mask
from engine.ops.penalise import TokenCounts, penalise
from engine.ops.sample import unpack
from engine.ops.sample_noise import gumbel, noise_key
from engine.ops.sample_table import MIN_TEMPERATURE
from engine.ops.sample_truncate import lowest_kept
from engine.request import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """For whom a row of logits is sampled.

    slot           where the request's token counts lie
    request_id     by which its constraint is found, if it has one
    position       of the token to be chosen, from the prompt's start
    num_outputs    output tokens before it
    draft_token_ids   those of them that are drafts, not yet in the counts
    """

    sampling: SamplingParams
    seed: int
    slot: int
    position: int
    num_outputs: int
    draft_token_ids: tuple[int, ...] = ()
    request_id: str = ""


class Sampler:
    """Holds, per slot, the counts that penalties need, and looks at the running requests' constraints; everything else
    is a function of its arguments."""

    def __init__(
        self, vocab_size: int, num_slots: int, device: torch.device, constraints: Constraints | None = None
    ) -> None:
        self._tokens = TokenCounts.zeros(num_slots, vocab_size, device)
        self._device = device
        self._constraints = constraints

    @property
    def num_bytes(self) -> int:
        return self._tokens.num_bytes

    def begin(self, slot: int, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Forgets the slot's last request."""
        if has_penalties(sampling):
            self._tokens.begin(slot, prompt_token_ids)

    def observe(self, slot: int, token_ids: Sequence[int], sampling: SamplingParams, request_id: str = "") -> None:
        """Counts tokens that became part of the output, and moves the request's constraint past them."""
        if self._constraints is not None and (matcher := self._constraints.get(request_id)):
            matcher.advance(token_ids)
        if has_penalties(sampling):
            ids = torch.tensor(token_ids, device=self._device)
            self._tokens.counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """argmax(log p + noise) of each row; argmax(log p) below MIN_TEMPERATURE.

        logits  [rows, vocab] fp32, -inf where an id may never be chosen; left as they are
        return  [rows] int64
        """
        logits = self._adjust(logits, rows)
        token_ids = logits.argmax(dim=-1)
        drawn = [index for index, row in enumerate(rows) if row.sampling.temperature >= MIN_TEMPERATURE]
        if drawn:
            token_ids[drawn] = self._draw(logits[drawn], [rows[index] for index in drawn])
        return token_ids

    def _adjust(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Penalties, then logit bias, then stop ids that are still too early, then what constraints rule out."""
        masks = self._masks(rows)
        penalised = [index for index, row in enumerate(rows) if has_penalties(row.sampling)]
        biased = [index for index, row in enumerate(rows) if row.sampling.logit_bias]
        early = [
            index
            for index, row in enumerate(rows)
            if row.num_outputs < row.sampling.min_tokens and not (index in masks and masks[index].must_end)
        ]
        if not (penalised or biased or early or masks):
            return logits
        logits = logits.clone()
        if penalised:
            logits[penalised] = self._penalise(logits[penalised], [rows[index] for index in penalised])
        for index in biased:
            ids, values = zip(*rows[index].sampling.logit_bias.items(), strict=True)
            logits[index, list(ids)] += torch.tensor(values, dtype=logits.dtype, device=self._device)
        for index in early:
            logits[index, list(rows[index].sampling.stop_token_ids)] = -torch.inf
        if masks:
            words = torch.from_numpy(np.stack([mask.words for mask in masks.values()])).to(self._device)
            logits[list(masks)] = logits[list(masks)].masked_fill(~unpack(words, logits.shape[-1]), -torch.inf)
        return logits

    def _masks(self, rows: Sequence[SamplingRow]) -> dict[int, Mask]:
        """Those of the rows whose requests have a constraint and whose drafts keep to it."""
        if self._constraints is None:
            return {}
        found = ((index, self._constraints.get(row.request_id), row) for index, row in enumerate(rows))
        masks = ((index, matcher.mask(row.draft_token_ids)) for index, matcher, row in found if matcher is not None)
        return {index: mask for index, mask in masks if mask is not None}

    def _penalise(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        slots = [row.slot for row in rows]
        counts = self._tokens.counts[slots]
        for index, row in enumerate(rows):
            for token_id in row.draft_token_ids:
                counts[index, token_id] += 1
        params = [row.sampling for row in rows]
        return penalise(
            logits,
            counts,
            self._tokens.in_prompt[slots],
            self._column([p.presence_penalty for p in params]),
            self._column([p.frequency_penalty for p in params]),
            self._column([p.repetition_penalty for p in params]),
        )

    def _draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        params = [row.sampling for row in rows]
        logits = logits / self._column([p.temperature for p in params])
        keys = [noise_key(row.seed, row.position) for row in rows]
        keys = torch.tensor(keys, dtype=torch.int32, device=self._device)
        if all(p.top_k == 0 and p.top_p == 1 and p.min_p == 0 for p in params):
            ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=self._device)
            return gumbel(keys[:, None], ids).add_(logits).argmax(dim=-1)
        # truncation leaves a few tokens of many; only they need noise
        index, ids = (logits >= self._lowest_kept(logits, params)).nonzero(as_tuple=True)
        scores = torch.full_like(logits, -torch.inf)
        scores[index, ids] = logits[index, ids] + gumbel(keys[index], ids.int())
        return scores.argmax(dim=-1)

    def _lowest_kept(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        return lowest_kept(
            logits,
            [p.top_k for p in params],
            self._column([p.top_p for p in params]),
            self._column([p.min_p for p in params]),
        )

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]


def has_penalties(sampling: SamplingParams) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[TokenLogprob, ...]:
    """log softmax of the model's own logits, at the chosen ids and at the num_top most likely ones.

    logits     [rows, vocab] fp32
    token_ids  [rows] int64
    """
    log_p = logits.log_softmax(dim=-1)
    chosen = log_p.gather(-1, token_ids[:, None])[:, 0].tolist()
    values, ids = log_p.topk(num_top, dim=-1)
    tops = [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return tuple(TokenLogprob(logprob, top) for logprob, top in zip(chosen, tops, strict=True))
