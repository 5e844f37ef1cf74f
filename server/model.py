"""What is served once the engine is ready: a name, its text files, and the ways from text to a request."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from engine import EngineInfo
from server.answers import ModelCard
from server.auth import Caller
from server.checkpoint import TextFiles
from server.errors import BadRequestError, NotFoundError
from server.prompt import PromptBuilder
from server.reasoning import CLOSE
from server.tokens import TextEncoder

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """max_model_len  prompt and output together; default_max_tokens  of a request that names none;
    thought_end  the tokens with which a thought is closed when its budget is spent"""

    name: str
    files: TextFiles
    info: EngineInfo
    encoder: TextEncoder
    prompts: PromptBuilder
    worker: Executor
    default_max_tokens: int
    created: int
    thought_end: tuple[int, ...] = ()

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len

    async def in_worker(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Runs blocking text work beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.worker, call, *arguments)

    def card(self) -> ModelCard:
        """The model as `/v1/models` shows it, its limits under every name that clients look for."""
        limit = self.max_model_len
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "longlane",
            "root": self.name,
            "parent": None,
            "max_model_len": limit,
            "context_length": limit,
            "context_window": limit,
            "default_max_tokens": self.default_max_tokens,
            "max_num_requests": self.info.max_num_requests,
            "device": self.info.device,
        }

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise NotFoundError(
                f"The model {name!r} does not exist here; this server serves {self.name!r}.",
                param="model",
                code="model_not_found",
            )


def served_model(
    name: str, files: TextFiles, info: EngineInfo, worker: Executor, default_max_tokens: int
) -> ServedModel:
    encoder = TextEncoder(files.vocabulary)
    return ServedModel(
        name=name,
        files=files,
        info=info,
        encoder=encoder,
        prompts=PromptBuilder(files, encoder, info.max_model_len),
        worker=worker,
        default_max_tokens=min(default_max_tokens, info.max_model_len - 1),
        created=int(time.time()),
        thought_end=tuple(encoder.encode_text(f"\n{CLOSE}", info.max_model_len, allows_control=True)),
    )


def check_model(name: str | None, model: ServedModel, caller: Caller) -> None:
    """raises BadRequestError, NotFoundError, PermissionDeniedError"""
    if name is None:
        raise BadRequestError(f"model is missing; this server serves {model.name!r}.", param="model")
    model.check_name(name)
    caller.check_model(name)
