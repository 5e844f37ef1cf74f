"""Memory of one Gated DeltaNet layer for all slots, and what its weights are beside the two products."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeltaState:
    """The committed state of each slot, and the rows after it that may still be taken back.

    state          [slots, value_heads, value_dim, key_dim]  fp32, committed
    inputs         [slots, width - 1 + MAX_PENDING_ROWS, channels]  of the convolution: the last committed ones, oldest
                   first, then those of the pending rows
    pending_key    [slots, MAX_PENDING_ROWS, key_heads, key_dim]
    pending_u      [slots, MAX_PENDING_ROWS, value_heads, value_dim]
    pending_alpha  [slots, MAX_PENDING_ROWS, value_heads]
    """

    state: torch.Tensor
    inputs: torch.Tensor
    pending_key: torch.Tensor
    pending_u: torch.Tensor
    pending_alpha: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
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
