"""What the layers of one pass share."""

from dataclasses import dataclass

import torch

from engine.ops.delta_state import Keep


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of several requests: where their angles, keys, values and states are.

    cos, sin      [rows, rotated pairs] fp32
    query_starts  [requests + 1] int32
    context_lens  [requests] int32
    block_tables  [requests, blocks] int32
    slot_mapping  [rows] int64
    state_slots   [requests] int64
    num_accepted  [requests] int32
    commits       whether the rows advance the Gated DeltaNet state at once
    num_rows      rows of each request, known on the host
    max_context   no context is longer
    folds         whether num_accepted may be other than zero
    keeps         Gated DeltaNet states that rows leave on their way, where they commit
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    state_slots: torch.Tensor
    num_accepted: torch.Tensor
    commits: bool
    num_rows: tuple[int, ...]
    max_context: int
    folds: bool
    keeps: tuple[Keep, ...] = ()
