from dataclasses import replace

import pytest

from config import EngineConfig
from engine.capacity import Capacity, check_host, choose_capacity, choose_demand, free_host_bytes, shorten_to_fit
from engine.errors import CapacityError
from engine.models.config import PROFILES
from engine.planner import Demand, largest_kv_tokens, one_snapshot, plan


@pytest.mark.parametrize(
    "max_model_len, kv_cache_tokens, expected",
    [
        (None, None, Capacity(4096, 4096)),
        (1000, None, Capacity(1000, 1024)),
        (None, 2000, Capacity(2000, 2048)),
        (None, 9000, Capacity(4096, 9024)),
        (512, 8192, Capacity(512, 8192)),
    ],
)
def test_what_is_not_set_follows(max_model_len, kv_cache_tokens, expected):
    assert choose_capacity(max_model_len, kv_cache_tokens, model_limit=4096) == expected


def test_context_beyond_the_checkpoint_is_refused():
    with pytest.raises(CapacityError, match="limit of 4096 tokens: set it to 4096 or less"):
        choose_capacity(4097, None, model_limit=4096)


@pytest.mark.parametrize(
    "fitting, expected",
    [
        (16_384, Capacity(10_000, 10_048)),
        (10_048, Capacity(10_000, 10_048)),
        (9_984, Capacity(9_984, 9_984)),
        (4_032, Capacity(10_000, 10_048)),
    ],
)
def test_a_length_that_nobody_asked_for_is_shortened_to_what_fits(fitting, expected):
    assert shorten_to_fit(Capacity(10_000, 10_048), fitting) == expected


CONFIG = next(iter(PROFILES.values()))
BUDGET = 22 * 2**30
UNSIZED = Demand(CONFIG, "w4", device="cpu")


def chosen(budget, **settings):
    return choose_demand(EngineConfig(max_num_requests=2, snapshot_bytes=0, **settings), UNSIZED, budget)


def test_a_context_that_nobody_asked_for_is_what_fits(caplog):
    found = chosen(BUDGET)
    assert found.context == found.kv_cache_tokens == largest_kv_tokens(found, BUDGET) < 262_144
    assert f"the context is {found.context} tokens instead of the checkpoint's 262144" in caplog.text


def test_a_context_that_was_asked_for_is_refused_with_what_fits():
    fitting = chosen(BUDGET).context
    assert chosen(BUDGET, max_model_len=fitting).context == fitting
    with pytest.raises(CapacityError, match=f"max_model_len and kv_cache_tokens to {fitting} or less"):
        chosen(BUDGET, max_model_len=fitting + 1)


def test_advice_names_settings_that_the_engine_has():
    with pytest.raises(CapacityError) as refused:
        choose_demand(EngineConfig(max_model_len=250_000, snapshot_bytes=2**30), UNSIZED, BUDGET)
    assert "snapshot_bytes 0 (frees 0.98 GiB)" in str(refused.value)
    assert "recipe" not in str(refused.value)


@pytest.mark.parametrize("device, most", [("cuda", 4 * 2**30), ("cpu", 2**30)])
def test_snapshots_take_what_contexts_leave(device, most):
    unsized = replace(UNSIZED, device=device)
    one = one_snapshot(unsized)
    config = EngineConfig(max_num_requests=2, max_model_len=64 * 256, num_drafts=0, prefill_chunk=512)
    plenty = choose_demand(config, unsized, 2**40)
    assert plenty.num_snapshots == most // one
    budget = plan(replace(plenty, num_snapshots=6)).num_bytes
    assert choose_demand(config, unsized, budget).num_snapshots == 6
    # two for each request come before a longer context, and none where there is no room for them
    with pytest.raises(CapacityError, match="snapshot_bytes 0"):
        choose_demand(config, unsized, budget - 3 * one)
    assert choose_demand(config.model_copy(update={"prefix_caching": False}), unsized, budget).num_snapshots == 0


def test_positions_beyond_the_limit_need_yarn():
    with pytest.raises(CapacityError, match="limit of 262144"):
        chosen(2**40, max_model_len=1_010_000)
    assert chosen(2**40, max_model_len=1_010_000, yarn=True).context == 1_010_000
    with pytest.raises(CapacityError, match="limit of 1010000"):
        chosen(2**40, max_model_len=1_010_001, yarn=True)


def test_free_memory_is_less_than_the_machine_has():
    with open("/proc/meminfo") as meminfo:
        total = int(meminfo.readline().split()[1]) * 1024
    assert 0 < free_host_bytes() <= total


def test_chunks_are_smaller_before_a_start_is_refused():
    unsized = replace(UNSIZED, device="cuda")
    config = EngineConfig(max_num_requests=1, max_model_len=4096, snapshot_bytes=0)
    roomy = choose_demand(config, unsized, 2**40)
    assert roomy.prefill_chunk == 4096
    budget = plan(replace(roomy, prefill_chunk=1024)).num_bytes
    assert choose_demand(config, unsized, budget).prefill_chunk == 1024
    with pytest.raises(CapacityError):
        choose_demand(config.model_copy(update={"prefill_chunk": 2048}), unsized, budget)


def test_a_host_without_room_for_the_embedding_is_refused():
    held = plan(replace(UNSIZED, device="cuda", is_embedding_on_host=True)).host_bytes
    check_host(replace(UNSIZED, device="cuda", is_embedding_on_host=True), held)
    with pytest.raises(CapacityError, match=r"0\.49 GiB of host memory"):
        check_host(replace(UNSIZED, device="cuda", is_embedding_on_host=True), held - 1)
