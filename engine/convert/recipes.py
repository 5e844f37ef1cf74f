"""How many bits each role of a matrix gets."""

from typing import Literal

Role = Literal[
    "embedding", "head", "attention", "gdn", "gdn_gates", "router", "experts", "shared_expert", "mlp", "mtp", "plain"
]

# 16: bf16; 32: fp32, for vectors. Routers stay as they are: a choice of experts flips at once, an error does not grow.
_UNTOUCHED: dict[Role, int] = {"router": 16, "plain": 32}
# the decay and the strength of writing act over the whole context, and are few
_ALL_8: dict[Role, int] = dict.fromkeys(
    ("embedding", "head", "attention", "gdn", "gdn_gates", "experts", "shared_expert", "mlp", "mtp"), 8
)

RECIPES: dict[str, dict[Role, int]] = {
    # quality first: 4 bits only where most of the weights are
    "a3b": _UNTOUCHED | _ALL_8 | {"experts": 4},
    # speed and small cards first; an embedding row is read once a token, so its size alone counts
    "w4": _UNTOUCHED | dict.fromkeys(_ALL_8, 4) | {"embedding": 8, "gdn_gates": 8},
    "w8": _UNTOUCHED | _ALL_8,
    "bf16": _UNTOUCHED | dict.fromkeys(_ALL_8, 16),
}
