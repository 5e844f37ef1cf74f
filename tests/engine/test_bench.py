import asyncio
import json

from engine.bench import BenchConfig, cut, measure
from tests.engine.checkpoints import DENSE, Geometry, write_checkpoint
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
    assert report["threads"] == 1
