"""POST /tokenize and /detokenize."""

from starlette.requests import Request
from starlette.responses import Response

from server.answers import Tokens
from server.auth import Caller
from server.continuation import prompt_ending
from server.errors import BadRequestError
from server.http import json_response, read_json
from server.model import ServedModel, check_model
from server.prompt import MESSAGES
from server.protocol import DetokenizeRequest, TokenizeRequest
from server.serving import Serving
from server.tool_schema import declared_tools


class Tokenize:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, request: Request) -> Response:
        """Ids of a bare prompt, or of messages as the chat template renders them."""
        body, _ = await read_json(request, TokenizeRequest, self._serving.config)
        model = self._model(request, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequestError("Send either prompt or messages.", param="prompt")
        token_ids = await model.in_worker(_token_ids, body, model)
        answer: Tokens = {
            "count": len(token_ids),
            "max_model_len": model.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = await model.in_worker(_spell_each, token_ids, model)
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        body, _ = await read_json(request, DetokenizeRequest, self._serving.config)
        model = self._model(request, body.model)
        return json_response({"prompt": await model.in_worker(_spell_checked, body.tokens, model)})

    def _model(self, request: Request, name: str | None) -> ServedModel:
        """These paths take a model name, but do not ask for one."""
        model = self._serving.model
        caller: Caller = request.state.caller
        check_model(model.name if name is None else name, model, caller)
        return model


def _token_ids(body: TokenizeRequest, model: ServedModel) -> tuple[int, ...]:
    if body.messages is None:
        return model.prompts.text(body.prompt or "").token_ids
    options = model.prompts.options(body.chat_template_kwargs, None, None)
    ending = prompt_ending(body.add_generation_prompt, body.continue_final_message)
    return model.prompts.chat(body.messages, declared_tools(body.tools), options, MESSAGES, ending).token_ids


def _spell_checked(token_ids: list[int], model: ServedModel) -> str:
    vocab_size = model.info.vocab_size
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise BadRequestError(f"tokens: {wrong} is no token id below {vocab_size}.", param="tokens")
    return _spell(token_ids, model)


def _spell(token_ids: list[int], model: ServedModel) -> str:
    return b"".join(map(model.files.vocabulary.literal_bytes, token_ids)).decode("utf-8", "replace")


def _spell_each(token_ids: tuple[int, ...], model: ServedModel) -> list[str]:
    return [_spell([token_id], model) for token_id in token_ids]
