"""Whether a JSON schema is put together as schemas are; what its keywords mean is for others to say."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from server.errors import BadRequestError

MAX_DEPTH = 64
# of JSON below the list of tools; the template's printer recurses
MAX_JSON_LEVELS = 160


def check_shape(schema: Any, where: str, param: str = "tools") -> None:
    """raises BadRequestError that names the field by its path behind `where`"""
    pending = [(schema, where, 0)]
    while pending:
        part, path, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise BadRequestError(f"{where}: the schema is nested deeper than {MAX_DEPTH} levels.", param=param)
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise BadRequestError(f"{path} is no JSON schema.", param=param)
        _check_lists(part, path, param)
        pending += [(inner, f"{path}.{place}", depth + 1) for place, inner in _inner(part, path, param)]


def check_levels(tools: Any) -> None:
    """raises BadRequestError"""
    level = [tools]
    for _ in range(MAX_JSON_LEVELS):
        level = [inner for value in level for inner in _values(value)]
        if not level:
            return
    raise BadRequestError(f"tools: there are more than {MAX_JSON_LEVELS} levels in one another.", param="tools")


def _values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _check_lists(schema: Mapping[str, Any], path: str, param: str) -> None:
    for key, (is_right, kind) in LISTS.items():
        if schema.get(key) is not None and not is_right(schema[key]):
            raise BadRequestError(f"{path}.{key} is no {kind}.", param=param)


def _inner(schema: Mapping[str, Any], path: str, param: str) -> Iterator[tuple[str, Any]]:
    """Schemas directly inside a schema, each with its place."""
    for key, value in schema.items():
        if value is None or key not in MAPPINGS | SEQUENCES | SINGLE:
            continue
        if key in MAPPINGS and isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        elif key in SEQUENCES and isinstance(value, list):
            yield from ((f"{key}[{index}]", inner) for index, inner in enumerate(value))
        elif key in SINGLE:
            yield key, value
        else:
            raise BadRequestError(f"{path}.{key} is no {'object' if key in MAPPINGS else 'list'}.", param=param)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: Any) -> bool:
    return isinstance(value, str) or _is_names(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


MAPPINGS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
SEQUENCES = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SINGLE = frozenset({"items", "additionalProperties", "not"})
LISTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "required": (_is_names, "list of names"),
    "enum": (_is_list, "list"),
    "type": (_is_type, "type name or list of them"),
}
