"""Names of models: which pattern means which, and what a client's name stands for."""

import re
from collections.abc import Iterable
from functools import lru_cache

from config import Alias

AUTO = "auto"
# a longer one is nobody's name, and patterns would take long over it
_LONGEST = 256


def matches(pattern: str, name: str) -> bool:
    """`*` stands for any text."""
    if "*" not in pattern:
        return pattern == name
    return len(name) <= _LONGEST and _compiled(pattern).fullmatch(name) is not None


def matches_any(patterns: Iterable[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def resolve(name: str, aliases: Iterable[Alias], served: Iterable[str]) -> str:
    """The name that upstreams know: an alias of exactly this name, else the name itself, else an alias that fits it."""
    fitting = [alias for alias in aliases if matches(alias.name, name)]
    exact = next((alias.model for alias in fitting if alias.name == name), None)
    if exact is not None:
        return exact
    return name if not fitting or name in served else fitting[0].model


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)
