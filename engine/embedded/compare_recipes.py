"""What recipes, 8-bit activations and KV codecs cost in decode steps: `python -m engine.embedded.compare_recipes`.

Held-out texts are given to the engine's own model: the first tokens as a prompt, the others one by one, each through
the pass that generates. All combinations of --recipes, --activations, --codecs and --outliers are measured against the
checkpoint itself in 32 bits on the same device.

A recipe may carry other bits for the tensors whose names end so: `a3b:experts.down=5`. Bits that no storage has are
kept in codes of 8.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F

from engine.cache.kv_codecs import CODECS
from engine.convert.convert import convert
from engine.convert.recipes import RECIPES, Role
from engine.embedded.compare_codecs import OUTLIER_FACTOR, OUTLIERS, table
from engine.embedded.evaluate import CHECKPOINT, HELD_OUT, SEED, Evaluation, has_answer, read_held_out
from engine.embedded.served import ServedDecoder
from engine.models.artifact import Artifact
from engine.models.quantized import build_model
from engine.models.weights import load_model
from engine.ops.quantized_weight import (
    GROUP,
    TILE_ROWS,
    QuantizedWeight,
    dequantize_weight,
    pack,
    quantize_weight,
)

NEEDLE_LENGTH = 1024
# rows of one decode pass while serving
_ROWS = 8
_BATCH_TOKENS = 11_000


@dataclass(frozen=True, slots=True)
class Setting:
    """recipe      one of RECIPES, or one with other bits for some tensors
    activations    8: rows are rounded before they meet a rounded matrix, as served; 16: they are not
    has_outliers   channels of the keys are 12 times larger
    """

    recipe: str
    activations: int
    codec: str
    has_outliers: bool

    @property
    def name(self) -> str:
        return " ".join([self.recipe, f"a{self.activations}", self.codec, *(["outliers"] * self.has_outliers)])


class Altered(Artifact):
    """An artifact whose tensors are read as a setting has them."""

    def __init__(self, directory: Path, device: torch.device, setting: Setting) -> None:
        super().__init__(directory, device)
        self._setting = setting

    def read(self, name: str) -> torch.Tensor | QuantizedWeight:
        tensor = super().read(name)
        if self._setting.has_outliers and isinstance(tensor, torch.Tensor):
            tensor = with_outliers(name, tensor)
        bits = bits_of(self._setting.recipe, name, self.tensors[name].role)
        if isinstance(tensor, torch.Tensor) and bits < 16:
            tensor = rounded_to(tensor, bits)
        if self._setting.activations == 16 and isinstance(tensor, QuantizedWeight):
            return dequantize_weight(tensor)
        return tensor


def bits_of(recipe: str, name: str, role: Role) -> int:
    """`a3b:experts.down=5,lm_head=6`: the ends of names and their bits."""
    base, _, others = recipe.partition(":")
    for end, bits in (pair.split("=") for pair in others.split(",") if pair):
        if name.endswith(end):
            return int(bits)
    return RECIPES[base][role]


def with_outliers(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Keys with large channels and queries with the same channels small: no score changes. Weights stand for 1 + w."""
    factor = {"k_norm.weight": OUTLIER_FACTOR, "q_norm.weight": 1 / OUTLIER_FACTOR}.get(".".join(name.split(".")[-2:]))
    if factor is None:
        return weight
    planted = weight.clone()
    planted[list(OUTLIERS)] = (1 + weight[list(OUTLIERS)]) * factor - 1
    return planted


def rounded_to(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """As it is converted; other than 4 and 8 bits in the storage of 8."""
    if bits in (4, 8):
        return quantize_weight(weight, bits)[0]
    codes, scales = best_codes(weight.float().unflatten(-1, (-1, GROUP)), bits)
    tiles = scales.unflatten(-2, (-1, TILE_ROWS)).movedim(-2, -1).contiguous()
    return QuantizedWeight(pack(codes.to(torch.int8), 8), tiles, weight.shape[-2], 8)


def best_codes(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of groups [..., 64] and fp16 scales [...], those of the smallest squared error from a few first scales."""
    top = 2.0 ** (bits - 1)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    # codes reach one further below zero, so the scale has the other sign
    tried = [_fitted(groups, -extreme / (top * factor), top) for factor in (1.0, 0.95, 1.05, 1.15)]
    codes, scales, errors = (torch.stack(parts) for parts in zip(*tried, strict=True))
    best = errors.argmin(0, keepdim=True)
    codes = codes.gather(0, best.expand(1, *codes.shape[1:]))[0]
    return codes, scales.gather(0, best)[0].squeeze(-1).to(torch.float16)


def _fitted(groups: torch.Tensor, scale: torch.Tensor, top: float) -> tuple[torch.Tensor, ...]:
    """Codes under a first scale, the best scale for them, and the squared error of both."""
    codes = (groups / torch.where(scale == 0, 1.0, scale)).round().clamp(-top, top - 1)
    scale = (groups * codes).sum(-1, keepdim=True) / codes.square().sum(-1, keepdim=True).clamp(min=1)
    scale = scale.to(torch.float16).float()
    return codes, scale, (groups - codes * scale).square().sum(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Text:
    """ids [rows, tokens]: the first `prompt` are read, the others given one by one; the last is only asked for."""

    ids: torch.Tensor
    prompt: int

    @property
    def wanted(self) -> torch.Tensor:
        """[rows, steps]"""
        return self.ids[:, self.prompt + 1 :]


def held_out_text(evaluation: Evaluation, rows: int, prompt: int, steps: int) -> Text:
    """Held-out texts, joined, and cut into rows."""
    ids = [i for encoding in evaluation.tokenizer.encode_batch(evaluation.held_out.texts) for i in encoding.ids]
    width = prompt + steps + 1
    if len(ids) < rows * width:
        raise SystemExit(f"the held-out texts have {len(ids)} tokens, {rows} rows of {width} are too many")
    return Text(torch.tensor(ids[: rows * width]).view(rows, width), prompt)


@torch.inference_mode()
def decoded(decoder: ServedDecoder, text: Text) -> Iterator[torch.Tensor]:
    """For every eight rows and every step: the log-probabilities of the tokens after it.  [rows, vocabulary] fp32"""
    for ids in text.ids.split(_ROWS):
        decoder.prefill(ids[:, : text.prompt].tolist(), ids.shape[1] - text.prompt)
        for token_ids in ids[:, text.prompt : -1].T:
            yield decoder.logits(decoder.step(token_ids)).log_softmax(-1)


@dataclass
class Divergence:
    """Of every row and step [rows, steps]: KL(reference || candidate), both losses, and whether they would choose one
    token."""

    nats: torch.Tensor
    loss: torch.Tensor
    reference_loss: torch.Tensor
    agreed: torch.Tensor

    def measures(self) -> dict[str, float]:
        """Intervals of 95 %, from how the rows differ."""
        rise = self.loss - self.reference_loss
        return {
            "kl": self.nats.mean().item(),
            "kl_pm": spread(self.nats),
            "perplexity": math.exp(self.loss.mean().item()),
            "rise_%": 100 * math.expm1(rise.mean().item()),
            "rise_pm": 100 * spread(rise),
            "same_token_%": 100 * self.agreed.double().mean().item(),
        }


def spread(values: torch.Tensor) -> float:
    """1.96 standard errors of the mean, rows taken for independent."""
    rows = values.mean(1)
    return 1.96 * (rows.std() / math.sqrt(len(rows))).item()


def divergence(reference: Sequence[torch.Tensor], decoder: ServedDecoder, text: Text) -> Divergence:
    columns = []
    batches = [part.T for part in text.wanted.split(_ROWS)]
    wanted = [step for batch in batches for step in batch]
    for expected, found, tokens in zip(reference, decoded(decoder, text), wanted, strict=True):
        expected, found = expected.double(), found.double().cpu()
        nats = (expected.exp() * (expected - found)).sum(-1)
        losses = [F.nll_loss(each, tokens, reduction="none") for each in (found, expected)]
        columns.append(torch.stack([nats, *losses, (expected.argmax(-1) == found.argmax(-1)).double()]))
    steps = text.wanted.shape[1]
    rows = [torch.stack(columns[start : start + steps], dim=-1) for start in range(0, len(columns), steps)]
    return Divergence(*torch.cat(rows, dim=1))


def needle_measures(evaluation: Evaluation, decoder: ServedDecoder, items: int) -> dict[str, float]:
    if not items:
        return {}
    evaluation.decoder = decoder
    examples = [evaluation.needle_example(Random(5 * SEED + i), NEEDLE_LENGTH) for i in range(items)]
    found = evaluation.score(examples, has_answer)
    low, high = found.interval
    return {"needle_1k_%": 100 * found.value, "low": 100 * low, "high": 100 * high}


def settings_of(arguments: argparse.Namespace) -> list[Setting]:
    outliers = [False, True] if arguments.outliers == "both" else [arguments.outliers == "planted"]
    crossed = product(arguments.recipes, arguments.activations, arguments.codecs, outliers)
    return [Setting(*each) for each in crossed]


class Comparison:
    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self._arguments, self._directory = arguments, directory
        self._device, self._dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
        self._evaluation = Evaluation(arguments.checkpoint, read_held_out(arguments.held_out), "cpu", _BATCH_TOKENS)
        self._text = held_out_text(self._evaluation, arguments.rows, arguments.prompt, arguments.steps)
        exact = load_model(arguments.checkpoint, self._device, torch.float32)
        decoder = ServedDecoder(exact, self._device, torch.float32)
        self._reference = [each.cpu() for each in decoded(decoder, self._text)]

    def measure(self, setting: Setting) -> dict[str, float]:
        began = time.monotonic()
        decoder = self._decoder(setting)
        row = divergence(self._reference, decoder, self._text).measures()
        row |= needle_measures(self._evaluation, decoder, self._arguments.items)
        return row | {"seconds": round(time.monotonic() - began, 1)}

    def _decoder(self, setting: Setting) -> ServedDecoder:
        with Altered(self._artifact(setting.recipe), self._device, setting) as artifact:
            model = build_model(artifact, self._device, self._dtype, drafts=False)
        return ServedDecoder(model, self._device, self._dtype, setting.codec)

    def _artifact(self, recipe: str) -> Path:
        """Other bits are made while reading, of what was not rounded before."""
        name = "bf16" if ":" in recipe else recipe
        directory = self._directory / name
        if not directory.exists():
            convert(self._arguments.checkpoint, directory, name)
        return directory


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    words.add_argument("--held-out", type=Path, default=HELD_OUT)
    words.add_argument("--recipes", nargs="+", default=list(RECIPES))
    words.add_argument("--activations", nargs="+", type=int, choices=[8, 16], default=[8])
    words.add_argument("--codecs", nargs="+", choices=list(CODECS), default=["bf16"])
    words.add_argument("--outliers", choices=["none", "planted", "both"], default="none")
    words.add_argument("--rows", type=int, default=16)
    words.add_argument("--prompt", type=int, default=256, help="tokens of a row that are read at once")
    words.add_argument("--steps", type=int, default=256, help="tokens of a row that are given one by one")
    words.add_argument("--items", type=int, default=0, help="needle items of 1K tokens, the same for every setting")
    words.add_argument("--device", default="cpu")
    words.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of what is not rounded")
    words.add_argument("--json", type=Path, help="file to write")
    return words


def main() -> None:
    arguments = parser().parse_args()
    rows: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as directory:
        comparison = Comparison(arguments, Path(directory))
        for setting in settings_of(arguments):
            rows[setting.name] = comparison.measure(setting)
            print(table("setting", {setting.name: rows[setting.name]}), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
