"""What an answer has to be, written as a grammar over the model's raw output.

The whole output is one grammar, a thought at its head included: that is any text up to `</think>`, as the reader of
the output sees it too. Of a tool call only the frame is given, and parameters that are not strings are JSON. The inside
of a string parameter is any text; it ends where `tool_calls` says that it ends, and nowhere else.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import engine
from server.errors import BadRequestError, UnsupportedError
from server.freeform import CUSTOM
from server.reasoning import CLOSE
from server.schema_ends import check_ends
from server.schema_shape import check_shape
from server.tool_schema import ToolSchemas

# with so few parameters any order is allowed: a rule for each subset of them; with more, the declared order
MAX_FREE_ORDER = 4
# no context holds more; a number of any size would not fit the message to the engine
LONGEST_THOUGHT = 2**31
# of all functions that may be called; compiling takes time and memory for each of them
MAX_PARAMETERS = 512
# between the parts of a JSON text stands what printers put there; in longer runs a hot model may lose itself
JSON_OPTIONS = {"whitespace_pattern": r"( |\r?\n[ \t]{0,64})?"}
WHATEVER = "(?s:.*)"
SPACES = r"[ \t\r\n]*"
ENDS_CALL = rf"(<\/parameter>{SPACES}<\/tool_call|<\/tool_call>{SPACES}<tool_call>{SPACES}<function=)"
ENDS_FUNCTION = rf"<\/parameter>{SPACES}<\/function"
NEXT_PARAMETER = rf"<\/parameter>{SPACES}<parameter="
# a text with its closing tag and what follows it; `only` where the other thing may not follow
TEXTS = rf"""
NAME: /[^<>\s]{{1,64}}/
next_or_end[lazy]: NEXT_OR_END
end_or_next[lazy]: END_OR_NEXT
only_next[lazy]: ONLY_NEXT
only_end[lazy]: ONLY_END
NEXT_OR_END: /{WHATEVER}{NEXT_PARAMETER}/ & ~/{WHATEVER}{ENDS_CALL}{WHATEVER}/
END_OR_NEXT: /{WHATEVER}{ENDS_FUNCTION}>/ & ~/{WHATEVER}{ENDS_CALL}{WHATEVER}/
ONLY_NEXT: /{WHATEVER}{NEXT_PARAMETER}/ & ~/{WHATEVER}({ENDS_CALL}|{ENDS_FUNCTION}){WHATEVER}/
ONLY_END: /{WHATEVER}{ENDS_FUNCTION}>/ & ~/{WHATEVER}({ENDS_CALL}|{NEXT_PARAMETER}){WHATEVER}/
"""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """name  of the one function that has to be called"""

    kind: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that a request asks of its answer.

    schema        JSON schema of the content; None when there must be a call instead
    tools         the functions that may be called; with a schema, the model chooses between content and calls
    is_parallel   several calls may follow each other
    param         the field that asks for it
    """

    schema: Mapping[str, Any] | bool | None
    tools: Sequence[Mapping[str, Any]]
    is_parallel: bool
    param: str

    def constraint(self, starts_in_thought: bool) -> engine.Constraint:
        """Blocking, for a worker thread. raises engine.SamplingError that says what in the schema is not supported"""
        constraint = engine.Constraint(self.grammar(starts_in_thought), self.param)
        engine.check_constraint(constraint)
        return constraint

    def grammar(self, starts_in_thought: bool) -> str:
        head = "thought LINE_ENDS " if starts_in_thought else ""
        kinds = [*(["content"] if self.schema is not None else []), *(["calls"] if self.tools else [])]
        rules = [
            f"start: {head}({' | '.join(kinds)})",
            rf"thought[lazy]: /{WHATEVER}<\/think>/",
            r"LINE_ENDS: /\n{0,2}/",
        ]
        if self.schema is not None:
            rules.append(f"content: {json_rule(self.schema)}")
        if self.tools:
            rules += call_rules(self.tools, self.is_parallel)
        return "\n".join(rules) + "\n"


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """At most so many tokens of thought. param  the field that says so"""

    num_tokens: int
    param: str = "thinking_token_budget"


def constraint_of(
    form: AnswerForm | None, budget: ThoughtBudget | None, starts_in_thought: bool, thought_end: tuple[int, ...]
) -> engine.Constraint | None:
    """What both ask of the engine. Blocking, for a worker thread. raises engine.SamplingError"""
    constraint = form.constraint(starts_in_thought) if form is not None else None
    if budget is None or not starts_in_thought:
        return constraint
    limit = engine.ThoughtLimit(budget.num_tokens, thought_end, CLOSE)
    return replace(constraint or engine.Constraint(param=budget.param), thought=limit)


def thought_budget(num_tokens: int | None, param: str) -> ThoughtBudget | None:
    """raises BadRequestError"""
    if num_tokens is None:
        return None
    if num_tokens < 0:
        raise BadRequestError(f"{param}: {num_tokens} is less than 0.", param=param)
    return ThoughtBudget(min(num_tokens, LONGEST_THOUGHT), param)


def json_rule(schema: Mapping[str, Any] | bool, *, is_strict: bool = True) -> str:
    """is_strict  a keyword that cannot be enforced is an error, and not passed over"""
    # the library's own switches are not the client's to set
    options = (
        schema if isinstance(schema, bool) else {**schema, "x-guidance": {**JSON_OPTIONS, "lenient": not is_strict}}
    )
    return f"%json {json.dumps(options)}"


def response_schema(response_format: Mapping[str, Any] | None, where: str) -> Mapping[str, Any] | bool | None:
    """The schema of `response_format` or `text.format`, None where any text will do. raises BadRequestError"""
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise UnsupportedError(f"{where}: type {kind!r} is none of text, json_object, json_schema.", param=where)
    # one API has the schema in an object of its own
    holder = response_format.get("json_schema", response_format)
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict | bool):
        raise BadRequestError(f"{where}: there is no JSON schema under `schema`.", param=where)
    return schema


def tool_choice(choice: str | Mapping[str, Any] | None) -> ToolChoice:
    """As chat completions and responses write it. raises UnsupportedError"""
    if choice is None:
        return ToolChoice()
    if choice in ("auto", "none", "required"):
        return ToolChoice(choice)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind in ("function", CUSTOM):
        # one API has the name in an object of its own
        name = _dict(choice.get(kind, choice)).get("name")
        if isinstance(name, str):
            return ToolChoice("required", name)
        raise BadRequestError(f"tool_choice: the {kind} tool has no name.", param="tool_choice")
    raise UnsupportedError("tool_choice: none of auto, none, required, or one tool by name.", param="tool_choice")


def callable_functions(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[Mapping[str, Any]]:
    """The function objects that a choice leaves. raises BadRequestError when one has to be called and there is none"""
    functions = [tool["function"] for tool in tools if choice.kind != "none"]
    chosen = [function for function in functions if choice.name in (None, function["name"])]
    if choice.kind == "required" and not chosen:
        missing = "function" if choice.name is None else f"tool named {choice.name!r}"
        raise BadRequestError(f"tool_choice: a call is required, but tools has no {missing}.", param="tool_choice")
    return chosen


def answer_form(
    schema: Mapping[str, Any] | bool | None,
    functions: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    is_parallel: bool = True,
    param: str = "response_format",
) -> AnswerForm | None:
    """None where nothing is asked for.

    functions  those that may be called
    param      the field that the schema stands in

    raises  BadRequestError for a schema or function of which no grammar can be made
    """
    if choice.kind == "required" or schema is not None:
        check_functions(functions)
    if schema is not None:
        check_shape(schema, param, param)
        check_ends(schema, param, param)
    if choice.kind == "required":
        return AnswerForm(None, functions, is_parallel and choice.name is None, "tool_choice")
    return None if schema is None else AnswerForm(schema, functions, is_parallel, param)


def call_rules(tools: Sequence[Mapping[str, Any]], is_parallel: bool) -> Iterator[str]:
    yield 'calls: call ("\\n" call)*' if is_parallel else "calls: call"
    names = " | ".join(f"{_quote(tool['name'] + '>')} f{index}" for index, tool in enumerate(tools))
    yield f'call: "<tool_call>\\n<function=" ({names}) "\\n</tool_call>"'
    schemas = ToolSchemas(tools)
    for index, tool in enumerate(tools):
        yield from FunctionRules(f"f{index}", tool, schemas).rules()
    yield TEXTS


class FunctionRules:
    """The rules of one function: from behind its name to the end of its `</function>`.

    Behind `<parameter=` stands a rule named by what may still come, so that required parameters come once and the
    others at most once.
    """

    def __init__(self, prefix: str, tool: Mapping[str, Any], schemas: ToolSchemas) -> None:
        self._prefix = prefix
        self._root = tool.get("parameters") or {}
        self._is_strict = tool.get("strict") is True
        self._properties = _dict(self._root.get("properties"))
        required = self._root.get("required")
        self._required = frozenset(name for name in required if isinstance(name, str)) if required else frozenset()
        # the wire has no way to write some names
        undeclared = sorted(self._required - set(self._properties))
        self._names = [name for name in [*self._properties, *undeclared] if is_writable(name)]
        if missing := self._required - set(self._names):
            raise UnsupportedError(
                f"tool_choice: parameter {min(missing)!r} of {tool['name']!r} cannot be written in a call.",
                param="tool_choice",
            )
        self._is_text = [
            "string" in schemas.types(tool["name"], name) or name not in self._properties for name in self._names
        ]

        needed = (index for index, name in enumerate(self._names) if name in self._required)
        self._last_required = max(needed, default=-1)

    def rules(self) -> Iterator[str]:
        if not self._names and "properties" not in self._root and self._root.get("additionalProperties") is not False:
            yield from self._open_rules()
            return
        everything = range(len(self._names))
        if len(everything) <= MAX_FREE_ORDER:
            everything = tuple(everything)
        yield f"{self._prefix}: {self._opening(everything)}"
        yield from self._free_rules(everything) if isinstance(everything, tuple) else self._ordered_rules()
        for index, name in enumerate(self._names):
            if not self._is_text[index]:
                yield f"{self._prefix}_v{index}: {json_rule(self._schema(name), is_strict=self._is_strict)}"

    def _free_rules(self, everything: tuple[int, ...]) -> Iterator[str]:
        for size in range(1, len(everything) + 1):
            for left in combinations(everything, size):
                ways = (self._parameter(index, tuple(other for other in left if other != index)) for index in left)
                yield f"{self._rule(left)}: {' | '.join(ways)}"

    def _ordered_rules(self) -> Iterator[str]:
        """One short rule for each parameter: it comes, or, where it need not, those behind it."""
        for index, name in enumerate(self._names):
            rest = range(index + 1, len(self._names))
            skips = [self._rule(rest)] if rest and name not in self._required else []
            yield f"{self._rule(range(index, len(self._names)))}: {' | '.join([self._parameter(index, rest), *skips])}"

    def _open_rules(self) -> Iterator[str]:
        """No parameter is declared and none is ruled out: any names, all of them texts."""
        yield f'{self._prefix}: "\\n</function>" | "\\n<parameter=" {self._prefix}_any'
        yield f'{self._prefix}_any: NAME ">\\n" (next_or_end {self._prefix}_any | end_or_next)'

    def _opening(self, everything: Sequence[int]) -> str:
        ways = [f'"\\n<parameter=" {self._rule(everything)}'] if everything else []
        return " | ".join([*ways, *([] if self._needs(everything) else ['"\\n</function>"'])])

    def _parameter(self, index: int, rest: Sequence[int]) -> str:
        """The parameter, and then those of `rest`."""
        return f"{_quote(self._names[index] + chr(62) + chr(10))} {self._value(index, rest)}"

    def _value(self, index: int, rest: Sequence[int]) -> str:
        """A value, its closing tag, and what follows it."""
        following = self._rule(rest) if rest else ""
        if not self._is_text[index]:
            ways = [f'"<parameter=" {following}'] if rest else []
            ways += [] if self._needs(rest) else ['"</function>"']
            return f'{self._prefix}_v{index} "\\n</parameter>\\n" ({" | ".join(ways)})'
        if not rest:
            return "only_end"
        return f"only_next {following}" if self._needs(rest) else f"(next_or_end {following} | end_or_next)"

    def _needs(self, left: Sequence[int]) -> bool:
        if isinstance(left, range):
            return left.start <= self._last_required
        return any(self._names[index] in self._required for index in left)

    def _rule(self, left: Sequence[int]) -> str:
        """A range is named by its start, as all of them reach to the end."""
        return f"{self._prefix}_p{left.start if isinstance(left, range) else '_'.join(map(str, left))}"

    def _schema(self, name: str) -> Mapping[str, Any] | bool:
        """With the definitions that it may refer to."""
        schema = self._properties[name]
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return schema if isinstance(schema, bool) else {**definitions, **schema}


def check_functions(functions: Sequence[Mapping[str, Any]]) -> None:
    """raises BadRequestError that names the function and the field of its schema"""
    num_parameters = 0
    for function in functions:
        root = function.get("parameters") or {}
        where = f"tools: {function['name']!r}: parameters"
        check_shape(root, where)
        check_ends(root, where, "tools")
        num_parameters += len({*(root.get("properties") or {}), *(root.get("required") or ())})
        if num_parameters > MAX_PARAMETERS:
            raise BadRequestError(
                f"tools: up to {function['name']!r} there are {num_parameters} parameters; where the form of the "
                f"answer is asked for, all functions together may have {MAX_PARAMETERS}.",
                param="tools",
            )


def is_writable(name: str) -> bool:
    return bool(name) and name == name.strip() and not set(name) & set("<>\n")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
