"""Grammars that outputs have to match, as masks over the vocabulary. Plain data in and out, no torch.

The library is llguidance: a new schema costs about a millisecond, and a lazy terminal with a complement says exactly
where a free text ends, so that the text itself stays free.
"""

import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer, normalizers

from engine.errors import SamplingError
from engine.request import Constraint, Request, ThoughtLimit

TOKENIZER_FILE = "tokenizer.json"

log = logging.getLogger("longlane.engine")

# numbered lines, from two before the place on
_COPY_OF_GRAMMAR = re.compile(r"\n *[0-9]+ \|")


# the engine compiles between two steps, and everybody waits: a grammar of this size takes it about a tenth of a second
MAX_GRAMMAR_CHARS = 131_072
MAX_GRAMMAR_SYMBOLS = 10_000


def check_constraint(constraint: Constraint) -> None:
    """raises  SamplingError that names the request's field and what the grammar may not contain"""
    if constraint.grammar is None:
        return
    if (length := len(constraint.grammar)) > MAX_GRAMMAR_CHARS:
        raise SamplingError(
            constraint.param, f"makes a grammar of {length} characters; at most {MAX_GRAMMAR_CHARS} are taken"
        )
    if refusal := _REFUSALS.of(constraint.grammar):
        raise SamplingError(constraint.param, f"cannot be applied: {refusal}")


def grammar_limits() -> LLParserLimits:
    """What compiles can also be followed: a row of the parser holds a few items for each symbol at most."""
    return LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        max_items_in_row=10 * MAX_GRAMMAR_SYMBOLS,
        step_max_items=100 * MAX_GRAMMAR_SYMBOLS,
    )


class Refusals:
    """Why grammars cannot be compiled, of the latest ones: a request is checked before its prompt is tokenised and
    again when it is submitted, for each of its choices."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def of(self, grammar: str) -> str:
        """Empty when it can be compiled."""
        digest = hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        refusal = self._known.get(digest)
        if refusal is None:
            refusal = self._known[digest] = _refusal(grammar)
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return refusal


_REFUSALS = Refusals(1024)


def _refusal(grammar: str) -> str:
    lark = LLMatcher.grammar_from_lark(grammar)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(lark, limits=grammar_limits())
    return _first_lines(messages[0]) if is_error else ""


def _first_lines(message: str) -> str:
    """The message without its place in, and its copy of, the grammar, which the client did not write."""
    text = _COPY_OF_GRAMMAR.split(message, maxsplit=1)[0]
    return text.partition("failed to compile JSON schema: ")[2] or text


class ByteVocabulary:
    """What every token id spells, in the form in which llguidance asks for it.

    tokens             bytes by id; empty for ids that spell nothing
    special_token_ids  control tokens, which are never text
    """

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        # an id of its own, since the ids that end an output differ between requests
        self.eos_token_id = vocab_size
        self.tokens = [b""] * (vocab_size + 1)
        self.special_token_ids = [vocab_size]
        # text that is forced must come out as it is
        tokenizer.normalizer = normalizers.Sequence([])
        self._tokenizer = tokenizer
        byte_of = byte_alphabet()
        for piece, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
            self.tokens[token_id] = b"".join(byte_of.get(char) or char.encode() for char in piece)
        for token_id, token in tokenizer.get_added_tokens_decoder().items():
            self.tokens[token_id] = token.content.encode()
            if token.special:
                self.special_token_ids.append(token_id)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def byte_alphabet() -> dict[str, bytes]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


def load_vocabulary(checkpoint_dir: Path, vocab_size: int) -> LLTokenizer:
    """raises  OSError, ValueError when the checkpoint has no tokenizer.json that spells its ids in bytes"""
    text = (checkpoint_dir / TOKENIZER_FILE).read_text()
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{checkpoint_dir / TOKENIZER_FILE} is not a tokenizer: {error}") from error
    num_ids = max(tokenizer.get_vocab().values()) + 1
    if num_ids > vocab_size:
        raise ValueError(f"{TOKENIZER_FILE} has {num_ids} ids, the model {vocab_size}")
    return LLTokenizer(ByteVocabulary(tokenizer, vocab_size))


@dataclass(frozen=True, slots=True)
class ThoughtPlace:
    """How far a thought has come: its tokens, those of its forced end, its last bytes, and whether it still goes on."""

    num_tokens: int = 0
    num_end_tokens: int = 0
    tail: bytes = b""
    is_open: bool = True


class Thought:
    """A limited thought: a function of the tokens so far, so that drafts need no undoing."""

    def __init__(self, limit: ThoughtLimit, spell: Callable[[list[int]], bytes]) -> None:
        self._limit = limit
        self._close = limit.end_text.encode()
        self._spell = spell

    def after(self, place: ThoughtPlace, token_ids: Sequence[int]) -> ThoughtPlace:
        for token_id in token_ids:
            if not place.is_open:
                break
            text = place.tail + self._spell([token_id])
            place = ThoughtPlace(
                num_tokens=place.num_tokens + 1,
                num_end_tokens=place.num_end_tokens + (token_id == self.forced(place)),
                tail=text[-len(self._close) :],
                is_open=self._close not in text,
            )
        return place

    def forced(self, place: ThoughtPlace) -> int | None:
        """The only token that may come next, once the limit is reached."""
        is_over = place.is_open and place.num_tokens >= self._limit.max_tokens
        return self._limit.end_token_ids[place.num_end_tokens] if is_over and self._has_more(place) else None

    def _has_more(self, place: ThoughtPlace) -> bool:
        return place.num_end_tokens < len(self._limit.end_token_ids)


class Matcher:
    """One request's place in its grammar and in its thought. Only tokens that stand advance it; drafts are looked at
    and taken back."""

    def __init__(
        self,
        matcher: LLMatcher | None,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        thought: Thought | None = None,
    ) -> None:
        self._matcher = matcher
        self._thought = thought
        self._place = ThoughtPlace()
        self._end = vocab_size
        self._stops = frozenset(stop_token_ids)
        self._masks: dict[tuple[int, ...], Mask | None] = {}
        self.has_failed = False

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes over output tokens, up to the one that ends the output."""
        kept = self._before_stop(token_ids)
        self._masks.clear()
        if self._thought is not None:
            self._place = self._thought.after(self._place, kept)
        if self._matcher is not None and self._matcher.try_consume_tokens(kept) < len(kept):
            self._fail("a token that it had allowed was refused")

    def mask(self, draft_token_ids: tuple[int, ...]) -> "Mask | None":
        """What may follow the output and these drafts; None where anything may, or where the drafts themselves may not
        be, so that whatever is chosen after them is dropped."""
        if draft_token_ids not in self._masks:
            mask = None if self._matcher is None else self._look(draft_token_ids)
            self._masks[draft_token_ids] = self._hurried(mask, draft_token_ids)
        return self._masks[draft_token_ids]

    def _hurried(self, mask: "Mask | None", draft_token_ids: tuple[int, ...]) -> "Mask | None":
        """Only the thought's end where it is due. A grammar may have to finish a character first."""
        if self._thought is None:
            return mask
        token_id = self._thought.forced(self._thought.after(self._place, draft_token_ids))
        if token_id is None or (mask is not None and not mask.allows(token_id)):
            return mask
        words = np.zeros(self._end // 32 + 1, dtype=np.int32)
        words.view(np.uint32)[token_id // 32] = np.uint32(1 << token_id % 32)
        return Mask(words, must_end=False)

    def _look(self, draft_token_ids: tuple[int, ...]) -> "Mask | None":
        kept = self._before_stop(draft_token_ids)
        if len(kept) < len(draft_token_ids) or self._matcher.validate_tokens(kept) < len(kept):
            return None
        self._matcher.consume_tokens(kept)
        mask = self._compute()
        self._matcher.rollback(len(kept))
        return mask

    def _before_stop(self, token_ids: Sequence[int]) -> list[int]:
        end = next((index for index, token_id in enumerate(token_ids) if token_id in self._stops), len(token_ids))
        return list(token_ids[:end])

    def _compute(self) -> "Mask":
        words = np.zeros(self._end // 32 + 1, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
        bits = words.view(np.uint32)
        for token_id in (self._end, *self._stops):
            bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        must_end = not bits.any()
        if must_end or self._matcher.is_accepting():
            for token_id in self._stops:
                bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        return Mask(words, must_end)

    def _fail(self, reason: str) -> None:
        if not self.has_failed:
            log.error("a constraint gave out in the middle of an output: %s", reason.partition("\n")[0])
        self.has_failed = True


class Mask:
    """words  [vocab // 32 + 1] int32: bit i % 32 of word i // 32 says whether id i may come next
    must_end  nothing but a stop id may
    """

    __slots__ = ("must_end", "words")

    def __init__(self, words: np.ndarray, must_end: bool) -> None:
        self.words = words
        self.must_end = must_end

    def allows(self, token_id: int) -> bool:
        return bool(self.words.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & 1)


class Constraints:
    """The matchers of the requests that have a constraint. The vocabulary takes seconds to read, and holds up other
    threads for a good part of them, so an engine reads it beside its other loading and waits for it before it is
    ready; without `begin_loading` it is read when the first of these requests comes."""

    def __init__(self, checkpoint_dir: Path, vocab_size: int) -> None:
        self._checkpoint_dir = checkpoint_dir
        self._vocab_size = vocab_size
        self._vocabulary: Future[LLTokenizer] | None = None
        self._matchers: dict[str, Matcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def begin_loading(self) -> "Future[LLTokenizer]":
        """Reads the vocabulary in a thread. What is wrong with it is told to the requests that need it."""
        reader = ThreadPoolExecutor(1, thread_name_prefix="vocabulary")
        self._vocabulary = reader.submit(load_vocabulary, self._checkpoint_dir, self._vocab_size)
        reader.shutdown(wait=False)
        return self._vocabulary

    def add(self, request: Request) -> None:
        """Compiles the request's grammar, if it has one. raises SamplingError"""
        constraint = request.sampling.constraint
        if constraint is None:
            return
        vocabulary = self._spellings(constraint)
        grammar = None if constraint.grammar is None else _compile(constraint, vocabulary)
        thought = Thought(constraint.thought, vocabulary.decode_bytes) if constraint.thought else None
        matcher = Matcher(grammar, self._vocab_size, request.sampling.stop_token_ids, thought)
        # computed here, where the request can still be refused; the first step finds it
        matcher.mask(())
        if matcher.has_failed:
            raise SamplingError(constraint.param, "cannot be applied: nothing can be said of its first token")
        self._matchers[request.request_id] = matcher

    def get(self, request_id: str) -> Matcher | None:
        return self._matchers.get(request_id)

    def remove(self, request_id: str) -> Matcher | None:
        """The request is gone; what it had is returned."""
        return self._matchers.pop(request_id, None)

    def _spellings(self, constraint: Constraint) -> LLTokenizer:
        try:
            return (self._vocabulary or self.begin_loading()).result()
        except (OSError, ValueError) as error:
            self._vocabulary = None
            raise SamplingError(constraint.param, f"needs the tokens' spelling: {error}") from error


def _compile(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
    """raises  SamplingError"""
    lark = LLMatcher.grammar_from_lark(constraint.grammar)
    matcher = LLMatcher(vocabulary, lark, log_level=0, limits=grammar_limits())
    if matcher.is_error():
        raise SamplingError(constraint.param, f"cannot be applied: {_first_lines(matcher.get_error())}")
    return matcher
