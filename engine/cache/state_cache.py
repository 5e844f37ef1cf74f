"""Gated DeltaNet state of all requests, in slots, and snapshots of it."""

import torch

from engine.batch import MAX_PENDING_ROWS
from engine.cache.kv_cache import KVCache
from engine.models.config import CONV_WIDTH, GDN_HEAD_DIM, ModelConfig
from engine.ops.delta_state import DeltaState, KeptStates
from engine.ops.gated_delta_copy import gated_delta_copy

NUM_TAPS = CONV_WIDTH - 1


class StateCache:
    """One slot per request: committed state, and the rows of the last pass that may be taken back.

    layers  the Gated DeltaNet layers in order
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, device: torch.device, snapshots: "StateSnapshots | None" = None
    ) -> None:
        """snapshots  what passes over prompts may leave states in on their way"""
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        pending = (num_slots, MAX_PENDING_ROWS)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(config.num_gdn_layers, *shape, device=device)

        self.num_slots = num_slots
        self._storage = DeltaState(
            state=zeros(num_slots, value_heads, GDN_HEAD_DIM, GDN_HEAD_DIM),
            inputs=zeros(num_slots, NUM_TAPS + MAX_PENDING_ROWS, config.gdn_channels),
            pending_key=zeros(*pending, key_heads, GDN_HEAD_DIM),
            pending_u=zeros(*pending, value_heads, GDN_HEAD_DIM),
            pending_alpha=zeros(*pending, value_heads),
        )
        own = zip(*self._storage.tensors(), strict=True)
        kept = snapshots.layers if snapshots else [None] * config.num_gdn_layers
        self.layers = [DeltaState(*tensors, kept=copies) for tensors, copies in zip(own, kept, strict=True)]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._storage.tensors())

    def reset(self, slot: int) -> None:
        """The slot is as new: a request that begins there sees nothing of the one before."""
        for tensor in self._storage.tensors():
            tensor[:, slot].zero_()

    @property
    def device(self) -> torch.device:
        return self._storage.state.device

    @property
    def storage(self) -> DeltaState:
        """All layers in one, [layers, slots, ...]."""
        return self._storage

    def committed(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one slot in all layers: state, and the convolution's last inputs.  [layers, ...], not copies"""
        return self._storage.state[:, slot], self._storage.inputs[:, slot, :NUM_TAPS]


class StateSnapshots:
    """Committed states that stand for reuse, each with the target's hidden state of the same token.

    The hidden state is there for MTP, whose row of a token needs the token after it: the row of a snapshot's last
    token belongs to whatever goes on from there.
    """

    def __init__(
        self, config: ModelConfig, count: int, device: torch.device, dtype: torch.dtype, window_bytes: int = 0
    ) -> None:
        """window_bytes  of what MTP sees, where that is not in the blocks that the KV cache shares"""
        layers, channels = config.num_gdn_layers, config.gdn_channels
        heads = (config.linear_num_value_heads, GDN_HEAD_DIM, GDN_HEAD_DIM)
        self._state = torch.zeros(count, layers, *heads, device=device)
        self._taps = torch.zeros(count, layers, NUM_TAPS, channels, device=device)
        self._hidden = torch.zeros(count, config.hidden_size, device=device, dtype=dtype)
        self._windows = torch.zeros(count, window_bytes, device=device, dtype=torch.uint8)
        self.count = count

    @property
    def layers(self) -> list[KeptStates]:
        return [KeptStates(*of) for of in zip(self._state.unbind(1), self._taps.unbind(1), strict=True)]

    @property
    def num_bytes(self) -> int:
        return self._state.nbytes + self._taps.nbytes + self._hidden.nbytes + self._windows.nbytes

    def save(self, index: int, states: StateCache, slot: int, hidden: torch.Tensor) -> None:
        """hidden  [hidden]"""
        self._state[index], self._taps[index] = states.committed(slot)
        self.save_hidden(index, hidden)

    def save_hidden(self, index: int, hidden: torch.Tensor) -> None:
        """[hidden], of a state that a pass has left there"""
        self._hidden[index] = hidden

    def save_pending(
        self,
        indices: torch.Tensor,
        states: StateCache,
        slots: torch.Tensor,
        counts: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """What would be committed if so many pending rows were. Nothing is, and nothing is waited for.

        indices  [n] int64, all different
        slots    [n] int64
        counts   [n] int32  rows; of -1 no state is written
        hidden   [n, hidden]  of the last of those rows
        """
        gated_delta_copy(states.storage, slots, counts, self._state, self._taps, indices)
        self._hidden.index_copy_(0, indices, hidden.to(self._hidden.dtype))

    def restore(self, index: int, states: StateCache, slot: int) -> None:
        state, taps = states.committed(slot)
        state.copy_(self._state[index])
        taps.copy_(self._taps[index])

    @property
    def device(self) -> torch.device:
        return self._state.device

    def parts(self, index: int) -> tuple[torch.Tensor, ...]:
        """All tensors of one snapshot, not copies."""
        return self._state[index], self._taps[index], self._hidden[index], self._windows[index]

    def save_window(self, index: int, kv: KVCache, slot: int) -> None:
        """What MTP sees of the slot's request, if that is a window; once its rows up to the snapshot's are written."""
        if kv.window is not None:
            self._windows[index] = kv.pack_window(slot)

    def restore_window(self, index: int, kv: KVCache, slot: int) -> None:
        if kv.window is not None:
            kv.unpack_window(slot, self._windows[index])

    def hidden(self, index: int) -> torch.Tensor:
        """[hidden]"""
        return self._hidden[index]
