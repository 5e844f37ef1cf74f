"""The checkpoint's chat template, rendered so that no text of a caller can act as control.

The template's own `<|im_start|>`, `<think>` … must become control ids, the same characters in a message must not. So a
mark, a character that occurs nowhere in the request, is put behind every `<` of the caller's text before rendering:
the template's conditions, trims and joins see it as ordinary text, and only what the template wrote spells a token.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.continuation import FIELD, with_end
from server.errors import BadRequestError

# Unicode's noncharacters: no text has a use for them
MARKS = [chr(0xFDD0 + offset) for offset in range(32)]
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatTemplate:
    """raises jinja2.TemplateSyntaxError when the checkpoint's template is none"""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source)
        self.variables = meta.find_undeclared_variables(environment.parse(source))

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        *,
        opens_answer: bool = True,
        continues: str | None = None,
    ) -> tuple[str, str]:
        """The prompt with its marks, and the mark.

        opens_answer  the prompt ends where a new answer begins
        continues     it ends inside this part of the last message

        raises        BadRequestError when the template refuses the messages
        """
        if taken := RESERVED & set(options):
            raise BadRequestError(
                f"chat_template_kwargs.{min(taken)} is set by the server; leave it out", param="chat_template_kwargs"
            )
        mark = MARKS[0]
        try:
            mark = choose_mark((messages, tools, dict(options)))
            guarded, end = guard(messages, mark), 2 * mark
            prompt = self._template.render(
                messages=with_end(guarded, continues, end) if continues else guarded,
                tools=guard(tools, mark) if tools else None,
                add_generation_prompt=opens_answer,
                **guard(dict(options), mark),
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            reason = str(error).replace(mark, "")
            raise BadRequestError(f"The chat template refuses these messages: {reason}", param="messages") from error
        return _until(prompt, end) if continues else prompt, mark


def _until(prompt: str, end: str) -> str:
    before, found, _ = prompt.rpartition(end)
    if not found:
        raise BadRequestError(f"{FIELD}: the chat template leaves the end of the last message out.", param=FIELD)
    return before


def choose_mark(value: Any) -> str:
    for mark in MARKS:
        if not _contains(value, mark):
            return mark
    raise BadRequestError(
        "The messages use all of the noncharacters U+FDD0 to U+FDEF; leave one out.", param="messages"
    )


def guard(value: Any, mark: str) -> Any:
    """`value` with the mark behind every `<` of every text in it, keys included."""
    match value:
        case str():
            return value.replace("<", "<" + mark)
        case dict():
            return {guard(key, mark): guard(item, mark) for key, item in value.items()}
        case list() | tuple():
            return [guard(item, mark) for item in value]
        case _:
            return value


def _contains(value: Any, mark: str) -> bool:
    match value:
        case str():
            return mark in value
        case dict():
            return any(mark in key or _contains(item, mark) for key, item in value.items())
        case list() | tuple():
            return any(_contains(item, mark) for item in value)
        case _:
            return False


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)
