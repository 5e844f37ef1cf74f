"""Whether any JSON text of a schema comes to an end. A schema that only ever asks for more of itself has none, and an
answer in its form would be written until its token limit.

Contradictions between keywords are found where the grammar is compiled; here all but references count as fulfillable.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from server.errors import BadRequestError
from server.tool_schema import resolve

# each takes in what the last one found; a deeper tangle of references is taken to end
MAX_ROUNDS = 8
# what lies deeper, references followed, is taken to end too
MAX_DEPTH = 100
SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def check_ends(schema: Mapping[str, Any] | bool, where: str, param: str) -> None:
    """raises BadRequestError. The schema's shape is that of a schema"""
    if schema is False:
        raise BadRequestError(
            f"{where}: the schema `false` allows no JSON text at all; use `true` for any.", param=param
        )
    endings = Endings(schema)
    for _ in range(MAX_ROUNDS):
        num_known = len(endings.known)
        endings.begin_round()
        if endings.ends(schema):
            return
        if len(endings.known) == num_known:
            raise BadRequestError(
                f"{where}: no JSON text of this schema ever ends, since it requires itself inside of itself, or what "
                "`false` forbids; leave a way out, such as null, an optional property or an empty list.",
                param=param,
            )


class Endings:
    """known  references to schemas that are found to have an end"""

    def __init__(self, root: Mapping[str, Any] | bool) -> None:
        self._root = root
        self.known: set[str] = set()
        self._seen: set[str] = set()
        self._depth = 0

    def begin_round(self) -> None:
        self._seen.clear()

    def ends(self, schema: Any) -> bool:
        """Less than the truth while `known` is: a reference inside of itself counts as endless."""
        if not isinstance(schema, Mapping) or self._depth == MAX_DEPTH:
            return schema is not False
        self._depth += 1
        try:
            return all(self._ways(schema)) and self._has_end(schema)
        finally:
            self._depth -= 1

    def _ways(self, schema: Mapping[str, Any]) -> Iterator[bool]:
        if "$ref" in schema:
            yield self._reference_ends(schema["$ref"])
        for part in schema.get("allOf") or ():
            yield self.ends(part)
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                yield any(self.ends(part) for part in schema[key])

    def _reference_ends(self, reference: Any) -> bool:
        if reference not in self.known and reference not in self._seen:
            self._seen.add(reference)
            # what leads nowhere is told elsewhere
            target = resolve(reference, self._root)
            if target is None or self.ends(target):
                self.known.add(reference)
        return reference in self.known

    def _has_end(self, schema: Mapping[str, Any]) -> bool:
        """Of the schema's own keywords."""
        declared = schema.get("type")
        types = {declared} if isinstance(declared, str) else set(declared or SCALARS)
        if types & SCALARS or "const" in schema or "enum" in schema:
            return True
        return ("object" in types and self._object_ends(schema)) or ("array" in types and self._array_ends(schema))

    def _object_ends(self, schema: Mapping[str, Any]) -> bool:
        properties = schema.get("properties") or {}
        others = schema.get("additionalProperties")
        return all(self.ends(properties.get(name, others)) for name in schema.get("required") or ())

    def _array_ends(self, schema: Mapping[str, Any]) -> bool:
        first, rest = schema.get("prefixItems") or [], schema.get("items")
        fewest = schema.get("minItems")
        if not isinstance(fewest, int) or fewest < 1:
            return True
        return all(map(self.ends, first[:fewest])) and (len(first) >= fewest or self.ends(rest))
