"""The engine on a CUDA GPU says what it says on the CPU."""

from functools import cache
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from engine.checkpoint_dir import EMBEDDED_DIR
from engine.embedded.skills import needles
from engine.embedded.skills.example import Example, load_template, user
from tests.embedded.haystack import haystack
from tests.engine.runtime import engine, generate, request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

QUESTIONS = (
    "Write a short story about a dog and a boat.",
    "Sort these words: pear, apple, fig, cherry.",
    "My name is Anna and I live in Oslo. Where do I live?",
)
STOP_IDS = (8168, 8166)


@cache
def fact() -> Example:
    return needles.needle(Random(6), haystack(), 600, 1, 1)


def encode(messages) -> list[int]:
    text = load_template()(messages=messages, add_generation_prompt=True, enable_thinking=False)
    return Tokenizer.from_file(str(EMBEDDED_DIR / "tokenizer.json")).encode(text).ids


@pytest.fixture(scope="module")
def prompts():
    return [*(encode([user(text)]) for text in QUESTIONS), encode(fact().messages[:-1])]


def replies(prompts, **changes) -> list[list[int]]:
    requests = [request(str(index), ids, max_tokens=48, stop_token_ids=STOP_IDS) for index, ids in enumerate(prompts)]
    return generate(engine(EMBEDDED_DIR, max_model_len=4096, **changes), *requests)


@pytest.fixture(scope="module")
def on_cpu(prompts):
    return replies(prompts, num_drafts=0)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_greedy_tokens_equal_those_of_the_cpu(prompts, on_cpu, num_drafts):
    assert replies(prompts, device="cuda", dtype="float32", num_drafts=num_drafts) == on_cpu


def test_bfloat16_finds_the_fact(prompts):
    tokenizer = Tokenizer.from_file(str(EMBEDDED_DIR / "tokenizer.json"))
    reply = tokenizer.decode(replies(prompts, device="cuda", dtype="bfloat16")[3])
    assert fact().expected["value"] in reply


@pytest.fixture(autouse=True)
def free_memory():
    yield
    torch.cuda.empty_cache()
