import pytest

from config import Key
from router.errors import QuotaError
from router.quota import DAY_S, Bucket, Quotas, Usage, span


def key(**limits):
    return Key(name="a", sha256="a" * 64, **limits)


def admit(quotas, one, tokens=100, conversation=None, now=0.0, utc=0.0):
    return quotas.admit(one, tokens, conversation, now, utc)


def refusal(*arguments, **named):
    with pytest.raises(QuotaError) as caught:
        admit(*arguments, **named)
    return caught.value


def test_bucket_refills_steadily_up_to_its_size():
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)
    assert bucket.level(10.0) == 10
    assert bucket.wait_s(20, 10.0) == pytest.approx(10)
    assert bucket.level(1000.0) == 60
    bucket.take(-5, 1000.0)
    assert bucket.level(1000.0) == 60


def test_a_prompt_larger_than_the_bucket_goes_into_debt_once():
    quotas, one = Quotas(), key(prompt_tokens_per_minute=1000)
    admit(quotas, one, 3000)
    error = refusal(quotas, one, 1, now=60.0)
    assert "uncached prompt tokens per minute" in str(error)
    admit(quotas, one, 500, now=60.0 * 2.5)


def test_requests_per_minute():
    quotas, one = Quotas(), key(requests_per_minute=2)
    admit(quotas, one)
    admit(quotas, one)
    assert refusal(quotas, one).retry_after_s == 30
    admit(quotas, one, now=30.0)


def test_concurrent_requests_come_back_when_settled_even_under_new_limits():
    quotas, one = Quotas(), key(concurrent_requests=1)
    grant = admit(quotas, one)
    assert "concurrent_requests" in str(refusal(quotas, one))
    wider = key(concurrent_requests=2)
    second = admit(quotas, wider)
    refusal(quotas, wider)
    grant.settle(None, False, 0.0, 0.0)
    second.settle(None, False, 0.0, 0.0)
    admit(quotas, wider)
    admit(quotas, wider)


@pytest.mark.parametrize(
    ("usage", "is_refused", "level"),
    [
        (Usage(800, 700, 50), False, 900),
        (Usage(800, None, 50), False, 500),
        (None, False, 500),
        (None, True, 1000),
        (Usage(900, 0, 0), False, 100),
    ],
)
def test_truth_replaces_the_estimate(usage, is_refused, level):
    quotas, one = Quotas(), key(prompt_tokens_per_minute=1000)
    grant = admit(quotas, one, 500)
    grant.settle(usage, is_refused, 0.0, 0.0)
    assert grant.headers(0.0)["x-ratelimit-remaining-tokens"] == str(level)


def test_tokens_of_a_conversation_are_estimated_as_its_growth():
    quotas, one = Quotas(), key(prompt_tokens_per_minute=1000)
    admit(quotas, one, 900, "c")
    quotas.note_length("c", 900)
    admit(quotas, one, 1000, "c")
    assert "about 1000" in str(refusal(quotas, one, 1000, "other"))


def test_day_is_utc_and_counts_output():
    quotas, one = Quotas(), key(tokens_per_day=1000)
    admit(quotas, one, 400).settle(Usage(400, 0, 600), False, 0.0, 0.0)
    error = refusal(quotas, one, 1, utc=DAY_S - 10.0)
    assert (error.retry_after_s, error.is_retry_useful) == (10, False)
    assert refusal(quotas, one, 1, utc=100.0).retry_after_s == 60
    admit(quotas, one, 1, utc=DAY_S + 1.0)


def test_headers_tell_the_limits_that_there_are():
    quotas = Quotas()
    assert admit(quotas, key()).headers(0.0) == {}
    quotas = Quotas()
    told = admit(quotas, key(requests_per_minute=2, prompt_tokens_per_minute=1000), 250).headers(0.0)
    assert told == {
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
