"""Memory of one Gated DeltaNet layer for all slots."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeltaState:
    """The committed state of each slot, and the rows after it that may still be taken back.

    state          [slots, value_heads, value_dim, key_dim]  fp32
    taps           [slots, width - 1, channels]              last inputs of the convolution, oldest first
    pending_key    [slots, MAX_PENDING_ROWS, key_heads, key_dim]
    pending_u      [slots, MAX_PENDING_ROWS, value_heads, value_dim]
    pending_alpha  [slots, MAX_PENDING_ROWS, value_heads]
    pending_input  [slots, MAX_PENDING_ROWS, channels]       inputs of the convolution
    """

    state: torch.Tensor
    taps: torch.Tensor
    pending_key: torch.Tensor
    pending_u: torch.Tensor
    pending_alpha: torch.Tensor
    pending_input: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (
            self.state,
            self.taps,
            self.pending_key,
            self.pending_u,
            self.pending_alpha,
            self.pending_input,
        )
