import math

import pytest

from engine.errors import ContextLengthError, RequestError, SamplingError
from engine.request import EngineInfo, Request, SamplingParams
from engine.validation import check_request

INFO = EngineInfo("dir", 100, 50, "cpu", 3, 8, 100)


def check(prompt=(1, 2, 3), **sampling):
    check_request(Request("a", prompt, SamplingParams(**{"max_tokens": 10} | sampling)), INFO)


def test_neutral_and_extreme_values_pass():
    check()
    check(temperature=0.0, top_k=10_000, top_p=0.0, min_p=1.0, seed=-(2**63), logprobs=20, min_tokens=10)
    check(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=0.5, logit_bias={0: -100, 49: 100.0})
    check(prompt=(49,) * 90, stop_token_ids=(0, 49))


@pytest.mark.parametrize(
    "param, value, says",
    [
        ("temperature", -0.1, "between 0 and 10"),
        ("temperature", math.nan, "between 0 and 10"),
        ("temperature", math.inf, "between 0 and 10"),
        ("top_p", 1.1, "between 0 and 1"),
        ("min_p", -1.0, "between 0 and 1"),
        ("top_k", -1, "0 (off) or more"),
        ("presence_penalty", 2.1, "between -2 and 2"),
        ("frequency_penalty", -2.1, "between -2 and 2"),
        ("repetition_penalty", 1e-30, "between 0.01 and 10"),
        ("repetition_penalty", math.nan, "between 0.01 and 10"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", 11, "between 0 and 10"),
        ("logprobs", 21, "between 0 and 20"),
        ("seed", 2**63, "64-bit"),
        ("logit_bias", {50: 1.0}, "between 0 and 49"),
        ("logit_bias", {1: 101.0}, "between -100 and 100"),
        ("stop_token_ids", (50,), "between 0 and 49"),
        ("stop_token_ids", (1,) * 65, "at most 64 entries, got 65"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024 entries, got 1025"),
    ],
)
def test_error_names_the_parameter_and_its_range(param, value, says):
    with pytest.raises(SamplingError) as caught:
        check(**{param: value})
    assert caught.value.param == param
    assert str(caught.value).startswith(param)
    assert says in str(caught.value)


@pytest.mark.parametrize("prompt, says", [((), "empty"), ((1, 50), "got 50"), ((-1, 3), "got -1")])
def test_prompt_ids_must_be_in_the_vocabulary(prompt, says):
    with pytest.raises(RequestError, match=says):
        check(prompt=prompt)


def test_prompt_and_output_must_fit_the_context():
    with pytest.raises(ContextLengthError) as caught:
        check(prompt=(1,) * 91)
    assert caught.value.max_model_len == 100
    assert "91 prompt tokens and 10 output tokens" in str(caught.value)


@pytest.mark.parametrize("marks", [(0,), (4,), (2, 2), (3, 1)])
def test_marks_must_ascend_within_the_prompt(marks):
    sampling = SamplingParams(max_tokens=1)
    check_request(Request("a", (1, 2, 3), sampling, marks=(1, 3)), INFO)
    with pytest.raises(RequestError, match="ascend from 1 to 3"):
        check_request(Request("a", (1, 2, 3), sampling, marks=marks), INFO)
