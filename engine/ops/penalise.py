"""Presence, frequency and repetition penalties, and the counts that they need."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.sample_argmax import launched
from engine.ops.sample_table import FREQUENCY, IS_PENALISED, PRESENCE, REPETITION, WIDTH, SamplingTable, number


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """counts     [slots, vocab] int32  output tokens so far, of slots whose requests have penalties
    in_prompt  [slots, vocab] bool
    """

    counts: torch.Tensor
    in_prompt: torch.Tensor

    @classmethod
    def zeros(cls, num_slots: int, vocab_size: int, device: torch.device | str) -> "TokenCounts":
        return cls(
            torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device),
            torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device),
        )

    @property
    def num_bytes(self) -> int:
        return self.counts.nbytes + self.in_prompt.nbytes

    def begin(self, slot: int, prompt_token_ids: Sequence[int]) -> None:
        """Forgets the slot's last request."""
        ids = torch.tensor(prompt_token_ids)
        if self.in_prompt.is_cuda:
            # pinned, so that the host does not wait for what runs on the device
            ids = ids.pin_memory().to(self.in_prompt.device, non_blocking=True)
        self.counts[slot].zero_()
        self.in_prompt[slot].zero_().index_fill_(0, ids, True)


def penalise(
    logits: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """l' = l / r if l > 0 else l * r, for ids in prompt or output; then l' - presence * (count > 0) - frequency * count

    logits     [rows, vocab]
    counts     [rows, vocab] int   of each id in the output
    in_prompt  [rows, vocab] bool
    presence, frequency, repetition   [rows, 1]
    """
    repeated = in_prompt | (counts > 0)
    logits = torch.where(repeated, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - presence * (counts > 0) - frequency * counts


def observe(
    tokens: TokenCounts,
    table: SamplingTable,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    """counts[slot, id] += 1 for the tokens that became part of a request's output, if it has penalties

    token_ids   [rows] int64  of the same number of rows for each request
    slots       [requests] int32, -1 for none
    num_tokens  [requests] int32, of the first rows of the request
    writes      tokens.counts
    """
    implementation = observe_triton if token_ids.is_cuda else observe_reference
    implementation(tokens, table, token_ids, slots, num_tokens)


def observe_reference(
    tokens: TokenCounts,
    table: SamplingTable,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    by_request = token_ids.view(len(slots), -1)
    penalised = (slots >= 0) & table.words[slots.clamp(min=0).long(), IS_PENALISED.value].bool()
    stands = torch.arange(by_request.shape[1], device=slots.device) < (num_tokens * penalised)[:, None]
    request, place = stands.nonzero(as_tuple=True)
    ids = slots[request].long(), by_request[request, place]
    tokens.counts.index_put_(ids, torch.ones_like(request, dtype=torch.int32), accumulate=True)


def observe_triton(
    tokens: TokenCounts,
    table: SamplingTable,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    requests = len(slots)
    assert token_ids.is_contiguous() and tokens.counts.is_contiguous() and len(token_ids) % requests == 0
    observe_kernel[(requests,)](
        token_ids, slots, num_tokens, table.words, tokens.counts, tokens.counts.shape[1], len(token_ids) // requests,
        **launched(token_ids.device, num_warps=1),
    )  # fmt: skip


@triton.jit
def observe_kernel(
    token_ids_ptr, slots_ptr, num_tokens_ptr, table_ptr, counts_ptr, vocab, rows_per_request, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    counted = (slot >= 0) & (tl.load(table_ptr + tl.maximum(slot, 0) * WIDTH + IS_PENALISED) > 0)
    for row in range(0, tl.load(num_tokens_ptr + request) * counted.to(tl.int32)):
        token_id = tl.load(token_ids_ptr + request * rows_per_request + row)
        tl.atomic_add(counts_ptr + slot * vocab + token_id, 1, sem="relaxed")


@triton.jit
def penalised(logits, ids, counts_ptr, in_prompt_ptr, drafts_ptr, num_drafts, slot_ptr, vocab):
    """counts_ptr and in_prompt_ptr are the slot's; drafts stand before the row's token and are not yet counted."""
    held = ids < vocab
    counts = tl.load(counts_ptr + ids, mask=held, other=0)
    for draft in range(0, num_drafts):
        counts += (ids == tl.load(drafts_ptr + draft)).to(tl.int32)
    present = counts > 0
    repeated = present | (tl.load(in_prompt_ptr + ids, mask=held, other=0) != 0)
    repetition = tl.zeros_like(logits) + number(slot_ptr, REPETITION)
    scaled = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(repeated, scaled, logits)
    logits = logits - number(slot_ptr, PRESENCE) * present.to(tl.float32)
    return logits - number(slot_ptr, FREQUENCY) * counts.to(tl.float32)
