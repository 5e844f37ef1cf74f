"""Counts of output tokens on the device."""

import pytest
import torch

from engine.ops import penalise as op
from engine.ops.sample_table import SamplingTable
from tests.ops.kernels import both

IMPLEMENTATIONS = pytest.mark.parametrize("observe", both(op.observe_reference, op.observe_triton))


def tables(device):
    """Slots 0 and 2 have penalties."""
    table = SamplingTable.neutral(3, device)
    table.write(0, frequency_penalty=0.5)
    table.write(2, repetition_penalty=1.2)
    return table, op.TokenCounts.zeros(3, 8, device)


def integers(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


@IMPLEMENTATIONS
def test_the_first_rows_of_each_request_count(observe, device):
    table, tokens = tables(device)
    token_ids = integers([5, 5, 1, 7, 7, 7, 3, 2, 4], device, torch.int64)
    observe(tokens, table, token_ids, integers([2, 1, 0], device), integers([2, 3, 1], device))
    observe(tokens, table, token_ids, integers([2, -1, 0], device), integers([3, 3, 0], device))
    expected = [[0, 0, 0, 1, 0, 0, 0, 0], [0] * 8, [0, 1, 0, 0, 0, 4, 0, 0]]
    assert tokens.counts.tolist() == expected, "a slot without penalties counts nothing"


def test_a_slot_forgets_its_last_request(device):
    _, tokens = tables(device)
    tokens.counts[1] = 3
    tokens.in_prompt[1, 2] = True
    tokens.begin(1, [4, 4, 0])
    assert tokens.counts[1].tolist() == [0] * 8
    assert tokens.in_prompt[1].nonzero()[:, 0].tolist() == [0, 4]
