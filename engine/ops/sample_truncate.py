"""Top-k, top-p and min-p as the smallest logit that is kept, found without sorting the vocabulary.

Counts and masses of what lies above a few cuts narrow the smallest kept logit down to an interval; the logits in it are
collected, and each is ranked against all others. Masses that programs add up are integers, so that their order does
not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, next_power_of_2
from engine.ops.sample_argmax import launched
from engine.ops.sample_table import IS_TRUNCATED, LOG_MIN_P, TOP_K, TOP_P, WIDTH, number

# tokens that are ranked first when top-p stands alone; the whole vocabulary only if their mass does not reach it
NUCLEUS_LOOK = 512
# of the largest logit's mass; 2**18 tokens of it stay below 2**63
MASS_UNIT = tl.constexpr(2.0**40)
# ids that a bisecting program reads at once
BISECTED = 8192
NO_LIMIT = tl.constexpr(2**63 - 1)
# which limits decide: none, top-k alone, top-p alone, top-p over what top-k leaves
BY_COUNT = tl.constexpr(1)
BY_MASS = tl.constexpr(2)
BY_BOTH = tl.constexpr(3)


def lowest_kept(logits: torch.Tensor, top_k: Sequence[int], top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit that top-k, then top-p over what is left, then min-p keep. At least the largest is kept, and
    of equal logits all or none, so that the choice does not depend on how the rows beside it are sorted.

    logits        [rows, vocab]
    top_k         per row, 0 for off
    top_p, min_p  [rows, 1]
    return        [rows, 1]
    """
    vocab = logits.shape[-1]
    limits = [min(k or vocab, vocab) for k in top_k]
    limit = torch.tensor(limits, device=logits.device)[:, None]
    is_unlimited = limit == vocab
    ranked = max(k if k < vocab else min(NUCLEUS_LOOK, vocab) for k in limits)
    best = logits.topk(ranked, dim=-1).values
    total = (logits - best[:, :1]).exp().sum(dim=-1, keepdim=True)
    if ranked < vocab and bool((is_unlimited & (top_p < 1) & (_mass(best, limit)[:, -1:] < top_p * total)).any()):
        best = logits.sort(dim=-1, descending=True).values
    mass = _mass(best, limit)
    total = torch.where(is_unlimited, total, mass[:, -1:])
    within = torch.arange(best.shape[-1], device=logits.device) < limit
    # a token is kept while the mass of those before it has not reached top_p
    kept = within & ((mass - (best - best[:, :1]).exp() < top_p * total) | (top_p >= 1))
    lowest = best.gather(-1, kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    lowest = lowest.masked_fill(is_unlimited & (top_p >= 1), -torch.inf)
    return torch.maximum(lowest, best[:, :1] + min_p.log())


def _mass(best: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Running sum of exp(l - max) over the first `limit` of each row's logits, sorted from the largest."""
    within = torch.arange(best.shape[-1], device=best.device) < limit
    return ((best - best[:, :1]).exp() * within).cumsum(dim=-1)


@dataclass(frozen=True, slots=True)
class TruncateShape:
    """How the search is cut. Only `counted` and `tile` change roundings.

    block         ids of a program
    counters      programs of a row that count above cuts; each takes `counted` ids in turn, a `tile` at once
    cuts          of an interval, in each of `levels` rounds
    capacity      logits that are ranked; one program bisects where the interval still holds more
    rankers       programs of a row that rank; each takes `ranked` logits after each other
    """

    block: int
    counters: int
    rankers: int
    counted: int = 512
    tile: int = 64
    cuts: int = 32
    levels: int = 2
    capacity: int = 8192
    ranked: int = 16


def shape_for(rows: int) -> TruncateShape:
    """Enough programs for a large card, and few where many rows need them: those with nothing to do cost time too."""
    counters, rankers = max(32, min(512, 1024 // rows)), max(16, min(128, 512 // rows))
    return TruncateShape(block=1024 if rows <= 8 else 2048, counters=counters, rankers=rankers)


@dataclass(frozen=True, slots=True)
class TruncateWorkspace:
    """What the kernels of a search tell each other; contents never outlive a call.

    scaled   [rows, vocab] fp32              logits over temperature
    ranges   [rows, programs, 2] fp32        largest and smallest finite of a program's
    counts   [rows, levels, cuts] int32      logits above a cut
    masses   [rows, levels, cuts] int64      their mass
    bounds   [rows, levels + 1, 2] fp32      the interval, without its lower end
    places   [rows, levels + 1, 4] int64     count and mass above it, logits in it, which limits decide
    used     [rows] int32                    logits that have been collected
    values   [rows, capacity] fp32           these
    before   [rows, capacity] int64          mass above each of them
    found    [rows] int64                    mass of what top-k leaves
    lowest   [rows] fp32                     what bisection found
    """

    scaled: torch.Tensor
    ranges: torch.Tensor
    counts: torch.Tensor
    masses: torch.Tensor
    bounds: torch.Tensor
    places: torch.Tensor
    used: torch.Tensor
    values: torch.Tensor
    before: torch.Tensor
    found: torch.Tensor
    lowest: torch.Tensor

    @classmethod
    def empty(cls, rows: int, vocab: int, shape: TruncateShape, device: torch.device | str) -> "TruncateWorkspace":
        def made(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return torch.empty(rows, *sizes, dtype=dtype, device=device)

        return cls(
            scaled=made(torch.float32, vocab),
            ranges=made(torch.float32, cdiv(vocab, shape.block), 2),
            counts=made(torch.int32, shape.levels, shape.cuts),
            masses=made(torch.int64, shape.levels, shape.cuts),
            bounds=made(torch.float32, shape.levels + 1, 2),
            places=made(torch.int64, shape.levels + 1, 4),
            used=made(torch.int32),
            values=made(torch.float32, shape.capacity),
            before=made(torch.int64, shape.capacity),
            found=made(torch.int64),
            lowest=made(torch.float32),
        )


def narrow_triton(table: torch.Tensor, slots: torch.Tensor, space: TruncateWorkspace, shape: TruncateShape) -> None:
    """From logits over temperature and their ranges to all that lowest_of_row asks for."""
    rows, vocab = space.scaled.shape
    programs = cdiv(vocab, shape.block)
    common = {"LEVELS": shape.levels, "CUTS": shape.cuts, "CAPACITY": shape.capacity, **launched(table.device)}
    state = (space.counts, space.masses, space.bounds, space.places)
    for level in range(shape.levels):
        tally_kernel[(min(shape.counters, cdiv(vocab, shape.counted)), rows)](
            table, slots, space.scaled, space.ranges, *state, vocab, programs, LEVEL=level, BLOCK=shape.counted,
            TILE=shape.tile, PARTS=next_power_of_2(programs), **common,
        )  # fmt: skip
    collect_kernel[(programs, rows)](
        table, slots, space.scaled, *state, space.used, space.values, vocab, BLOCK=shape.block, **common
    )
    rank_kernel[(min(shape.rankers, cdiv(shape.capacity, shape.ranked)), rows)](
        table, slots, *state, space.values, space.before, space.found,
        MINE=shape.ranked, TILE=2 * shape.tile, **common,
    )  # fmt: skip
    bisect_kernel[(rows,)](
        table, slots, space.scaled, *state, space.lowest, vocab, BLOCK=min(BISECTED, next_power_of_2(vocab)),
        **common | launched(table.device, num_warps=16),
    )  # fmt: skip


@triton.jit
def ordered(x):
    """int32 that compare as the numbers do."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(code):
    return (code ^ ((code >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_truncated(table_ptr, slot, WIDTH: tl.constexpr):
    """Whether the row has a request, and one that truncates."""
    return tl.load(table_ptr + tl.maximum(slot, 0).to(tl.int64) * WIDTH + IS_TRUNCATED) * (slot >= 0).to(tl.int32) > 0


@triton.jit
def range_of_row(ranges_ptr, row, programs, PARTS: tl.constexpr):
    """Largest and smallest finite logit."""
    part = tl.arange(0, PARTS)
    at = ranges_ptr + (row * programs + part) * 2
    top = tl.max(tl.load(at, mask=part < programs, other=float("-inf")), axis=0)
    return top, tl.min(tl.load(at + 1, mask=part < programs, other=float("inf")), axis=0)


@triton.jit
def mass_of(logits, top):
    """exp(l - max) in units that add up exactly."""
    return (tl.exp(logits - top) * MASS_UNIT).to(tl.int64)


@triton.jit
def share(total, top_p):
    """The mass that top-p keeps a token up to; at least something, so that the most likely one is kept."""
    return (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64) + 1


@triton.jit
def cuts_of(low, high, LEVEL: tl.constexpr, CUTS: tl.constexpr):
    """From high down to low, which is the last. Denser at the top at first: nuclei are small."""
    j = tl.arange(0, CUTS)
    part = (j + 1).to(tl.float32) / CUTS
    if LEVEL == 0:
        part = part * part
    return tl.where(j == CUTS - 1, low, tl.maximum(high - (high - low) * part, low))


@triton.jit
def interval(bounds_ptr, places_ptr, row, level, LEVELS: tl.constexpr):
    """low, high, count and mass above, logits in it, limits that decide"""
    bounds = bounds_ptr + (row * (LEVELS + 1) + level) * 2
    place = places_ptr + (row * (LEVELS + 1) + level) * 4
    return (
        tl.load(bounds), tl.load(bounds + 1),
        tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3),
    )  # fmt: skip


@triton.jit
def keep_interval(
    bounds_ptr, places_ptr, row, level, low, high, count, mass, inside, deciding, LEVELS: tl.constexpr
):  # fmt: skip
    bounds = bounds_ptr + (row * (LEVELS + 1) + level) * 2
    place = places_ptr + (row * (LEVELS + 1) + level) * 4
    tl.store(bounds, low)
    tl.store(bounds + 1, high)
    tl.store(place, count)
    tl.store(place + 1, mass)
    tl.store(place + 2, inside)
    tl.store(place + 3, deciding)


@triton.jit
def total_mass(masses_ptr, row, LEVELS: tl.constexpr, CUTS: tl.constexpr):
    return tl.load(masses_ptr + row * LEVELS * CUTS + CUTS - 1)


@triton.jit
def narrowed(
    counts_ptr, masses_ptr, bounds_ptr, places_ptr, slot_ptr, row,
    LEVEL: tl.constexpr, LEVELS: tl.constexpr, CUTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The interval after what has been counted at LEVEL, or the same if it was small enough before."""
    low, high, count, mass, inside, deciding = interval(bounds_ptr, places_ptr, row, LEVEL, LEVELS)
    if inside > CAPACITY:
        at = (row * LEVELS + LEVEL) * CUTS + tl.arange(0, CUTS)
        counts = tl.load(counts_ptr + at).to(tl.int64)
        masses = tl.load(masses_ptr + at)
        cuts = cuts_of(low, high, LEVEL, CUTS)
        top_k, top_p = tl.load(slot_ptr + TOP_K), number(slot_ptr, TOP_P)
        if LEVEL == 0:
            limits_count = (top_k > 0) & (top_k < tl.max(counts, axis=0))
            deciding = limits_count.to(tl.int64) + 2 * (top_p < 1).to(tl.int64)
        limit = share(total_mass(masses_ptr, row, LEVELS, CUTS), top_p)
        keeps = tl.where(deciding % 2 == 1, counts < top_k, masses < limit)
        high = tl.minimum(high, tl.min(tl.where(keeps, cuts, float("inf")), axis=0))
        low = tl.max(tl.where(keeps, float("-inf"), cuts), axis=0)
        count = tl.maximum(count, tl.max(tl.where(keeps, counts, 0), axis=0))
        mass = tl.maximum(mass, tl.max(tl.where(keeps, masses, 0), axis=0))
        inside = tl.min(tl.where(keeps, NO_LIMIT, counts), axis=0)
        # what top-k leaves is collected as a whole, since top-p looks at all of it
        inside = tl.where(deciding == BY_BOTH, inside, inside - count)
        inside = tl.where(deciding == 0, 0, inside)
    return low, high, count, mass, inside, deciding


@triton.jit
def tally_kernel(
    table_ptr, slots_ptr, scaled_ptr, ranges_ptr, counts_ptr, masses_ptr, bounds_ptr, places_ptr, vocab, programs,
    LEVEL: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr, CUTS: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds up counts and masses above the cuts of the interval that the levels before left."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if is_truncated(table_ptr, slot, WIDTH):
        slot_ptr = table_ptr + slot.to(tl.int64) * WIDTH
        top, bottom = range_of_row(ranges_ptr, row, programs, PARTS)
        if LEVEL == 0:
            # just below the smallest, since an interval does not contain its lower end
            low, high = from_ordered(ordered(bottom) - 1), top
            limits_count = (tl.load(slot_ptr + TOP_K) > 0) & (tl.load(slot_ptr + TOP_K) < vocab)
            is_limited = (limits_count | (number(slot_ptr, TOP_P) < 1)) & (top > float("-inf"))
            zero = row * 0
            count, mass, inside, deciding = zero, zero, tl.where(is_limited, zero + NO_LIMIT, zero), zero
        else:
            low, high, count, mass, inside, deciding = narrowed(
                counts_ptr, masses_ptr, bounds_ptr, places_ptr, slot_ptr, row, LEVEL - 1, LEVELS, CUTS, CAPACITY
            )
        if part == 0:
            keep_interval(bounds_ptr, places_ptr, row, LEVEL, low, high, count, mass, inside, deciding, LEVELS)
        if inside > CAPACITY:
            cuts = cuts_of(low, high, LEVEL, CUTS)
            counts = tl.zeros([CUTS], tl.int32)
            masses = tl.zeros([CUTS], tl.int64)
            for start in range(part * BLOCK, vocab, tl.num_programs(0) * BLOCK):
                more, mass_more = above_cuts(scaled_ptr + row * vocab, start, vocab, cuts, top, BLOCK, TILE, CUTS)
                counts += more
                # rounded for each block alone, so that it does not matter who counts it
                masses += (mass_more * MASS_UNIT).to(tl.int64)
            at = (row * LEVELS + LEVEL) * CUTS + tl.arange(0, CUTS)
            tl.atomic_add(counts_ptr + at, counts, sem="relaxed")
            tl.atomic_add(masses_ptr + at, masses, sem="relaxed")


@triton.jit
def above_cuts(row_ptr, start, vocab, cuts, top, BLOCK: tl.constexpr, TILE: tl.constexpr, CUTS: tl.constexpr):
    """Count and mass of a block's logits above each cut; [CUTS] int32 and fp32."""
    counts = tl.zeros([CUTS, TILE], tl.float32)
    masses = tl.zeros([CUTS, TILE], tl.float32)
    # unrolled, so that all loads are under way at once
    for first in tl.static_range(0, BLOCK, TILE):
        ids = start + first + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
        above = (logits[None, :] > cuts[:, None]).to(tl.float32)
        counts += above
        masses = tl.fma(above, tl.broadcast_to(tl.exp(logits - top)[None, :], (CUTS, TILE)), masses)
    # integers are summed across lanes by one instruction
    return tl.sum(counts.to(tl.int32), axis=1), tl.sum(masses, axis=1)


@triton.jit
def collect_kernel(
    table_ptr, slots_ptr, scaled_ptr, counts_ptr, masses_ptr, bounds_ptr, places_ptr, used_ptr, values_ptr, vocab,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, CUTS: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copies the logits of the interval, in any order; with all above them where top-p follows top-k."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if is_truncated(table_ptr, slot, WIDTH):
        slot_ptr = table_ptr + slot.to(tl.int64) * WIDTH
        low, high, count, mass, inside, deciding = narrowed(
            counts_ptr, masses_ptr, bounds_ptr, places_ptr, slot_ptr, row, LEVELS - 1, LEVELS, CUTS, CAPACITY
        )
        if part == 0:
            keep_interval(bounds_ptr, places_ptr, row, LEVELS, low, high, count, mass, inside, deciding, LEVELS)
        if (inside > 0) & (inside <= CAPACITY):
            ids = part * BLOCK + tl.arange(0, BLOCK)
            logits = tl.load(scaled_ptr + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
            taken = (logits > low) & (logits <= tl.where(deciding == BY_BOTH, float("inf"), high))
            held = tl.sum(taken.to(tl.int32), axis=0)
            if held > 0:
                place = tl.atomic_add(used_ptr + row, held, sem="relaxed") + tl.cumsum(taken.to(tl.int32), axis=0) - 1
                tl.store(values_ptr + row * CAPACITY + place, logits, mask=taken)


@triton.jit
def rank_kernel(
    table_ptr, slots_ptr, counts_ptr, masses_ptr, bounds_ptr, places_ptr, values_ptr, before_ptr, found_ptr,
    MINE: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr, CUTS: tl.constexpr, CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Mass above each collected logit, all of it for those that top-k drops."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if is_truncated(table_ptr, slot, WIDTH):
        _low, _high, count, mass, inside, deciding = interval(bounds_ptr, places_ptr, row, LEVELS, LEVELS)
        if inside <= CAPACITY:
            most = count_limit(table_ptr, slot, deciding)
            top = top_of_row(bounds_ptr, row, LEVELS)
            # what top-k leaves is collected as a whole
            count, mass = tl.where(deciding == BY_BOTH, 0, count), tl.where(deciding == BY_BOTH, 0, mass)
            for first in range(tl.program_id(0) * MINE, inside.to(tl.int32), tl.num_programs(0) * MINE):
                rank(
                    values_ptr + row * CAPACITY, before_ptr + row * CAPACITY, found_ptr + row, first, inside, top, most,
                    count, mass, MINE, TILE,
                )  # fmt: skip


@triton.jit
def count_limit(table_ptr, slot, deciding):
    top_k = tl.load(table_ptr + slot.to(tl.int64) * WIDTH + TOP_K).to(tl.int64)
    return tl.where(deciding == BY_MASS, NO_LIMIT, top_k)


@triton.jit
def top_of_row(bounds_ptr, row, LEVELS: tl.constexpr):
    """The upper end of the first interval."""
    return tl.load(bounds_ptr + row * (LEVELS + 1) * 2 + 1)


@triton.jit
def rank(
    values_ptr, before_ptr, found_ptr, first, inside, top, most, count, mass, MINE: tl.constexpr, TILE: tl.constexpr
):
    """A few of the collected logits against all; count and mass lie above all of them."""
    mine = first + tl.arange(0, MINE)
    values = tl.load(values_ptr + mine, mask=mine < inside, other=float("-inf"))
    above = tl.zeros([MINE, TILE], tl.int32)
    with_equal = tl.zeros([MINE, TILE], tl.int32)
    before = tl.zeros([MINE, TILE], tl.int64)
    for start in range(0, inside.to(tl.int32), TILE):
        other = start + tl.arange(0, TILE)
        others = tl.load(values_ptr + other, mask=other < inside, other=float("-inf"))
        is_above = others[None, :] > values[:, None]
        above += is_above.to(tl.int32)
        with_equal += (others[None, :] >= values[:, None]).to(tl.int32)
        before += tl.where(is_above, mass_of(others, top)[None, :], 0)
    above, with_equal = tl.sum(above, axis=1) + count, tl.sum(with_equal, axis=1) + count
    before = tl.sum(before, axis=1) + mass
    kept = above < most
    tl.store(before_ptr + mine, tl.where(kept, before, NO_LIMIT), mask=mine < inside)
    # equal ones that top-k keeps beyond its number count only as far as the number goes
    is_last = kept & (with_equal >= most) & (mine < inside)
    tl.store(found_ptr + tl.zeros_like(mine), before + (most - above) * mass_of(values, top), mask=is_last)


@triton.jit
def bisect_kernel(
    table_ptr, slots_ptr, scaled_ptr, counts_ptr, masses_ptr, bounds_ptr, places_ptr, lowest_ptr, vocab,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, CUTS: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The smallest kept logit where too many were left to be ranked."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if is_truncated(table_ptr, slot, WIDTH):
        low, high, _count, _mass, inside, deciding = interval(bounds_ptr, places_ptr, row, LEVELS, LEVELS)
        if inside > CAPACITY:
            most, top = count_limit(table_ptr, slot, deciding), top_of_row(bounds_ptr, row, LEVELS)
            top_p = number(table_ptr + slot.to(tl.int64) * WIDTH, TOP_P)
            total = total_mass(masses_ptr, row, LEVELS, CUTS)
            row_ptr = scaled_ptr + row * vocab
            tl.store(lowest_ptr + row, bisected(row_ptr, vocab, top, low, high, deciding, most, total, top_p, BLOCK))


@triton.jit
def bisected(row_ptr, vocab, top, low, high, deciding, most, total, top_p, BLOCK: tl.constexpr):
    """The smallest kept logit of (low, high], by one program that reads the row for every bit."""
    limit = tl.where(deciding == BY_MASS, share(total, top_p), NO_LIMIT)
    lowest = bisect(row_ptr, vocab, top, low, high, most, limit, BLOCK)
    if deciding == BY_BOTH:
        count, mass = above_cut(row_ptr, vocab, top, lowest, BLOCK)
        left = mass + (most - count) * mass_of(lowest, top)
        below = from_ordered(ordered(lowest) - 1)
        lowest = bisect(row_ptr, vocab, top, below, top, most, share(left, top_p), BLOCK)
    return lowest


@triton.jit
def bisect(row_ptr, vocab, top, low, high, most_count, most_mass, BLOCK: tl.constexpr):
    """The smallest logit of (low, high] above which lie less than most_count logits and most_mass."""
    least, greatest = ends_within(row_ptr, vocab, low, high, BLOCK)
    # int64: the distance of two codes passes 2**31
    below, found = ordered(least).to(tl.int64) - 1, ordered(greatest).to(tl.int64)
    while found - below > 1:
        middle = below + ((found - below) >> 1)
        count, mass = above_cut(row_ptr, vocab, top, from_ordered(middle.to(tl.int32)), BLOCK)
        keeps = (count < most_count) & (mass < most_mass)
        found = tl.where(keeps, middle, found)
        below = tl.where(keeps, below, middle)
    return from_ordered(found.to(tl.int32))


@triton.jit
def ends_within(row_ptr, vocab, low, high, BLOCK: tl.constexpr):
    """Smallest and largest logit of (low, high]."""
    least = tl.full([BLOCK], float("inf"), tl.float32)
    greatest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
        within = (logits > low) & (logits <= high)
        least = tl.minimum(least, tl.where(within, logits, float("inf")))
        greatest = tl.maximum(greatest, tl.where(within, logits, float("-inf")))
    return tl.min(least, axis=0), tl.max(greatest, axis=0)


@triton.jit
def above_cut(row_ptr, vocab, top, cut, BLOCK: tl.constexpr):
    """Count and mass of the logits above it."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
        is_above = logits > cut
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp(logits - top), 0.0)
    return tl.sum(count, axis=0).to(tl.int64), tl.sum((mass * MASS_UNIT).to(tl.int64), axis=0)


@triton.jit
def lowest_of_row(
    ranges_ptr, masses_ptr, bounds_ptr, places_ptr, values_ptr, before_ptr, found_ptr, lowest_ptr, slot_ptr,
    row, programs,
    PARTS: tl.constexpr, LEVELS: tl.constexpr, CUTS: tl.constexpr, CAPACITY: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """The smallest logit that is kept."""
    _low, _high, _count, _mass, inside, deciding = interval(bounds_ptr, places_ptr, row, LEVELS, LEVELS)
    lowest = tl.full([], float("-inf"), tl.float32)
    if inside > CAPACITY:
        lowest = tl.load(lowest_ptr + row)
    elif inside > 0:
        total = total_mass(masses_ptr, row, LEVELS, CUTS)
        if deciding == BY_BOTH:
            total = tl.load(found_ptr + row)
        limit = tl.where(deciding == BY_COUNT, NO_LIMIT, share(total, number(slot_ptr, TOP_P)))
        kept = tl.full([LOOK], float("inf"), tl.float32)
        for start in range(0, inside.to(tl.int32), LOOK):
            place = row * CAPACITY + start + tl.arange(0, LOOK)
            held = start + tl.arange(0, LOOK) < inside
            before = tl.load(before_ptr + place, mask=held, other=NO_LIMIT)
            values = tl.load(values_ptr + place, mask=held, other=float("inf"))
            kept = tl.minimum(kept, tl.where(before < limit, values, float("inf")))
        lowest = tl.min(kept, axis=0)
    top, _bottom = range_of_row(ranges_ptr, row, programs, PARTS)
    return tl.maximum(lowest, top + number(slot_ptr, LOG_MIN_P))
