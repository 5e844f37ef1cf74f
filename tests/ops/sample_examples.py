"""Random requests at random places of their outputs, and what may be chosen for them."""

import random
from dataclasses import dataclass

import numpy as np
import torch

from engine.ops import sample as op
from engine.ops.penalise import TokenCounts
from engine.ops.sample_noise import gumbel, noise_key
from engine.ops.sample_table import IS_PENALISED, MIN_TEMPERATURE, SamplingTable
from engine.ops.sample_truncate import lowest_kept

# choices whose scores differ by less may change places, as may tokens this close to top_p: logarithms and exponentials
# round differently, and masses add up in another order
MARGIN = 2e-5


@dataclass(frozen=True)
class Example:
    """Rows of some requests: each request's i-th comes after i of its drafts.

    requests  fields of SamplingTable.write, one slot each
    outputs   ids so far
    masks     words and flags per row
    """

    requests: list[dict]
    prompts: list[list[int]]
    outputs: list[list[int]]
    drafts: list[list[int]]
    logits: torch.Tensor
    masks: tuple[torch.Tensor, torch.Tensor]

    @property
    def rows_per_request(self):
        return len(self.drafts[0]) + 1

    def position(self, slot):
        return len(self.prompts[slot]) + len(self.outputs[slot])

    def on(self, device):
        """What the op takes."""
        num_slots, vocab = len(self.requests), self.logits.shape[1]
        table, tokens = SamplingTable.neutral(num_slots, device), TokenCounts.zeros(num_slots, vocab, device)
        for slot, fields in enumerate(self.requests):
            table.write(slot, num_prompt_tokens=len(self.prompts[slot]), **fields)
            if table.words[slot, IS_PENALISED.value]:
                tokens.begin(slot, self.prompts[slot])
                counts = torch.bincount(torch.tensor(self.outputs[slot], dtype=torch.int64), minlength=vocab)
                tokens.counts[slot] = counts.to(device)
        return self.logits.to(device), table, tokens, self._rows(device)

    def _rows(self, device):
        num, slots = self.rows_per_request, range(len(self.requests))
        return op.SampleRows(
            slots=torch.tensor(slots, dtype=torch.int32, device=device).repeat_interleave(num),
            positions=torch.tensor([self.position(s) + i for s in slots for i in range(num)], device=device),
            drafts=torch.tensor(self.drafts, dtype=torch.int64, device=device),
            num_drafts=torch.arange(num, dtype=torch.int32, device=device).repeat(len(slots)),
            mask_words=self.masks[0].to(device),
            mask_flags=self.masks[1].to(device),
        )


def random_fields(rng, vocab):
    """Every switch on or off, independently."""

    def maybe(value, neutral):
        return value if rng.random() < 0.4 else neutral

    ids = rng.sample(range(vocab), 40)
    return {
        "seed": rng.randrange(-(2**63), 2**63),
        "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 2.5]),
        "top_k": maybe(rng.choice([1, 2, 5, 20, vocab // 2, vocab + 5]), 0),
        "top_p": maybe(rng.choice([0.0, 0.05, 0.5, 0.9, 0.95, 0.999]), 1.0),
        "min_p": maybe(rng.choice([0.01, 0.2, 1.0]), 0.0),
        "presence_penalty": maybe(rng.uniform(-2, 2), 0.0),
        "frequency_penalty": maybe(rng.uniform(-2, 2), 0.0),
        "repetition_penalty": maybe(rng.uniform(0.5, 2), 1.0),
        "logit_bias": maybe({i: rng.uniform(-100, 10) for i in ids[: rng.randint(1, 30)]}, {}),
        "stop_token_ids": tuple(ids[30 : 30 + rng.randint(1, 5)]),
        "min_tokens": maybe(4, 0),
    }


def random_example(seed, vocab, num_requests=3, num_drafts=2):
    rng = random.Random(seed)
    num_rows = num_requests * (num_drafts + 1)

    def lists(most, least=0):
        # few ids, so that they repeat
        return [[rng.randrange(vocab // 8) for _ in range(rng.randint(least, most))] for _ in range(num_requests)]

    logits = np.random.default_rng(seed).normal(0, rng.choice([0.1, 1, 4]), (num_rows, vocab))
    logits = torch.from_numpy(logits).float()
    if rng.random() < 0.3:
        logits = logits.bfloat16().float()
    logits[:, -3:] = -torch.inf
    words = np.random.default_rng(seed + 1).integers(-(2**31), 2**31, (num_rows, vocab // 32 + 1))
    flags = [rng.choice([0, 0, 1, 3]) for _ in range(num_rows)]
    return Example(
        requests=[random_fields(rng, vocab) for _ in range(num_requests)],
        prompts=lists(9, least=1),
        outputs=lists(6, least=1),
        drafts=lists(num_drafts, least=num_drafts),
        logits=logits,
        masks=(torch.from_numpy(words.astype(np.int32)), torch.tensor(flags, dtype=torch.int32)),
    )


def assert_choices(example, chosen):
    """The reference's, unless a rounding could have made another."""
    inputs = example.on("cpu")
    expected, chosen = op.sample_reference(*inputs), chosen.cpu()
    for row in (expected != chosen).nonzero()[:, 0].tolist():
        fields = example.requests[row // example.rows_per_request]
        assert is_close(inputs, row, fields, expected[row], chosen[row]), (row, fields, expected[row], chosen[row])


def is_close(inputs, row, fields, expected, chosen):
    if fields["temperature"] < MIN_TEMPERATURE:
        return False
    scaled = scaled_logits(inputs, row, fields)
    noise = gumbel(
        torch.tensor(noise_key(fields["seed"], int(inputs[3].positions[row])), dtype=torch.int32),
        torch.tensor([expected, chosen], dtype=torch.int32),
    )
    pair = scaled[torch.stack([expected, chosen])]
    least = lowest_kept(
        scaled[None].float(), [fields["top_k"]], torch.tensor([[fields["top_p"]]]), torch.tensor([[fields["min_p"]]])
    )
    both_kept = (pair >= least[0]).all()
    score = pair + noise.double()
    return bool(both_kept and score[0] - score[1] < MARGIN) or nucleus_margin(scaled, fields) < MARGIN


def scaled_logits(inputs, row, fields):
    logits, table, tokens, rows = inputs
    slots = rows.slots.long()
    adjusted = op.adjusted(logits, table.words[slots], table.numbers[slots], tokens, rows)[row]
    return (adjusted / torch.tensor(fields["temperature"])).double()


def nucleus_margin(scaled, fields):
    """How close the mass before any token comes to top_p."""
    order = scaled.sort(descending=True).values
    if fields["top_k"]:
        order = order[: fields["top_k"]]
    p = order.softmax(-1)
    return (p.cumsum(-1) - p - fields["top_p"]).abs().min().item() if fields["top_p"] < 1 else 1.0
