"""How the request of each slot chooses its tokens, as one table on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.sample_noise import seed_key

# logits divided by less leave the range of fp32, and then id 0 would win every time
MIN_TEMPERATURE = 1e-5
# words of a slot, where each stands
TEMPERATURE = tl.constexpr(0)
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
LOG_MIN_P = tl.constexpr(3)
PRESENCE = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
REPETITION = tl.constexpr(6)
IS_PENALISED = tl.constexpr(7)
SEED_KEY = tl.constexpr(8)
MIN_TOKENS = tl.constexpr(10)
NUM_PROMPT_TOKENS = tl.constexpr(11)
IS_TRUNCATED = tl.constexpr(12)
MIN_P = tl.constexpr(13)
STOP_IDS = tl.constexpr(16)
MAX_STOP_IDS = tl.constexpr(64)
BIAS_IDS = tl.constexpr(80)
BIASES = tl.constexpr(1104)
MAX_BIASES = tl.constexpr(1024)
WIDTH = tl.constexpr(2128)
# behind the ids of a list, which are sorted; larger than every id
NO_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """words  [slots, 2128] int32: numbers and flags of a slot, its stop ids, its biased ids and their biases"""

    words: torch.Tensor

    @classmethod
    def neutral(cls, num_slots: int, device: torch.device | str) -> "SamplingTable":
        """Greedy, and nothing else, in every slot."""
        return cls(_slot_words().repeat(num_slots, 1).to(device))

    def write(
        self,
        slot: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        min_tokens: int = 0,
        num_prompt_tokens: int = 0,
        logit_bias: Mapping[int, float] | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """What the slot's next request asks for, in one copy.

        raises  ValueError for more than 64 stop ids or 1024 biases
        """
        words = _slot_words()
        numbers = words.view(torch.float32)
        is_greedy = temperature < MIN_TEMPERATURE
        numbers[TEMPERATURE.value] = 0.0 if is_greedy else temperature
        numbers[TOP_P.value] = top_p
        numbers[MIN_P.value] = min_p
        # not on the device, whose logarithm rounds otherwise
        numbers[LOG_MIN_P.value] = numbers[MIN_P.value].log()
        numbers[PRESENCE.value], numbers[FREQUENCY.value] = presence_penalty, frequency_penalty
        numbers[REPETITION.value] = repetition_penalty
        words[TOP_K.value] = min(top_k, NO_ID)
        words[IS_PENALISED.value] = bool(presence_penalty or frequency_penalty or repetition_penalty != 1)
        words[IS_TRUNCATED.value] = not is_greedy and (top_k > 0 or top_p < 1 or min_p > 0)
        words.view(torch.int64)[SEED_KEY.value // 2] = seed_key(seed)
        words[MIN_TOKENS.value], words[NUM_PROMPT_TOKENS.value] = min_tokens, num_prompt_tokens
        _write_ids(words, STOP_IDS.value, sorted(stop_token_ids), MAX_STOP_IDS.value)
        biases = sorted((logit_bias or {}).items())
        _write_ids(words, BIAS_IDS.value, [token_id for token_id, _ in biases], MAX_BIASES.value)
        numbers[BIASES.value : BIASES.value + len(biases)] = torch.tensor([bias for _, bias in biases])
        # pinned, so that the host does not wait for what runs on the device
        self.words[slot].copy_(words.pin_memory() if self.words.is_cuda else words, non_blocking=True)

    @property
    def numbers(self) -> torch.Tensor:
        """[slots, 2128] fp32, the same memory"""
        return self.words.view(torch.float32)

    def __len__(self) -> int:
        return len(self.words)


def _slot_words() -> torch.Tensor:
    words = torch.zeros(WIDTH.value, dtype=torch.int32)
    words.view(torch.float32)[[TOP_P.value, REPETITION.value]] = 1.0
    words.view(torch.float32)[LOG_MIN_P.value] = -torch.inf
    words[STOP_IDS.value : BIASES.value] = NO_ID
    return words


def _write_ids(words: torch.Tensor, start: int, token_ids: Sequence[int], most: int) -> None:
    if len(token_ids) > most:
        raise ValueError(f"{len(token_ids)} ids; a slot holds at most {most}")
    words[start : start + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)


@triton.jit
def number(slot_ptr, PLACE: tl.constexpr):
    """A word that stands for an fp32 number."""
    return tl.load(slot_ptr + PLACE).to(tl.float32, bitcast=True)


@triton.jit
def ids_between(ids_ptr, first, end, MOST: tl.constexpr):
    """Which of a sorted list of ids lie in first : end, as first and end of their places."""
    listed = tl.load(ids_ptr + tl.arange(0, MOST))
    return tl.sum((listed < first).to(tl.int32)), tl.sum((listed < end).to(tl.int32))
