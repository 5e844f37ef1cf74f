"""Speculation may change speed and nothing else."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from engine.batch import BlockTables
from engine.cache.kv_cache import KVCache
from engine.cache.state_cache import StateCache
from engine.constraint import Constraints
from engine.engine import EngineCore
from engine.model_runner import ModelRunner
from engine.models.weights import load_model
from engine.request import EngineInfo
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.speculative import accept
from tests.engine.checkpoints import DENSE, MOE, Geometry, oracle_model, write_checkpoint, write_shards
from tests.engine.runtime import engine, generate, request

CPU = torch.device("cpu")
GEOMETRY = Geometry(vocab_size=320)
SMALL = Geometry(vocab_size=16, hidden_size=32, width=16, heads=2, kv_heads=1, key_heads=1)


@pytest.mark.parametrize(
    "drafts, chosen, expected",
    [
        ((), (5,), (5,)),
        ((5, 6), (5, 6, 7), (5, 6, 7)),
        ((5, 6), (5, 9, 7), (5, 9)),
        ((5, 6), (9, 6, 7), (9,)),
    ],
)
def test_accept(drafts, chosen, expected):
    assert accept(drafts, chosen) == expected


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), MOE, GEOMETRY)


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("small"), DENSE, SMALL)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 3.0, "seed": 4},
        {"temperature": 2.0, "seed": 5, "top_k": 40, "top_p": 0.95, "frequency_penalty": 1.0, "min_tokens": 10},
    ],
)
def test_tokens_with_speculation_equal_those_without(checkpoint_dir, sampling):
    """Not only greedy ones: a seed gives the same tokens whether they were drafted or not."""
    prompts = [range(5, 5 + length) for length in (1, 63, 100)]
    requests = [request(f"r{i}", p, max_tokens=40, **sampling) for i, p in enumerate(prompts)]
    drafting, plain = (engine(checkpoint_dir, num_drafts=n) for n in (3, 0))
    assert generate(drafting, *requests) == generate(plain, *requests)
    assert drafting.stats().num_draft_tokens > 0
    assert plain.stats().num_draft_tokens == 0


# --- a checkpoint of which MTP knows everything: the decoder adds nothing to the embedding, so the next token is a
# function of the last one, and MTP computes the same function of the token it is given


def transparent_checkpoint(directory, fc):
    write_checkpoint(directory, MOE, GEOMETRY)
    tensors = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["mtp.fc.weight"] = fc
    tensors["mtp.pre_fc_norm_embedding.weight"].zero_()
    tensors["mtp.pre_fc_norm_hidden.weight"].zero_()
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    write_shards(directory, tensors)
    return directory


def acceptance(core, **sampling):
    (tokens,) = generate(core, request("a", range(30), max_tokens=60, **sampling))
    # a text that repeats one token could be guessed without looking
    assert sum(a != b for a, b in pairwise(tokens)) > 40
    return core.stats().num_accepted_tokens / core.stats().num_draft_tokens


IDENTITY = torch.eye(GEOMETRY.hidden_size)
NOTHING = torch.zeros_like(IDENTITY)


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_a_perfect_mtp_is_always_accepted(tmp_path, num_drafts):
    directory = transparent_checkpoint(tmp_path, torch.cat([IDENTITY, NOTHING], dim=1))
    assert acceptance(engine(directory, num_drafts=num_drafts)) == 1.0
    assert acceptance(engine(directory, num_drafts=num_drafts), temperature=1.0, seed=1) == 1.0


@pytest.mark.parametrize("penalty", [-0.5, 0.5])
def test_penalties_see_the_drafts_of_the_same_round(tmp_path, penalty):
    """Every draft is accepted, so most tokens follow a draft that the counts do not hold yet."""
    directory = transparent_checkpoint(tmp_path, torch.cat([IDENTITY, NOTHING], dim=1))
    sampling = {"max_tokens": 60, "temperature": 1.0, "top_k": 4, "seed": 1, "frequency_penalty": penalty}
    drafting, plain = (engine(directory, num_drafts=n) for n in (7, 0))
    assert generate(drafting, request("a", range(30), **sampling)) == generate(
        plain, request("a", range(30), **sampling)
    )
    assert drafting.stats().num_accepted_tokens == drafting.stats().num_draft_tokens > 40


def test_a_swapped_concatenation_would_be_seen(tmp_path):
    directory = transparent_checkpoint(tmp_path, torch.cat([NOTHING, IDENTITY], dim=1))
    assert acceptance(engine(directory, num_drafts=1)) < 0.05


def test_a_missing_shift_would_be_seen(tmp_path):
    """MTP that is given each row's own token instead of the one after it."""
    directory = transparent_checkpoint(tmp_path, torch.cat([IDENTITY, NOTHING], dim=1))
    core, parts = build(directory, num_drafts=1)
    forward, seen = parts.model.forward_mtp, [torch.tensor([0])]

    def unshifted(batch, hidden, kv):
        own = torch.cat([seen[-1][-1:], batch.token_ids[:-1]])
        seen.append(batch.token_ids)
        return forward(replace(batch, token_ids=own), hidden, kv)

    parts.model.forward_mtp = unshifted
    assert acceptance(core) < 0.05


# --- MTP's KV against an oracle


class Parts:
    """An engine whose insides a test may look at."""

    def __init__(self, checkpoint_dir, num_drafts, num_slots):
        num_blocks = num_slots * 8
        self.model = load_model(checkpoint_dir, CPU, torch.float32)
        self.kv = KVCache(self.model.config, num_blocks, CPU, torch.float32)
        self.tables = BlockTables(num_slots, num_blocks, CPU)
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            num_slots=num_slots,
            prefill_chunk=64,
            num_drafts=num_drafts,
            max_queued_requests=10_000,
            max_queued_tokens=1_000_000,
        )
        self.runner = ModelRunner(
            self.model,
            self.kv,
            StateCache(self.model.config, num_slots, CPU),
            Sampler(self.model.config.vocab_size, num_slots, CPU),
            self.tables,
            num_drafts,
        )


def build(checkpoint_dir, num_drafts=3, num_slots=2):
    parts = Parts(checkpoint_dir, num_drafts, num_slots)
    info = EngineInfo(str(checkpoint_dir), 512, parts.model.config.num_ids, "cpu", num_drafts, num_slots, 512)
    constraints = Constraints(checkpoint_dir, parts.model.config.vocab_size)
    return EngineCore(info, parts.scheduler, parts.runner, constraints), parts


def rms1(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)


def rotated(keys, positions):
    """Pairs (i, i + 32) of the first 64 dims; the rest stays."""
    angles = positions[:, None, None] * 1e7 ** (-torch.arange(32, dtype=torch.float64) / 32)
    first, second, rest = keys.split([32, 32, keys.shape[-1] - 64], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def oracle_mtp_kv(profile, checkpoint_dir, token_ids):
    """Keys and values of MTP's layer for positions 0 .. n-2, from transformers' hidden states."""
    tensors = {}
    for shard in checkpoint_dir.glob("*.safetensors"):
        tensors |= {name: tensor.double() for name, tensor in load_file(shard).items()}
    with torch.no_grad():
        hidden = oracle_model(profile, GEOMETRY).model(torch.tensor([token_ids])).last_hidden_state[0, :-1].double()
    embedded = tensors["model.embed_tokens.weight"][token_ids[1:]]
    joined = torch.cat(
        [
            rms1(embedded, tensors["mtp.pre_fc_norm_embedding.weight"]),
            rms1(hidden, tensors["mtp.pre_fc_norm_hidden.weight"]),
        ],
        dim=-1,
    )
    x = rms1(joined @ tensors["mtp.fc.weight"].T, tensors["mtp.layers.0.input_layernorm.weight"])
    keys, values = (
        (x @ tensors[f"mtp.layers.0.self_attn.{name}.weight"].T).unflatten(-1, (-1, 256))
        for name in ("k_proj", "v_proj")
    )
    keys = rms1(keys, tensors["mtp.layers.0.self_attn.k_norm.weight"])
    return rotated(keys, torch.arange(len(keys), dtype=torch.float64)), values


@pytest.mark.parametrize("profile", [MOE, DENSE])
def test_mtp_kv_after_fifty_rounds_equals_one_pass_of_an_oracle(profile, tmp_path):
    directory = write_checkpoint(tmp_path, profile, GEOMETRY)
    core, parts = build(directory)
    # at this temperature drafts are accepted often but not always
    core.add(request("a", range(7, 150), max_tokens=300, temperature=4.0, seed=1))
    core.add(request("beside", range(50, 70), max_tokens=60, temperature=4.0, seed=2))
    (state,) = (each for each in parts.scheduler.running if each.request.request_id == "a")
    while state.is_prefilling or core.stats().num_steps < 54:
        core.step()
    accepted = core.stats().num_accepted_tokens / core.stats().num_draft_tokens
    assert 0.1 < accepted < 0.9
    keys, values = oracle_mtp_kv(profile, directory, state.token_ids)
    blocks = torch.tensor(state.block_ids)
    mine = (
        x[blocks].flatten(0, 1)[: len(keys)].double() for x in (parts.kv.layers[-1].keys, parts.kv.layers[-1].values)
    )
    for actual, expected in zip(mine, (keys, values), strict=True):
        assert (actual - expected).norm() <= 1e-4 * expected.norm()
        assert (actual - expected).abs().max() <= 1e-3


# --- the distribution


def counted(core, seeds):
    """How often each token comes second, and how often third."""
    requests = [request(f"s{seed}", (1, 2, 3), max_tokens=5, temperature=1.0, seed=seed) for seed in seeds]
    outputs = generate(core, *requests)
    return [Counter(tokens[place] for tokens in outputs) for place in (1, 2)]


def assert_same_distribution(first, second):
    """Chi-square over two samples, rare tokens together, against its mean plus four standard deviations."""
    common = [k for k in first.keys() | second.keys() if first[k] + second[k] >= 16]
    cells = [(first[k], second[k]) for k in common]
    cells.append((first.total() - sum(a for a, _ in cells), second.total() - sum(b for _, b in cells)))
    # both samples are of one size, so each cell splits evenly
    chi_square = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    free = len(cells) - 1
    assert first.total() == second.total() and free >= 6
    assert chi_square < free + 4 * math.sqrt(2 * free)


NUM_SEEDS = 500


def many(directory, num_drafts):
    return engine(directory, num_drafts=num_drafts, max_num_requests=32, max_queued_requests=NUM_SEEDS)


@pytest.fixture(scope="module")
def plain_counts(small_dir):
    return counted(many(small_dir, num_drafts=0), range(NUM_SEEDS))


def test_sampling_with_speculation_has_the_same_distribution(small_dir, plain_counts):
    core = many(small_dir, num_drafts=3)
    for mine, plain in zip(counted(core, range(NUM_SEEDS, 2 * NUM_SEEDS)), plain_counts, strict=True):
        assert_same_distribution(mine, plain)
    accepted = core.stats().num_accepted_tokens / core.stats().num_draft_tokens
    assert 0.05 < accepted < 0.95, "both branches of the rule must be taken"


def test_a_rule_that_accepts_too_much_would_be_seen(small_dir, plain_counts, monkeypatch):
    """The first draft is published whatever the target says."""
    monkeypatch.setattr("engine.model_runner.accept", lambda drafts, chosen: (*drafts[:1], chosen[min(1, len(drafts))]))
    seconds, _ = counted(many(small_dir, num_drafts=3), range(NUM_SEEDS, 2 * NUM_SEEDS))
    with pytest.raises(AssertionError):
        assert_same_distribution(seconds, plain_counts[0])
