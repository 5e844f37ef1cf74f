import asyncio

import pytest

from config import Key
from router.errors import QuotaError
from router.ledger import MemoryLedger
from router.quota import DAY_S, Usage, limit_headers, refilled, span


def key(**limits):
    return Key(name="a", sha256="a" * 64, **limits)


class Ledger:
    """The ledger in memory with a clock that the test sets."""

    def __init__(self):
        self.now = 0.0
        self._ledger = MemoryLedger(lambda: self.now)

    def admit(self, one, tokens=100, conversation=None, now=None):
        self.now = self.now if now is None else now
        return asyncio.run(self._ledger.admit(one, tokens, conversation))

    def settle(self, grant, usage=None, is_refused=False):
        asyncio.run(self._ledger.settle(grant, usage, is_refused))

    def refusal(self, *arguments, **named):
        with pytest.raises(QuotaError) as caught:
            self.admit(*arguments, **named)
        return caught.value


@pytest.fixture
def ledger():
    return Ledger()


def test_bucket_refills_steadily_up_to_its_size():
    assert refilled(0.0, 60, 10.0) == 10
    assert refilled(10.0, 60, 1000.0) == 60
    # a clock that was set back takes nothing away
    assert refilled(10.0, 60, -5.0) == 10


def test_a_prompt_larger_than_the_bucket_goes_into_debt_once(ledger):
    one = key(prompt_tokens_per_minute=1000)
    ledger.admit(one, 3000)
    assert "uncached prompt tokens per minute" in str(ledger.refusal(one, 1, now=60.0))
    ledger.admit(one, 500, now=60.0 * 2.5)


def test_requests_per_minute(ledger):
    one = key(requests_per_minute=2)
    ledger.admit(one)
    ledger.admit(one)
    assert ledger.refusal(one).retry_after_s == 30
    ledger.admit(one, now=30.0)


def test_new_limit_begins_with_a_full_bucket_and_leaves_the_others(ledger):
    one = key(requests_per_minute=1, prompt_tokens_per_minute=100)
    ledger.admit(one, 100)
    wider = key(requests_per_minute=2, prompt_tokens_per_minute=100)
    assert "requests per minute" in str(ledger.refusal(one, 0))
    assert "prompt tokens per minute" in str(ledger.refusal(wider, 100))
    ledger.admit(wider, 0)


def test_concurrent_requests_come_back_when_settled_even_under_new_limits(ledger):
    one = key(concurrent_requests=1)
    grant = ledger.admit(one)
    assert "concurrent_requests" in str(ledger.refusal(one))
    wider = key(concurrent_requests=2)
    second = ledger.admit(wider)
    ledger.refusal(wider)
    ledger.settle(grant)
    ledger.settle(second)
    ledger.admit(wider)
    ledger.admit(wider)


@pytest.mark.parametrize(
    ("usage", "is_refused", "level"),
    [
        (Usage(800, 700, 50), False, 900),
        (Usage(800, None, 50), False, 200),
        # more cached than asked is no gift
        (Usage(100, 9000, 0), False, 1000),
        (None, False, 500),
        (None, True, 1000),
        (Usage(900, 0, 0), False, 100),
    ],
)
def test_truth_replaces_the_estimate(ledger, usage, is_refused, level):
    one = key(prompt_tokens_per_minute=1000)
    ledger.settle(ledger.admit(one, 500), usage, is_refused)
    assert limit_headers(one, ledger.admit(one, 0).balance)["x-ratelimit-remaining-tokens"] == str(level)


def test_tokens_of_a_conversation_are_estimated_as_its_growth(ledger):
    one = key(prompt_tokens_per_minute=1000)
    ledger.settle(ledger.admit(one, 900, "c"))
    ledger.settle(ledger.admit(one, 1000, "c"), is_refused=True)
    # what was refused was not computed, so its length is not known
    assert ledger.admit(one, 1000, "c").tokens == 100
    assert "about 1000" in str(ledger.refusal(one, 1000, "other"))


@pytest.mark.parametrize("usage", [None, Usage(900, None, 0)])
def test_a_name_for_a_conversation_makes_nothing_cheaper_than_its_upstream_says(ledger, usage):
    one = key(prompt_tokens_per_minute=1000)
    ledger.settle(ledger.admit(one, 900, "c"), Usage(900, 0, 0))
    again = ledger.admit(one, 900, "c")
    assert again.tokens == 0
    ledger.settle(again, usage)
    assert "uncached prompt tokens per minute" in str(ledger.refusal(one, 1))


def test_more_cached_than_asked_gives_nothing_back(ledger):
    one = key(tokens_per_day=1000)
    ledger.settle(ledger.admit(one, 1000), Usage(1000, 0, 0))
    ledger.refusal(one, 1)
    forged = key(prompt_tokens_per_minute=1000)
    ledger.admit(forged, 600)
    ledger.settle(ledger.admit(forged, 0), Usage(100, 10**9, 0))
    assert "about 600" in str(ledger.refusal(forged, 600))


def test_day_is_utc_and_counts_output(ledger):
    one = key(tokens_per_day=1000)
    ledger.settle(ledger.admit(one, 400), Usage(400, 0, 600))
    assert ledger.refusal(one, 1, now=100.0).retry_after_s == 60
    error = ledger.refusal(one, 1, now=DAY_S - 10.0)
    assert (error.retry_after_s, error.is_retry_useful) == (10, False)
    ledger.admit(one, 1, now=DAY_S + 1.0)


def test_headers_tell_the_limits_that_there_are(ledger):
    assert limit_headers(key(), ledger.admit(key()).balance) == {}
    one = key(requests_per_minute=2, prompt_tokens_per_minute=1000)
    assert limit_headers(one, ledger.admit(one, 250).balance) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "750",
        "x-ratelimit-reset-tokens": "15s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.25, "250ms"), (1, "1s"), (360, "6m0s"), (59.5, "1m0s"), (3725, "1h2m5s")]
)
def test_span(seconds, text):
    assert span(seconds) == text
