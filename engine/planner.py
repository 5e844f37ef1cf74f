"""Every byte of an engine, before anything of it is loaded. Plain arithmetic over the geometry, and nothing else."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from config.engine import BLOCK_SIZE
from engine.cache.kv_codecs import CODECS, GROUP
from engine.cache.mtp_window import MtpWindow
from engine.convert.recipes import RECIPES, Role
from engine.errors import CapacityError
from engine.models.config import (
    CONV_WIDTH,
    GDN_HEAD_DIM,
    ROTATED_DIMS,
    YARN_FACTOR,
    YARN_LIMIT,
    ModelConfig,
    MoeConfig,
)
from engine.models.layout import FUSED_GATE_UP, tensor_shapes

Mtp = Literal["off", "full", "window"]
Place = Literal["device", "host"]

# a matrix of 4 or 8 bits lies in whole tiles of so many rows, with one fp16 scale per row and group of columns
TILE_ROWS = 16
SCALE_BYTES = 2
FLOAT_BYTES = 4
# rows of a slot that the next pass may take back
PENDING_ROWS = 8
# int32 counts of the output and a bool for the prompt, per id of the vocabulary; on a GPU also what a slot's request
# asks for (ops/sample_table), and where it stands beside its drafts (ops/decode_slots)
SAMPLING_BYTES, SAMPLING_NUMBERS, SLOT_NUMBERS = 5, 2128, 5
INT64_BYTES = 8
# copies of the logits that live at once while tokens are chosen: as computed, adjusted, noise, scores
LOGIT_COPIES = 4
# decode attention: contexts are cut finer near their beginning (ops/attention_splits)
SPLITS = ((8_192, 64), (65_536, 512), (math.inf, 1024))
# a prompt's attention (ops/attention_prefill): tokens of a part of a context, coded parts that are restored at a time,
# and query rows times heads whose results of such parts there is room for
PART, RESTORED_PARTS, PARTIAL_ROWS = 8192, 4, 396 * 128
# a prompt's recurrence (ops/gated_delta_prefill): rows of a chunk, and of a request between two launches
DELTA_CHUNK, DELTA_SEGMENT = 64, 1024
# matrices that so many rows share become bf16 before they are multiplied, so many bytes at a time
# (ops/dequantized_matmul)
DECODED_ROWS, DECODED_BYTES = 2048, 64 * 2**20
# positions, angles, places and choices of a prompt's row
SMALL_ROW_BYTES = 512
# activations of a row in a decode pass, in residual streams
DECODE_ROW_STREAMS = 32
# most requests and rows of a captured pass; graphs of each number of requests (forward, and three ways to choose), and
# what the driver keeps for one beside the workspace that all share
GRAPH_REQUESTS, GRAPH_ROWS = 8, 32
GRAPHS_PER_COUNT, GRAPH_BYTES = 4, 2 * 2**20
# the driver's and the libraries' own, in every process that uses a card, and loaded kernels; most on a large card
CUDA_CONTEXT_BYTES = 768 * 2**20
# shares that no allocation of ours is
OUTSIDE = ("CUDA graphs", "CUDA context")
# blocks whose bytes are gathered on the device at a time on their way to or from host memory
STAGED_BLOCKS = 256
# how far the searches for what fits look
MOST_BLOCKS, MOST_REQUESTS = 1 << 22, 64
# what the allocator cannot use between what it gave out; on a CPU the activations and logits as well
RESERVE_BYTES = {"cuda": 256 * 2**20, "cpu": 384 * 2**20}


@dataclass(frozen=True, slots=True)
class Demand:
    """What an engine is to hold.

    recipe             of the artifact; None for a checkpoint as it is, in the type of the activations
    codec              of the KV cache; `bf16` stands for the type of the activations
    activation_bytes   2 or 4, of one number
    context            longest prompt and output together
    num_requests       that run at once
    kv_cache_tokens    of all requests together
    num_snapshots      recurrent states that stand for reuse
    mtp                off: neither its layer nor its keys and values; window: those of the first 64 and the newest
                       `mtp_window` tokens of each request
    is_embedding_on_host  which saves nothing where the table is the head too
    prefill_chunk      most prompt tokens of a step
    host_cache_bytes   of the prefix cache's host tier
    device             whose budget it is
    """

    config: ModelConfig
    recipe: str | None = None
    codec: str = "bf16"
    activation_bytes: int = 2
    context: int = BLOCK_SIZE
    num_requests: int = 1
    kv_cache_tokens: int = BLOCK_SIZE
    num_snapshots: int = 0
    num_drafts: int = 0
    mtp: Mtp = "full"
    mtp_window: int = 4096
    is_embedding_on_host: bool = False
    prefill_chunk: int = 512
    host_cache_bytes: int = 0
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def num_blocks(self) -> int:
        return _blocks(self.kv_cache_tokens)

    @property
    def has_mtp(self) -> bool:
        return self.config.has_mtp and self.mtp != "off"

    @property
    def window(self) -> MtpWindow | None:
        return MtpWindow.of_tokens(self.mtp_window) if self.has_mtp and self.mtp == "window" else None

    @property
    def may_move_embedding(self) -> bool:
        return self.device == "cuda" and not self.config.tie_word_embeddings

    @property
    def fits_all(self) -> bool:
        """Whether every request may reach the full context at once."""
        return self.num_blocks >= self.num_requests * _blocks(self.context)

    def having(self, **changes: int | str | bool) -> "Demand":
        return replace(self, **changes)

    def with_full(self, context: int, num_requests: int) -> "Demand":
        """The same for so many requests of that context, all at once."""
        tokens = num_requests * _blocks(context) * BLOCK_SIZE
        return replace(self, context=context, num_requests=num_requests, kv_cache_tokens=tokens)


@dataclass(frozen=True, slots=True)
class Share:
    """One line of a plan."""

    name: str
    num_bytes: int
    place: Place = "device"


@dataclass(frozen=True, slots=True)
class Plan:
    shares: tuple[Share, ...]

    @property
    def num_bytes(self) -> int:
        """Of the device."""
        return self._in("device")

    @property
    def host_bytes(self) -> int:
        """Beside the device, where that is not the host itself."""
        return self._in("host")

    def of(self, *names: str) -> int:
        return sum(share.num_bytes for share in self.shares if share.name in names)

    def _in(self, place: Place) -> int:
        return sum(share.num_bytes for share in self.shares if share.place == place)

    def table(self, budget: int) -> str:
        """Bytes and GiB of each line, then what is left of the budget."""
        lines = [(share.name + " (host)" * (share.place == "host"), share.num_bytes) for share in self.shares]
        lines += [("all", self.num_bytes), ("of", budget), ("left", budget - self.num_bytes)]
        return "\n".join(f"  {name:<28}{count:>18,}{count / 2**30:>9.3f} GiB" for name, count in lines)


@dataclass(frozen=True, slots=True)
class Option:
    """A change that makes a plan smaller. setting, value  as the engine's settings have them"""

    setting: str
    value: str
    saved_bytes: int

    def __str__(self) -> str:
        return f"{self.setting} {self.value} (frees {gib(self.saved_bytes)})"


def plan(demand: Demand) -> Plan:
    """Weights by role, then what requests hold, then what steps need."""
    shares = [*_weights(demand), *_caches(demand), *_work(demand)]
    return Plan(tuple(share for share in shares if share.num_bytes))


def fits(demand: Demand, budget: int) -> bool:
    return plan(demand).num_bytes <= budget


def check_fits(demand: Demand, budget: int, settings: Iterable[str] | None = None) -> Plan:
    """settings  those that advice may name; all when None. raises  CapacityError that says what would fit"""
    wanted = plan(demand)
    if wanted.num_bytes <= budget:
        return wanted
    raise CapacityError(explain(demand, wanted, budget, settings))


def explain(demand: Demand, wanted: Plan, budget: int, settings: Iterable[str] | None = None) -> str:
    """Why a plan is refused, and what would fit instead."""
    kv_bytes = wanted.of("KV blocks", "MTP KV blocks")
    lines = [
        f"a KV cache of {demand.num_blocks * BLOCK_SIZE} tokens needs {gib(kv_bytes)} and everything else "
        f"{gib(wanted.num_bytes - kv_bytes)}, but {gib(budget)} are free: {_fitting_advice(demand, budget)}"
    ]
    found = [option for option in options(demand) if settings is None or option.setting in settings]
    enough = wanted.num_bytes - budget
    if found:
        lines.append("what would help: " + "; ".join(f"{o}{', enough' * (o.saved_bytes >= enough)}" for o in found))
    return "\n".join(lines)


def largest_kv_tokens(demand: Demand, budget: int) -> int:
    """KV cache tokens that fit beside everything else of the demand; a multiple of 64, 0 when nothing fits."""
    return _largest(lambda n: replace(demand, kv_cache_tokens=n * BLOCK_SIZE), MOST_BLOCKS, budget) * BLOCK_SIZE


def largest_context(demand: Demand, budget: int) -> int:
    """The longest context that as many requests could all reach at once; a multiple of 64, 0 when none fits."""
    return _largest(lambda n: demand.with_full(n * BLOCK_SIZE, demand.num_requests), MOST_BLOCKS, budget) * BLOCK_SIZE


def most_requests(demand: Demand, budget: int) -> int:
    """Requests that could all reach the demand's context at once; 0 when not even one could."""
    return _largest(lambda n: demand.with_full(demand.context, n), MOST_REQUESTS, budget)


def with_most_snapshots(demand: Demand, budget: int) -> Demand:
    """The same with as many of its snapshots as fit."""
    count = _largest(lambda n: replace(demand, num_snapshots=n), demand.num_snapshots, budget)
    return replace(demand, num_snapshots=count)


def context_limit(config: ModelConfig, is_stretched: bool) -> int:
    """Tokens that a checkpoint knows positions for; stretched, those that YaRN is documented to reach."""
    native = config.max_position_embeddings
    return min(YARN_FACTOR * native, YARN_LIMIT) if is_stretched else native


def num_snapshots(demand: Demand, snapshot_bytes: int) -> int:
    """As many as the budget holds; more than one per block could never be used."""
    return min(snapshot_bytes // one_snapshot(demand), demand.num_blocks)


def one_snapshot(demand: Demand) -> int:
    """State and last convolution inputs of every layer, one hidden state, and what MTP sees if that is a window."""
    config = demand.config
    inputs = (CONV_WIDTH - 1) * config.gdn_channels
    states = config.num_gdn_layers * FLOAT_BYTES * (_state(config) + inputs)
    return states + config.hidden_size * demand.activation_bytes + _window_bytes(demand)


def options(demand: Demand) -> list[Option]:
    """What a smaller demand would free, the largest first."""
    before = plan(demand).num_bytes
    found = [Option(s, v, before - plan(d).num_bytes) for s, v, d in _variants(demand)]
    return sorted((option for option in found if option.saved_bytes > 0), key=lambda option: -option.saved_bytes)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _fitting_advice(demand: Demand, budget: int) -> str:
    tokens = largest_kv_tokens(demand, budget)
    if not tokens:
        return "lower max_num_requests or snapshot_bytes, or give the engine more memory"
    if demand.num_requests == 1 or not demand.fits_all:
        return f"set max_model_len and kv_cache_tokens to {tokens} or less"
    return (
        f"set max_model_len and kv_cache_tokens to {tokens} or less; {demand.num_requests} requests fit with a "
        f"context of {largest_context(demand, budget)} each, a context of {demand.context} for "
        f"{most_requests(demand, budget)} requests"
    )


def _variants(demand: Demand) -> Iterator[tuple[str, str, Demand]]:
    for codec in CODECS:
        yield "kv_codec", codec, replace(demand, codec=codec)
    if demand.recipe is not None:
        for recipe in RECIPES:
            yield "recipe", recipe, replace(demand, recipe=recipe)
    if demand.may_move_embedding and not demand.is_embedding_on_host:
        yield "embedding_memory", "host", replace(demand, is_embedding_on_host=True)
    if demand.has_mtp:
        if demand.mtp == "full":
            yield "mtp_window", str(demand.mtp_window), replace(demand, mtp="window")
        yield "num_drafts", "0", replace(demand, mtp="off", num_drafts=0)
    if demand.num_snapshots:
        yield "snapshot_bytes", "0", replace(demand, num_snapshots=0)
    if demand.num_requests > 1:
        fewer = demand.num_requests // 2
        smaller = demand.with_full(demand.context, fewer) if demand.fits_all else replace(demand, num_requests=fewer)
        yield "max_num_requests", str(fewer), smaller
    if demand.prefill_chunk > 512:
        yield "prefill_chunk", "512", replace(demand, prefill_chunk=512)


def _largest(demand_of: Callable[[int], Demand], most: int, budget: int) -> int:
    """The largest count whose plan fits; what a plan takes never falls as a count rises."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(demand_of(middle), budget):
            low = middle
        else:
            high = middle - 1
    return low


def _weights(demand: Demand) -> list[Share]:
    bits = _bits(demand)
    counts = dict.fromkeys((*_ROLE_NAMES.values(), "MTP"), 0)
    for name, role, rows, columns in _matrices(demand.config):
        is_mtp = name.startswith("mtp.")
        if not is_mtp or demand.has_mtp:
            counts["MTP" if is_mtp else _ROLE_NAMES[role]] += matrix_bytes(rows, columns, bits[role])
    if demand.config.tie_word_embeddings and (demand.recipe is not None or demand.device == "cpu"):
        # the same matrix once more, laid out for products
        vocab, hidden = demand.config.vocab_size, demand.config.hidden_size
        counts["head"] += matrix_bytes(vocab, hidden, bits["embedding"])
    host = {"embedding"} if demand.is_embedding_on_host and demand.may_move_embedding else set()
    return [Share(f"weights: {name}", count, "host" if name in host else "device") for name, count in counts.items()]


_ROLE_NAMES: dict[Role, str] = {
    "embedding": "embedding",
    "head": "head",
    "attention": "attention",
    "gdn": "GDN",
    "gdn_gates": "GDN",
    "experts": "experts",
    "shared_expert": "shared experts",
    "mlp": "MLP",
    "router": "router",
    "mtp": "MTP",
    "plain": "norms",
}


def _bits(demand: Demand) -> dict[Role, int]:
    """What a recipe leaves in 16 bits has the type of the activations once it is loaded."""
    recipe = RECIPES[demand.recipe or "bf16"]
    return {role: bits if bits != 16 else 8 * demand.activation_bytes for role, bits in recipe.items()}


def matrix_bytes(rows: int, columns: int, bits: int) -> int:
    """Of a plain tensor, or of codes and scales in whole tiles."""
    if bits >= 16:
        return rows * columns * bits // 8
    tiles = -(-rows // TILE_ROWS)
    return tiles * TILE_ROWS * (columns * bits // 8 + columns // GROUP * SCALE_BYTES)


# matrices that read the same input lie one above the other
_STACKS: dict[str, tuple[str, Role]] = {
    "self_attn.q_proj": ("self_attn.projection", "attention"),
    "self_attn.k_proj": ("self_attn.projection", "attention"),
    "self_attn.v_proj": ("self_attn.projection", "attention"),
    "self_attn.o_proj": ("self_attn.o_proj", "attention"),
    "linear_attn.in_proj_qkv": ("linear_attn.in_proj", "gdn"),
    "linear_attn.in_proj_z": ("linear_attn.in_proj", "gdn"),
    "linear_attn.in_proj_a": ("linear_attn.in_proj_gates", "gdn_gates"),
    "linear_attn.in_proj_b": ("linear_attn.in_proj_gates", "gdn_gates"),
    "linear_attn.out_proj": ("linear_attn.out_proj", "gdn"),
    "mlp.gate": ("mlp.router", "router"),
    "mlp.shared_expert_gate": ("mlp.router", "router"),
    "mlp.shared_expert.gate_proj": ("mlp.shared_expert.gate_up", "shared_expert"),
    "mlp.shared_expert.up_proj": ("mlp.shared_expert.gate_up", "shared_expert"),
    "mlp.shared_expert.down_proj": ("mlp.shared_expert.down", "shared_expert"),
    "mlp.gate_proj": ("mlp.gate_up", "mlp"),
    "mlp.up_proj": ("mlp.gate_up", "mlp"),
    "mlp.down_proj": ("mlp.down", "mlp"),
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_up", "experts"),
    "mlp.experts.down_proj": ("mlp.experts.down", "experts"),
    "embed_tokens": ("embed_tokens", "embedding"),
    "lm_head": ("lm_head", "head"),
    "fc": ("fc", "mtp"),
}


def _matrices(config: ModelConfig) -> Iterator[tuple[str, Role, int, int]]:
    """Name, role, rows and columns of everything that is loaded, stacked as it is loaded."""
    prefixes = [*(f"layers.{i}." for i in range(config.num_hidden_layers)), "mtp.layers.0."]
    stacks: dict[str, tuple[Role, int, int]] = {}
    for name, shape in tensor_shapes(config, {prefix + FUSED_GATE_UP for prefix in prefixes}).items():
        prefix, rest = _split(name.removesuffix(".weight"))
        stack, role = _STACKS.get(rest, (rest, "plain"))
        rows = math.prod(shape[:-1]) * _copies(config, rest)
        above = stacks.get(prefix + stack, (role, 0, 0))[1]
        stacks[prefix + stack] = role, above + rows, shape[-1]
    for name, (role, rows, columns) in stacks.items():
        yield name, role, rows, columns
    yield "rope", "plain", 1, ROTATED_DIMS // 2


def _split(name: str) -> tuple[str, str]:
    """layers.3.mlp.gate -> layers.3. and mlp.gate"""
    parts = name.split(".")
    count = (parts[0] == "mtp") + 2 * ("layers" in parts)
    return "".join(f"{part}." for part in parts[:count]), ".".join(parts[count:])


def _copies(config: ModelConfig, name: str) -> int:
    """The norms of query and key are held once per head."""
    heads = {"self_attn.q_norm": config.num_attention_heads, "self_attn.k_norm": config.num_key_value_heads}
    return heads.get(name, 1)


def _caches(demand: Demand) -> list[Share]:
    config, slots, blocks = demand.config, demand.num_requests, demand.num_blocks
    block_bytes = BLOCK_SIZE * kv_token_bytes(demand)
    pending = PENDING_ROWS * (
        (config.linear_num_key_heads + config.linear_num_value_heads) * GDN_HEAD_DIM + config.linear_num_value_heads
    )
    inputs = (CONV_WIDTH - 1 + PENDING_ROWS) * config.gdn_channels
    per_slot = config.num_gdn_layers * FLOAT_BYTES * slots
    return [
        Share("KV blocks", blocks * block_bytes * config.num_attention_layers),
        Share("MTP KV blocks", _mtp_bytes(demand)),
        Share("GDN states", per_slot * _state(config)),
        Share("GDN pending rows", per_slot * pending),
        Share("convolution inputs", per_slot * inputs),
        Share("snapshots", demand.num_snapshots * one_snapshot(demand)),
        Share("host cache", demand.host_cache_bytes, "host"),
        *_tables(demand),
    ]


def _tables(demand: Demand) -> list[Share]:
    slots, counts = demand.num_requests, demand.num_requests * demand.config.vocab_size * SAMPLING_BYTES
    if demand.device == "cpu":
        return [Share("sampling tables", counts), Share("block tables", slots * demand.num_blocks * FLOAT_BYTES)]
    drafts = SLOT_NUMBERS + max(demand.num_drafts, 1)
    return [
        Share("draft state", slots * drafts * INT64_BYTES),
        Share("sampling tables", counts + slots * SAMPLING_NUMBERS * FLOAT_BYTES),
        # rows that are dropped may lie behind the last block
        Share("block tables", slots * (_blocks(demand.context) + 1) * FLOAT_BYTES),
    ]


def kv_token_bytes(demand: Demand) -> int:
    """Of one token in one layer."""
    codec, config = CODECS[demand.codec], demand.config
    num_bytes = codec.bytes_per_token(config.num_key_value_heads, config.head_dim)
    return num_bytes if codec.is_coded else num_bytes * demand.activation_bytes // 2


def _mtp_bytes(demand: Demand) -> int:
    if demand.window is not None:
        return demand.num_requests * _window_bytes(demand)
    return demand.num_blocks * BLOCK_SIZE * kv_token_bytes(demand) if demand.has_mtp else 0


def _window_bytes(demand: Demand) -> int:
    """Of one request."""
    return demand.window.blocks_per_slot * BLOCK_SIZE * kv_token_bytes(demand) if demand.window is not None else 0


def _state(config: ModelConfig) -> int:
    """Numbers of one layer's committed state."""
    return config.linear_num_value_heads * GDN_HEAD_DIM * GDN_HEAD_DIM


def _work(demand: Demand) -> list[Share]:
    reserve = Share("reserve", RESERVE_BYTES[demand.device])
    if demand.device == "cpu":
        return [reserve]
    return [
        Share("CUDA graphs", min(demand.num_requests, GRAPH_REQUESTS) * GRAPHS_PER_COUNT * GRAPH_BYTES),
        Share("decode workspace", decode_workspace(demand)),
        Share("prefill workspace", prompt_workspace(demand)),
        Share("staging of the host cache", _staging_bytes(demand)),
        Share("CUDA context", CUDA_CONTEXT_BYTES),
        reserve,
    ]


def decode_workspace(demand: Demand) -> int:
    """Logits while tokens are chosen, partial results of split attention, and the rows' activations."""
    config = demand.config
    rows = most_rows(demand.num_requests, demand.num_drafts)
    partials = config.num_attention_heads * num_splits(demand.context) * (config.head_dim + 2)
    numbers = LOGIT_COPIES * config.vocab_size + partials
    return rows * (numbers * FLOAT_BYTES + DECODE_ROW_STREAMS * demand.activation_bytes * config.hidden_size)


def _staging_bytes(demand: Demand) -> int:
    """One layer's share of the blocks that are gathered at a time (tier_copy): as it lies, in order, and joined."""
    return 3 * STAGED_BLOCKS * BLOCK_SIZE * kv_token_bytes(demand) if demand.host_cache_bytes else 0


def most_rows(num_requests: int, num_drafts: int) -> int:
    """Rows after which tokens are chosen at once: those of a decode pass, which verifies fewer drafts where many
    requests decode, or the last ones of as many prompts as may end in one step."""
    counts = range(1, min(num_requests, GRAPH_REQUESTS) + 1)
    return max(num_requests, *(count * min(1 + num_drafts, GRAPH_ROWS // count) for count in counts))


def prompt_workspace(demand: Demand) -> int:
    """Most that lives at once beside what is held while a chunk goes through a layer, its rows' numbers included."""
    config, rows = demand.config, demand.prefill_chunk
    numbers = demand.activation_bytes * config.hidden_size
    attention, feed_forward = attention_workspace(demand), rows * _feed_forward_row(demand)
    # the residual stream, and the hidden states of the pass before
    decoder = 2 * rows * numbers + max(attention, _delta_workspace(demand), feed_forward)
    # of the pass itself, behind a hit once more, and of MTP's own: embedding, the two joined, their product, residual
    mtp = 7 * rows * numbers + max(attention, feed_forward) if demand.has_mtp else 0
    decoded = DECODED_BYTES if demand.recipe is not None and rows >= DECODED_ROWS else 0
    return max(decoder, mtp) + rows * SMALL_ROW_BYTES + decoded


def attention_workspace(demand: Demand) -> int:
    """Projection, query and results, which stay in fp32 until they are rotated back, and what is beside them."""
    config, codec, width = demand.config, CODECS[demand.codec], demand.activation_bytes
    numbers = config.num_attention_heads * config.head_dim
    projected = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    output = 2 * FLOAT_BYTES + width if codec.is_rotated else width
    return demand.prefill_chunk * (width * (projected + numbers) + numbers * output) + restored_bytes(demand)


def restored_bytes(demand: Demand) -> int:
    """Prompts attend over codes that were restored to fp16, some parts at a time; where a context has several parts,
    every row keeps in fp32 what it knows, and what it knows of parts that are computed side by side."""
    config = demand.config
    tokens = min(_blocks(demand.context) * BLOCK_SIZE, RESTORED_PARTS * PART) * CODECS[demand.codec].is_coded
    numbers = 2 * tokens * config.num_key_value_heads * config.head_dim
    heads = demand.prefill_chunk * config.num_attention_heads + PARTIAL_ROWS
    return 2 * numbers + (heads * config.head_dim * FLOAT_BYTES if demand.context > PART else 0)


def _delta_workspace(demand: Demand) -> int:
    """Projection, convolved inputs and results in fp32; then what chunks of 64 rows leave for the scan over them, of
    1,024 rows of a request at most, or the gated results."""
    config, width = demand.config, demand.activation_bytes
    values = config.linear_num_value_heads * GDN_HEAD_DIM
    projected = config.gdn_channels + values + 2 * config.linear_num_value_heads
    row = width * (projected + config.gdn_channels) + FLOAT_BYTES * (2 * config.linear_num_key_heads + values)
    per_head = 3 * FLOAT_BYTES + (2 * FLOAT_BYTES) * GDN_HEAD_DIM + FLOAT_BYTES * DELTA_CHUNK
    scanned = min(demand.prefill_chunk, DELTA_SEGMENT * demand.num_requests) * config.linear_num_value_heads * per_head
    return demand.prefill_chunk * row + max(scanned, demand.prefill_chunk * width * values)


def _feed_forward_row(demand: Demand) -> int:
    """The normed input, also in the order of the codes, what stands between the products, and results."""
    config, ffn = demand.config, demand.config.feed_forward
    if not isinstance(ffn, MoeConfig):
        return demand.activation_bytes * (3 * config.hidden_size + ffn.intermediate_size)
    of_experts = ffn.num_experts_per_tok * (ffn.moe_intermediate_size + config.hidden_size)
    logits = FLOAT_BYTES * (ffn.num_experts + 1)
    return demand.activation_bytes * (of_experts + 4 * config.hidden_size + ffn.moe_intermediate_size) + logits


def num_splits(context: int) -> int:
    """Pieces in which decode attention reads a context."""
    count, start = 0, 0
    for end, size in SPLITS:
        count += max(0, -(-(min(context, end) - start) // size))
        start = end
    return int(count)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
