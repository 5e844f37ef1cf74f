import json
from pathlib import Path

import pytest

from server.checkpoint import TextFiles
from tests.server.live import load_once, running
from tests.server.raw import call
from tests.server.vocabulary import cached_tokenizer

ROOT = Path(__file__).parent.parent.parent
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A directory of text files per template generation, with the family's real vocabulary."""
    if not SHARED.exists():
        pytest.skip(f"the family's chat templates are not at {SHARED}")
    return {
        generation: _checkpoint(tmp_path_factory.mktemp(f"family-{generation}"), generation)
        for generation in ("3_6", "3_8")
    }


def _checkpoint(directory: Path, generation: str) -> Path:
    tokenizer = cached_tokenizer(ROOT / ".cache")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).symlink_to(tokenizer / name)
    (directory / "chat_template.jinja").symlink_to(SHARED / f"qwen{generation}_chat_template.jinja")
    generation_config = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "eos_token_id": [248046, 248044]}
    (directory / "generation_config.json").write_text(json.dumps(generation_config))
    (directory / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 262_144}}))
    return directory


@pytest.fixture(scope="session")
def checkpoint(checkpoints) -> Path:
    return checkpoints["3_6"]


@pytest.fixture(scope="session")
def files(checkpoint) -> TextFiles:
    return load_once(checkpoint)


# what an agent's own patch format has of all that JSON and markup would change
PATCH = """*** Begin Patch
*** Update File: a.py
-    if x: return "\\n" </parameter>
+    日本 \u2028 {"a": 1}
*** End
"""
SCRIPT = [
    {"when": "call the tool", "output": "why\n</think>\n\nI'll check.\n" + call(path="/srv/a", line="12")},
    {"when": "call twice", "output": "</think>" + call("get_time") + "\n" + call("get_time")},
    {"when": "call in characters", "output": "</think>" + call(path="/srv/日本", old="a\n b"), "chunk": "char"},
    {"when": "cut the call", "output": "</think>" + call(old="one two three four five six seven eight nine ten")},
    {"when": "long call", "output": "</think>" + call(new="some line of text\n" * 200), "token_ms": 1},
    {"when": "write the patch", "output": "why</think>\n\nSo.\n" + call("apply_patch", input=PATCH), "chunk": 3},
    {"when": "cut the patch", "output": "</think>" + call("apply_patch", input=PATCH * 9)},
    {"when": "only think", "output": "thinking and thinking and thinking"},
    {"when": "stop here", "output": "</think>\n\nThe quick brown fox jumps"},
    {"when": "emoji", "output": "</think>\n\n🧑‍🚀 日本 a\u2028b\u2029c\x85d"},
    {"when": "count slowly", "output": "</think>\n\n" + "tick " * 3000, "token_ms": 10},
    {"when": "think long first", "output": "</think>\n\nat last", "prefill_ms": 700},
    {"when": "prefill forever", "output": "</think>\n\nnever", "prefill_ms": 60_000},
    {"when": "die soon", "output": "</think>\n\none two three four five", "die_after": 3},
    {"when": "die at once", "output": "</think>\n\none", "die_after": 0},
    {"when": "fail at the end", "output": "</think>\n\none two", "finish": "error"},
    {"when": "end by limit", "output": "</think>\n\none two", "finish": "length"},
    {"when": "flood", "output": "</think>\n\n" + "0123456789 " * 1000},
    {"when": "json please", "output": '</think>\n\n{"answer": 42}'},
    {"output": "hm\n</think>\n\nHello, world"},
]


@pytest.fixture(scope="session")
def live(checkpoint, tmp_path_factory):
    """The server that most tests talk to."""
    directory = tmp_path_factory.mktemp("live")
    with running(checkpoint, SCRIPT, directory, max_model_len=4096, heartbeat_s=0.2, send_timeout_s=2) as live:
        yield live
