"""Where a prompt of messages ends: before a new answer, behind the last message, or inside it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from server.errors import BadRequestError
from server.reasoning import CLOSE, OPEN
from server.tool_calls import CALL, END_CALL

FIELD = "continue_final_message"

Ending = Literal["answer", "messages", "last message"]


def prompt_ending(adds_prompt: bool | None, continues: bool | None) -> Ending:
    """adds_prompt, continues  `add_generation_prompt` and `continue_final_message`. raises BadRequestError"""
    if not continues:
        return "messages" if adds_prompt is False else "answer"
    if adds_prompt:
        raise BadRequestError(
            f"{FIELD}: the last message cannot go on when add_generation_prompt is true; send false.", param=FIELD
        )
    return "last message"


def open_part(turn: Mapping[str, Any], has_tools: bool, options: Mapping[str, Any]) -> str:
    """The part of the last turn that generation continues: `content`, or `reasoning_content` when that is all it has.

    options  the template's

    raises   BadRequestError for a turn that cannot go on
    """
    content, thought = turn["content"], turn.get("reasoning_content", "")
    if turn["role"] != "assistant":
        raise _refused(f"it is of role {turn['role']}, and only one of role assistant can")
    if turn.get("tool_calls"):
        raise _refused("it ends with tool calls, which are complete; send their results instead")
    if content.lstrip().startswith(OPEN) and CLOSE not in content:
        raise _refused(f"its content begins with {OPEN}; send an open thought as reasoning_content")
    if has_tools and content.rfind(CALL) > content.rfind(END_CALL):
        raise _refused("its content ends inside a tool call; end it before the call")
    if not content and not thought:
        raise _refused("it is empty; leave it out, and the field too")
    if not content and options.get("enable_thinking") is False:
        raise _refused("it ends inside a thought, but enable_thinking is false")
    return "content" if content else "reasoning_content"


def check_form(wants_form: bool, ending: Ending, starts_in_thought: bool) -> None:
    """A form is enforced from the first character of an answer on. raises BadRequestError"""
    if wants_form and ending == "last message" and not starts_in_thought:
        raise _refused(
            "it has content already, whose form can no longer be decided; leave out response_format or output_config, "
            "and a tool_choice that asks for a call"
        )


def with_end(turns: Sequence[dict[str, Any]], part: str, end: str) -> list[dict[str, Any]]:
    """The turns with a mark behind the part that goes on: the template would trim the spaces there."""
    return [*turns[:-1], turns[-1] | {part: turns[-1][part] + end}]


def _refused(reason: str) -> BadRequestError:
    return BadRequestError(f"The last message cannot go on: {reason}.", param=FIELD)
