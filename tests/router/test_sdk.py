"""The OpenAI SDK through the gateway."""

import asyncio
import json

import openai
import pytest


def chunk(**delta):
    value = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
    }
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def answer(received, connection):
    if received.json.get("stream"):
        await connection.stream(chunk(role="assistant", content=""), chunk(content="h\u2028i"), b"data: [DONE]\n\n")
        return
    message = {"role": "assistant", "content": "hi"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    await connection.answer(
        200, {"id": "c", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
    )


@pytest.fixture
def sdk(gateway, upstream):
    running = gateway(long=upstream(answer=answer))
    with openai.OpenAI(base_url=running.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def test_whole_answer(sdk):
    assert sdk.chat.completions.create(**ASK).choices[0].message.content == "hi"


def test_stream(sdk):
    stream = sdk.chat.completions.create(**ASK, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == "h\u2028i"


def test_models(sdk):
    assert [(model.id, model.max_model_len) for model in sdk.models.list()] == [("tiny", 4096)]


def test_errors_are_the_classes_that_the_sdk_knows(sdk):
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(**ASK | {"model": "gpt"})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_broken_stream_is_an_error_not_an_end(gateway, upstream):
    async def breaks(received, connection):
        await connection.start_stream()
        await connection.chunk(chunk(content="half"))
        connection.reset()

    running = gateway(long=upstream(answer=breaks))
    with (
        openai.OpenAI(base_url=running.url + "/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.APIError, match=r"broke off|without finishing"),
    ):
        list(client.chat.completions.create(**ASK, stream=True))


def test_five_at_once(gateway, upstream):
    running = gateway(long=upstream(answer=answer))

    async def both():
        async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(5)))

    assert [one.choices[0].message.content for one in asyncio.run(both())] == ["hi"] * 5
