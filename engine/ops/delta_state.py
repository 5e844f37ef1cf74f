"""Memory of one Gated DeltaNet layer for all slots, what is kept of it, and its weights beside the two products."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Committed states of one layer that stand for reuse; the layers of a copy lie together.

    state  [copies, value_heads, value_dim, key_dim] fp32
    taps   [copies, width - 1, channels]  the convolution's last inputs
    """

    state: torch.Tensor
    taps: torch.Tensor


@dataclass(frozen=True, slots=True)
class Keep:
    """States that a pass over prompts keeps on its way, all after the same number of a request's rows.

    num_rows   a multiple of 64
    indices    of each request: the copy that its state is to be, -1 for none. Who has one has more rows than that
    on_device  [requests] int64, the same
    """

    num_rows: int
    indices: tuple[int, ...]
    on_device: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeltaState:
    """The committed state of each slot, and the rows after it that may still be taken back.

    state          [slots, value_heads, value_dim, key_dim]  fp32, committed
    inputs         [slots, width - 1 + MAX_PENDING_ROWS, channels]  of the convolution: the last committed ones, oldest
                   first, then those of the pending rows
    pending_key    [slots, MAX_PENDING_ROWS, key_heads, key_dim]
    pending_u      [slots, MAX_PENDING_ROWS, value_heads, value_dim]
    pending_alpha  [slots, MAX_PENDING_ROWS, value_heads]
    kept           where states of this layer are kept, if any are
    """

    state: torch.Tensor
    inputs: torch.Tensor
    pending_key: torch.Tensor
    pending_u: torch.Tensor
    pending_alpha: torch.Tensor
    kept: KeptStates | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a slot has."""
        return self.state, self.inputs, self.pending_key, self.pending_u, self.pending_alpha


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """conv            [channels, width] fp32  over query|key|value
    decay, dt_bias  [value_heads] fp32  decay is -exp(A_log)
    norm            [dim] fp32  of the gated norm
    dim             of a head's keys and of its values
    """

    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    key_heads: int
    value_heads: int
    dim: int

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """query|key|value, z, a, b of the projection's rows."""
        sizes = [len(self.conv), self.value_heads * self.dim, self.value_heads, self.value_heads]
        return projected.split(sizes, dim=-1)

    def heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """query, key and value [rows, heads, dim]"""
        sizes = [self.key_heads, self.key_heads, self.value_heads]
        return convolved.unflatten(-1, (-1, self.dim)).split(sizes, dim=1)
