"""Draws the loss curve of a training log."""

import argparse
import json
from pathlib import Path

SMOOTHED = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("output", type=Path, help="PNG file to write")
    parser.add_argument("--tokens-per-step", type=int, default=16 * 8448)
    arguments = parser.parse_args()
    draw_curve([json.loads(line) for line in arguments.log.read_text().splitlines()], arguments)


def draw_curve(entries: list[dict], arguments: argparse.Namespace) -> None:
    # imported here: only this script needs the package
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6.4, 3.4), dpi=90)).subplots()
    tokens = [entry["step"] * arguments.tokens_per_step / 1e6 for entry in entries]
    for name, label in (("loss", "next token"), ("draft_1", "draft 1"), ("draft_2", "draft 2"), ("draft_3", "draft 3")):
        axes.plot(tokens, smoothed([entry[name] for entry in entries]), label=label, linewidth=1.2)
    axes.set(xlabel="million tokens", ylabel="weighted loss (nats)", ylim=(0, 4))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(arguments.output)


def smoothed(values: list[float]) -> list[float]:
    """Mean of the last SMOOTHED values."""
    windows = (values[max(0, end - SMOOTHED) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


if __name__ == "__main__":
    main()
