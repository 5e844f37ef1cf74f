"""What every KV codec costs on the trained checkpoint: `python -m engine.embedded.compare_codecs`."""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F

from engine.cache.kv_codecs import CODECS, Form, KVCodec
from engine.embedded.decoder import Decoder
from engine.embedded.evaluate import CHECKPOINT, HELD_OUT, SEED, Evaluation, has_answer, read_held_out
from engine.embedded.train_model import Packing, TrainModel
from engine.ops.hadamard import hadamard
from engine.ops.kv_codec_e8 import e8_decode, e8_encode
from engine.ops.kv_codec_int8 import int8_decode, int8_encode

NEEDLE_LENGTHS = {"needle_1k": 1024, "needle_4k": 4096}
# channels of every head that large models may have many times larger than the rest: a pair that RoPE turns, and others
OUTLIERS, OUTLIER_FACTOR = (5, 37, 100, 200), 12.0
CODERS = {"int8": (int8_encode, int8_decode), "e8": (e8_encode, e8_decode)}


def stored(x: torch.Tensor, form: Form, is_rotated: bool) -> torch.Tensor:
    """What attention reads back after x was stored in that form."""
    if form == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    encode, decode = CODERS[form]
    coded = decode(*encode(hadamard(x) if is_rotated else x), x.dtype)
    return hadamard(coded) if is_rotated else coded


class Coded:
    """Attention sees only keys and values that went through a codec."""

    codec: KVCodec

    def attention_inputs(self, x, prefix, positions):
        q, k, v, gate = super().attention_inputs(x, prefix, positions)
        k = stored(k, self.codec.keys, self.codec.is_rotated)
        return q, k, stored(v, self.codec.values, self.codec.is_rotated), gate


class CodedModel(Coded, TrainModel):
    pass


class CodedDecoder(Coded, Decoder):
    pass


@dataclass
class Divergence:
    """Sums over predicted tokens."""

    nats: float = 0.0
    loss: float = 0.0
    agreed: int = 0
    tokens: int = 0

    def add(self, reference: torch.Tensor, coded: torch.Tensor, wanted: torch.Tensor) -> None:
        """Log-probabilities [tokens, vocabulary] and the tokens that came [tokens]."""
        self.nats += float((reference.exp() * (reference - coded)).sum())
        self.loss += float(F.nll_loss(coded, wanted, reduction="sum"))
        self.agreed += int((reference.argmax(-1) == coded.argmax(-1)).sum())
        self.tokens += len(wanted)


def plant_outliers(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keys with large channels and queries with the same channels small: no score changes.

    Norm weights stand for 1 + w.
    """
    planted = dict(weights)
    for name, weight in weights.items():
        factor = {"k_norm": OUTLIER_FACTOR, "q_norm": 1 / OUTLIER_FACTOR}.get(name.rpartition(".")[2])
        if factor is not None:
            planted[name] = weight.clone()
            planted[name][list(OUTLIERS)] = (1 + weight[list(OUTLIERS)]) * factor - 1
    return planted


def chunks_of_text(evaluation: Evaluation, num_tokens: int) -> Iterator[torch.Tensor]:
    """Held-out texts, joined, in rows of 1024 tokens: [1, 1024] each."""
    ids = [i for encoding in evaluation.tokenizer.encode_batch(evaluation.held_out.texts) for i in encoding.ids]
    for begin in range(0, min(num_tokens, len(ids) - 1024) // 1024 * 1024, 1024):
        yield torch.tensor([ids[begin : begin + 1024]])


def divergences(
    candidates: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], chunks: Iterable[torch.Tensor]
) -> dict[str, Divergence]:
    """KL(bf16 || candidate), loss, and how often both would choose the same token, for every candidate.

    candidates  name -> [1, tokens] to the log-probabilities [tokens - 1, vocabulary]; "bf16" is one of them
    """
    totals = {name: Divergence() for name in candidates}
    for ids in chunks:
        reference = candidates["bf16"](ids)
        for name, total in totals.items():
            total.add(reference, candidates[name](ids), ids[0, 1:])
    return totals


@torch.inference_mode()
def codec_divergences(evaluation: Evaluation, num_tokens: int) -> dict[str, Divergence]:
    model = CodedModel(evaluation.decoder.geometry, evaluation.decoder.weights)
    candidates = {name: partial(log_probabilities, model, codec) for name, codec in CODECS.items()}
    return divergences(candidates, chunks_of_text(evaluation, num_tokens))


def log_probabilities(model: CodedModel, codec: KVCodec, ids: torch.Tensor) -> torch.Tensor:
    model.codec = codec
    hidden = model.hidden(ids, Packing.of(torch.arange(ids.shape[1]).unsqueeze(0)))
    return model.logits(hidden[0, :-1]).log_softmax(-1)


def text_measures(found: Divergence) -> dict[str, float]:
    return {
        "kl": found.nats / found.tokens,
        "perplexity": math.exp(found.loss / found.tokens),
        "same_token": found.agreed / found.tokens,
    }


def measure_codec(evaluation: Evaluation, codec: KVCodec, found: Divergence, items: int) -> dict[str, float]:
    evaluation.decoder.codec = codec
    row = text_measures(found)
    for key, size in NEEDLE_LENGTHS.items() if items else ():
        examples = [evaluation.needle_example(Random(4 * SEED + i), size) for i in range(items)]
        row[key] = evaluation.score(examples, has_answer).value
    geometry = evaluation.decoder.geometry
    return row | {"bytes_per_token": codec.bytes_per_token(geometry.kv_heads, geometry.head_dim)}


def table(kind: str, rows: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = ["".join([f"{kind:<12}", *(f"{column:>17}" for column in columns)])]
    for name, row in rows.items():
        lines.append("".join([f"{name:<12}", *(f"{row[column]:>17.5g}" for column in columns)]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--held-out", type=Path, default=HELD_OUT)
    parser.add_argument("--tokens", type=int, default=16384, help="held-out tokens for KL and perplexity")
    parser.add_argument("--items", type=int, default=24, help="items per needle row; 0 leaves them out")
    parser.add_argument("--outliers", action="store_true", help="plant channels in the keys that are 12 times larger")
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    evaluation = Evaluation(arguments.checkpoint, read_held_out(arguments.held_out), "cpu", 20_000)
    weights = evaluation.decoder.weights
    weights = plant_outliers(weights) if arguments.outliers else weights
    evaluation.decoder = CodedDecoder(evaluation.decoder.geometry, weights)
    found = codec_divergences(evaluation, arguments.tokens)
    rows = {name: measure_codec(evaluation, codec, found[name], arguments.items) for name, codec in CODECS.items()}
    print(table("codec", rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
