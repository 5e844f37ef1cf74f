"""Where a checkpoint lies."""

from pathlib import Path

EMBEDDED_NAME = "longlane-tiny"
EMBEDDED_DIR = Path(__file__).parent / "embedded" / "checkpoint"


def resolve_checkpoint(model: str) -> Path:
    """The directory of the checkpoint that comes with the project by its name, any other by its path."""
    return EMBEDDED_DIR if model == EMBEDDED_NAME else Path(model)
