"""Products of many rows on a GPU at the real dimensions: right against fp32, then timed in several shapes.

    python3 tests/bench/prefill.py --out DIR [--rows 8192]

Writes DIR/prefill.json and prints one line a product and shape.
"""

import argparse
import json
import subprocess
import sys
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
from triton.testing import do_bench  # noqa: E402

from engine.ops.quantized_experts import QuantizedExperts  # noqa: E402
from engine.ops.quantized_grouped import (  # noqa: E402
    expert_blocks,
    quantized_grouped_experts_reference,
    quantized_grouped_experts_triton,
)
from engine.ops.quantized_matmul import (  # noqa: E402
    MatmulShape,
    quantized_matmul_reference,
    quantized_matmul_triton,
    quantized_mlp_triton,
)
from engine.ops.quantized_weight import QuantizedWeight  # noqa: E402

HIDDEN, WIDTH, EXPERTS, CHOSEN = 2048, 512, 256, 8
PRODUCTS = {"gdn in": (12_288, 2048), "attention in": (9216, 2048), "out": (2048, 4096)}
SHAPES = (
    MatmulShape(128, 128, 8, 3),
    MatmulShape(128, 128, 4, 3),
    MatmulShape(128, 256, 8, 3),
    MatmulShape(128, 256, 8, 4),
    MatmulShape(256, 128, 8, 3),
    MatmulShape(256, 256, 8, 3),
    MatmulShape(64, 256, 8, 3),
    MatmulShape(64, 256, 4, 3),
)


def weight(bits, outputs, columns, stack=()):
    tiles, groups = -(-outputs // 16), columns // 64
    words = torch.empty(*stack, tiles, groups, bits // 2, 16, 4, dtype=torch.int32, device="cuda")
    words.random_(-(2**31), 2**31 - 1)
    scales = torch.empty(*stack, tiles, groups, 16, dtype=torch.float16, device="cuda")
    deviation = (4.6 if bits == 4 else 74) * columns**0.5
    scales.uniform_(0.8 / deviation, 1.2 / deviation)
    return QuantizedWeight(words, scales, outputs, bits)


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def timed(name, run, flops, found):
    try:
        run()
        ms = do_bench(run, warmup=10, rep=60, return_mode="median")
        found[name] = {"ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1)}
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(name, found[name], flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=8192)
    arguments = parser.parse_args()
    found, checks, rows = {}, {}, arguments.rows
    for bits in (4, 8):
        for name, (outputs, columns) in PRODUCTS.items():
            matrix, x = weight(bits, outputs, columns), torch.randn(rows, columns, device="cuda").bfloat16()
            actual = quantized_matmul_triton(x[:300], [matrix], torch.bfloat16)
            checks[f"{name} {bits}"] = relative(actual, quantized_matmul_reference(x[:300], [matrix], torch.float32))
            for shape in SHAPES if bits == 4 else SHAPES[:1]:
                label = f"{name} {bits} bits {tuple(vars_of(shape))}"
                timed(label, lambda s=shape, m=matrix, v=x: quantized_matmul_triton(v, [m], torch.bfloat16, shape=s),
                      2 * rows * outputs * columns, found)  # fmt: skip
            if bits == 4:
                dense = torch.randn(outputs, columns, device="cuda").bfloat16()
                timed(f"{name} cuBLAS bf16", lambda v=x, d=dense: v @ d.T, 2 * rows * outputs * columns, found)
    experts = QuantizedExperts(
        weight(4, 2 * WIDTH, HIDDEN, (EXPERTS,)), weight(4, HIDDEN, WIDTH, (EXPERTS,)),
        weight(4, 2 * WIDTH, HIDDEN), weight(4, HIDDEN, WIDTH),
    )  # fmt: skip
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    chosen = torch.rand(rows, EXPERTS, device="cuda").topk(CHOSEN).indices
    weights = torch.rand(rows, CHOSEN + 1, device="cuda")
    part = slice(0, 256)
    checks["experts"] = relative(
        quantized_grouped_experts_triton(x[part], chosen[part], weights[part], experts, torch.bfloat16),
        quantized_grouped_experts_reference(x[part], chosen[part], weights[part], experts, torch.float32),
    )
    flops = 2 * rows * (CHOSEN + 1) * 3 * HIDDEN * WIDTH
    for shape in SHAPES:
        timed(f"experts {tuple(vars_of(shape))}", lambda s=shape: quantized_grouped_experts_triton(
            x, chosen, weights, experts, torch.bfloat16, shape=s), flops, found)  # fmt: skip
    timed("experts, default shape", lambda: quantized_grouped_experts_triton(
        x, chosen, weights, experts, torch.bfloat16), flops, found)  # fmt: skip
    timed("experts, 64 rows", lambda: quantized_grouped_experts_triton(
        x[:64], chosen[:64], weights[:64], experts, torch.bfloat16), flops * 64 / rows, found)  # fmt: skip
    timed("order of the experts", lambda: expert_blocks(chosen, EXPERTS, 128, 64), 0, found)
    timed("shared expert", lambda: quantized_mlp_triton(
        x, experts.shared_gate_up, experts.shared_down, torch.bfloat16), 6 * rows * HIDDEN * WIDTH, found)  # fmt: skip
    print("relative errors", {name: f"{error:.1e}" for name, error in checks.items()})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    about = {
        "date": date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "commit": commit.strip(), "rows": rows,
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = about | {"relative_errors": checks, "timings": found}
    (arguments.out / "prefill.json").write_text(json.dumps(result, indent=1))


def vars_of(shape):
    return shape.block_m, shape.block_n, shape.num_warps, shape.num_stages


if __name__ == "__main__":
    main()
