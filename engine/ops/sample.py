"""Choice of a token for each row, as its request's parameters on the device say."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, next_power_of_2
from engine.ops.penalise import TokenCounts, penalise, penalised
from engine.ops.sample_argmax import best_kernel, best_key, launched
from engine.ops.sample_noise import gumbel, gumbel_noise, noise_keys_of
from engine.ops.sample_table import (
    BIAS_IDS,
    BIASES,
    FREQUENCY,
    IS_PENALISED,
    IS_TRUNCATED,
    MAX_BIASES,
    MAX_STOP_IDS,
    MIN_P,
    MIN_TOKENS,
    NO_ID,
    NUM_PROMPT_TOKENS,
    PRESENCE,
    REPETITION,
    SEED_KEY,
    STOP_IDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WIDTH,
    SamplingTable,
    ids_between,
    number,
)
from engine.ops.sample_truncate import (
    TruncateShape,
    TruncateWorkspace,
    is_truncated,
    lowest_kept,
    lowest_of_row,
    narrow_triton,
    shape_for,
)

# bits of a row's flags
HAS_MASK = tl.constexpr(1)
MUST_END = tl.constexpr(2)
# collected logits that are looked at together
LOOK = 1024


@dataclass(frozen=True, slots=True)
class SampleRows:
    """For whom a row of logits is sampled. Requests have the same number of rows, beside each other.

    slots       [rows] int32              of the row's request; -1: none, its token is 0
    positions   [rows] int64              of the token to be chosen, from the prompt's start
    drafts      [requests, drafts] int64  of the round, not yet in the counts, in their order
    num_drafts  [rows] int32              so many of them come before the row's token
    mask_words  [rows, at least vocab / 32] int32, or None where no request has a constraint; one bit per id
    mask_flags  [rows] int32              1: the row has a mask; 2: which allows nothing but stop ids
    """

    slots: torch.Tensor
    positions: torch.Tensor
    drafts: torch.Tensor
    num_drafts: torch.Tensor
    mask_words: torch.Tensor | None = None
    mask_flags: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SampleWorkspace:
    """Contents never outlive a call.

    keys      [rows, programs] int64   the best choice among a program's ids
    truncate  for rows that are truncated
    """

    keys: torch.Tensor
    truncate: TruncateWorkspace

    @classmethod
    def empty(
        cls, rows: int, vocab: int, device: torch.device | str, shape: TruncateShape | None = None
    ) -> "SampleWorkspace":
        shape = shape or shape_for(rows)
        keys = torch.empty(rows, cdiv(vocab, shape.block), dtype=torch.int64, device=device)
        return cls(keys, TruncateWorkspace.empty(rows, vocab, shape, device))


def sample(
    logits: torch.Tensor,
    table: SamplingTable,
    tokens: TokenCounts,
    rows: SampleRows,
    workspace: SampleWorkspace | None = None,
) -> torch.Tensor:
    """argmax(log p + gumbel(seed, position, id)), or argmax(log p) for a greedy request; p of the logits after
    penalties, bias, stop ids that are still too early, mask, temperature, top-k, top-p and min-p, in this order

    logits     [rows, vocab] fp32, contiguous, -inf where an id may never be chosen; left as they are
    workspace  for these rows and this vocabulary; allocated when not given
    return     [rows] int64
    """
    if logits.is_cuda:
        return sample_triton(logits, table, tokens, rows, workspace)
    return sample_reference(logits, table, tokens, rows)


def sample_reference(logits: torch.Tensor, table: SamplingTable, tokens: TokenCounts, rows: SampleRows) -> torch.Tensor:
    slots = rows.slots.clamp(min=0).long()
    words, numbers = table.words[slots], table.numbers[slots]
    logits = adjusted(logits, words, numbers, tokens, rows)
    temperature = numbers[:, TEMPERATURE.value, None]
    drawn = temperature > 0
    scaled = torch.where(drawn, logits / torch.where(drawn, temperature, 1.0), logits)
    top_p, min_p = numbers[:, TOP_P.value, None], numbers[:, MIN_P.value, None]
    lowest = lowest_kept(scaled, words[:, TOP_K.value].tolist(), top_p, min_p)
    is_cut = words[:, IS_TRUNCATED.value, None].bool() & (scaled < lowest)
    ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    keys = noise_keys_of(words.view(torch.int64)[:, SEED_KEY.value // 2], rows.positions)
    scores = torch.where(drawn, scaled + gumbel(keys[:, None], ids), scaled)
    return scores.masked_fill(is_cut, -torch.inf).argmax(dim=-1) * (rows.slots >= 0)


def adjusted(
    logits: torch.Tensor, words: torch.Tensor, numbers: torch.Tensor, tokens: TokenCounts, rows: SampleRows
) -> torch.Tensor:
    """Penalties, then bias, then stop ids that are still too early, then what masks rule out."""
    logits = _penalise(logits, words, numbers, tokens, rows)
    flags = torch.zeros_like(rows.slots) if rows.mask_flags is None else rows.mask_flags
    is_early = rows.positions - words[:, NUM_PROMPT_TOKENS.value] < words[:, MIN_TOKENS.value]
    is_early &= (flags & MUST_END.value) == 0
    for row in range(len(logits)):
        biased, stops = (_listed(words[row], *of) for of in ((BIAS_IDS, MAX_BIASES), (STOP_IDS, MAX_STOP_IDS)))
        logits[row, biased] += numbers[row, BIASES.value : BIASES.value + len(biased)]
        logits[row, stops] = torch.where(is_early[row], -torch.inf, logits[row, stops])
    if rows.mask_words is None:
        return logits
    allowed = unpack(rows.mask_words, logits.shape[-1]) | ((flags & HAS_MASK.value) == 0)[:, None]
    return logits.masked_fill(~allowed, -torch.inf)


def _listed(words: torch.Tensor, first: tl.constexpr, most: tl.constexpr) -> torch.Tensor:
    ids = words[first.value : first.value + most.value]
    return ids[ids != NO_ID].long()


def _penalise(
    logits: torch.Tensor, words: torch.Tensor, numbers: torch.Tensor, tokens: TokenCounts, rows: SampleRows
) -> torch.Tensor:
    slots = rows.slots.clamp(min=0).long()
    drafts = rows.drafts.repeat_interleave(len(logits) // len(rows.drafts), dim=0)
    counts = tokens.counts[slots]
    for row, number_of in enumerate(rows.num_drafts.tolist()):
        counts[row].index_add_(0, drafts[row, :number_of], torch.ones_like(drafts[row, :number_of], dtype=torch.int32))
    columns = [numbers[:, of.value, None] for of in (PRESENCE, FREQUENCY, REPETITION)]
    is_penalised = words[:, IS_PENALISED.value, None].bool()
    return torch.where(is_penalised, penalise(logits, counts, tokens.in_prompt[slots], *columns), logits)


def unpack(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """One bool per id: bit i % 32 of word i // 32.

    words   [rows, at least vocab_size / 32] int32
    return  [rows, vocab_size] bool
    """
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> bits) & 1).flatten(1)[:, :vocab_size].bool()


def sample_triton(
    logits: torch.Tensor,
    table: SamplingTable,
    tokens: TokenCounts,
    rows: SampleRows,
    workspace: SampleWorkspace | None = None,
    shape: TruncateShape | None = None,
) -> torch.Tensor:
    num_rows, vocab = logits.shape
    shape = shape or shape_for(num_rows)
    workspace = workspace or SampleWorkspace.empty(num_rows, vocab, logits.device, shape)
    _check(logits, tokens, rows)
    launch = launched(logits.device)
    parts = workspace.keys.shape[1]
    part_lanes = {"PARTS": next_power_of_2(parts)}
    space = workspace.truncate
    assert space.scaled.shape == logits.shape and parts == cdiv(vocab, shape.block)
    masks = (rows.mask_words, rows.mask_flags) if rows.mask_words is not None else (rows.slots, rows.slots)
    adjust_kernel[(parts, num_rows)](
        logits, table.words, tokens.counts, tokens.in_prompt.view(torch.int8), rows.slots, rows.positions,
        rows.drafts, rows.num_drafts, *masks, workspace.keys, space.scaled, space.ranges,
        space.counts, space.masses, space.used, vocab, rows.drafts.stride(0), masks[0].stride(0),
        num_rows // len(rows.drafts),
        HAS_MASKS=rows.mask_words is not None, BLOCK=shape.block, TALLIES=shape.levels * shape.cuts, **launch,
    )  # fmt: skip
    narrow_triton(table.words, rows.slots, space, shape)
    scan_kernel[(parts, num_rows)](
        table.words, rows.slots, rows.positions, workspace.keys, space.scaled, space.ranges, space.masses,
        space.bounds, space.places, space.values, space.before, space.found, space.lowest, vocab,
        BLOCK=shape.block, LEVELS=shape.levels, CUTS=shape.cuts, CAPACITY=shape.capacity,
        LOOK=min(LOOK, next_power_of_2(shape.capacity)), **part_lanes, **launch,
    )  # fmt: skip
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    best_kernel[(num_rows,)](workspace.keys, token_ids, parts, **part_lanes, **launch)
    return token_ids


def _check(logits: torch.Tensor, tokens: TokenCounts, rows: SampleRows) -> None:
    assert logits.is_contiguous() and logits.dtype == torch.float32
    assert tokens.counts.is_contiguous() and tokens.in_prompt.is_contiguous()
    assert len(rows.slots) == len(rows.positions) == len(rows.num_drafts) == len(logits)
    assert len(logits) % len(rows.drafts) == 0 and (rows.drafts.shape[1] == 0 or rows.drafts.stride(1) == 1)
    assert rows.mask_words is None or rows.mask_words.stride(1) == 1


@triton.jit
def biased(logits, ids, first, slot_ptr, BLOCK: tl.constexpr):
    place, end = ids_between(slot_ptr + BIAS_IDS, first, first + BLOCK, MAX_BIASES)
    for i in range(place, end):
        logits = tl.where(ids == tl.load(slot_ptr + BIAS_IDS + i), logits + number(slot_ptr + i, BIASES), logits)
    return logits


@triton.jit
def without_stops(logits, ids, first, slot_ptr, BLOCK: tl.constexpr):
    place, end = ids_between(slot_ptr + STOP_IDS, first, first + BLOCK, MAX_STOP_IDS)
    for i in range(place, end):
        logits = tl.where(ids == tl.load(slot_ptr + STOP_IDS + i), float("-inf"), logits)
    return logits


@triton.jit
def masked(logits, ids, words_ptr, vocab):
    words = tl.load(words_ptr + ids // 32, mask=ids < vocab, other=0)
    return tl.where(((words >> (ids % 32)) & 1) != 0, logits, float("-inf"))


@triton.jit
def forget_tallies(counts_ptr, masses_ptr, used_ptr, row, TALLIES: tl.constexpr):
    at = row * TALLIES + tl.arange(0, TALLIES)
    tl.store(counts_ptr + at, tl.zeros([TALLIES], tl.int32))
    tl.store(masses_ptr + at, tl.zeros([TALLIES], tl.int64))
    tl.store(used_ptr + row, 0)


@triton.jit
def adjust_kernel(
    logits_ptr, table_ptr, counts_ptr, in_prompt_ptr, slots_ptr, positions_ptr, drafts_ptr, num_drafts_ptr,
    mask_words_ptr, mask_flags_ptr, keys_ptr, scaled_ptr, ranges_ptr, tally_counts_ptr, tally_masses_ptr, used_ptr,
    vocab, drafts_stride, mask_stride, rows_per_request,
    HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr, TALLIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits as the request wants them: the best choice of each program, or, of a row to be truncated, what that asks
    for."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = part * BLOCK
    ids = first + tl.arange(0, BLOCK)
    place = row * tl.num_programs(0) + part
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        # id 0
        tl.store(keys_ptr + place, 0x7FFFFFFF)
    else:
        slot_ptr = table_ptr + slot * WIDTH
        position = tl.load(positions_ptr + row)
        logits = tl.load(logits_ptr + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        if tl.load(slot_ptr + IS_PENALISED) > 0:
            logits = penalised(
                logits, ids, counts_ptr + slot * vocab, in_prompt_ptr + slot * vocab,
                drafts_ptr + row // rows_per_request * drafts_stride, tl.load(num_drafts_ptr + row), slot_ptr, vocab,
            )  # fmt: skip
        if tl.load(slot_ptr + BIAS_IDS) < vocab:
            logits = biased(logits, ids, first, slot_ptr, BLOCK)
        flags = 0
        if HAS_MASKS:
            flags = tl.load(mask_flags_ptr + row)
        is_early = position - tl.load(slot_ptr + NUM_PROMPT_TOKENS) < tl.load(slot_ptr + MIN_TOKENS)
        if is_early & ((flags & MUST_END) == 0):
            logits = without_stops(logits, ids, first, slot_ptr, BLOCK)
        if (flags & HAS_MASK) != 0:
            logits = masked(logits, ids, mask_words_ptr + row * mask_stride, vocab)
        temperature = number(slot_ptr, TEMPERATURE)
        if temperature > 0:
            logits = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
        if is_truncated(table_ptr, slot, WIDTH):
            tl.store(scaled_ptr + row * vocab + ids, logits, mask=ids < vocab)
            tl.store(ranges_ptr + place * 2, tl.max(logits, axis=0))
            finite = tl.where(logits > float("-inf"), logits, float("inf"))
            tl.store(ranges_ptr + place * 2 + 1, tl.min(finite, axis=0))
            if part == 0:
                forget_tallies(tally_counts_ptr, tally_masses_ptr, used_ptr, row, TALLIES)
        else:
            if temperature > 0:
                logits += gumbel_noise(seed_key_of(slot_ptr), position, ids)
            tl.store(keys_ptr + place, best_key(logits, ids, vocab))


@triton.jit
def seed_key_of(slot_ptr):
    return tl.load((slot_ptr + SEED_KEY).to(tl.pointer_type(tl.int64)))


@triton.jit
def scan_kernel(
    table_ptr, slots_ptr, positions_ptr, keys_ptr, scaled_ptr, ranges_ptr, masses_ptr, bounds_ptr, places_ptr,
    values_ptr, before_ptr, found_ptr, lowest_ptr, vocab,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr, CUTS: tl.constexpr, CAPACITY: tl.constexpr,
    LOOK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best choice among a program's ids that truncation left."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if is_truncated(table_ptr, slot, WIDTH):
        slot_ptr = table_ptr + slot * WIDTH
        programs = tl.num_programs(0)
        lowest = lowest_of_row(
            ranges_ptr, masses_ptr, bounds_ptr, places_ptr, values_ptr, before_ptr, found_ptr, lowest_ptr, slot_ptr,
            row, programs, PARTS, LEVELS, CUTS, CAPACITY, LOOK,
        )  # fmt: skip
        ids = part * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(scaled_ptr + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        scores = tl.where(logits >= lowest, logits, float("-inf"))
        if tl.max(scores, axis=0) > float("-inf"):
            scores += gumbel_noise(seed_key_of(slot_ptr), tl.load(positions_ptr + row), ids)
        tl.store(keys_ptr + row * programs + part, best_key(scores, ids, vocab))
