"""The SDKs of OpenAI and Anthropic over the gateway and the server: helpers, tools, errors and retries."""

import concurrent.futures
import contextlib
import json

import anthropic
import openai
import pydantic
import pytest

from config import Key, Upstream
from config.keys import digest, write_keys
from engine import resolve_checkpoint
from tests.router.live import LoopThread, eventually, running_gateway
from tests.server.live import NAME, running

MAX_MODEL_LEN = 4096
LIMITED = "sk-limited"
CALL = (
    "<tool_call>\n<function=read_file>\n<parameter=path>\n notes.txt\n</parameter>\n"
    "<parameter=limit>\n20\n</parameter>\n</function>\n</tool_call>"
)
SCRIPT = [
    {"when": "say hello", "output": "They greet.\n</think>\n\nHello \u2028 日本 🐦"},
    {"when": "hello without a thought", "output": "Hello"},
    {"when": "read it", "output": f"Files first.\n</think>\n\nI look.\n\n{CALL}"},
    {"when": "read both", "output": f"</think>\n\n{CALL}\n{CALL}"},
    {"when": "quietly", "output": CALL},
    {"when": "as json", "output": 'Well.\n</think>\n\n{"name": "heron", "wings": 2}'},
    {"when": "json without a thought", "output": '{"name": "heron", "wings": 2}'},
    {"when": "fail midway", "output": "</think>\n\none two three", "finish": "error"},
    {"when": "a moment", "output": "</think>\n\nat last", "prefill_ms": 700},
    {"when": "contents", "output": "It says heron."},
]
HELLO = "Hello \u2028 日本 🐦"
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


class Bird(pydantic.BaseModel):
    name: str
    wings: int


class ReadFile(pydantic.BaseModel):
    """Reads a file."""

    path: str
    limit: int


BIRD = Bird(name="heron", wings=2)
READ = openai.pydantic_function_tool(ReadFile, name="read_file")
ANTHROPIC_READ = {"name": "read_file", "description": "Reads.", "input_schema": ReadFile.model_json_schema()}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """One request at a time, and none may wait; a key that may send one at a time is refused by the gateway."""
    directory = tmp_path_factory.mktemp("sdk")
    write_keys(
        directory / "keys.toml",
        [
            Key(name="limited", sha256=digest(LIMITED), concurrent_requests=1),
            Key(name="free", sha256=digest("sk-free")),
        ],
    )
    with contextlib.ExitStack() as stack:
        checkpoint = resolve_checkpoint("longlane-tiny")
        limits = {"max_model_len": MAX_MODEL_LEN, "max_num_requests": 1, "max_queued_requests": 0}
        live = stack.enter_context(running(checkpoint, SCRIPT, directory, **limits))
        threads = LoopThread()
        stack.callback(threads.stop)
        upstream = Upstream(name="engine", url=live.url, lane="long")
        gateway = stack.enter_context(running_gateway(threads, upstream, keys_file=directory / "keys.toml"))
        yield gateway.url
        eventually(lambda: gateway.num_open == 0 and live.engine.stats.num_running == 0)


@pytest.fixture
def sdk(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-free", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def claude(url):
    with anthropic.Anthropic(base_url=url, api_key="sk-free", max_retries=0, timeout=20) as client:
        yield client


def ask(text: str, **fields) -> dict:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **fields}


def test_stream_helper(sdk):
    with sdk.chat.completions.stream(**ask("say hello")) as stream:
        kinds = {event.type for event in stream}
        end = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert (end.choices[0].message.content, end.choices[0].finish_reason) == (HELLO, "stop")
    assert end.choices[0].message.reasoning_content == "They greet."


def test_streamed_tool_call_is_parsed(sdk):
    with sdk.chat.completions.stream(**ask("read both", tools=[READ])) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        end = stream.get_final_completion()
    assert [event.parsed_arguments for event in done] == [ReadFile(path=" notes.txt", limit=20)] * 2
    calls = end.choices[0].message.tool_calls
    assert [call.function.parsed_arguments for call in calls] == [event.parsed_arguments for event in done]
    assert len({call.id for call in calls}) == 2


def test_tool_round_trip(sdk):
    asked = ask("read it", tools=[READ])
    answer = sdk.chat.completions.parse(**asked).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"contents of {call.function.parsed_arguments.path}"}
        for call in answer.tool_calls
    ]
    messages = [*asked["messages"], answer, *results]
    last = sdk.chat.completions.create(**asked | {"messages": messages})
    assert last.choices[0].message.reasoning_content == "It says heron."


def test_parse_helper(sdk):
    parsed = sdk.chat.completions.parse(**ask("as json", response_format=Bird))
    assert parsed.choices[0].message.parsed == BIRD
    with sdk.chat.completions.stream(**ask("as json", response_format=Bird)) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == BIRD
    assert sdk.responses.parse(model=NAME, input="as json", text_format=Bird).output_parsed == BIRD
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(**ask("as json", response_format=Bird, max_tokens=12))


def test_streaming_and_raw_responses(sdk):
    asked = ask("say hello", stream=True)
    with sdk.chat.completions.with_streaming_response.create(**asked) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == HELLO
    raw = sdk.chat.completions.with_raw_response.create(**ask("say hello"))
    assert raw.request_id and raw.parse().choices[0].message.content == HELLO


def test_responses_stream_helper(sdk):
    with sdk.responses.stream(model=NAME, input="say hello") as stream:
        kinds = [event.type for event in stream]
        end = stream.get_final_response()
    assert (kinds[0], kinds[-1], end.output_text) == ("response.created", "response.completed", HELLO)
    assert end.output[0].content[0].text == "They greet."


LONG = "word " * 2 * MAX_MODEL_LEN


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 7}, openai.BadRequestError, None),
        ({"audio": {"voice": "a"}}, openai.BadRequestError, "unsupported_parameter"),
        (ask(LONG), openai.BadRequestError, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "fail midway"}]}, openai.APIError, "internal_error"),
    ],
    ids=["model", "value", "unsupported", "too long", "engine"],
)
def test_errors_are_the_classes_that_the_sdk_knows(sdk, fields, kind, code, stream):
    with pytest.raises(kind) as caught:
        answer = sdk.chat.completions.create(**ask("hi", stream=stream) | fields)
        if stream:
            list(answer)
    assert caught.value.code == code


def test_wrong_keys(url):
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="sk-wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(**ask("say hello"))
    with anthropic.Anthropic(base_url=url, api_key="sk-wrong") as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(**ask("hi", max_tokens=10))


@contextlib.contextmanager
def busy(url, key):
    """While another request, slower than a refusal, has the only place."""
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        stream = client.chat.completions.create(**ask("a moment", stream=True))
        ending = pool.submit(list, stream)
        yield
        assert ending.result(20)


@pytest.mark.parametrize(
    ("key", "kind", "status"), [(LIMITED, openai.RateLimitError, 429), ("sk-free", openai.InternalServerError, 503)]
)
def test_openai_waits_and_tries_again(url, key, kind, status):
    """As long as Retry-After says, which is when there is room again."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=20) as client:
        with busy(url, key):
            with pytest.raises(kind) as caught:
                client.with_options(max_retries=0).chat.completions.create(**ask("say hello"))
            assert caught.value.status_code == status
            answer = client.with_options(max_retries=2).chat.completions.with_raw_response.create(**ask("say hello"))
        assert answer.retries_taken == 1
        assert answer.parse().choices[0].message.content == HELLO


@pytest.mark.parametrize(
    ("key", "kind", "status"),
    [(LIMITED, anthropic.RateLimitError, 429), ("sk-free", anthropic.InternalServerError, 529)],
)
def test_anthropic_waits_and_tries_again(url, key, kind, status):
    asked = ask("hello without a thought", max_tokens=50)
    with anthropic.Anthropic(base_url=url, api_key=key, timeout=20) as client:
        with busy(url, key):
            with pytest.raises(kind) as caught:
                client.with_options(max_retries=0).messages.create(**asked)
            assert caught.value.status_code == status
            answer = client.with_options(max_retries=2).messages.with_raw_response.create(**asked)
        assert answer.retries_taken == 1
        assert answer.parse().content[0].text == "Hello"


def test_anthropic_stream_helper(claude):
    with claude.messages.stream(**ask("say hello", max_tokens=2000), **THINK) as stream:
        kinds = {event.type for event in stream}
        end = stream.get_final_message()
    assert {"thinking", "signature", "text", "content_block_stop", "message_stop"} <= kinds
    thought, text = end.content
    assert (thought.thinking, text.text, end.stop_reason) == ("They greet.", HELLO, "end_turn")
    assert thought.signature and end.usage.output_tokens > 0


def test_anthropic_tool_round_trip(claude):
    asked = ask("read it", max_tokens=2000, tools=[ANTHROPIC_READ])
    with claude.messages.stream(**asked, **THINK) as stream:
        answer = stream.get_final_message()
    assert answer.stop_reason == "tool_use"
    call = answer.content[-1]
    assert call.input == {"path": " notes.txt", "limit": 20}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "contents: a heron"}
    messages = [
        *asked["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    last = claude.messages.create(**asked | {"messages": messages})
    assert last.content[0].text == "It says heron."


def test_anthropic_tool_runner(claude):
    seen = []

    @anthropic.beta_tool
    def read_file(path: str, limit: int) -> str:
        """Reads a file.

        Args:
            path: where it is
            limit: how many lines
        """
        seen.append((path, limit))
        return "contents: a heron"

    runner = claude.beta.messages.tool_runner(**ask("quietly", max_tokens=200), tools=[read_file])
    assert runner.until_done().content[0].text == "It says heron."
    assert seen == [(" notes.txt", 20)]


def test_anthropic_parse_helper(claude):
    parsed = claude.messages.parse(**ask("json without a thought", max_tokens=200), output_format=Bird)
    assert parsed.parsed_output == BIRD


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"model": "gpt-9"}, anthropic.NotFoundError, "gpt-9"),
        ({"extra_body": {"temperature": 7}}, anthropic.BadRequestError, "temperature"),
        (ask(LONG), anthropic.BadRequestError, "prompt is too long"),
        ({"messages": [{"role": "user", "content": "fail midway"}]}, anthropic.APIStatusError, "server failed"),
    ],
    ids=["model", "value", "too long", "engine"],
)
def test_anthropic_errors_are_the_classes_that_the_sdk_knows(claude, fields, kind, words, stream):
    with pytest.raises(kind, match=words):
        answer = claude.messages.create(**ask("hi", max_tokens=20, stream=stream) | fields)
        if stream:
            list(answer)
