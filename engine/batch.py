"""The rows of one forward pass, as the model sees them."""

from dataclasses import dataclass

import torch

# most rows that one request brings to a pass that may still be taken back: one token and up to seven drafts
MAX_PENDING_ROWS = 8


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of several requests, each request's rows contiguous and in order of position.

    token_ids       [rows] int64
    positions       [rows] int64
    query_starts    [requests + 1] int32   request i owns rows query_starts[i] : query_starts[i + 1]
    context_lens    [requests] int32       tokens in the KV cache once this pass has written its rows
    block_tables    [requests, blocks] int32, padded with 0
    slot_mapping    [rows] int64           block_id * 64 + offset of each row's KV
    state_slots     [requests] int64       slot of each request's GDN state
    num_accepted    [requests] int32       rows of the previous pass that turned out to be part of the output;
                                           folded into the GDN state, in order, before anything else
    commits         True: the rows are certain (prompt) and advance the GDN state at once.
                    False: at most MAX_PENDING_ROWS rows per request, left pending beside the state until the next
                    pass says through num_accepted how many of them stand.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    state_slots: torch.Tensor
    num_accepted: torch.Tensor
    commits: bool
