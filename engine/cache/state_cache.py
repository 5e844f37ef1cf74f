"""Gated DeltaNet state of all requests, in slots."""

import torch

from engine.batch import MAX_PENDING_ROWS
from engine.models.config import CONV_WIDTH, GDN_HEAD_DIM, ModelConfig
from engine.ops.delta_state import DeltaState


class StateCache:
    """One slot per request: committed state, and the rows of the last pass that may be taken back.

    layers  the Gated DeltaNet layers in order
    """

    def __init__(self, config: ModelConfig, num_slots: int, device: torch.device) -> None:
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        pending = (num_slots, MAX_PENDING_ROWS)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(config.num_gdn_layers, *shape, device=device)

        self.num_slots = num_slots
        self._storage = DeltaState(
            state=zeros(num_slots, value_heads, GDN_HEAD_DIM, GDN_HEAD_DIM),
            inputs=zeros(num_slots, CONV_WIDTH - 1 + MAX_PENDING_ROWS, config.gdn_channels),
            pending_key=zeros(*pending, key_heads, GDN_HEAD_DIM),
            pending_u=zeros(*pending, value_heads, GDN_HEAD_DIM),
            pending_alpha=zeros(*pending, value_heads),
        )
        self.layers = [DeltaState(*tensors) for tensors in zip(*self._storage.tensors(), strict=True)]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._storage.tensors())

    def reset(self, slot: int) -> None:
        """The slot is as new: a request that begins there sees nothing of the one before."""
        for tensor in self._storage.tensors():
            tensor[:, slot].zero_()
