"""Multi-token prediction: a proposal for the token after next."""

from dataclasses import dataclass

import torch

from engine.layers.decoder_layer import DecoderLayer
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rows import Rows
from engine.ops.coded_kv import CodedKV
from engine.ops.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class Mtp:
    """norm(layer(fc(embedding_norm(e) | hidden_norm(h)))).  fc [hidden, 2 * hidden]"""

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    fc: Linear
    layer: DecoderLayer
    norm: RMSNorm

    def __call__(
        self, embedded: torch.Tensor, hidden: torch.Tensor, rows: Rows, cache: PagedKV | CodedKV
    ) -> torch.Tensor:
        """embedded  [rows, hidden]  of the token after the one that gave `hidden`"""
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1)
        return self.norm(self.layer(self.fc(joined, is_prompt=rows.commits), rows, cache))
