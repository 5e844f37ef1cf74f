import asyncio
import json

from engine import EngineInfo
from engine.bench import BenchConfig, Timing, cut, decode_bytes, decode_rate, measure
from tests.engine.checkpoints import DENSE, MOE, Geometry, write_checkpoint
from tests.engine.runtime import settings


def test_cut_goes_round():
    assert cut([1, 2, 3], 2, 5) == (3, 1, 2, 3, 1)


def test_rows_come_from_the_real_engine(tmp_path):
    directory = write_checkpoint(tmp_path, DENSE, Geometry())
    bench = BenchConfig(prompt_tokens=(100,), requests=(1, 2), output_tokens=8)
    report = json.loads(json.dumps(asyncio.run(measure(settings(directory), bench))))
    assert [(row["prompt_tokens"], row["requests"]) for row in report["rows"]] == [(100, 1), (100, 2)]
    for row in report["rows"]:
        assert row["ttft_s"] > 0
        assert row["decode_tok_s"] > 0
        assert row["prefill_tok_s"] <= row["prompt_tokens"] * row["requests"] / row["ttft_s"] * 1.1
        assert row["peak_bytes"] > 10**8
        assert row["plan_bytes"] > 10**8
        assert row["prefilled"]
    assert report["threads"] == 1


def test_filled_rows_decode_behind_prompts_that_were_not_computed(tmp_path):
    directory = write_checkpoint(tmp_path, MOE, Geometry())
    bench = BenchConfig(prompt_tokens=(1000,), requests=(2,), output_tokens=8, fills=True)
    (row,) = asyncio.run(measure(settings(directory, prefill_chunk=512), bench))["rows"]
    assert (row["prefilled"], row["ttft_s"], row["prefill_tok_s"]) == (False, None, None)
    assert row["decode_tok_s"] > 0


def test_several_requests_are_timed_while_all_of_them_decode():
    """The second begins when the first has four tokens, and ends two seconds after it."""
    first = Timing(0.0, ((1.0, 1), (2.0, 1), (3.0, 2), (4.0, 1), (5.0, 1)))
    second = Timing(0.0, ((3.0, 1), (4.0, 2), (5.0, 1), (6.0, 1), (7.0, 1)))
    assert decode_rate([first, second]) == 5 / 2
    assert decode_rate([first]) == 5 / 4
    assert (first.first_s, second.first_s) == (1.0, 3.0)


def test_requests_that_never_decode_together_are_timed_from_end_to_end():
    one, other = Timing(0.0, ((1.0, 1), (2.0, 1))), Timing(0.0, ((5.0, 1), (6.0, 1)))
    assert decode_rate([one, other]) == 3 / 5


def test_a_decode_step_reads_what_it_needs(tmp_path):
    """Counted by hand: two of four experts, and of the KV cache and the states the requests' part."""
    write_checkpoint(tmp_path, MOE, Geometry(num_experts=4, experts_per_token=2))
    planned = {
        "weights: embedding": 10**9,
        "weights: MTP": 10**8,
        "weights: head": 7,
        "weights: attention": 20,
        "weights: experts": 400,
        "KV blocks": 6400,
        "GDN states": 80,
        "snapshots": 10**6,
    }
    info = EngineInfo(str(tmp_path), 640, 320, "cpu", 0, 4, 640)
    assert decode_bytes(planned, tmp_path, 100, 1, info) == 27 + 200 + 1000 + 20
    assert decode_bytes(planned, tmp_path, 100, 2, info) == 27 + 300 + 2 * (1000 + 20)
