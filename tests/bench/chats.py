"""`python -m tests.bench.chats`: what the server takes of the time to the first token of a long chat that comes back.

The engine behind it answers at once from a script; all else is real: HTTP, checks, chat template, tokenising. The chat
is this repository's own source as messages, then grows by a question and an answer each turn, after others of the same
length. What a real engine takes (`tests/bench/returns.py`) comes on top.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from tests.bench.programs import CHECKPOINT, engines, machine

MESSAGE_CHARACTERS = 6000
ROOT = Path(__file__).parents[2]


def pieces() -> Iterator[str]:
    """Source text, the beginning of each piece its own."""
    for number, file in enumerate(cycle(sorted((ROOT / "engine").rglob("*.py")))):
        text = file.read_text(encoding="utf-8")
        for start in range(0, len(text), MESSAGE_CHARACTERS):
            yield f"{number}/{start}: {text[start : start + MESSAGE_CHARACTERS]}"


def chat(source: Iterator[str], num_tokens: int, count: Tokenizer) -> list[dict[str, str]]:
    """Messages of so many tokens, in turns."""
    messages, total = [], 0
    while total < num_tokens:
        text = next(source)
        total += len(count.encode(text).ids)
        messages.append({"role": "user" if len(messages) % 2 == 0 else "assistant", "content": text})
    return messages[: len(messages) // 2 * 2]


def ask(client: httpx.Client, model: str, messages: list[dict[str, str]]) -> tuple[float, int]:
    """Seconds to the first piece of the answer, and tokens of the prompt."""
    body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    began, first_s, num_tokens = time.monotonic(), 0.0, 0
    with client.stream("POST", "/v1/chat/completions", json=body, timeout=60) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            deltas = [choice["delta"] for choice in event.get("choices", ())]
            if not first_s and any(delta.get("content") or delta.get("reasoning_content") for delta in deltas):
                first_s = time.monotonic() - began
            num_tokens = (event.get("usage") or {}).get("prompt_tokens", num_tokens)
    return first_s, num_tokens


def measure(url: str, arguments: argparse.Namespace) -> None:
    source, count = pieces(), Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    chats = [chat(source, arguments.tokens, count) for _ in range(1 + arguments.others)]
    with httpx.Client(base_url=url) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        print(f"{time.strftime('%Y-%m-%d')}, {machine()}, model {model}")
        for turn in range(arguments.turns):
            for number, messages in enumerate(chats):
                question = {"role": "user", "content": f"turn {turn} of {number}: " + "what does it do? " * 10}
                first_s, num_tokens = ask(client, model, [*messages, question])
                if number == 0:
                    print(f"turn {turn}: {num_tokens:,} prompt tokens, first token after {first_s * 1000:.1f} ms")
                messages += [question, {"role": "assistant", "content": f"answer {turn}"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=90_000)
    parser.add_argument("--others", type=int, default=5)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, engines(1, {"output": "yes"}, Path(directory)) as (url,):
        measure(url, arguments)


if __name__ == "__main__":
    main()
