"""The base of every settings section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen settings; an unknown key is an error, so that a typing mistake never passes for a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)
