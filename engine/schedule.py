"""What one step computes, as plain data between the scheduler and whoever runs it."""

import enum
from dataclasses import dataclass, field

from config.engine import BLOCK_SIZE
from engine.cache.prefix_cache import CachedPath
from engine.cache.tiers import Transfer
from engine.request import Request, TokenLogprob


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request inside the engine.

    arrival              order of submission
    seed                 of its random numbers: the request's own, or a random one
    token_ids            prompt and output so far
    num_computed_tokens  tokens whose KV and GDN state stand
    num_accepted_rows    rows of its last pass that stand but are not yet folded into the GDN state
    num_in_flight        passes that were scheduled and will give it tokens
    last_turn            number of its last turn to decode, of all turns of all requests
    num_cached_tokens    of its prompt that were not computed again
    draft_token_ids      MTP's proposal for what follows token_ids
    block_ids            KV blocks, in order of position
    num_promised_blocks  reserved and not yet taken
    slot                 of its GDN state and its sampling counts; -1 while it waits
    path                 its blocks that the prefix cache knows
    cuts                 where states are to stand: its chunks end there, unless a pass keeps states inside of them
    has_begun            its first chunk was scheduled, and with it decided what it reuses
    fetch_until_s        it waits no longer than this for what lies outside the device
    fetch_seen           how much had come from the slower tiers when it was looked at last
    """

    request: Request
    arrival: int
    seed: int
    token_ids: list[int]
    path: CachedPath
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_accepted_rows: int = 0
    num_in_flight: int = 0
    last_turn: int = 0
    num_cached_tokens: int = 0
    draft_token_ids: tuple[int, ...] = ()
    block_ids: list[int] = field(default_factory=list)
    num_promised_blocks: int = 0
    slot: int = -1
    cuts: tuple[int, ...] = ()
    has_begun: bool = False
    fetch_until_s: float | None = None
    fetch_seen: int = -1

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def token_limit(self) -> int:
        """Prompt and output may never be longer than this; it is what admission reserves."""
        return self.num_prompt_tokens + self.request.sampling.max_tokens

    @property
    def num_shared_blocks(self) -> int:
        return self.num_cached_tokens // BLOCK_SIZE

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.num_prompt_tokens

    @property
    def may_go_on(self) -> bool:
        """Whether it can still run once the passes in flight have given it one token each, the least that they may."""
        return self.num_output_tokens + self.num_in_flight < self.request.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens start : end of one request.

    is_first  nothing of the request is on the device yet but the blocks that it shares
    restored  index of the snapshot that it starts from; None anywhere but at a first chunk with a hit
    transfer  what has to be brought back before it, that snapshot included; after the chunks before it have begun,
              since it may take what they began from
    """

    state: RequestState
    start: int
    end: int
    is_first: bool = False
    restored: int | None = None
    transfer: Transfer | None = None

    @property
    def ends_prompt(self) -> bool:
        return self.end == self.state.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """The state of a slot's request after `position` tokens, to be kept as snapshot `index`."""

    slot: int
    index: int
    position: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one step computes: some prompt tokens, and one pass over the last token and the drafts of every request
    that decodes.

    kept    states among the rows of the decode pass before this one, to be copied before anything else. A position that
            the accepted rows do not reach is left out, or copied for nothing
    stores  what earlier schedules left on the device and is to lie outside of it too; next
    copies  states that stand after a chunk, or inside of it, and are to be kept; no two in the same place
    """

    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[RequestState, ...] = ()
    kept: tuple[SnapshotCopy, ...] = ()
    stores: tuple[Transfer, ...] = ()
    copies: tuple[SnapshotCopy, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.decodes)

    @property
    def sampled(self) -> tuple[RequestState, ...]:
        """Requests that get a token in this step, in the order of their outcomes."""
        return tuple(chunk.state for chunk in self.chunks if chunk.ends_prompt) + self.decodes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave one request: accepted drafts and the target's own token, and drafts for the next step."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
