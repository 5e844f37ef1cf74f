"""Responses that may be asked for again or gone on from, in memory and bounded."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from server.errors import NotFoundError
from server.protocol import ChatMessage

MAX_RESPONSES = 1_024
MAX_CHARS = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """messages  the conversation up to and with this response; body  the response as it was answered, in JSON"""

    messages: Sequence[ChatMessage]
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body) + sum(_size(message) for message in self.messages)


class ResponseStore:
    """The oldest are forgotten first. A tenant sees its own only."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._max_responses = max_responses
        self._max_chars = max_chars
        self._num_chars = 0
        self._kept: OrderedDict[tuple[str, str], tuple[int, KeptResponse]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tenant: str, response_id: str, kept: KeptResponse) -> None:
        size = kept.size
        self._kept[tenant, response_id] = (size, kept)
        self._num_chars += size
        while len(self._kept) > self._max_responses or (self._num_chars > self._max_chars and self._kept):
            _, (forgotten, _) = self._kept.popitem(last=False)
            self._num_chars -= forgotten

    def messages(self, tenant: str, response_id: str) -> Sequence[ChatMessage]:
        """The conversation that another response goes on from. raises NotFoundError"""
        found = self._kept.get((tenant, response_id))
        if found is None:
            raise NotFoundError(
                f"previous_response_id: {response_id!r} is not kept here; only the last responses with store true are. "
                "Send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found[1].messages

    def body(self, tenant: str, response_id: str) -> bytes:
        """raises NotFoundError"""
        return self._find(tenant, response_id)[1].body

    def delete(self, tenant: str, response_id: str) -> None:
        """raises NotFoundError"""
        self._num_chars -= self._find(tenant, response_id)[0]
        del self._kept[tenant, response_id]

    def _find(self, tenant: str, response_id: str) -> tuple[int, KeptResponse]:
        found = self._kept.get((tenant, response_id))
        if found is None:
            raise NotFoundError(
                f"Response with id {response_id!r} not found; only the last responses with store true are kept.",
                param="response_id",
            )
        return found


def _size(message: ChatMessage) -> int:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
    calls = sum(len(str(call.function.arguments)) for call in message.tool_calls or ())
    return len(text) + len(message.reasoning_content or "") + calls
