"""What goes into the engine and what comes out: plain data, no torch, no text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """Closes a thought in which the output begins.

    max_tokens     of thought; then come the others
    end_token_ids  what closes it
    end_text       the text with which it is closed, whatever tokens spell it
    """

    max_tokens: int
    end_token_ids: tuple[int, ...]
    end_text: str


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output has to be.

    grammar     of its text from the first token on, the thought included, in llguidance's form of Lark; a stop id is
                possible only where the grammar may end
    param       the field of the client's request that it was made of, for errors
    """

    grammar: str | None = None
    param: str = "constraint"
    thought: ThoughtLimit | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Neutral values mean off; the server fills in a checkpoint's own defaults.

    max_tokens          at most this many output tokens
    temperature         0 is greedy, and so is what lies below 1e-5
    top_k               0 is off
    logprobs            None: none; n: the chosen token's and the n most likely ones', of the distribution before
                        temperature and truncation
    stop_token_ids      the token that stops is not part of the output
    min_tokens          stop ids are not sampled before this many output tokens, unless a constraint allows nothing else
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. The salt keeps tenants' cached prefixes apart.

    marks  tokens, ascending, after which a conversation may go on otherwise: the ends of system and of user messages
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an output token and of the most likely ones at its position, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step added to a request.

    token_ids           new output tokens; several when drafts were accepted, none when only the reason is new
    logprobs            one per token when asked for, else empty
    finish_reason       set in the last event
    num_cached_tokens   prompt tokens that were not computed again
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine serves; the server shows it and checks requests against it.

    kv_codec       how keys and values are kept
    planned_bytes  of the device, by what they are for
    max_queued_requests  that may wait beside those that run; None where nobody said
    """

    checkpoint_dir: str
    max_model_len: int
    vocab_size: int
    device: str
    num_drafts: int
    max_num_requests: int
    kv_cache_tokens: int
    planned_bytes: Mapping[str, int] = field(default_factory=dict)
    kv_codec: str = "bf16"
    max_queued_requests: int | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters since start, sent along with the events of a step.

    num_prompt_tokens     computed; those reused are num_cached_tokens
    num_free_kv_blocks    that no running request holds, cached ones included
    num_cached_blocks     that a prompt may reuse, those of running requests included
    num_snapshots         recurrent states that stand for reuse
    num_evicted_blocks    cached ones that were given up for others; likewise num_evicted_snapshots
    num_prefix_queries    requests whose prompt was looked up
    num_host_tokens       brought back to the device from host memory; num_disk_tokens of them had come from disk
    host_bytes            that the prefix cache has in host memory; likewise disk_bytes
    num_host_evicted      blocks and states that made room in host memory for others; likewise num_disk_evicted
    num_host_damaged      that were not what had been written there; likewise num_disk_damaged
    num_tier_dropped      that were to be kept, or brought from disk, when there was no room
    num_disk_failures     files that could not be read, written or removed
    peak_bytes            most memory that the engine has held: of a GPU what torch took and the driver's part as
                          planned, else the whole process
    """

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    num_aborted: int = 0
    num_cached_blocks: int = 0
    num_snapshots: int = 0
    num_prefix_queries: int = 0
    num_cached_tokens: int = 0
    num_evicted_blocks: int = 0
    num_evicted_snapshots: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    num_host_evicted: int = 0
    num_disk_evicted: int = 0
    num_host_damaged: int = 0
    num_disk_damaged: int = 0
    num_tier_dropped: int = 0
    num_disk_failures: int = 0
    peak_bytes: int = 0
