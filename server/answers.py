"""What the APIs answer, as types: the code that writes an answer names them, and `/openapi.json` is made of them.

What a client sends stands in `protocol`, `messages_protocol` and `responses_protocol`.
"""

from typing import Any, Literal, NotRequired, TypedDict


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class MessagesErrorDetail(TypedDict):
    type: str
    message: str


class MessagesErrorBody(TypedDict):
    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    content: list[TokenLogprob]


class CalledFunction(TypedDict):
    name: str
    arguments: str


class CalledCustom(TypedDict):
    name: str
    input: str


class Call(TypedDict):
    """Has the object of its type."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[CalledFunction]
    custom: NotRequired[CalledCustom]


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class MessagesUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBlock(TypedDict):
    """A block of type text, thinking or tool_use, with the fields of its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class AnsweredMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(TypedDict):
    input_tokens: int


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: str | None
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(TypedDict):
    effort: str | None
    summary: str | None


class ResponseText(TypedDict):
    format: dict[str, Any]


class ItemContent(TypedDict):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


class OutputItem(TypedDict):
    """An item of type message, reasoning, function_call or custom_tool_call, with the fields of its type."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[ItemContent]]
    summary: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    store: bool
    temperature: float | None
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class GeneratedText(TypedDict):
    """tok_s counts from the first token on and is null where there is no second one."""

    id: str
    model: str
    text: str
    reasoning: str
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tok_s: float | None
    ttft_ms: float
    latency_ms: float


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class SpelledText(TypedDict):
    prompt: str


class ModelCard(TypedDict):
    """max_model_len, context_length and context_window are the same limit of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    context_length: int
    context_window: int
    default_max_tokens: int
    max_num_requests: int
    device: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Liveness(TypedDict):
    status: Literal["alive"]


class Readiness(TypedDict):
    status: Literal["ready", "loading", "restarting", "closed"]
    model: str
    running: int
    waiting: int
