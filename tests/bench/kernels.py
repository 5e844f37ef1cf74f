"""Products with quantised weights on a GPU: right against the reference, then timed at the real dimensions.

    python3 tests/bench/kernels.py --out DIR [--seconds 85]

Writes DIR/kernels.json and prints the tables. A part that fails is recorded with its traceback; the others still run,
in the order of their worth, until the time is over.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
import traceback
import types
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
# the ops need torch and triton alone; the engine's face would ask for what a server needs
sys.modules["engine"] = types.ModuleType("engine")
sys.modules["engine"].__path__ = [str(ROOT / "engine")]

import torch  # noqa: E402
import triton  # noqa: E402

from engine.copy_speed import copy_bytes_per_s  # noqa: E402
from engine.ops import (  # noqa: E402
    launch,
    quantize_rows,
    quantized_experts,
    quantized_linear,
    router_logits,
)
from engine.ops.quantize_rows import QuantizedRows, quantize_rows_reference  # noqa: E402
from engine.ops.quantized_experts import (  # noqa: E402
    QuantizedExperts,
    quantized_experts_reference,
    quantized_experts_triton,
)
from engine.ops.quantized_linear import quantized_linear_reference, quantized_linear_triton  # noqa: E402
from engine.ops.quantized_weight import QuantizedWeight  # noqa: E402
from engine.ops.router_logits import router_logits_reference, router_logits_triton  # noqa: E402
from tests.bench.graph_time import milliseconds  # noqa: E402

DEVICE = "cuda"
# more than twice the largest L2 cache, so that every pass reads from memory
DISTINCT_BYTES = 256 << 20
ROWS = (1, 2, 4, 8, 16, 32)
EPS = 1e-6


@dataclass(frozen=True)
class Model:
    """attention and gdn: [outputs of the projection, inputs of the output matrix]

    gates  outputs in 8 bits below those of gdn
    """

    layers: int
    hidden: int
    vocab: int
    attention: tuple[int, int]
    gdn: tuple[int, int]
    gates: int
    experts: int
    width: int


@dataclass(frozen=True)
class Bits:
    """body: attention, GDN, dense feed-forward and head"""

    body: int
    experts: int
    shared: int


MODELS = {
    "35b-a3b": Model(40, 2048, 248_320, (9216, 4096), (12_288, 4096), 64, 256, 512),
    "27b": Model(64, 5120, 248_320, (14_336, 6144), (16_384, 6144), 96, 0, 17_408),
}
RECIPES = {"w4": Bits(4, 4, 4), "a3b": Bits(8, 4, 8), "w8": Bits(8, 8, 8)}
CHOSEN = 8


def weight(bits, outputs, columns, stack=()):
    tiles, groups = -(-outputs // 16), columns // 64
    words = torch.empty(*stack, tiles, groups, bits // 2, 16, 4, dtype=torch.int32, device=DEVICE)
    words.random_(-(2**31), 2**31 - 1)
    scales = torch.empty(*stack, tiles, groups, 16, dtype=torch.float16, device=DEVICE)
    # random codes of 4 bits have a deviation of 4.6, those of 8 of 74: outputs stay about as large as inputs
    deviation = (4.6 if bits == 4 else 74) * columns**0.5
    scales.uniform_(0.8 / deviation, 1.2 / deviation)
    return QuantizedWeight(words, scales, outputs, bits)


def bytes_of(*weights):
    return sum(w.words.nbytes + w.scales.nbytes for w in weights)


def activations(rows, columns):
    return quantize_rows_reference(torch.randn(rows, columns, device=DEVICE))


def first(x, count):
    return QuantizedRows(x.values[:count], x.scales[:count], x.sums[:count])


def experts_of(model, bits, shared_bits):
    return QuantizedExperts(
        gate_up=weight(bits, 2 * model.width, model.hidden, (model.experts,)),
        down=weight(bits, model.hidden, model.width, (model.experts,)),
        shared_gate_up=weight(shared_bits, 2 * model.width, model.hidden),
        shared_down=weight(shared_bits, model.hidden, model.width),
    )


def logits_of(rows, model):
    return torch.randn(rows, model.experts + 1, device=DEVICE)


def compare(actual, expected):
    error = (actual.double() - expected.double()).abs()
    rms = expected.double().square().mean().sqrt()
    return {
        "equal": torch.equal(actual, expected),
        "unequal": (error > 0).sum().item(),
        "worst": (error.max() / rms).item(),
    }


def compare_rows(actual, expected):
    scale = ((actual.scales - expected.scales).abs() / expected.scales.clamp(min=1e-30)).max().item()
    codes = (actual.values.int() - expected.values.int()).abs()
    return {
        "codes_off": (codes > 0).sum().item(),
        "largest_code_error": codes.max().item(),
        "relative_scale_error": scale,
    }


def check_rounding():
    found = {}
    for columns in (2048, 5120):
        x, norm = torch.randn(4, columns, device=DEVICE).bfloat16(), torch.rand(columns, device=DEVICE) + 0.5
        wide = torch.randn(4, 2 * columns, device=DEVICE).bfloat16()
        pairs = {
            "plain": (quantize_rows.quantize_rows_triton(x), quantize_rows_reference(x)),
            "rms_norm": (
                quantize_rows.quantize_rms_norm_triton(x, norm, EPS),
                quantize_rows.quantize_rms_norm_reference(x, norm, EPS),
            ),
            "silu_mul": (
                quantize_rows.quantize_silu_mul_triton(wide),
                quantize_rows.quantize_silu_mul_reference(wide),
            ),
        }
        found |= {f"{name} {columns}": compare_rows(*pair) for name, pair in pairs.items()}
    return found


def check_linear(bits, columns_of_model):
    """Every number of rows against the reference, bit by bit."""
    found = {}
    for columns in columns_of_model:
        matrix, x = weight(bits, 272, columns), activations(32, columns)
        expected = quantized_linear_reference(x, [matrix], torch.float32)
        unequal = {}
        for rows in range(1, 33):
            actual = quantized_linear_triton(first(x, rows), [matrix], torch.float32)
            if not torch.equal(actual, expected[:rows]):
                unequal[rows] = compare(actual, expected[:rows])
        found[f"{bits} bits, {columns} columns"] = {"unequal": unequal}
    return found


def check_pair():
    """Two matrices in one launch, with a residual."""
    found = {}
    for columns, rows in itertools.product((2048, 5120), (1, 3, 9)):
        matrices, x = [weight(4, 4096, columns), weight(8, 40, columns)], activations(rows, columns)
        residual = torch.randn(rows, 4136, device=DEVICE).bfloat16()
        actual = quantized_linear_triton(x, matrices, torch.bfloat16, residual)
        found[f"{rows}x{columns}"] = compare(actual, quantized_linear_reference(x, matrices, torch.bfloat16, residual))
    return found


def check_router():
    model = MODELS["35b-a3b"]
    x, norm = torch.randn(9, model.hidden, device=DEVICE).bfloat16(), torch.rand(model.hidden, device=DEVICE) + 0.5
    router = (torch.randn(model.experts + 1, model.hidden, device=DEVICE) * model.hidden**-0.5).bfloat16()
    rows, logits = router_logits_triton(x, norm, EPS, router)
    expected_rows, expected = router_logits_reference(x, norm, EPS, router)
    alone = torch.cat([router_logits_triton(row, norm, EPS, router)[1] for row in x.split(1)])
    return {
        "rows": compare_rows(rows, expected_rows),
        "logits": compare(logits, expected),
        "alone_same_bits": torch.equal(alone, logits),
    }


def check_experts():
    model = MODELS["35b-a3b"]
    found = {}
    for bits, shared_bits in ((4, 8), (4, 4), (8, 8)):
        experts = experts_of(model, bits, shared_bits)
        x, logits = activations(32, model.hidden), logits_of(32, model)
        host = QuantizedRows(x.values.cpu(), x.scales.cpu(), x.sums.cpu())
        cpu = QuantizedExperts(*(getattr(experts, name).to("cpu") for name in experts.__slots__))
        expected = quantized_experts_reference(host, logits.cpu(), cpu, CHOSEN, torch.float32).to(DEVICE)
        together = quantized_experts_triton(x, logits, experts, CHOSEN, torch.float32)
        unequal = [
            rows
            for rows in range(1, 32)
            if not torch.equal(
                quantized_experts_triton(first(x, rows), logits[:rows], experts, CHOSEN, torch.float32),
                together[:rows],
            )
        ]
        found[f"{bits}/{shared_bits}"] = {"reference": compare(together, expected), "rows_unequal": unequal}
    return found


def seconds_of(work):
    """Median time of one replay."""
    return milliseconds(work, replays=11) * 1e-3


def copy_speed():
    return {"bytes_s": copy_bytes_per_s()}


def time_linear(bits, outputs, columns, rows, **options):
    one = weight(bits, outputs, columns)
    copies = max(4, min(160, DISTINCT_BYTES // bytes_of(one)))
    matrices = [one] + [weight(bits, outputs, columns) for _ in range(copies - 1)]
    x = activations(rows, columns)

    def work():
        for matrix in matrices:
            quantized_linear_triton(x, [matrix], torch.bfloat16, **options)

    each = seconds_of(work) / len(matrices)
    return {"us": each * 1e6, "bytes_s": bytes_of(one) / each}


def linear_shapes(model):
    body = {model.attention[0]: model.hidden, model.gdn[0]: model.hidden}
    shapes = [*body.items(), (model.hidden, model.attention[1])]
    if not model.experts:
        shapes += [(2 * model.width, model.hidden), (model.hidden, model.width)]
    return [*shapes, (model.vocab, model.hidden)]


def time_one_row():
    return {
        f"{name} {bits} bits {outputs}x{columns}": time_linear(bits, outputs, columns, 1)
        for (name, model), bits in itertools.product(MODELS.items(), (4, 8))
        for outputs, columns in linear_shapes(model)
    }


def time_rows():
    """More rows, by each of the two ways where both can."""
    found = {}
    for (outputs, columns), rows in itertools.product(((12_288, 2048), (2048, 4096)), ROWS):
        for is_few in (True, False) if rows <= 2 else (False,):
            way = "dp4a" if is_few else "matrix instructions"
            found[f"{outputs}x{columns} {rows} rows, {way}"] = time_linear(4, outputs, columns, rows, is_few=is_few)
    return found


def time_segments():
    """Would another number of segments, which is another order of addition, be faster?"""
    shapes = ((12_288, 2048), (2048, 4096), (9216, 2048), (5120, 6144), (5120, 17_408), (34_816, 5120))
    return {
        f"{outputs}x{columns} {segments} segments": time_linear(4, outputs, columns, 1, segments=segments)
        for (outputs, columns), segments in itertools.product(shapes, (8, 16))
    }


def time_rounding():
    found = {}
    for columns, rows in itertools.product((2048, 5120), (1, 8)):
        x, norm = torch.randn(rows, columns, device=DEVICE).bfloat16(), torch.rand(columns, device=DEVICE)
        wide = torch.randn(rows, 2 * columns, device=DEVICE).bfloat16()
        works = {
            "plain": lambda x=x: quantize_rows.quantize_rows_triton(x),
            "rms_norm": lambda x=x, norm=norm: quantize_rows.quantize_rms_norm_triton(x, norm, EPS),
            "silu_mul": lambda wide=wide: quantize_rows.quantize_silu_mul_triton(wide),
        }
        for name, work in works.items():
            each = seconds_of(lambda work=work: [work() for _ in range(50)]) / 50
            found[f"{name} {rows}x{columns}"] = {"us": each * 1e6}
    return found


def time_experts():
    model = MODELS["35b-a3b"]
    layers = [experts_of(model, 4, 4) for _ in range(3)]
    found = {}
    for rows in ROWS[:4]:
        x = activations(rows, model.hidden)
        choices = [logits_of(rows, model) for _ in range(12)]

        def work(x=x, choices=choices):
            for place, logits in enumerate(choices):
                quantized_experts_triton(x, logits, layers[place % 3], CHOSEN, torch.bfloat16)

        each = seconds_of(work) / len(choices)
        slots = sum(len(logits[:, :-1].topk(CHOSEN).indices.unique()) for logits in choices) / len(choices)
        expert, shared = layers[0].gate_up[0], layers[0].shared_gate_up
        size = slots * bytes_of(expert, layers[0].down[0]) + bytes_of(shared, layers[0].shared_down)
        found[f"{rows} rows"] = {"us": each * 1e6, "bytes_s": size / each}
    return found


class Token:
    """All products of a token with norms, router and activations, each depending on the one before.

    What mixers make of their projection is left out: their output matrix reads rows that were there before.
    """

    def __init__(self, model, bits):
        self.model = model
        self.layers = [self._layer(i, bits) for i in range(model.layers)]
        self.head = [weight(bits.body, model.vocab, model.hidden)]
        self.norm = torch.rand(model.hidden, device=DEVICE) + 0.5
        self.bytes = sum(layer["bytes"] for layer in self.layers) + bytes_of(*self.head)

    def _layer(self, index, bits):
        model = self.model
        is_attention = index % 4 == 3
        outputs, inputs = model.attention if is_attention else model.gdn
        layer = {"projection": [weight(bits.body, outputs, model.hidden)]}
        if not is_attention:
            layer["projection"].append(weight(8, model.gates, model.hidden))
        layer["output"] = [weight(bits.body, model.hidden, inputs)]
        if model.experts:
            one = layer["experts"] = experts_of(model, bits.experts, bits.shared)
            layer["router"] = torch.randn(model.experts + 1, model.hidden, device=DEVICE).bfloat16()
            read = CHOSEN * bytes_of(one.gate_up[0], one.down[0]) + bytes_of(one.shared_gate_up, one.shared_down)
            read += layer["router"].nbytes
        else:
            layer["gate_up"] = [weight(bits.body, 2 * model.width, model.hidden)]
            layer["down"] = [weight(bits.body, model.hidden, model.width)]
            read = bytes_of(*layer["gate_up"], *layer["down"])
        return layer | {"bytes": read + bytes_of(*layer["projection"], *layer["output"])}

    def work(self, rows):
        start = torch.randn(rows, self.model.hidden, device=DEVICE).bfloat16()
        mixed = activations(rows, self.layers[0]["output"][0].columns)

        def run():
            x = start
            for layer in self.layers:
                x = self._run_layer(x, mixed, layer)
            return quantized_linear_triton(self._normed(x), self.head, torch.float32)

        return run

    def _normed(self, x):
        return quantize_rows.quantize_rms_norm_triton(x, self.norm, EPS)

    def _run_layer(self, x, mixed, layer):
        quantized_linear_triton(self._normed(x), layer["projection"], torch.bfloat16)
        x = quantized_linear_triton(mixed, layer["output"], torch.bfloat16, x)
        if "experts" in layer:
            rows, logits = router_logits_triton(x, self.norm, EPS, layer["router"])
            return quantized_experts_triton(rows, logits, layer["experts"], CHOSEN, torch.bfloat16, x)
        inner = quantized_linear_triton(self._normed(x), layer["gate_up"], torch.float32)
        return quantized_linear_triton(quantize_rows.quantize_silu_mul_triton(inner), layer["down"], torch.bfloat16, x)


def time_token(name, recipe, rows_list):
    token = Token(MODELS[name], RECIPES[recipe])
    found = {"bytes_one_row": token.bytes}
    for rows, pdl in itertools.product(rows_list, (True, False)):
        if rows == 1 or pdl:
            with dependent_launch(pdl):
                seconds = seconds_of(token.work(rows))
            label = f"{rows} rows" + ("" if pdl else ", no dependent launch")
            found[label] = {"ms": seconds * 1e3, "bytes_s": token.bytes / seconds}
    found["replays_agree"] = replays_agree(token)
    return found


def replays_agree(token):
    """The same bits from a graph as from launches one by one, replay after replay."""
    run = token.work(1)
    expected = run().clone()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        kept.append(run())
    agreed = 0
    for _ in range(20):
        kept[0].fill_(torch.nan)
        graph.replay()
        agreed += torch.equal(kept[0], expected)
    return f"{agreed} of 20"


class dependent_launch:
    def __init__(self, is_on):
        self._is_on = is_on
        self._modules = (launch, quantize_rows, quantized_linear, quantized_experts, router_logits)

    def __enter__(self):
        self._before = launch.has_dependent_launch
        self._set(self._before if self._is_on else lambda device: False)

    def __exit__(self, *_):
        self._set(self._before)

    def _set(self, function):
        for module in self._modules:
            module.has_dependent_launch = function


PARTS = {
    "copy": copy_speed,
    "check_rounding": check_rounding,
    "check_experts": check_experts,
    "check_router": check_router,
    "check_pair": check_pair,
    "check_linear_35b_4": lambda: check_linear(4, (512, 2048, 4096)),
    "check_linear_35b_8": lambda: check_linear(8, (512, 2048, 4096)),
    "check_linear_27b_4": lambda: check_linear(4, (5120, 6144, 17_408)),
    "check_linear_27b_8": lambda: check_linear(8, (5120, 6144, 17_408)),
    "token_35b_w4": lambda: time_token("35b-a3b", "w4", (1, 2, 4, 8)),
    "token_35b_a3b": lambda: time_token("35b-a3b", "a3b", (1, 4)),
    "experts": time_experts,
    "token_27b_w4": lambda: time_token("27b", "w4", (1, 4)),
    "rows": time_rows,
    "one_row": time_one_row,
    "rounding": time_rounding,
    "segments": time_segments,
    "token_35b_w8": lambda: time_token("35b-a3b", "w8", (1,)),
}


def environment():
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": date.today().isoformat(),
        "commit": git.stdout.strip() or "unknown",
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }


def run_part(part):
    started = time.monotonic()
    try:
        with torch.inference_mode():
            result = part()
            torch.cuda.synchronize()
    except Exception:
        # recorded, printed, and counted in the exit status
        result = {"failed": traceback.format_exc()}
    torch.cuda.empty_cache()
    return {"seconds": round(time.monotonic() - started, 1), "result": result}


def show(name, entry, copy_bytes_s):
    print(f"\n{name} ({entry['seconds']} s)")
    if "failed" in entry["result"]:
        print(entry["result"]["failed"])
        return
    for key, value in entry["result"].items():
        share = ""
        if isinstance(value, dict) and "bytes_s" in value and copy_bytes_s:
            share = f"  {value['bytes_s'] / copy_bytes_s:.0%} of copy speed"
        print(f"  {key}: {value}{share}")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seconds", type=float, default=85)
    options.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    started = time.monotonic()
    report = {"environment": environment(), "parts": {}, "skipped": []}
    copy_bytes_s = None
    for name in arguments.parts:
        if time.monotonic() - started > arguments.seconds:
            report["skipped"].append(name)
            continue
        report["parts"][name] = run_part(PARTS[name])
        if name == "copy" and "failed" not in report["parts"][name]["result"]:
            copy_bytes_s = report["parts"][name]["result"]["bytes_s"]
        show(name, report["parts"][name], copy_bytes_s)
        # after every part: what was measured survives what comes next
        (arguments.out / "kernels.json").write_text(json.dumps(report, indent=1))
    print(f"\nskipped for time: {report['skipped']}")
    return int(any("failed" in entry["result"] for entry in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
