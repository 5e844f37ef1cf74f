"""MTP against its formulas, written out over a whole sequence without any cache."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from engine.models.weights import load_model
from tests.engine.checkpoints import MOE, PROFILES, Geometry, transparent, write_checkpoint
from tests.engine.passes import CPU, Runner, relative_error

PARITY = 1e-4
GEOMETRY = Geometry()
HEAD_DIM, ROTATED = 256, 64
TOTAL = 90


@pytest.fixture(scope="module", params=PROFILES)
def directory(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param, GEOMETRY)


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory, CPU, torch.float32)


@pytest.fixture(scope="module")
def tensors(directory):
    found = {}
    for shard in directory.glob("*.safetensors"):
        found |= load_file(shard)
    return found


@pytest.fixture(scope="module")
def token_ids():
    return torch.randint(0, GEOMETRY.vocab_size, (TOTAL + 1,), generator=torch.Generator().manual_seed(7))


def rms1(x, w):
    return (1 + w) * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rotate(x):
    """Partial RoPE of [tokens, heads, 256] at positions 0, 1, ..."""
    half = ROTATED // 2
    angle = torch.arange(len(x))[:, None] / 1e7 ** (torch.arange(half) * 2 / ROTATED)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x[..., :half], x[..., half:ROTATED], x[..., ROTATED:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)


def swiglu(x, t, prefix):
    return (F.silu(x @ t[prefix + "gate_proj.weight"].T) * (x @ t[prefix + "up_proj.weight"].T)) @ t[
        prefix + "down_proj.weight"
    ].T


def feed_forward(x, t):
    prefix = "mtp.layers.0.mlp."
    if prefix + "gate.weight" not in t:
        return swiglu(x, t, prefix)
    shares = torch.softmax(x @ t[prefix + "gate.weight"].T, -1)
    best = shares.topk(GEOMETRY.experts_per_token, -1)
    kept = torch.zeros_like(shares).scatter(1, best.indices, best.values / best.values.sum(-1, keepdim=True))
    routed = sum(kept[:, e, None] * swiglu(x, t, f"{prefix}experts.{e}.") for e in range(GEOMETRY.num_experts))
    return routed + torch.sigmoid(x @ t[prefix + "shared_expert_gate.weight"].T) * swiglu(
        x, t, prefix + "shared_expert."
    )


def attention(x, t):
    """Returns the output and what is cached: keys after norm and rotation, values as projected."""
    p, n = "mtp.layers.0.self_attn.", len(x)
    query, gate = (x @ t[p + "q_proj.weight"].T).view(n, GEOMETRY.heads, 2, HEAD_DIM).unbind(2)
    key, value = ((x @ t[p + f"{name}_proj.weight"].T).view(n, GEOMETRY.kv_heads, HEAD_DIM) for name in "kv")
    query, key = rotate(rms1(query, t[p + "q_norm.weight"])), rotate(rms1(key, t[p + "k_norm.weight"]))
    group = GEOMETRY.heads // GEOMETRY.kv_heads
    k, v = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", query, k) / 16
    weights = torch.softmax(scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")), -1)
    out = torch.einsum("hij,jhd->ihd", weights, v) * torch.sigmoid(gate)
    return out.flatten(1) @ t[p + "o_proj.weight"].T, key, value


def formulas(t, hidden, next_ids):
    """Hidden states after mtp.norm, keys and values for rows at positions 0, 1, ..."""
    embedded = t["model.embed_tokens.weight"][next_ids]
    joined = [rms1(embedded, t["mtp.pre_fc_norm_embedding.weight"]), rms1(hidden, t["mtp.pre_fc_norm_hidden.weight"])]
    x = torch.cat(joined, -1) @ t["mtp.fc.weight"].T
    attended, key, value = attention(rms1(x, t["mtp.layers.0.input_layernorm.weight"]), t)
    x = x + attended
    x = x + feed_forward(rms1(x, t["mtp.layers.0.post_attention_layernorm.weight"]), t)
    return rms1(x, t["mtp.norm.weight"]), key, value


def cached(runner, length):
    cache, table = runner.kv.layers[-1], runner.tables[0].long()
    return (x[table].flatten(0, 1)[:length] for x in (cache.keys, cache.values))


@pytest.mark.parametrize("chunk", [TOTAL, 64, 7])
def test_prefill_matches_the_formulas(model, tensors, token_ids, chunk):
    runner = Runner(model)
    hidden, proposed = [], []
    for start in range(0, TOTAL, chunk):
        rows = token_ids[start : min(start + chunk, TOTAL)]
        hidden.append(runner.forward({0: rows}, {0: start}, commits=True))
        following = runner.batch({0: token_ids[start + 1 : start + 1 + len(rows)]}, {0: start}, commits=True)
        proposed.append(model.forward_mtp(following, hidden[-1], runner.kv))
    expected, keys, values = formulas(tensors, torch.cat(hidden), token_ids[1:])
    assert relative_error(torch.cat(proposed), expected) < PARITY
    for actual, wanted in zip(cached(runner, TOTAL), (keys, values), strict=True):
        assert relative_error(actual, wanted) < PARITY


def test_drafts_are_fed_back_with_their_own_hidden_state(model, tensors, token_ids):
    """Three drafts after a prompt: position and token move on by one, the hidden state is MTP's own."""
    runner, length = Runner(model), 40
    hidden = runner.prefill(token_ids[:length])
    fed, ids = hidden, token_ids[1 : length + 1].tolist()
    out = model.forward_mtp(runner.batch({0: ids}, {0: 0}, commits=True), hidden, runner.kv)[-1:]
    for step in range(3):
        expected, _, _ = formulas(tensors, fed, torch.tensor(ids))
        assert relative_error(out, expected[-1:]) < PARITY
        draft = int(model.compute_logits(out).argmax())
        batch = runner.batch({0: [draft]}, {0: length + step}, commits=False)
        fed, ids = torch.cat([fed, out]), [*ids, draft]
        out = model.forward_mtp(batch, out, runner.kv)


def test_rows_written_again_replace_those_of_drafts(model, tensors, token_ids):
    runner = Runner(model)
    hidden = runner.prefill(token_ids[:TOTAL])
    noise = torch.randn(30, GEOMETRY.hidden_size, generator=torch.Generator().manual_seed(1))
    model.forward_mtp(runner.batch({0: token_ids[5:35]}, {0: 50}, commits=False), noise, runner.kv)
    model.forward_mtp(runner.batch({0: token_ids[1 : TOTAL + 1]}, {0: 0}, commits=True), hidden, runner.kv)
    _, keys, values = formulas(tensors, hidden, token_ids[1:])
    for actual, wanted in zip(cached(runner, TOTAL), (keys, values), strict=True):
        assert relative_error(actual, wanted) < PARITY


def test_a_decoder_that_adds_nothing_is_predicted_by_mtp_alone(token_ids, tmp_path):
    """With fc = [I | 0] and output projections of zero, MTP's logits after x[t+1] are the target's one token later."""
    model = load_model(write_checkpoint(tmp_path, MOE, GEOMETRY, edit=transparent), CPU, torch.float32)
    runner = Runner(model)
    hidden = runner.prefill(token_ids[:TOTAL])
    batch = runner.batch({0: token_ids[1:TOTAL]}, {0: 0}, commits=True)
    proposed = model.compute_logits(model.forward_mtp(batch, hidden[:-1], runner.kv))
    assert torch.equal(proposed.argmax(-1), model.compute_logits(hidden[1:]).argmax(-1))
