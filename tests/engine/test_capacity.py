import pytest

from engine.capacity import (
    WORKSPACE_BYTES,
    Capacity,
    check_fits,
    choose_capacity,
    fitting_tokens,
    free_host_bytes,
    shorten_to_fit,
)
from engine.errors import CapacityError


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


def test_refusal_names_what_would_fit():
    capacity = Capacity(4096, 4096)
    check_fits(capacity, block_bytes=1000, fixed_bytes=500, free_bytes=WORKSPACE_BYTES + 64_500)
    with pytest.raises(CapacityError, match="max_model_len and kv_cache_tokens to 3968 or less"):
        check_fits(capacity, block_bytes=1000, fixed_bytes=500, free_bytes=WORKSPACE_BYTES + 63_400)


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


def test_fitting_tokens_are_whole_blocks():
    free_bytes = WORKSPACE_BYTES + 500 + 2_999
    assert fitting_tokens(block_bytes=1000, fixed_bytes=500, free_bytes=free_bytes) == 128
    assert fitting_tokens(block_bytes=1000, fixed_bytes=500, free_bytes=0) == 0


def test_refusal_when_nothing_would_fit():
    with pytest.raises(CapacityError, match="lower max_num_requests"):
        check_fits(Capacity(64, 64), block_bytes=1000, fixed_bytes=500, free_bytes=100)


def test_free_memory_is_less_than_the_machine_has():
    with open("/proc/meminfo") as meminfo:
        total = int(meminfo.readline().split()[1]) * 1024
    assert 0 < free_host_bytes() <= total
