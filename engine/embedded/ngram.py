"""Unigram and 5-gram models of token ids, as a scale for the neural model's bits per byte."""

import numpy as np

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NgramModel:
    """Witten-Bell interpolation down to a uniform distribution.

    P(w | h) = (count(h w) + kinds(h) P(w | shorter h)) / (count(h) + kinds(h)),
    where kinds(h) is the number of different tokens seen after h.
    """

    def __init__(self, token_ids: np.ndarray, order: int, vocab_size: int):
        self.order, self.vocab_size = order, vocab_size
        self.tables = [count_table(token_ids, size) for size in range(1, order + 1)]

    def bits(self, token_ids: np.ndarray) -> float:
        """-log2 P of the whole text; contexts at its start are shorter."""
        probability = np.full(len(token_ids), 1.0 / self.vocab_size)
        for size, table in enumerate(self.tables, 1):
            if len(token_ids) < size:
                break
            keys, contexts = hashes(token_ids, size)
            count = lookup(table["keys"], table["counts"], keys)
            total = lookup(table["contexts"], table["totals"], contexts)
            kinds = lookup(table["contexts"], table["kinds"], contexts)
            shorter = probability[size - 1 :]
            probability[size - 1 :] = np.where(
                total > 0, (count + kinds * shorter) / np.maximum(total + kinds, 1), shorter
            )
        return float(-np.log2(probability).sum())


def hashes(token_ids: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """64-bit hashes of every run of `size` tokens, and of the run without its last token."""
    count = len(token_ids) - size + 1
    key = np.full(count, np.uint64(size))
    context = key
    for offset in range(size):
        context = key
        key = (key + token_ids[offset : offset + count].astype(np.uint64) + np.uint64(1)) * MULTIPLIER
        key ^= key >> np.uint64(29)
    return key, context


def count_table(token_ids: np.ndarray, size: int) -> dict[str, np.ndarray]:
    keys, contexts = hashes(token_ids, size)
    unique, first, counts = np.unique(keys, return_index=True, return_counts=True)
    owners, inverse = np.unique(contexts[first], return_inverse=True)
    totals = np.bincount(inverse, weights=counts)
    return {"keys": unique, "counts": counts, "contexts": owners, "totals": totals, "kinds": np.bincount(inverse)}


def lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
