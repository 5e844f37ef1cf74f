"""The codecs of the KV cache: names, what each stores, and the bytes of a token."""

from dataclasses import dataclass
from typing import Literal

# dimensions that share one scale, and the bytes of the scale
GROUP = 64
SCALE_BYTES = 2

Form = Literal["bf16", "int8", "e8"]
BITS: dict[Form, int] = {"bf16": 16, "int8": 8, "e8": 4}
# dimensions per stored element: one bf16 number, or one 32-bit word of codes
FOLDS: dict[Form, int] = {"bf16": 1, "int8": 4, "e8": 8}


@dataclass(frozen=True, slots=True)
class KVCodec:
    """How keys and values are stored.

    is_rotated  keys (after norm and RoPE), values and queries go through a 64-point Walsh-Hadamard transform,
                the attention output through the same once more
    """

    name: str
    keys: Form
    values: Form
    is_rotated: bool

    @property
    def is_coded(self) -> bool:
        """Stored as words and scales (CodedKV) rather than as numbers (PagedKV)."""
        return self.keys != "bf16"

    @property
    def folds(self) -> tuple[int, int]:
        return FOLDS[self.keys], FOLDS[self.values]

    def bytes_per_token(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one token in one layer, keys and values together."""
        bits = BITS[self.keys] + BITS[self.values]
        scales = 2 * SCALE_BYTES * (head_dim // GROUP) if self.is_coded else 0
        return kv_heads * (bits * head_dim // 8 + scales)


CODECS = {
    codec.name: codec
    for codec in (
        KVCodec("bf16", "bf16", "bf16", is_rotated=False),
        KVCodec("int8-g64", "int8", "int8", is_rotated=False),
        KVCodec("rk8v4", "int8", "e8", is_rotated=True),
        KVCodec("rk4v4-e8", "e8", "e8", is_rotated=True),
    )
}
