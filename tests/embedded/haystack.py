"""Filler text that training never saw."""

import json

from engine.embedded.evaluate import HELD_OUT
from engine.embedded.skills.needles import Haystack

ABOUT_TOKEN_CHARS = 4


def haystack() -> Haystack:
    texts = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    lines = [line for entry in texts if "text" in entry for line in entry["text"].split("\n")]
    paragraphs = [line for line in lines if 40 < len(line) < 1500]
    return Haystack(paragraphs, [len(line) // ABOUT_TOKEN_CHARS for line in paragraphs])
