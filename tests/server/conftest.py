import json
from pathlib import Path

import pytest

from server.checkpoint import TextFiles
from tests.server.live import load_once
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
