"""Everything the engine raises, as one tree.

EngineError
├── CheckpointError             the checkpoint is not one that the engine serves; names the tensor or field
├── CapacityError               the asked context does not fit the memory there is
├── RequestError                the request can never run as it is
│   ├── ContextLengthError      prompt + output pass max_model_len
│   └── SamplingError           a sampling parameter is out of range; `param` names it
└── UnavailableError            try again later; `retry_after_s` says when
    ├── QueueFullError          too many requests or prompt tokens wait
    └── EngineDiedError         loading, restarting, or died under the request
"""


class EngineError(Exception):
    """Base of the tree."""


class CheckpointError(EngineError):
    pass


class CapacityError(EngineError):
    pass


class RequestError(EngineError):
    pass


class ContextLengthError(RequestError):
    def __init__(self, max_model_len: int, num_prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"maximum context length is {max_model_len} tokens, but {num_prompt_tokens} prompt tokens "
            f"and {max_tokens} output tokens were asked for"
        )
        self.max_model_len = max_model_len
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens


class SamplingError(RequestError):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param
        self.reason = message


class UnavailableError(EngineError):
    def __init__(self, message: str, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(UnavailableError):
    pass


class EngineDiedError(UnavailableError):
    pass
