"""Attention and KV append on a GPU: right against the fp64 oracle, then timed for every codec at the real dimensions.

    python3 tests/bench/attention.py --out DIR [--sweep]

Writes DIR/attention.json and prints the tables. A part that fails is recorded with its traceback; the others still run.
"""

import argparse
import json
import subprocess
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

from engine.cache.kv_codecs import CODECS  # noqa: E402
from engine.copy_speed import copy_bytes_per_s  # noqa: E402
from engine.ops.attention_decode import (  # noqa: E402
    DecodeShape,
    DecodeWorkspace,
    attention_decode_reference,
    attention_decode_rounded_triton,
    attention_decode_triton,
)
from engine.ops.attention_prefill import attention_prefill_triton  # noqa: E402
from engine.ops.coded_kv import CodedKV  # noqa: E402
from engine.ops.kv_append_projected import kv_append_projected_reference, kv_append_projected_triton  # noqa: E402
from engine.ops.paged_kv import PagedKV  # noqa: E402
from tests.bench.graph_time import milliseconds  # noqa: E402

# KV heads, query heads
MODELS = {"35b-a3b": (2, 16), "27b": (4, 24)}
CONTEXTS = (8192, 65536, 262144)
ROWS = (1, 2, 4, 8)
# one within the first size of split, two just past the others
CHECK_CONTEXTS = (200, 17_001, 70_000)
HEAD_DIM, BLOCK, SCALE = 256, 64, 1 / 16
DEVICE = "cuda"
# more than twice the largest L2 cache, so that every pass reads from memory
DISTINCT_BYTES = 256 << 20


def storage(codec, num_blocks, kv_heads):
    """Random codes with scales of sane size."""
    if not codec.is_coded:
        shape = (2, num_blocks, BLOCK, kv_heads, HEAD_DIM)
        return PagedKV(*torch.randn(shape, dtype=torch.bfloat16, device=DEVICE))
    cache = CodedKV.zeros(num_blocks, BLOCK, kv_heads, HEAD_DIM, codec.folds, codec.is_rotated, DEVICE)
    for words, scales, fold in zip(
        (cache.keys, cache.values), (cache.key_scales, cache.value_scales), codec.folds, strict=True
    ):
        words.random_(-(2**31), 2**31)
        scales.uniform_(0.5, 1.5).mul_(0.3 if fold == 8 else 0.02)
    return cache


def integers(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def query_for(codec, rows, heads):
    """As attention takes it: of random numbers a rotation makes random numbers."""
    return torch.randn(rows, heads, HEAD_DIM, device=DEVICE).to(torch.float16 if codec.is_coded else torch.bfloat16)


def decode(query, cache, tables, context, workspace, **options):
    """Rows of one request."""
    rows = len(query)
    starts, lens = integers(0, rows), integers(context)
    return attention_decode_triton(query, cache, starts, lens, tables, SCALE, rows, context, workspace, **options)


def errors(actual, oracle):
    """Relative L2 error, and the largest single error in units of the oracle's rms."""
    difference = actual.double() - oracle
    rms = oracle.square().mean().sqrt()
    return {"relative": (difference.norm() / oracle.norm()).item(), "worst": (difference.abs().max() / rms).item()}


def check_decode(codec, kv_heads, heads):
    found = []
    for context in CHECK_CONTEXTS:
        num_blocks = -(-context // BLOCK)
        cache = storage(codec, num_blocks, kv_heads)
        tables = torch.randperm(num_blocks, device=DEVICE).int().view(1, -1)
        query = query_for(codec, 8, heads)
        oracle = attention_decode_reference(query.double(), cache, integers(0, 8), integers(context), tables, SCALE)
        workspace = DecodeWorkspace.empty(8, heads, HEAD_DIM, context, DEVICE)
        for tensor in (workspace.partials, workspace.stats):
            tensor.fill_(torch.nan)
        together = decode(query, cache, tables, context, workspace)
        same = {"dependent": torch.equal(decode(query, cache, tables, context, workspace, dependent=True), together)}
        for rows in (1, 2, 4):
            # the last rows of the same context
            part = decode(query[-rows:].contiguous(), cache, tables, context, workspace)
            same[f"{rows} rows"] = torch.equal(part, together[-rows:])
        early = decode(query[:1].contiguous(), cache, tables, context - 7, workspace)
        same["first row alone"] = torch.equal(early, together[:1])
        found.append({"context": context, **errors(together, oracle), "same_bits": same})
    return found


def check_prefill(codec, kv_heads, heads):
    context, rows = 3000, 700
    cache = storage(codec, -(-context // BLOCK), kv_heads)
    tables = torch.randperm(-(-context // BLOCK), device=DEVICE).int().view(1, -1)
    query = query_for(codec, rows, heads)

    def run(first, last, **options):
        part = query[first:last].contiguous()
        lens = integers(context - rows + last)
        return attention_prefill_triton(
            part, cache, integers(0, len(part)), lens, tables, SCALE, (len(part),), context, **options
        )

    whole, parts = run(0, rows), {"part": 1024}
    oracle = attention_decode_reference(query.double(), cache, integers(0, rows), integers(context), tables, SCALE)
    same = {
        "cut at 333": torch.equal(whole, torch.cat([run(0, 333), run(333, rows)])),
        "parts side by side": torch.equal(run(0, rows, **parts, side_by_side=1), run(0, rows, **parts, side_by_side=3)),
    }
    return {**errors(whole, oracle), "same_bits": same}


def projection(rows, kv_heads, heads):
    """What an attention layer's product gives, norm weights, and angles."""
    projected = torch.randn(rows, (2 * heads + 2 * kv_heads) * HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    weight = 1 + torch.rand(heads + kv_heads, HEAD_DIM, device=DEVICE)
    angles = 6 * torch.rand(rows, 32, device=DEVICE)
    return projected, weight, 1e-6, angles.cos(), angles.sin()


def check_append(codec, kv_heads, heads):
    arguments, slots = projection(640, kv_heads, heads), torch.randperm(640, device=DEVICE)
    caches = [storage(codec, 10, kv_heads) for _ in range(2)]
    expected = kv_append_projected_reference(*arguments, caches[0], slots)
    actual = kv_append_projected_triton(*arguments, caches[1], slots)
    names = ("keys", "values", "key_scales", "value_scales") if codec.is_coded else ("keys", "values")
    different = {n: (getattr(caches[0], n) != getattr(caches[1], n)).float().mean().item() for n in names}
    return {"different": different, "query": errors(actual, expected.double())}


CHECKS = {"decode": check_decode, "prefill": check_prefill, "append": check_append}


def guarded(part, *args):
    """What a part found, or its traceback."""
    start = time.perf_counter()
    try:
        found = part(*args)
        torch.cuda.synchronize()
    except Exception:
        found = {"failed": traceback.format_exc()[-3000:]}
    return {"seconds": round(time.perf_counter() - start, 1), "found": found}


def check_one(model, name):
    torch.manual_seed(0)
    return {part: guarded(check, CODECS[name], *MODELS[model]) for part, check in CHECKS.items()}


def check_all():
    """Each model and codec in a process of its own: they compile side by side, and none can take down another."""
    command = [sys.executable, str(Path(__file__).resolve())]
    running = {
        (model, name): subprocess.Popen(
            [*command, "--check", model, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for model in MODELS
        for name in CODECS
    }
    results = {}
    for (model, name), process in running.items():
        out, err = process.communicate()
        good = process.returncode == 0
        results[f"{model} {name}"] = json.loads(out.splitlines()[-1]) if good else {"died": err[-3000:]}
    return results


def time_decode(codec, kv_heads, heads, copy_rate, rows_list=ROWS, contexts=CONTEXTS, **options):
    found = []
    for context in contexts:
        per_copy = context // BLOCK
        copy_bytes = context * codec.bytes_per_token(kv_heads, HEAD_DIM)
        copies = max(2, min(64, -(-DISTINCT_BYTES // copy_bytes)))
        cache = storage(codec, per_copy * copies, kv_heads)
        tables = torch.randperm(per_copy * copies, device=DEVICE).int().view(copies, 1, per_copy)
        for rows in rows_list:
            query = query_for(codec, rows, heads)
            workspace = DecodeWorkspace.empty(rows, heads, HEAD_DIM, context, DEVICE)
            starts, lens = integers(0, rows), integers(context)

            def run(query=query, cache=cache, tables=tables, starts=starts, lens=lens, workspace=workspace):
                for table in tables:
                    attention_decode_triton(
                        query, cache, starts, lens, table, SCALE, len(query), table.shape[1] * BLOCK, workspace,
                        **options,
                    )  # fmt: skip

            us = milliseconds(run) / copies * 1e3
            share = copy_bytes / us * 1e6 / copy_rate
            found.append({"context": context, "rows": rows, "us": round(us, 2), "copy_share": round(share, 3)})
        del cache
    return found


def time_layer(codec, kv_heads, heads, contexts=(7680, *CONTEXTS)):
    """What stands between the two products of a decode pass: append, attention, gate and rounding, one row.

    Launched as in a graph, for the longest context.
    """
    found, most = [], max(contexts)
    for context in contexts:
        per_copy, copy_bytes = context // BLOCK, context * codec.bytes_per_token(kv_heads, HEAD_DIM)
        copies = max(2, min(64, -(-DISTINCT_BYTES // copy_bytes)))
        cache = storage(codec, per_copy * copies, kv_heads)
        tables = torch.randperm(per_copy * copies, device=DEVICE).int().view(copies, 1, per_copy)
        arguments = projection(1, kv_heads, heads)
        gate = arguments[0][:, -heads * HEAD_DIM :]
        workspace = DecodeWorkspace.empty(1, heads, HEAD_DIM, most, DEVICE)
        starts, lens = integers(0, 1), integers(context)
        slots = [table[0, -1:].long() * BLOCK + BLOCK - 1 for table in tables]

        def run(arguments=arguments, gate=gate, cache=cache, tables=tables, slots=slots, starts=starts, lens=lens,
                workspace=workspace):  # fmt: skip
            for table, slot in zip(tables, slots, strict=True):
                query = kv_append_projected_triton(*arguments, cache, slot, dependent=True)
                attention_decode_rounded_triton(
                    query, gate, cache, starts, lens, table, SCALE, 1, most, workspace, dependent=True
                )

        us = milliseconds(run) / copies * 1e3
        found.append({"context": context, "us": round(us, 2), "tb_per_s": round(copy_bytes / us / 1e6, 2)})
        del cache
    return found


def time_prefill(codec, kv_heads, heads, rows=2048, **options):
    found = []
    for context in CONTEXTS:
        cache = storage(codec, context // BLOCK, kv_heads)
        tables = torch.randperm(context // BLOCK, device=DEVICE).int().view(1, -1)
        query = query_for(codec, rows, heads)
        starts, lens = integers(0, rows), integers(context)

        def run(query=query, cache=cache, tables=tables, starts=starts, lens=lens, context=context):
            attention_prefill_triton(query, cache, starts, lens, tables, SCALE, (rows,), context, **options)

        ms = milliseconds(run, replays=3)
        products = 4 * rows * heads * HEAD_DIM * (context - rows / 2)
        found.append({"context": context, "rows": rows, "ms": round(ms, 3), "tflops": round(products / ms / 1e9, 1)})
    return found


def time_append(codec, kv_heads, heads):
    cache, found = storage(codec, 64, kv_heads), []
    for rows in (1, 8, 2048):
        arguments, slots = projection(rows, kv_heads, heads), torch.randperm(4096, device=DEVICE)[:rows]

        def run(arguments=arguments, slots=slots):
            for _ in range(10):
                kv_append_projected_triton(*arguments, cache, slots)

        found.append({"rows": rows, "us": round(milliseconds(run) * 100, 2)})
    return found


def time_all(copy_rate):
    results = {}
    for model, heads in MODELS.items():
        for name, codec in CODECS.items():
            results[f"{model} {name}"] = {
                "decode": guarded(time_decode, codec, *heads, copy_rate),
                "layer": guarded(time_layer, codec, *heads),
                "prefill": guarded(time_prefill, codec, *heads),
                "append": guarded(time_append, codec, *heads),
            }
    return results


def sweep(copy_rate):
    """Other cuts of the kernels at the 35B's dimensions, one row and four."""
    results = {}
    for name in ("bf16", "int8-g64", "rk4v4-e8"):
        for rows, block_m in ((1, 16), (4, 16), (4, 32)):
            for block_n, num_warps, num_stages in ((32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3)):
                for programs in (132, 264, 396, 528):
                    shape = DecodeShape(block_m, block_n, num_warps, num_stages, programs)
                    part = guarded(sweep_decode, CODECS[name], copy_rate, rows, shape)
                    results[f"{name} rows {rows} {shape}"] = part
    return results


def sweep_decode(codec, copy_rate, rows, shape):
    return time_decode(codec, *MODELS["35b-a3b"], copy_rate, rows_list=(rows,), shape=shape)


def report(results):
    for case, parts in results["times"].items():
        for part, outcome in parts.items():
            rows = outcome["found"]
            if not isinstance(rows, list):
                print(case, part, str(rows)[-400:])
                continue
            for row in rows:
                print(case, part, *(f"{key} {value}" for key, value in row.items()))
    print(json.dumps(results["checks"], indent=1))
    print(f"copy {results['copy_bytes_per_s'] / 1e12:.2f} TB/s, {results['seconds']:.0f} s")


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("."))
    arguments.add_argument("--check", nargs=2, metavar=("MODEL", "CODEC"), help="one check, as JSON")
    arguments.add_argument("--sweep", action="store_true", help="also time other cuts of the decode kernel (minutes)")
    chosen = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing is timed")
    if chosen.check:
        print(json.dumps(check_one(*chosen.check)))
        return
    start = time.perf_counter()
    results = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "checks": check_all(),
        "copy_bytes_per_s": copy_bytes_per_s(),
    }
    results["times"] = time_all(results["copy_bytes_per_s"])
    if chosen.sweep:
        results["sweep"] = sweep(results["copy_bytes_per_s"])
    results["seconds"] = time.perf_counter() - start
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "attention.json").write_text(json.dumps(results, indent=1))
    report(results)


if __name__ == "__main__":
    main()
