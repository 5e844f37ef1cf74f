"""Raw model text through the pipeline, cut in any way."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from server.pipeline import TextPipeline, TextRules
from server.reasoning import Reasoning
from server.tool_calls import CallArguments, CallStart, Content
from server.tool_schema import ToolSchemas

TOOLS = [
    {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "old": {"type": "string"},
                "new": {"type": "string"},
                "edits": {"type": "array", "items": {"type": "object"}},
                "options": {"type": "object"},
                "line": {"type": "integer"},
                "ratio": {"type": "number"},
                "recursive": {"type": "boolean"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "mode": {"enum": ["fast", "slow"]},
                "place": {"$ref": "#/$defs/place"},
            },
            "$defs": {"place": {"type": "object"}},
        },
    },
    {"name": "get_time"},
]
# its input is one text
FREEFORM = {"name": "patch", "parameters": {"type": "object", "properties": {"input": {"type": "string"}}}}


@dataclass
class Read:
    """What a client has at the end."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""
    # these depend on how the text is cut into tokens
    num_tokens: int = field(default=0, compare=False)
    num_reasoning_tokens: int = field(default=0, compare=False)

    def arguments(self, index: int = 0) -> dict:
        return json.loads(self.calls[index][1])


def rules(**options) -> TextRules:
    names = options.pop("tools", None)
    tools = ToolSchemas(names, [FREEFORM["name"]]) if names else None
    return TextRules(**{"token_bytes": lambda token_id: bytes([token_id]), "tools": tools, **options})


def read(raw: str | bytes, cuts: Iterable[int] = (), *, reason: str = "stop", **options) -> Read:
    """The joined answer, with the raw bytes as tokens that end at `cuts`: one token when there are none."""
    raw = raw.encode() if isinstance(raw, str) else raw
    ends = [0, *sorted({cut for cut in cuts if 0 < cut < len(raw)}), len(raw)]
    tokens = [raw[start:end] for start, end in pairwise(ends)]
    return read_tokens(range(len(tokens)), (), rules(token_bytes=tokens.__getitem__, **options), reason)


def read_tokens(ids: Sequence[int], cuts: Sequence[int], text_rules: TextRules, reason: str = "stop") -> Read:
    pipeline = TextPipeline(text_rules)
    events = []
    ends = sorted({cut for cut in cuts if 0 < cut < len(ids)} | {len(ids)})
    start = 0
    for end in ends:
        events += pipeline.push(ids[start:end])
        start = end
    events += pipeline.finish(reason)
    result = Read(finish=pipeline.finish_reason(reason))
    result.num_tokens, result.num_reasoning_tokens = pipeline.num_tokens, pipeline.num_reasoning_tokens
    for event in events:
        match event:
            case Content(text):
                result.content += text
            case Reasoning(text):
                result.reasoning += text
            case CallStart(index, _, name):
                assert index == len(result.calls)
                result.calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(result.calls) - 1
                result.calls[index] = (result.calls[index][0], result.calls[index][1] + text)
    return result


def call(name: str = "edit", /, **parameters: str) -> str:
    """A tool call as the model writes it."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"
