"""Sampling on a GPU: right against the reference at the real vocabulary, then timed.

    python3 tests/bench/sampling.py --out DIR [--check SEEDS] [--time] [--sweep]

Writes DIR/sampling.json; times are medians of replays of a CUDA graph that holds the op many times.
"""

import argparse
import itertools
import json
import sys
import time
import traceback
import types
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
# the ops need torch and triton alone; the engine's face would ask for what a server needs
sys.modules["engine"] = types.ModuleType("engine")
sys.modules["engine"].__path__ = [str(ROOT / "engine")]

import torch  # noqa: E402
import triton  # noqa: E402

from engine.ops.logprobs import logprobs_of, logprobs_reference  # noqa: E402
from engine.ops.penalise import TokenCounts  # noqa: E402
from engine.ops.sample import SampleRows, SampleWorkspace, sample_triton  # noqa: E402
from engine.ops.sample_argmax import argmax  # noqa: E402
from engine.ops.sample_table import SamplingTable  # noqa: E402
from engine.ops.sample_truncate import TruncateShape, shape_for  # noqa: E402
from tests.bench.graph_time import milliseconds  # noqa: E402
from tests.ops.sample_examples import assert_choices, random_example  # noqa: E402

VOCAB = 248_320
DEVICE = "cuda"
ROWS = (1, 4, 8, 32)
REPEATS = 20
REQUESTS = {
    "temperature": {"temperature": 0.7},
    "defaults": {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "presence_penalty": 1.5},
    "top-k 20": {"temperature": 1.0, "top_k": 20},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "top-k 5000": {"temperature": 1.0, "top_k": 5000},
    "top-k 50000, top-p": {"temperature": 1.0, "top_k": 50_000, "top_p": 0.9},
    "1024 biases": {"temperature": 1.0, "logit_bias": {240 * i: 1.0 for i in range(1024)}},
}


def peaked(rows):
    """As a language model's: a few likely tokens far above the others."""
    logits = torch.randn(rows, VOCAB, device=DEVICE) * 2.5
    likely = torch.randint(VOCAB, (rows, 200), device=DEVICE)
    return logits.scatter_add_(1, likely, torch.linspace(22, 2, 200, device=DEVICE).expand(rows, -1).contiguous())


def flat(rows):
    return torch.randn(rows, VOCAB, device=DEVICE)


def rounded(rows):
    """Few different numbers, as from products in bf16."""
    return flat(rows).bfloat16().float()


LOGITS = {"peaked": peaked, "flat": flat, "rounded": rounded}


def prepared(rows, fields):
    table, tokens = SamplingTable.neutral(rows, DEVICE), TokenCounts.zeros(rows, VOCAB, DEVICE)
    for slot in range(rows):
        table.write(slot, seed=slot, num_prompt_tokens=10, **fields)
        tokens.begin(slot, range(1000))
    asked = SampleRows(
        slots=torch.arange(rows, dtype=torch.int32, device=DEVICE),
        positions=torch.full((rows,), 50, device=DEVICE),
        drafts=torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE),
        num_drafts=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        mask_words=torch.full((rows, VOCAB // 32 + 1), -1, dtype=torch.int32, device=DEVICE),
        mask_flags=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
    )
    return table, tokens, asked


def microseconds(run):
    """Median time of one of the REPEATS of `run` in a CUDA graph."""

    def repeated():
        for _ in range(REPEATS):
            run()

    return round(milliseconds(repeated) / REPEATS * 1e3, 2)


def guarded(part, *args, **options):
    """What a part found, or the end of its traceback."""
    try:
        found = part(*args, **options)
        torch.cuda.synchronize()
        return found
    except Exception:
        return {"failed": traceback.format_exc()[-2000:]}


def check(seed, shape):
    example = random_example(seed, VOCAB)
    assert_choices(example, sample_triton(*example.on(DEVICE), shape=shape))
    return True


def check_logprobs():
    logits = rounded(4)
    token_ids = argmax(logits)
    assert torch.equal(token_ids.cpu(), logits.cpu().argmax(-1))
    chosen, ids, values = (x.cpu() for x in logprobs_of(logits, token_ids))
    expected = logprobs_reference(logits.cpu().double(), token_ids.cpu(), 20)
    assert torch.equal(ids, expected[1])
    return max((chosen - expected[0]).abs().max().item(), (values - expected[2]).abs().max().item())


def check_graph():
    """The same tokens from a replay, and from other positions of the same graph."""
    table, tokens, asked = prepared(4, REQUESTS["defaults"])
    logits, space = peaked(4), SampleWorkspace.empty(4, VOCAB, DEVICE)
    sample_triton(logits, table, tokens, asked, space)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = sample_triton(logits, table, tokens, asked, space)
    differ = 0
    for position in range(50, 90):
        asked.positions.fill_(position)
        graph.replay()
        differ += (chosen != sample_triton(logits, table, tokens, asked)).sum().item()
    assert differ == 0, differ
    return True


def check_masses():
    """The same bits however many programs of whatever width add them up."""
    logits, found = flat(4), []
    table, tokens, asked = prepared(4, REQUESTS["top-p"])
    for rows in (1, 4, 32):
        space = SampleWorkspace.empty(4, VOCAB, DEVICE, shape_for(rows))
        sample_triton(logits, table, tokens, asked, space, shape_for(rows))
        found.append(space.truncate.masses.clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    return True


def check_all(seeds):
    # with the second, nearly all rows are bisected
    shapes = (shape_for(9), TruncateShape(block=1024, counters=100, rankers=4, levels=1, capacity=64))
    found = {f"seed {seed} shape {i}": guarded(check, seed, shape) for seed in seeds for i, shape in enumerate(shapes)}
    return found | {
        "logprobs": guarded(check_logprobs),
        "graph": guarded(check_graph),
        "masses": guarded(check_masses),
    }


def time_one(rows, logits, fields, **options):
    table, tokens, asked = prepared(rows, fields)
    space = SampleWorkspace.empty(rows, VOCAB, DEVICE, options.get("shape"))
    return microseconds(lambda: sample_triton(logits, table, tokens, asked, space, **options))


def time_all():
    times = {}
    for rows in ROWS:
        for kind, make in LOGITS.items():
            logits = make(rows)
            for name, fields in REQUESTS.items():
                times[f"{name}, {kind}, {rows} rows"] = guarded(time_one, rows, logits, fields)
        times[f"greedy, {rows} rows"] = guarded(microseconds, lambda logits=logits: argmax(logits))
        ids = argmax(logits)
        times[f"logprobs, {rows} rows"] = guarded(microseconds, lambda logits=logits, ids=ids: logprobs_of(logits, ids))
    return times


def sweep():
    """Other cuts of the kernels."""
    cuts = itertools.product((1024, 2048), (64, 128, 256, 512), (32, 128), (512, 1024))
    shapes = [TruncateShape(*numbers) for numbers in cuts]
    times = {}
    for rows in (1, 8):
        for kind, name in (("peaked", "defaults"), ("flat", "top-p"), ("flat", "temperature")):
            logits = LOGITS[kind](rows)
            for shape in shapes:
                key = f"{name}, {kind}, {rows} rows, {shape}"
                times[key] = guarded(time_one, rows, logits, REQUESTS[name], shape=shape)
    return times


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("."))
    arguments.add_argument("--check", type=int, default=0, help="random passes at the real vocabulary")
    arguments.add_argument("--time", action="store_true")
    arguments.add_argument("--sweep", action="store_true", help="also time other cuts of the kernels")
    chosen = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing is timed")
    start = time.perf_counter()
    torch.manual_seed(0)
    results = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "checks": check_all(range(chosen.check)) if chosen.check else {},
        "us": time_all() if chosen.time else {},
        "sweep_us": sweep() if chosen.sweep else {},
    }
    results["seconds"] = time.perf_counter() - start
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "sampling.json").write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
