"""The declared tools: which names count, and what type each parameter has."""

import ast
import json
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from server.errors import BadRequestError
from server.freeform import CUSTOM, described

STRING = frozenset({"string"})
MAX_DEPTH = 8
MAX_TOOL_NAME = 256
# literal_eval compiles its input; past this size a value stays a string
MAX_PYTHON_CHARS = 65_536
PYTHON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
LOOSE_NUMBER = re.compile(r"[+-]?[0-9]{1,400}(\.[0-9]{0,400})?([eE][+-]?[0-9]{1,3})?")


class ToolSchemas:
    """Types of parameters by tool name.

    tools     function objects of the request: ``{"name": …, "parameters": JSON schema}``
    freeform  names of those whose input is one text, and no object of parameters
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]], freeform: Collection[str] = ()) -> None:
        self._parameters = {tool["name"]: tool.get("parameters") or {} for tool in tools}
        self._freeform = frozenset(freeform)

    def is_freeform(self, name: str) -> bool:
        return name in self._freeform

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON types that the schema allows; string where it says nothing."""
        root = self._parameters[tool]
        properties = root.get("properties") if isinstance(root, dict) else None
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        return frozenset(_types(schema, root, MAX_DEPTH)) or STRING


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth == 0:
        return set()
    if "$ref" in schema:
        return _types(resolve(schema["$ref"], root), root, depth - 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    branches = [part for key in ("anyOf", "oneOf", "allOf") for part in _list(schema.get(key))]
    if branches:
        return set().union(*(_types(part, root, depth - 1) for part in branches))
    return _implied_types(schema)


def _implied_types(schema: dict[str, Any]) -> set[str]:
    if "enum" in schema or "const" in schema:
        values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        return {PYTHON_TYPES.get(type(value), "null") for value in values}
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else set()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def resolve(reference: Any, root: Any) -> Any:
    """What a reference inside of the same schema leads to; None when that is nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for step in reference.split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def declared_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The functions as the chat template takes them, tools of type custom among them; other types are skipped.

    raises  BadRequestError for a tool without a usable name, and for a name that stands for two kinds of tools
    """
    declared: list[dict[str, Any]] = []
    kinds: dict[str, str] = {}
    for index, tool in enumerate(tools or []):
        kind = tool.get("type", "function")
        if kind not in ("function", CUSTOM):
            continue
        where, told = f"tools[{index}].{kind}", tool.get(kind)
        _check_function(where, told)
        if kinds.setdefault(told["name"], kind) != kind:
            raise BadRequestError(
                f"{where}.name: {told['name']!r} is the name of a function and of a tool of type custom.",
                param=f"{where}.name",
            )
        declared.append(tool if kind == "function" else _as_function(told))
    return declared


def freeform_names(tools: Iterable[Mapping[str, Any]] | None) -> frozenset[str]:
    """Of declared tools, those of type custom."""
    return frozenset(tool[CUSTOM]["name"] for tool in tools or () if tool.get("type") == CUSTOM)


def _as_function(custom: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": custom["name"], **described(custom)}}


def _check_function(where: str, function: Any) -> None:
    if not isinstance(function, dict):
        raise BadRequestError(f"{where} is missing or no object.", param=where)
    name = function.get("name")
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= MAX_TOOL_NAME
        or set(name) & set("<>\n")
        or name != name.strip()
    ):
        raise BadRequestError(
            f"{where}.name: {name!r} is no name of 1 to {MAX_TOOL_NAME} characters without < > or line ends.",
            param=f"{where}.name",
        )
    if not isinstance(function.get("parameters"), dict | None):
        raise BadRequestError(f"{where}.parameters is no JSON schema object.", param=f"{where}.parameters")


def to_json(text: str, types: frozenset[str]) -> str:
    """The raw text of a parameter as JSON of a declared type other than string; a JSON string when it fits none."""
    bare = text.strip()
    for name, convert in CONVERSIONS.items():
        if name in types and (value := convert(bare)) is not None:
            return value
    return json.dumps(text, ensure_ascii=False)


def _null(text: str) -> str | None:
    return "null" if text.lower() in ("null", "none") else None


def _boolean(text: str) -> str | None:
    return text.lower() if text.lower() in ("true", "false") else None


def _integer(text: str) -> str | None:
    if not LOOSE_NUMBER.fullmatch(text):
        return None
    whole, _, fraction = text.partition(".")
    if re.fullmatch(r"[+-]?[0-9]+", whole) and not fraction.strip("0"):
        return str(int(whole))
    value = float(text)
    return str(int(value)) if value.is_integer() else None


def _number(text: str) -> str | None:
    if not LOOSE_NUMBER.fullmatch(text) or abs(float(text)) == float("inf"):
        return None
    # as it was written, where that is JSON
    return text if JSON_NUMBER.fullmatch(text) else json.dumps(float(text))


def _object(text: str) -> str | None:
    return _container(text, dict)


def _array(text: str) -> str | None:
    return _container(text, list)


def _container(text: str, kind: type) -> str | None:
    """JSON stays as it was written; a Python literal becomes JSON."""
    try:
        return text if isinstance(json.loads(text, parse_constant=refuse_constant), kind) else None
    except (ValueError, RecursionError):
        return _from_python(text, kind)


def refuse_constant(constant: str) -> Any:
    """For `json.loads`, which would take NaN and Infinity."""
    raise ValueError(f"{constant} is not JSON")


def _from_python(text: str, kind: type) -> str | None:
    if len(text) > MAX_PYTHON_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, kind) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


CONVERSIONS = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
}
