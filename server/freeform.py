"""Tools of type custom, called with one text: to the model, functions with one string parameter."""

from collections.abc import Mapping
from typing import Any

CUSTOM = "custom"
# the one parameter, as the model knows it
INPUT = "input"


def described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Description and parameters of the function. A grammar is told to the model, and not enforced."""
    description = tool.get("description") or ""
    if grammar := _grammar(tool.get("format")):
        description += f"\n\nThe {INPUT} follows this {grammar.get('syntax', 'lark')} grammar:\n{grammar['definition']}"
    schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"description": description, "parameters": schema}


def _grammar(form: Any) -> Mapping[str, Any] | None:
    """One API has it in an object of its own."""
    grammar = form.get("grammar", form) if isinstance(form, dict) else None
    return grammar if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str) else None
