"""python -m engine.convert --src HF_DIR --dst OUT --recipe a3b|w4|w8|bf16"""

import argparse
import sys
import time
from pathlib import Path

import torch

from config.output import while_read
from engine.convert.convert import convert
from engine.convert.recipes import RECIPES
from engine.errors import CheckpointError


def main() -> int:
    arguments = _parser().parse_args()
    progress = _Progress()
    try:
        device = torch.device(arguments.device)
        manifest = convert(arguments.src, arguments.dst, arguments.recipe, device=device, report=progress)
    except CheckpointError as error:
        print(f"conversion failed: {error}", file=sys.stderr)
        return 1
    _print_errors(manifest["errors"])
    size = sum(file["bytes"] for file in manifest["files"].values())
    print(f"{arguments.dst}: {manifest['profile']}, recipe {manifest['recipe']}, {size / 1e9:.2f} GB, verified")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.convert", description="Hugging Face checkpoint to artifact")
    parser.add_argument("--src", type=Path, required=True, help="directory with config.json and safetensors files")
    parser.add_argument("--dst", type=Path, required=True, help="directory of the artifact; an interrupted one goes on")
    parser.add_argument("--recipe", choices=sorted(RECIPES), required=True)
    parser.add_argument("--device", default="cpu", help="where weights are rounded: cpu or cuda")
    return parser


class _Progress:
    """One line a unit, with the time that is left."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, done: int, total: int, name: str) -> None:
        left = (time.monotonic() - self._started) / done * (total - done)
        print(f"{done}/{total} {name}, {left:.0f} s left", file=sys.stderr, flush=True)


def _print_errors(errors: dict[str, dict[str, float]]) -> None:
    if errors:
        print(f"{'role':<14} {'squared error':>14} {'with max-abs':>14}")
    for role, error in errors.items():
        print(f"{role:<14} {error['stored']:>14.3e} {error['max_abs']:>14.3e}")


if __name__ == "__main__":
    sys.exit(while_read(main))
