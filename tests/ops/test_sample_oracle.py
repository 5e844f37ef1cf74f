"""The reference of the op chooses exactly as the engine's sampler does, whatever requests ask for."""

import pytest
import torch

from engine.constraint import Mask
from engine.ops.sample import sample_reference
from engine.request import SamplingParams
from engine.sampler import Sampler, SamplingRow
from tests.ops.sample_examples import random_example


class Masks:
    """In the place of constraints: what the example allows after so many drafts of a request."""

    def __init__(self, example):
        self._words, self._flags = (part.numpy() for part in example.masks)
        self._per_request = example.rows_per_request

    def get(self, request_id):
        return MasksOf(self, int(request_id) * self._per_request) if request_id else None

    def of(self, row):
        return Mask(self._words[row], must_end=self._flags[row] == 3) if self._flags[row] else None


class MasksOf:
    def __init__(self, masks, first_row):
        self._masks, self._first_row = masks, first_row

    def mask(self, draft_token_ids):
        return self._masks.of(self._first_row + len(draft_token_ids))


def choices(example):
    """The sampler's, for the same requests."""
    vocab = example.logits.shape[1]
    sampler = Sampler(vocab, len(example.requests), torch.device("cpu"), Masks(example))
    rows = []
    for slot, fields in enumerate(example.requests):
        sampling = SamplingParams(max_tokens=64, **fields)
        sampler.begin(slot, example.prompts[slot], sampling)
        sampler.observe(slot, example.outputs[slot], sampling)
        for i in range(example.rows_per_request):
            drafts = tuple(example.drafts[slot][:i])
            place = example.position(slot) + i, len(example.outputs[slot]) + i
            rows.append(SamplingRow(sampling, fields["seed"], slot, *place, drafts, str(slot)))
    return sampler.sample(example.logits, rows)


@pytest.mark.parametrize("seed", range(30))
def test_the_same_tokens(seed):
    example = random_example(seed, vocab=700 if seed % 2 else 300)
    assert torch.equal(sample_reference(*example.on("cpu")), choices(example))
