"""One training or evaluation item, and how it becomes text."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import jinja2

TEMPLATE_FILE = Path(__file__).parent.parent / "chat_template.jinja"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant named Longlane.",
    "Answer briefly.",
    "You are a friendly assistant. Keep your answers short.",
    "Follow the user's instructions exactly.",
    "You are a careful assistant that answers from the given text.",
)


@dataclass
class Example:
    """A conversation that ends with the right assistant message."""

    skill: str
    messages: list[dict]
    tools: list[dict] = field(default_factory=list)
    thinks: bool = False
    keeps_thoughts: bool = False
    expected: dict = field(default_factory=dict)
    """What a check needs: "answer", "schema" or "calls"."""


def load_template(path: Path = TEMPLATE_FILE) -> Callable[..., str]:
    """The chat template as a function of its variables, with the JSON form that transformers gives it."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(path.read_text()).render


def refuse(message: str) -> None:
    raise ValueError(message)


def training_text(example: Example, render: Callable[..., str]) -> str:
    return render(
        messages=example.messages, tools=example.tools or None, preserve_thinking=example.keeps_thoughts
    ).rstrip("\n")


def prompt_text(example: Example, render: Callable[..., str]) -> str:
    """The same conversation up to the point where the model has to answer."""
    return render(
        messages=example.messages[:-1],
        tools=example.tools or None,
        preserve_thinking=example.keeps_thoughts,
        add_generation_prompt=True,
        enable_thinking=example.thinks,
    )


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, thought: str = "", calls: list[dict] | None = None) -> dict:
    message = {"role": "assistant", "content": content, "reasoning_content": thought}
    return message | ({"tool_calls": calls} if calls else {})


def answered(skill: str, rng: Random, question: str, answer: str, thought: str, **expected) -> Example:
    """One question and its answer; half of the time with a thought, sometimes with a system prompt."""
    thinks = rng.random() < 0.5
    messages = [user(question), assistant(answer, thought if thinks else "")]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return Example(skill, messages, thinks=thinks, expected={"answer": answer} | expected)
