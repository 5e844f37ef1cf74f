"""Memory of one Gated DeltaNet layer for all slots."""

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
