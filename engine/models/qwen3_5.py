"""The decoder of the family, dense or MoE, with its MTP layer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from config.engine import BLOCK_SIZE
from engine.batch import ForwardBatch
from engine.layers.decoder_layer import DecoderLayer
from engine.layers.embedding import Embedding, Head
from engine.layers.mtp import Mtp
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rope, plain_rope, yarn_rope
from engine.layers.rows import Rows
from engine.models.config import ROTATED_DIMS, YARN_FACTOR, ModelConfig
from engine.ops.coded_kv import CodedKV
from engine.ops.delta_state import DeltaState, Keep
from engine.ops.paged_kv import PagedKV
from engine.ops.window_rows import window_rows


class KVLayers(Protocol):
    """One entry per full-attention layer of the decoder, then MTP's. Each is asked for when its layer is launched."""

    @property
    def layers(self) -> Sequence[PagedKV | CodedKV]: ...


class MtpRing(Protocol):
    """ring  blocks of a slot that take a context's blocks in turn, but for its first (ops/window_rows)"""

    @property
    def ring(self) -> int: ...


class AllKVLayers(KVLayers, Protocol):
    """MTP's too. window  of its layer, None where that is paged like the others"""

    window: MtpRing | None


class StateLayers(Protocol):
    """One entry per Gated DeltaNet layer."""

    layers: Sequence[DeltaState]


class Qwen3_5:
    """Rows of tokens in, hidden states and logits out. Holds weights only; what requests leave is in kv and states."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: Head,
        rope: Rope,
        mtp: Mtp | None,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rope = rope
        self._mtp = mtp

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: KVLayers, states: StateLayers) -> torch.Tensor:
        """Hidden states after the final norm.

        return  [rows, hidden]
        writes  the rows' keys and values; of each state slot the accepted pending rows, then the new rows
                (committed or pending, as the batch says); where states are kept, those of the batch's keeps
        """
        rows = self._rows(batch)
        hidden = self._embedding(batch.token_ids)
        for layer, memory in zip(self._layers, self._memories(kv, states), strict=True):
            hidden = layer(hidden, rows, memory)
        return self._norm(hidden)

    @torch.no_grad()
    def forward_mtp(self, batch: ForwardBatch, target_hidden: torch.Tensor, kv: AllKVLayers) -> torch.Tensor:
        """MTP's hidden states: through compute_logits they propose the token after `batch.token_ids`.

        batch          token_ids are the tokens that follow the rows: x[t+1] for the hidden state of position p[t]
        target_hidden  [rows, hidden]  of forward, or of forward_mtp when a draft is fed back
        return         [rows, hidden]
        writes         the rows' keys and values in MTP's layer
        bounds         of a layer with a window, rows beyond it may not be among the batch's
        """
        if self._mtp is None:
            raise ValueError("the checkpoint has no MTP layer")
        rows = self._rows(batch) if kv.window is None else _seen_in(kv.window, self._rows(batch), batch.positions)
        return self._mtp(self._embedding(batch.token_ids), target_hidden, rows, kv.layers[-1])

    @torch.no_grad()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] fp32; -inf where no token stands behind an id."""
        return self._head(hidden)

    def _memories(self, kv: KVLayers, states: StateLayers) -> Iterator[PagedKV | CodedKV | DeltaState]:
        caches, memories = iter(kv.layers), iter(states.layers)
        return (next(caches if kind == "full_attention" else memories) for kind in self.config.layer_types)

    def _rows(self, batch: ForwardBatch) -> Rows:
        cos, sin = self._rope(batch.positions)
        return Rows(
            cos=cos,
            sin=sin,
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            slot_mapping=batch.slot_mapping,
            state_slots=batch.state_slots,
            num_accepted=batch.num_accepted,
            commits=batch.commits,
            num_rows=batch.num_rows,
            max_context=batch.max_context,
            folds=batch.folds,
            keeps=tuple(Keep(*each) for each in batch.keeps),
        )


def _seen_in(window: MtpRing, rows: Rows, positions: torch.Tensor) -> Rows:
    """The same rows over the slots' own blocks."""
    found = window_rows(
        rows.state_slots, positions, rows.query_starts, rows.context_lens, rows.slot_mapping, window.ring, rows.num_rows
    )
    return replace(
        rows,
        block_tables=found.block_tables,
        context_lens=found.context_lens,
        slot_mapping=found.slot_mapping,
        max_context=min(rows.max_context, window.ring * BLOCK_SIZE),
    )


def rope_of(config: ModelConfig, is_stretched: bool, device: torch.device) -> Rope:
    """is_stretched  YaRN, as the checkpoints document it"""
    if is_stretched:
        return yarn_rope(ROTATED_DIMS, config.rope_theta, YARN_FACTOR, config.max_position_embeddings, device)
    return plain_rope(ROTATED_DIMS, config.rope_theta, device)
