"""Conversations behind `previous_response_id`, in memory and bounded."""

from collections import OrderedDict
from collections.abc import Sequence

from server.errors import NotFoundError
from server.protocol import ChatMessage

MAX_RESPONSES = 1_024
MAX_CHARS = 64 * 1024 * 1024


class ResponseStore:
    """The oldest are forgotten first. A tenant sees its own only."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._max_responses = max_responses
        self._max_chars = max_chars
        self._num_chars = 0
        self._kept: OrderedDict[tuple[str, str], tuple[int, Sequence[ChatMessage]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tenant: str, response_id: str, messages: Sequence[ChatMessage]) -> None:
        size = sum(_size(message) for message in messages)
        self._kept[tenant, response_id] = (size, messages)
        self._num_chars += size
        while len(self._kept) > self._max_responses or (self._num_chars > self._max_chars and self._kept):
            _, (forgotten, _) = self._kept.popitem(last=False)
            self._num_chars -= forgotten

    def get(self, tenant: str, response_id: str) -> Sequence[ChatMessage]:
        """raises NotFoundError"""
        found = self._kept.get((tenant, response_id))
        if found is None:
            raise NotFoundError(
                f"previous_response_id: {response_id!r} is not kept here; only the last responses with store true are. "
                "Send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found[1]


def _size(message: ChatMessage) -> int:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
    calls = sum(len(str(call.function.arguments)) for call in message.tool_calls or ())
    return len(text) + len(message.reasoning_content or "") + calls
