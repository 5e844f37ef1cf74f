"""Gated DeltaNet between its two products on a GPU: right against fp64, then timed at the real dimensions.

    python3 tests/bench/gated_delta.py --out DIR [--part check decode decode_behind_products prefill]

Writes DIR/gated_delta.json. Figures are medians of CUDA graph replays over memories of more than the L2 cache.
"""

import argparse
import dataclasses
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

from engine.ops.causal_conv_heads import causal_conv_heads_triton  # noqa: E402
from engine.ops.delta_state import DeltaState, DeltaWeights  # noqa: E402
from engine.ops.gated_delta_decode import gated_delta_decode_rounded_triton  # noqa: E402
from engine.ops.gated_delta_prefill import gated_delta_prefill_reference, gated_delta_prefill_triton  # noqa: E402
from engine.ops.gated_rms_norm import gated_rms_norm_triton  # noqa: E402
from engine.ops.quantize_rows import quantize_rows_reference  # noqa: E402
from engine.ops.quantized_linear import quantized_linear_triton  # noqa: E402
from engine.ops.quantized_weight import QuantizedWeight  # noqa: E402
from tests.bench.graph_time import milliseconds  # noqa: E402
from tests.ops.delta_examples import delta_memory, delta_rows, delta_weights, doubled  # noqa: E402

DEVICE = "cuda"
# key heads, value heads per key head, hidden
MODELS = {"35b-a3b": (16, 2, 2048), "27b": (16, 3, 5120)}
# requests, rows of each
SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 4), (4, 1), (4, 4), (8, 1), (8, 4))
# states of so many bytes are more than twice the largest L2 cache
DISTINCT_BYTES = 128 << 20


def integers(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def guarded(part, *args):
    """What a part found, or its traceback."""
    try:
        found = part(*args)
        torch.cuda.synchronize()
    except Exception:
        found = {"failed": traceback.format_exc()[-3000:]}
    return found


def projection(outputs, columns):
    """Random codes of 4 bits whose product is about as large as what it multiplies."""
    words = torch.empty(-(-outputs // 16), columns // 64, 2, 16, 4, dtype=torch.int32, device=DEVICE)
    words.random_(-(2**31), 2**31 - 1)
    scales = torch.empty(*words.shape[:2], 16, dtype=torch.float16, device=DEVICE).fill_(1 / (4.6 * columns**0.5))
    return QuantizedWeight(words, scales, outputs, 4)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Distinct layers, one after the other, for so many requests of so many rows."""

    weights: DeltaWeights
    memories: list[DeltaState]
    slots: torch.Tensor
    starts: torch.Tensor
    accepted: torch.Tensor
    num_rows: tuple[int, ...]
    x: torch.Tensor

    def decode(self, memory):
        return gated_delta_decode_rounded_triton(
            self.x, self.weights, memory, self.slots, self.starts, self.accepted, self.num_rows
        )

    def run(self):
        for memory in self.memories:
            self.decode(memory)


def chain(key_heads, group, requests, rows, accepted):
    weights = delta_weights(key_heads, group, DEVICE)
    layers = max(8, min(48, DISTINCT_BYTES // (requests * weights.value_heads * 65536)))
    memories = [delta_memory(requests, weights, DEVICE) for _ in range(layers)]
    for memory in memories:
        for tensor in memory.tensors()[1:]:
            tensor.normal_().mul_(0.1)
    return Chain(
        weights=weights,
        memories=memories,
        slots=torch.arange(requests, device=DEVICE),
        starts=integers(*range(0, requests * rows + 1, rows)),
        accepted=integers(*[accepted] * requests),
        num_rows=(rows,) * requests,
        x=delta_rows(requests * rows, weights, DEVICE),
    )


def time_decode(key_heads, group, _hidden, shapes=SHAPES):
    """A chain of decode kernels alone: each reads its state while the one before it ends."""
    found = []
    for requests, rows in shapes:
        for accepted in (0, rows):
            layers = chain(key_heads, group, requests, rows, accepted)
            us = milliseconds(layers.run) / len(layers.memories) * 1e3
            found.append({"requests": requests, "rows": rows, "accepted": accepted, "us": round(us, 2)})
            del layers
    return found


def time_behind_products(key_heads, group, hidden, shapes=((1, 1), (1, 4), (4, 1))):
    """What a layer takes with its projection before it, and what the projection takes alone."""
    found = []
    for requests, rows in shapes:
        layers = chain(key_heads, group, requests, rows, rows)
        heads = layers.weights.value_heads
        outputs = len(layers.weights.conv) + heads * 128
        matrices = [projection(outputs, hidden) for _ in layers.memories]
        x = quantize_rows_reference(torch.randn(requests * rows, hidden, device=DEVICE))

        def products(matrices=matrices, x=x):
            for matrix in matrices:
                quantized_linear_triton(x, (matrix,), torch.bfloat16)

        def both(layers=layers, matrices=matrices, x=x):
            for matrix, memory in zip(matrices, layers.memories, strict=True):
                quantized_linear_triton(x, (matrix,), torch.bfloat16)
                layers.decode(memory)

        alone, together = (milliseconds(run) / len(matrices) * 1e3 for run in (products, both))
        shape = {"requests": requests, "rows": rows}
        found.append({**shape, "projection_us": round(alone, 2), "with_decode_us": round(together, 2)})
        del layers, matrices
    return found


def prompt(key_heads, group, num_rows):
    """A prompt's rows after the projection, with where they belong."""
    weights = delta_weights(key_heads, group, DEVICE)
    memory, x = delta_memory(len(num_rows), weights, DEVICE), delta_rows(sum(num_rows), weights, DEVICE)
    starts = integers(*itertools.accumulate(num_rows, initial=0))
    return weights, memory, x, (torch.arange(len(num_rows), device=DEVICE), starts, num_rows)


def time_prefill(key_heads, group, _hidden):
    found = []
    for num_rows in ((512,), (2048,), (8192,), (1024,) * 8):
        weights, memory, x, where = prompt(key_heads, group, num_rows)
        mixed, z, a, b = weights.split(x)
        z = z.unflatten(-1, (weights.value_heads, 128))

        def convolve(mixed=mixed, weights=weights, memory=memory, where=where):
            return causal_conv_heads_triton(mixed, weights.conv, memory.inputs, *where, 2 * weights.key_heads, 128)

        convolved, norms = convolve()

        def attend(parts=(convolved, norms, a, b, weights, memory.state, *where)):
            return gated_delta_prefill_triton(*parts)

        attended = attend()

        def normalise(attended=attended, z=z, weights=weights):
            return gated_rms_norm_triton(attended, z, weights.norm, weights.eps)

        steps = {"convolution": convolve, "delta_rule": attend, "norm": normalise}
        ms = {name: round(milliseconds(run), 4) for name, run in steps.items()}
        found.append({"num_rows": list(num_rows), "ms": ms, "sum_ms": round(sum(ms.values()), 4)})
    return found


def relative(actual, oracle):
    return ((actual.double() - oracle).norm() / oracle.norm()).item()


def check_prefill():
    """Relative L2 errors of outputs and states against fp64, of the kernels and of the reference in fp32."""
    found = []
    for num_rows, speed in (((8192,), 1.0), ((8192,), 1e-4), ((8192,), 40.0), ((100, 64, 2000), 1.0)):
        weights, memory, x, where = prompt(2, 2, num_rows)
        weights = dataclasses.replace(weights, decay=weights.decay * speed)
        mixed, _, a, b = weights.split(x)
        convolved, norms = causal_conv_heads_triton(mixed, weights.conv, memory.inputs, *where, 4, 128)
        states = {name: memory.state.clone() for name in ("kernel", "reference")}
        exact = memory.state.double()
        parts = (convolved.double(), norms.double(), a.double(), b.double(), doubled(weights))
        oracle = gated_delta_prefill_reference(*parts, exact, *where)
        errors = {"num_rows": list(num_rows), "decay": speed}
        for name, run in (("kernel", gated_delta_prefill_triton), ("reference", gated_delta_prefill_reference)):
            actual = run(convolved, norms, a, b, weights, states[name], *where)
            errors[name] = {"output": relative(actual, oracle), "state": relative(states[name], exact)}
        found.append(errors)
    return found


PARTS = {
    "decode": time_decode,
    "decode_behind_products": time_behind_products,
    "prefill": time_prefill,
}


def run_parts(chosen):
    results = {"check_prefill": guarded(check_prefill)} if "check" in chosen else {}
    for name, part in PARTS.items():
        if name in chosen:
            results[name] = {model: guarded(part, *sizes) for model, sizes in MODELS.items()}
    return results


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("."))
    arguments.add_argument("--part", nargs="*", choices=["check", *PARTS], default=["check", *PARTS])
    chosen = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing is timed")
    torch.manual_seed(0)
    start = time.perf_counter()
    results = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **run_parts(chosen.part),
        "seconds": time.perf_counter() - start,
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "gated_delta.json").write_text(json.dumps(results, indent=1))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
