import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise

import pytest
import torch

from engine.batch import MAX_PENDING_ROWS, BlockTables
from engine.cache.kv_cache import KVCache
from engine.cache.kv_codecs import CODECS
from engine.cache.state_cache import StateCache, StateSnapshots
from engine.convert.plan import plan as conversion_plan
from engine.convert.recipes import RECIPES
from engine.device_runner import MAX_REQUESTS, MAX_ROWS, rows_per_request
from engine.errors import CapacityError
from engine.models import plain, quantized
from engine.models.config import PROFILES, DenseConfig, ModelConfig, MoeConfig
from engine.models.layout import tensor_shapes
from engine.ops import attention_prefill, dequantized_matmul
from engine.ops.attention_decode import DecodeWorkspace
from engine.ops.decode_slots import DecodeSlots
from engine.ops.penalise import TokenCounts
from engine.ops.quantized_weight import GROUP, TILE_ROWS, QuantizedWeight, pack
from engine.ops.sample_table import SamplingTable
from engine.planner import (
    DECODED_BYTES,
    DECODED_ROWS,
    GRAPH_REQUESTS,
    GRAPH_ROWS,
    PART,
    PARTIAL_ROWS,
    PENDING_ROWS,
    RESTORED_PARTS,
    Demand,
    Plan,
    Share,
    attention_workspace,
    check_fits,
    explain,
    largest_context,
    largest_kv_tokens,
    most_requests,
    most_rows,
    num_snapshots,
    num_splits,
    options,
    plan,
    prompt_workspace,
    restored_bytes,
)
from engine.sampler import Sampler

META = torch.device("meta")
GIB = 2**30
A3B, B27 = PROFILES.values()
# one whose stacks of rows are no whole tiles, with a tied head and MTP
SMALL = replace(
    B27,
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    feed_forward=DenseConfig(128),
    tie_word_embeddings=True,
)
CONFIGS = {"35b-a3b": A3B, "27b": B27, "small": SMALL}


class MetaCheckpoint:
    """The tensors of a checkpoint as their shapes alone."""

    def __init__(self, config: ModelConfig) -> None:
        layers = [f"layers.{i}." for i in range(config.num_hidden_layers)] + ["mtp.layers.0."]
        fused = [f"{layer}mlp.experts.gate_up_proj" for layer in layers]
        self.config, self.shapes = config, tensor_shapes(config, fused)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.shapes[name], dtype=dtype, device=META)


class MetaArtifact:
    """What a conversion of it would store."""

    def __init__(self, config: ModelConfig, recipe: str) -> None:
        self.config, self._source, self._bits = config, MetaCheckpoint(config), RECIPES[recipe]
        units = conversion_plan(config, self._source.shapes)
        self._parts = {part.name: part for unit in units for part in unit.parts}

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def read(self, name: str) -> torch.Tensor | QuantizedWeight:
        part = self._parts[name]
        bits = self._bits[part.role]
        dtype = torch.float32 if bits == 32 else torch.bfloat16
        whole = part.arrange([self._source.read(source, dtype) for source in part.sources])
        return whole if bits >= 16 else quantized_on_meta(whole.shape, bits)


def quantized_on_meta(shape, bits):
    *stack, rows, columns = shape
    tiles, groups = -(-rows // TILE_ROWS), columns // GROUP
    codes = torch.empty(*stack, tiles * TILE_ROWS, groups, GROUP, dtype=torch.int8, device=META)
    scales = torch.empty(*stack, tiles, groups, TILE_ROWS, dtype=torch.float16, device=META)
    return QuantizedWeight(pack(codes, bits), scales, rows, bits)


def num_bytes(value) -> int:
    """Of every tensor below, each once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors(value)}.values())


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


def weights_of(found: Plan, *names: str) -> int:
    return found.of(*(f"weights: {name}" for name in names))


def own(layer):
    """Without another layer's matrix that it may ask for in time."""
    return replace(layer, following=None) if hasattr(layer, "following") else layer


def check_weights(model, found: Plan) -> None:
    """Role by role, and then in all."""
    config, layers = model.config, model._layers
    parts = (model._embedding, layers, model._norm, model._head, model._rope, model._mtp)
    mixers = [layer.mixer for layer in layers]
    attention = [mixer for mixer in mixers if hasattr(mixer, "kv_heads")]
    delta = [mixer for mixer in mixers if not hasattr(mixer, "kv_heads")]
    assert weights_of(found, "embedding") == num_bytes(model._embedding)
    assert weights_of(found, "head") == num_bytes(model._head)
    assert weights_of(found, "MTP") == num_bytes(model._mtp)
    assert weights_of(found, "attention") == num_bytes([(m.projection, m.output) for m in attention])
    assert weights_of(found, "GDN") == num_bytes([(own(m.projection), m.output) for m in delta])
    ffns = [layer.feed_forward for layer in layers]
    if isinstance(config.feed_forward, MoeConfig):
        assert weights_of(found, "router") == num_bytes([ffn.router for ffn in ffns])
    roles = ("experts", "shared experts", "router", "MLP")
    assert weights_of(found, *roles) == num_bytes(ffns)
    assert sum(s.num_bytes for s in found.shares if s.name.startswith("weights: ")) == num_bytes(parts)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_of_artifacts_are_counted_to_the_byte(name, recipe):
    config = CONFIGS[name]
    model = quantized.build_model(MetaArtifact(config, recipe), META, torch.bfloat16)
    check_weights(model, plan(Demand(config, recipe)))


@pytest.mark.parametrize("name", ["35b-a3b", "27b"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_checkpoints_are_counted_to_the_byte(name, dtype):
    config = CONFIGS[name]
    model = plain.build_model(MetaCheckpoint(config), config, META, dtype)
    check_weights(model, plan(Demand(config, activation_bytes=dtype.itemsize)))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_requests_hold_is_counted_to_the_byte(name, dtype):
    config = CONFIGS[name]
    asked = Demand(config, activation_bytes=dtype.itemsize, num_requests=5, kv_cache_tokens=1000, num_snapshots=3)
    found = plan(asked)
    states = StateCache(config, 5, META)
    assert found.of("GDN states", "GDN pending rows", "convolution inputs") == states.num_bytes
    assert found.of("convolution inputs") == num_bytes([layer.inputs for layer in states.layers])
    assert found.of("snapshots") == StateSnapshots(config, 3, META, dtype).num_bytes
    assert PENDING_ROWS == MAX_PENDING_ROWS


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_are_counted_to_the_byte(name, codec):
    config = CONFIGS[name]
    found = plan(Demand(config, codec=codec, kv_cache_tokens=1000))
    cache = KVCache(config, 16, META, torch.bfloat16, CODECS[codec])
    assert found.of("KV blocks", "MTP KV blocks") == cache.num_bytes
    assert found.of("KV blocks") == num_bytes([vars_of(layer) for layer in cache.layers[:-1]])


def vars_of(layer):
    return [getattr(layer, field.name) for field in fields(layer)]


def test_tables_of_a_cpu_are_counted_to_the_byte():
    found = plan(Demand(SMALL, num_requests=5, kv_cache_tokens=1000, device="cpu"))
    assert found.of("sampling tables") == Sampler(SMALL.vocab_size, 5, META).num_bytes
    assert found.of("block tables") == BlockTables(5, 16, META).ids.nbytes


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_tables_of_a_gpu_are_counted_to_the_byte(num_drafts):
    found = plan(Demand(A3B, context=1000, num_requests=5, kv_cache_tokens=9000, num_drafts=num_drafts))
    counts, table = TokenCounts.zeros(5, A3B.vocab_size, META), SamplingTable.neutral(5, META)
    assert found.of("sampling tables") == counts.num_bytes + table.words.nbytes
    assert found.of("block tables") == BlockTables(5, 17, META).ids.nbytes
    assert found.of("draft state") == DecodeSlots.empty(5, max(num_drafts, 1), META).numbers.nbytes
    rows = [count * rows_per_request(count, num_drafts) for count in range(1, 6)]
    assert most_rows(5, num_drafts) == max(rows)


def test_requests_that_decode_in_turns_share_graphs_and_may_end_their_prompts_together():
    assert (GRAPH_REQUESTS, GRAPH_ROWS) == (MAX_REQUESTS, MAX_ROWS)
    assert [most_rows(64, 3), most_rows(64, 0), most_rows(8, 3), most_rows(1, 7)] == [64, 64, 32, 8]
    found = [plan(Demand(A3B, num_requests=count)).of("CUDA graphs") for count in (1, 8, 64)]
    assert found == [8 * 2**20, 64 * 2**20, 64 * 2**20]


def test_restored_codes_by_hand():
    assert (PART, RESTORED_PARTS) == (attention_prefill.PART, attention_prefill.MOST_SIDE_BY_SIDE)
    block_m = attention_prefill.prefill_shape_for((9, 0)).block_m
    assert attention_prefill.MOST_PROGRAMS * block_m == PARTIAL_ROWS
    demand = Demand(A3B, codec="int8-g64", context=262_144, prefill_chunk=512)
    # keys and values of 32,768 tokens, two KV heads of 256 fp16 numbers; 512 rows of 16 heads of 256 fp32 numbers, and
    # those of parts side by side
    assert restored_bytes(demand) == 2 * 32_768 * 2 * 256 * 2 + 512 * 16 * 256 * 4 + 396 * 128 * 256 * 4
    assert restored_bytes(demand.having(context=8192)) == 2 * 8192 * 2 * 256 * 2
    assert restored_bytes(demand.having(codec="bf16", context=8192)) == 0


def test_the_workspace_of_prompts_by_hand():
    asked = Demand(A3B, codec="rk8v4", context=262_144, prefill_chunk=512)
    # 18 heads of 256 twice and 16 once, in bf16; 16 in fp32 twice and in bf16
    rows = 512 * (2 * (2 * 18 + 16) + (4 + 4 + 2) * 16) * 256
    assert attention_workspace(asked) == rows + restored_bytes(asked)
    plain = asked.having(codec="bf16", context=8192)
    assert attention_workspace(plain) == 512 * 2 * (2 * 18 + 16 + 16) * 256
    # Gated DeltaNet's projection and convolved inputs, its norms and results, and what 64 rows of 32 heads leave behind
    delta = 2 * (8192 + 4096 + 64 + 8192) + 4 * (32 + 4096) + 32 * (2 * 2 * 128 + 2 * 2 * 64 + 4 * 128 + 3 * 4)
    assert prompt_workspace(plain) == 512 * (2 * 2 * 2048 + delta + 512)
    # a long chunk leaves that of 1,024 rows, so that experts and what goes into them are more, in MTP's pass
    experts = 2 * (8 * (512 + 2048) + 4 * 2048 + 512) + 4 * 257
    assert prompt_workspace(plain.having(prefill_chunk=4096)) == 4096 * (7 * 2 * 2048 + experts + 512)


@pytest.mark.parametrize("context", [1, 128, 129, 16_384, 16_385, 65_536, 262_144, 1_010_000])
def test_attention_is_split_as_its_workspace_is(context):
    workspace = DecodeWorkspace.empty(1, A3B.num_attention_heads, A3B.head_dim, context, META)
    assert num_splits(context) == workspace.partials.shape[2]


def four_at_full_length(**changes):
    asked = Demand(A3B, "w4", "rk4v4-e8", mtp="off", is_embedding_on_host=True)
    return replace(asked.with_full(262_144, 4), **changes)


def test_four_requests_at_full_length_fit_24_gib():
    found = check_fits(four_at_full_length(), 24 * GIB)
    assert found.of("KV blocks") == 4 * 262_144 * 10 * 2 * 272
    held = [share for share in found.shares if share.name.startswith(("weights", "KV", "GDN", "conv"))]
    # 22.5 GiB by hand: 35.1 B weights at 4.25 bits without embedding and MTP, and 1.33 GiB of keys and values each
    assert 22.4 < Plan(tuple(held)).num_bytes / GIB < 22.6
    assert Share("weights: embedding", 248_320 * 2048 * 33 // 32, "host") in found.shares


def test_refusal_names_what_would_fit_and_what_would_help():
    asked = four_at_full_length(mtp="full", is_embedding_on_host=False, codec="int8-g64", num_snapshots=4)
    with pytest.raises(CapacityError) as refused:
        check_fits(asked, 24 * GIB)
    context, count = largest_context(asked, 24 * GIB), most_requests(asked, 24 * GIB)
    assert f"4 requests fit with a context of {context} each, a context of 262144 for {count} requests" in str(
        refused.value
    )
    for fitting, beyond in (
        (asked.with_full(context, 4), asked.with_full(context + 64, 4)),
        (asked.with_full(262_144, count), asked.with_full(262_144, count + 1)),
    ):
        assert plan(fitting).num_bytes <= 24 * GIB < plan(beyond).num_bytes
    assert "embedding_memory host (frees 0.49 GiB)" in str(refused.value)
    assert "kv_codec rk4v4-e8" in str(refused.value)
    assert "; ".join(map(str, options(asked))) in str(refused.value)


def test_an_option_that_is_enough_alone_is_marked():
    asked = four_at_full_length(mtp="full")
    text = explain(asked, plan(asked), 24 * GIB)
    assert "num_drafts 0 (frees 0.96 GiB), enough" in text
    assert "kv_codec" not in text


def test_advice_keeps_to_the_settings_there_are():
    asked = four_at_full_length(mtp="full", num_snapshots=4)
    text = explain(asked, plan(asked), 20 * GIB, {"snapshot_bytes"})
    assert "snapshot_bytes 0" in text
    assert "mtp" not in text


def test_an_option_frees_what_it_says():
    asked = four_at_full_length(mtp="full", is_embedding_on_host=False)
    found = {(o.setting, o.value): o.saved_bytes for o in options(asked)}
    before = plan(asked)
    assert found["num_drafts", "0"] == before.num_bytes - plan(replace(asked, mtp="off")).num_bytes
    assert found["embedding_memory", "host"] == weights_of(before, "embedding")
    assert all(a >= b for a, b in pairwise(found.values()))


@pytest.mark.parametrize("name", CONFIGS)
def test_without_drafts_nothing_of_mtp_is_loaded(name):
    config = CONFIGS[name]
    model = quantized.build_model(MetaArtifact(config, "w4"), META, torch.bfloat16, drafts=False)
    assert model._mtp is None
    found = plan(Demand(model.config, "w4", kv_cache_tokens=1000))
    assert found == plan(Demand(config, "w4", kv_cache_tokens=1000, mtp="off"))
    assert found.of("KV blocks") == KVCache(model.config, 16, META, torch.bfloat16).num_bytes
    parts = (model._embedding, model._layers, model._norm, model._head, model._rope)
    assert sum(s.num_bytes for s in found.shares if s.name.startswith("weights: ")) == num_bytes(parts)


@pytest.mark.parametrize("codec", CODECS)
def test_a_windowed_mtp_is_counted_to_the_byte(codec):
    asked = replace(four_at_full_length(mtp="window", mtp_window=4096), codec=codec, num_snapshots=3)
    found = plan(asked)
    cache = KVCache(A3B, 16, META, torch.bfloat16, CODECS[codec], asked.window, 4)
    assert found.of("MTP KV blocks") == cache.layers[-1].num_bytes
    if codec == "rk4v4-e8":
        assert cache.layers[-1].num_bytes == 4 * (64 + 4096 + 3 * 64) * 2 * 272
    snapshots = StateSnapshots(A3B, 3, META, torch.bfloat16, cache.window_bytes)
    assert found.of("snapshots") == snapshots.num_bytes


def test_a_tied_embedding_stays_where_its_head_is():
    asked = Demand(SMALL, "w4", is_embedding_on_host=True)
    assert plan(asked).host_bytes == 0
    assert ("embedding_memory", "host") not in {(o.setting, o.value) for o in options(Demand(SMALL, "w4"))}


def test_fitting_tokens_are_whole_blocks():
    asked = Demand(SMALL, device="cpu")
    block = KVCache(SMALL, 1, META, torch.bfloat16).num_bytes + 4
    fixed = plan(asked).num_bytes - block
    assert largest_kv_tokens(asked, fixed + 3 * block - 1) == 128
    assert largest_kv_tokens(asked, fixed + 3 * block) == 192
    assert largest_kv_tokens(asked, fixed - 1) == 0


def test_refusal_when_nothing_would_fit():
    with pytest.raises(CapacityError, match="lower max_num_requests or snapshot_bytes"):
        check_fits(Demand(SMALL, device="cpu"), 1000)


def test_snapshots_are_no_more_than_blocks():
    one = StateSnapshots(A3B, 1, META, torch.bfloat16).num_bytes
    asked = Demand(A3B, kv_cache_tokens=6400)
    assert num_snapshots(asked, 3 * one + 1) == 3
    assert num_snapshots(asked, 3 * one - 1) == 2
    assert num_snapshots(asked, 2**40) == 100


def test_planning_needs_no_torch():
    program = "import sys, engine.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_matrices_that_become_bf16_are_planned_where_steps_are_long():
    assert (DECODED_ROWS, DECODED_BYTES) == (dequantized_matmul.MANY_ROWS, dequantized_matmul.MOST_BYTES)
    plain, coded = (Demand(A3B, recipe=recipe, prefill_chunk=4096) for recipe in (None, "w4"))
    assert prompt_workspace(coded) - prompt_workspace(plain) == DECODED_BYTES
    short = {"prefill_chunk": 1024}
    assert prompt_workspace(coded.having(**short)) == prompt_workspace(plain.having(**short))
