"""Token ids to events of an answer: decode, split off reasoning, parse tool calls, match stop strings.

Pure objects, fed one token at a time, so the events of any cut of the same tokens join to the same answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine import FinishReason
from server.detokenizer import Detokenizer
from server.reasoning import Reasoning, ReasoningSplitter
from server.stop import StopMatcher
from server.tool_calls import CallArguments, CallEnd, CallEvent, Content, ToolCallParser
from server.tool_schema import ToolSchemas

Event = Reasoning | CallEvent


@dataclass(frozen=True, slots=True)
class TextRules:
    """How raw output is read.

    starts_in_thought   the prompt ends with an open `<think>`
    splits_reasoning    False: `<think>` is text like any other
    tools               declared tools; None makes every output text
    stops               stop strings, matched in content only
    is_parallel         False ends the answer after its first call
    calls_end_thought   False: only `</think>` does
    """

    token_bytes: Callable[[int], bytes]
    starts_in_thought: bool = False
    splits_reasoning: bool = True
    tools: ToolSchemas | None = None
    stops: Sequence[str] = ()
    is_parallel: bool = True
    calls_end_thought: bool = True


class TextPipeline:
    """One choice. `is_stopped` says that the answer is complete, whatever the engine may still generate."""

    def __init__(self, rules: TextRules) -> None:
        self._detokenizer = Detokenizer(rules.token_bytes)
        self._reasoning = (
            ReasoningSplitter(
                starts_open=rules.starts_in_thought, tools=rules.tools if rules.calls_end_thought else None
            )
            if rules.splits_reasoning
            else None
        )
        self._calls = ToolCallParser(rules.tools) if rules.tools else None
        self._stop = StopMatcher(rules.stops)
        self._has_stops = bool(rules.stops)
        self._is_parallel = rules.is_parallel
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.is_stopped = False

    @property
    def stop_string(self) -> str | None:
        return self._stop.hit

    def push(self, token_ids: Sequence[int]) -> list[Event]:
        """Events that the tokens make certain. Tokens after the end of the answer count for nothing."""
        events: list[Event] = []
        for token_id in token_ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            self.num_reasoning_tokens += self._reasoning is not None and self._reasoning.is_reasoning
            if text := self._detokenizer.push(token_id):
                self._read(text, events)
        return events

    def finish(self, reason: FinishReason) -> list[Event]:
        """Everything held back, through the same stages."""
        events: list[Event] = []
        if self.is_stopped:
            return events
        self._read(self._detokenizer.flush(), events)
        if self._reasoning is not None:
            self._take(*self._reasoning.flush(), events)
        if self._calls is not None:
            self._match(self._calls.flush(is_cut=reason != "stop"), events)
        if not self.is_stopped and (rest := self._stop.flush()):
            events.append(Content(rest))
        return events

    def finish_reason(self, reason: FinishReason) -> str:
        """OpenAI's word. An answer that was cut is never offered as a call to execute."""
        if not self.is_stopped and reason != "stop":
            return "length"
        return "tool_calls" if self._calls is not None and self._calls.num_calls else "stop"

    def _read(self, text: str, events: list[Event]) -> None:
        if self._reasoning is None:
            self._take("", text, events)
        else:
            self._take(*self._reasoning.push(text), events)

    def _take(self, reasoning: str, answer: str, events: list[Event]) -> None:
        if reasoning:
            events.append(Reasoning(reasoning))
        if answer:
            self._match([Content(answer)] if self._calls is None else self._calls.push(answer), events)

    def _match(self, parsed: list[CallEvent], events: list[Event]) -> None:
        for event in parsed:
            if self.is_stopped:
                return
            if isinstance(event, Content):
                self._match_content(event, events)
            else:
                self._release(events)
                events.append(event)
                self.is_stopped = isinstance(event, CallEnd) and not self._is_parallel

    def _match_content(self, content: Content, events: list[Event]) -> None:
        if not self._has_stops:
            events.append(content)
            return
        if passed := self._stop.push(content.text):
            events.append(Content(passed))
        self.is_stopped = self._stop.hit is not None

    def _release(self, events: list[Event]) -> None:
        """A call ends the text before it: no stop string reaches across."""
        if held := self._stop.flush():
            events.append(Content(held))


def join(events: Sequence[Event]) -> list[Event]:
    """Neighbours of one kind made one: what a single message needs to say."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content | Reasoning) and type(last) is type(event):
            joined[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            joined[-1] = event._replace(text=last.text + event.text)
        else:
            joined.append(event)
    return joined
