"""Trains the small checkpoint; several calls continue one another through a state file."""

import argparse
import dataclasses
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from engine.embedded.export import save_checkpoint
from engine.embedded.geometry import Geometry
from engine.embedded.optimise import Optimiser
from engine.embedded.rows import RowMaker, Sources, batches, load_sources
from engine.embedded.train_model import Packing, Stages, TrainModel, create_parameters, working_weights

BALANCE_WEIGHT = 0.01
DRAFT_WEIGHTS = (0.25, 0.15, 0.1)
WARMUP_STEPS = 100
DECAY_FROM = 0.55
FP8_FROM = 0.75
LOG_EVERY = 20


@dataclass
class TrainSettings:
    geometry: Geometry = field(default_factory=Geometry)
    rows: int = 16
    length: int = 8448
    draft_rows: int = 4
    workers: int = 12
    device: str = "cuda"
    compiles: bool = True
    progress_from: float = 0.0
    progress_to: float = 1.0
    seconds: float = 60.0
    """From the first finished step on; what comes before is start-up."""
    deadline: float = 0.0
    """Unix time at which to stop, instead of `seconds`."""


@dataclass
class Batch:
    token_ids: torch.Tensor
    weights: torch.Tensor
    packing: Packing
    draft_packing: Packing


def to_batch(arrays: dict[str, np.ndarray], settings: TrainSettings) -> Batch:
    """Moves one batch to the device; document boundaries are found on the host, where that costs no wait."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    packing, draft = Packing.of(tensors["positions"]), Packing.of(tensors["positions"][: settings.draft_rows])
    device = settings.device

    def moved(packing: Packing) -> Packing:
        return Packing(packing.positions.to(device), packing.cu_seqlens.to(device), packing.longest)

    return Batch(tensors["token_ids"].to(device), tensors["weights"].to(device), moved(packing), moved(draft))


def shifted(x: torch.Tensor, steps: int) -> torch.Tensor:
    """x[t + steps] at t; the end of a row repeats whatever it holds, and has no loss weight."""
    return torch.roll(x, -steps, dims=-1)


def weighted_loss(model: TrainModel, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor):
    losses = model.stages.token_losses(hidden, model.weights["head"], targets)
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1.0)


def training_loss(model: TrainModel, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Next-token loss, router balance, and the loss of three drafts in a row on part of the rows."""
    hidden = model.hidden(batch.token_ids, batch.packing)
    main = weighted_loss(model, hidden, shifted(batch.token_ids, 1), batch.weights)
    balance = torch.stack(model.balance).mean()
    drafts = draft_losses(model, hidden, batch)
    total = main + BALANCE_WEIGHT * balance
    for weight, loss in zip(DRAFT_WEIGHTS, drafts, strict=True):
        total = total + weight * loss
    parts = {"loss": main, "balance": balance} | {f"draft_{i}": loss for i, loss in enumerate(drafts, 1)}
    return total, {name: value.detach() for name, value in parts.items()}


def draft_losses(model: TrainModel, hidden: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """Draft d reads the true token x_{t+d} and its own last hidden state, and proposes x_{t+d+1}."""
    rows = batch.draft_packing.positions.shape[0]
    token_ids, hidden, kept = batch.token_ids[:rows], hidden[:rows], batch.weights[:rows]
    inside, losses = torch.ones_like(kept), []
    for depth in range(1, len(DRAFT_WEIGHTS) + 1):
        inside = inside * (shifted(kept, depth - 1) > 0)
        hidden = model.draft_hidden(shifted(token_ids, depth), hidden, batch.draft_packing)
        weights = shifted(kept, depth) * inside
        losses.append(weighted_loss(model, hidden, shifted(token_ids, depth + 1), weights))
    return losses


def rate_factor(step: int, progress: float) -> float:
    """Warm-up by steps, then flat, then linear to zero over the last part of the time."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, (1 - progress) / (1 - DECAY_FROM)))


class Trainer:
    def __init__(self, settings: TrainSettings, seed: int = 0):
        self.settings = settings
        created = create_parameters(settings.geometry, seed)
        self.parameters = {name: value.to(settings.device).requires_grad_() for name, value in created.items()}
        self.optimiser = Optimiser(self.parameters, settings.geometry)
        self.stages = Stages.compiled() if settings.compiles else Stages()
        self.dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
        self.step_count = 0

    def step(self, batch: Batch, progress: float) -> dict[str, torch.Tensor]:
        weights = working_weights(self.parameters, self.dtype, rounds_to_fp8=progress >= FP8_FROM)
        model = TrainModel(self.settings.geometry, weights, self.stages)
        loss, parts = training_loss(model, batch)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimiser.step(rate_factor(self.step_count, progress))
        self.step_count += 1
        return parts

    def save(self, path: Path) -> None:
        state = {"parameters": self.parameters, "optimiser": self.optimiser.state(), "step": self.step_count}
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.settings.device, weights_only=True)
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(state["parameters"][name])
        self.optimiser.load_state(state["optimiser"])
        self.step_count = state["step"]


def train(trainer: Trainer, stream: Iterator[dict], progress: Callable[[float | None], float], log: Path) -> None:
    """Steps until this call's share of the schedule is done; one JSON line of losses for every LOG_EVERY steps."""
    settings, begin = trainer.settings, None
    tokens_per_step = settings.rows * settings.length
    marked = time.monotonic()
    with log.open("a") as lines:
        while begin is None or time.monotonic() - begin < settings.seconds:
            parts = trainer.step(to_batch(next(stream), settings), progress(begin))
            if begin is None:
                begin = finished_at(settings.device)
                settings.seconds = settings.deadline - time.time() if settings.deadline else settings.seconds
            if trainer.step_count % LOG_EVERY == 0:
                entry = {name: round(value.item(), 4) for name, value in parts.items()}
                speed = LOG_EVERY * tokens_per_step / (time.monotonic() - marked)
                marked = time.monotonic()
                entry |= {"step": trainer.step_count, "progress": round(progress(begin), 4), "tokens_per_s": int(speed)}
                lines.write(json.dumps(entry) + "\n")
                if trainer.step_count % (10 * LOG_EVERY) == 0:
                    print(entry, flush=True)


def finished_at(device: str) -> float:
    """Now, after the first step has really run: compilation does not count as training time."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


class SharedProgress:
    """The share of the schedule that is done, readable from the data workers."""

    def __init__(self, settings: TrainSettings):
        self.settings = settings
        self.value = multiprocessing.Value("d", settings.progress_from)

    def __call__(self, begin: float | None = None) -> float:
        if begin is not None:
            done = min(1.0, (time.monotonic() - begin) / self.settings.seconds)
            self.value.value = self.settings.progress_from + done * (
                self.settings.progress_to - self.settings.progress_from
            )
        return self.value.value


class BatchStream(torch.utils.data.IterableDataset):
    """Batches made in worker processes; every worker has its own seed."""

    def __init__(self, sources: Sources, settings: TrainSettings, progress: SharedProgress, seed: int):
        self.sources, self.settings, self.progress, self.seed = sources, settings, progress, seed

    def __iter__(self) -> Iterator[dict]:
        worker = torch.utils.data.get_worker_info()
        seed = self.seed * 1000 + (worker.id if worker else 0)
        maker = RowMaker(self.sources, self.settings.length, seed)
        yield from batches(maker, self.settings.rows, self.progress, self.settings.length)


def keep_arrays(arrays: dict) -> dict:
    return arrays


def start_stream(sources: Sources, settings: TrainSettings, progress: SharedProgress, seed: int) -> Iterator[dict]:
    dataset = BatchStream(sources, settings, progress, seed)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=settings.workers,
        prefetch_factor=4 if settings.workers else None,
        collate_fn=keep_arrays,
        multiprocessing_context="fork" if settings.workers else None,
    )
    return iter(loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("checkpoint", type=Path, help="directory with the tokenizer; the weights are written there")
    parser.add_argument("state", type=Path, help="file to continue from, if it exists, and to save to")
    parser.add_argument("--samples", type=Path, help="the teacher's conversations")
    parser.add_argument("--log", type=Path, default=Path("train_log.jsonl"))
    parser.add_argument("--no-compile", action="store_true")
    for option in dataclasses.fields(TrainSettings):
        if option.type in (int, float, str, "int", "float", "str"):
            parser.add_argument(f"--{option.name.replace('_', '-')}", type=type(option.default), default=option.default)
    arguments = parser.parse_args()
    run(arguments)


def run(arguments: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    names = [option.name for option in dataclasses.fields(TrainSettings) if hasattr(arguments, option.name)]
    settings = TrainSettings(compiles=not arguments.no_compile, **{name: getattr(arguments, name) for name in names})
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    sources = load_sources(arguments.corpus, arguments.samples, tokenizer)
    progress = SharedProgress(settings)
    trainer = Trainer(settings)
    if arguments.state.exists():
        trainer.load(arguments.state)
    stream = start_stream(sources, settings, progress, seed=trainer.step_count + 1)
    train(trainer, stream, progress, arguments.log)
    trainer.save(arguments.state)
    save_checkpoint(trainer.parameters, settings.geometry, arguments.checkpoint)


if __name__ == "__main__":
    main()
