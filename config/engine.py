"""Settings of the engine."""

from typing import Literal, Self

from pydantic import ByteSize, Field, model_validator

from config.section import Section

BLOCK_SIZE = 64


class EngineConfig(Section):
    """What the engine serves and how much it holds. Counts are tokens unless the name says otherwise."""

    model: str = "longlane-tiny"
    """`longlane-tiny`, the checkpoint that comes with the project, or a Hugging Face directory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA GPU when there is one."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and activations; `auto` is bfloat16 on a GPU and float32 on a CPU."""

    max_model_len: int | None = Field(default=None, ge=BLOCK_SIZE)
    """Longest prompt plus output; the checkpoint's own limit when not set."""

    max_num_requests: int = Field(default=8, ge=1, le=64)
    """Requests that run at once."""

    kv_cache_tokens: int | None = Field(default=None, ge=BLOCK_SIZE)
    """Tokens that the KV cache holds for all requests together; `max_model_len` when not set."""

    kv_codec: Literal["auto", "bf16", "int8-g64", "rk8v4", "rk4v4-e8"] = "auto"
    """How keys and values are kept, from most to fewest bytes; `bf16` keeps them in the type of the activations. `auto`
    is int8-g64 for bfloat16 on a GPU, else that type."""

    memory_bytes: ByteSize | None = Field(default=None, ge=2**20)
    """Memory that the engine may take in all, like 24GiB; what is free at its start when not set."""

    embedding_memory: Literal["device", "host"] = "device"
    """Where the table of input embeddings lies. `host`: in pinned host memory, from which a GPU reads the rows that it
    needs; saves the table's size on the card and costs next to nothing. Means nothing on a CPU, or where the table is
    the output head too."""

    mtp_window: int | None = Field(default=None, ge=BLOCK_SIZE, multiple_of=BLOCK_SIZE)
    """Newest tokens that MTP attends to when it drafts, beside the first 64 of a context, so that its keys and values
    take so much for each request instead of a share of the KV cache; all tokens when not set. Changes which drafts are
    accepted, never what is answered."""

    yarn: bool = False
    """Positions four times as far as the checkpoint's own limit, to at most 1,010,000, as it documents (YaRN). Changes
    every answer a little, so only for prompts that need it."""

    max_queued_requests: int = Field(default=64, ge=0)
    """Requests that may wait; more are refused with 503."""

    max_queued_tokens: int = Field(default=1_048_576, ge=0)
    """Prompt tokens that may wait in all; more are refused with 503."""

    prefill_chunk: int | None = Field(default=None, ge=BLOCK_SIZE, multiple_of=BLOCK_SIZE)
    """Prompt tokens computed in one step, at most; decoding requests get a token between two chunks. When not set, 512
    on a CPU, and on a GPU, where launching a step costs as much as a thousand tokens, 4,096 or as many as fit."""

    longest_gap_ms: float | None = Field(default=None, gt=0)
    """Longest time between two tokens of an answer while prompts are computed beside it: chunks are made as small as
    that takes. 100 on a GPU and without bound on a CPU when not set."""

    prefix_caching: bool = True
    """Reuse what was computed for an earlier prompt that begins alike. Tenants never share."""

    snapshot_bytes: ByteSize | None = Field(default=None, ge=0)
    """Memory for recurrent states that reuse starts from, beside the KV cache, like 4GiB; when not set, what contexts
    leave of 4 GiB on a GPU and of 1 GiB on a CPU. No more is taken than blocks can use."""

    host_cache_bytes: ByteSize = ByteSize(0)
    """Host memory, like 8GiB, in which the prefix cache keeps copies: what the device has given up comes back from
    there instead of being computed again, also after the engine process was replaced. 0 keeps none. Taken at the start,
    and less of it where the machine has less."""

    disk_cache_dir: str | None = None
    """Directory in which the prefix cache keeps copies of what it has in host memory; they outlive the service. Prompts
    and answers can be computed back from what lies there: treat it like them."""

    disk_cache_bytes: ByteSize = Field(default=ByteSize(64 * 2**30), ge=2**20)
    """Most that the files in `disk_cache_dir` take together; what was used longest ago goes. No more than the file
    system has for them at the start: what they take already and what is free, less a twentieth of its size or 4 GiB,
    whichever is less, so that programs beside the cache can still write."""

    deterministic: bool = False
    """Reuse only what was computed as part of a prompt, so that reuse never changes a token. Answers, which are
    computed token by token and differ from that by rounding, are then computed again when they come back."""

    num_drafts: int = Field(default=3, ge=0, le=7)
    """Tokens that MTP proposes per step; 0 turns speculation off, and nothing of MTP is loaded. Changes no
    distribution, and no token at temperature 0 beyond what the rounding of products of more rows may."""

    cuda_graphs: bool = True
    """Replay decode passes as CUDA graphs; without them, for looking at kernels one by one, decoding takes many times
    as long."""

    hang_timeout_s: float = Field(default=300.0, gt=0)
    """The engine process is replaced when one step takes longer than this."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine process; when not set, every core, or one for a model less than 1,024 wide."""

    log_reuse: bool = True
    """One line per request says how much of its prompt was reused and why no more; never what it says."""

    @model_validator(mode="after")
    def _tiers_are_of_a_cache(self) -> Self:
        if self.host_cache_bytes and not self.prefix_caching:
            raise ValueError("host_cache_bytes is for what prefix_caching keeps, which is off")
        return self

    @model_validator(mode="after")
    def _disk_goes_through_host_memory(self) -> Self:
        if self.disk_cache_dir is not None and not (self.host_cache_bytes and self.prefix_caching):
            raise ValueError("disk_cache_dir needs prefix_caching, and host_cache_bytes through which files are read")
        return self

    @model_validator(mode="after")
    def _cache_holds_one_request(self) -> Self:
        longest, held = self.max_model_len, self.kv_cache_tokens
        if longest is not None and held is not None and held < longest:
            raise ValueError(
                f"kv_cache_tokens {held} is less than max_model_len {longest}: "
                "one request of full length would never be admitted"
            )
        return self
