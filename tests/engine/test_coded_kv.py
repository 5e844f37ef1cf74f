"""The engine over a coded KV cache: near what it says over plain numbers, and the same whatever is reused."""

import pytest
import torch

from engine.cache.kv_cache import KVCache
from engine.cache.kv_codecs import CODECS
from engine.checkpoint_dir import EMBEDDED_DIR
from engine.convert.convert import convert
from engine.engine import EngineCore
from engine.loading import cache_key, choose_codec
from engine.models.config import PROFILES
from engine.models.weights import load_model
from tests.engine.checkpoints import DENSE, Geometry, write_checkpoint
from tests.engine.passes import CPU, Runner, relative_error
from tests.engine.runtime import engine, finish, generate, request

CODED = [codec for codec in CODECS.values() if codec.is_coded]
# of a row's output, with random weights: what the codes cost, and rounding beside it
LIMITS = {"int8-g64": 0.01, "rk8v4": 0.1, "rk4v4-e8": 0.15}
GEOMETRY = Geometry(hidden_size=128, num_experts=4, experts_per_token=2, width=64, vocab_size=96)
TOKEN_IDS = tuple(range(3, 90))
each_codec = pytest.mark.parametrize("codec", CODED, ids=lambda codec: codec.name)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    return load_model(write_checkpoint(tmp_path_factory.mktemp("dense"), DENSE, GEOMETRY), CPU, torch.float32)


@each_codec
def test_cache_takes_what_is_counted(codec):
    config = PROFILES["Qwen3.6-35B-A3B"]
    cache = KVCache(config, 3, torch.device("meta"), torch.bfloat16, codec)
    assert len(cache.layers) == 11
    assert cache.num_bytes == 11 * 3 * 64 * codec.bytes_per_token(2, 256)


def test_auto_is_coded_only_for_bfloat16_on_a_gpu():
    gpu = torch.device("cuda")
    assert choose_codec("auto", gpu, torch.bfloat16).name == "int8-g64"
    assert choose_codec("auto", gpu, torch.float32).name == choose_codec("auto", CPU, torch.bfloat16).name == "bf16"
    assert choose_codec("rk4v4-e8", CPU, torch.float32).name == "rk4v4-e8"


def test_what_is_cached_names_its_codec():
    keys = {cache_key(EMBEDDED_DIR, torch.float32, codec=codec) for codec in CODECS.values()}
    assert len(keys) == len(CODECS)


@each_codec
def test_prompts_stay_near_plain_numbers(model, codec):
    plain = Runner(model).prefill(TOKEN_IDS)
    coded = Runner(model, codec=codec).prefill(TOKEN_IDS)
    assert 0 < relative_error(coded, plain) < LIMITS[codec.name]


@each_codec
def test_decode_reads_what_prefill_reads(model, codec):
    """The same rows as a prompt and token by token."""
    whole = Runner(model, codec=codec).prefill(TOKEN_IDS)
    runner = Runner(model, codec=codec)
    runner.prefill(TOKEN_IDS[:70])
    one_by_one = runner.decode(TOKEN_IDS[70:], start=70)
    assert relative_error(one_by_one, whole[70:]) < LIMITS[codec.name] / 5


@each_codec
def test_quantised_layers_decode_over_codes(codec, tmp_path):
    torch.manual_seed(0)
    convert(write_checkpoint(tmp_path / "source", DENSE, GEOMETRY), tmp_path / "artifact", "w8")
    artifact = load_model(tmp_path / "artifact", CPU, torch.float32)
    found = []
    for each in (CODECS["bf16"], codec):
        runner = Runner(artifact, codec=each)
        runner.prefill(TOKEN_IDS[:70])
        found.append(runner.decode(TOKEN_IDS[70:], start=70))
    assert 0 < relative_error(found[1], found[0]) < 2 * LIMITS[codec.name]


def reply(core: EngineCore, name: str, prompt) -> list[int]:
    return finish(core, request(name, prompt, max_tokens=12)).token_ids


@each_codec
def test_embedded_checkpoint_says_the_same(codec):
    prompt = [5, 900, 17, 44, 2000, 31] * 30
    expected = reply(engine(EMBEDDED_DIR, num_drafts=0), "plain", prompt)
    core = engine(EMBEDDED_DIR, kv_codec=codec.name, deterministic=True)
    assert core.info.kv_codec == codec.name
    first = reply(core, "first", prompt)
    if codec.name == "int8-g64":
        assert first == expected
    again = finish(core, request("again", prompt, max_tokens=12))
    assert again.num_cached_tokens > 0 and again.token_ids == first


def test_passes_ahead_of_the_host_read_codes_too(tmp_path):
    torch.manual_seed(0)
    convert(write_checkpoint(tmp_path / "source", DENSE, GEOMETRY), tmp_path / "artifact", "w8")
    requests = [request(str(n), TOKEN_IDS[: 70 - n], max_tokens=8) for n in range(2)]
    fields = {"kv_codec": "int8-g64", "num_drafts": 0, "max_num_requests": 2, "max_model_len": 256}
    found = [generate(engine(tmp_path / "artifact", is_ahead=ahead, **fields), *requests) for ahead in (False, True)]
    assert found[0] == found[1]
