"""Writes the held-out documents and conversations that the evaluation reads."""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from tokenizers import Tokenizer

from engine.embedded.corpus import read_json_lines
from engine.embedded.rows import read_samples

BYTES_PER_SOURCE = 60_000
TALKS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--samples", type=Path, help="the teacher's conversations")
    arguments = parser.parse_args()
    documents = choose_documents(arguments.corpus)
    if arguments.samples:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
        talks, rests = read_samples(arguments.samples, tokenizer, held_out=True)
        documents += [{"source": "teacher", "text": text} for text in within(rests, BYTES_PER_SOURCE)]
        documents += [{"source": "teacher", "talk": talk} for talk in talks[:TALKS]]
    arguments.output.write_text("".join(json.dumps(item) + "\n" for item in documents))


def choose_documents(corpus: Path) -> list[dict]:
    texts = defaultdict(list)
    for item in read_json_lines(corpus):
        if item["held_out"]:
            texts[item["source"]].append(item["text"])
    return [
        {"source": source, "text": text} for source, items in texts.items() for text in within(items, BYTES_PER_SOURCE)
    ]


def within(texts: list[str], num_bytes: int) -> list[str]:
    kept: list[str] = []
    for text in texts:
        if num_bytes > 0:
            kept.append(text)
            num_bytes -= len(text.encode())
    return kept


if __name__ == "__main__":
    main()
