"""Both lanes with a real vLLM behind the short one."""

import json
import time

import httpx
import openai
import pytest

from engine import resolve_checkpoint
from tests.e2e import vllm
from tests.e2e.stack import end, start_stack, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

HELLO = [{"role": "user", "content": "Hello! Who are you?"}]


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory):
    assert vllm.is_prepared(), "no vLLM here: python -m tests.e2e.vllm prepares it"
    folder = tmp_path_factory.mktemp("vllm")
    vllm.write_bfloat16(resolve_checkpoint("longlane-tiny"), folder / "checkpoint")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_xml", "--enable-prompt-tokens-details")
    with vllm.running(folder / "checkpoint", folder / "log", *tools) as url:
        yield url


@pytest.fixture(scope="module")
def both(vllm_url):
    stack = start_stack("--max-model-len", "8192", "--vllm-url", vllm_url, "--long-prompt-tokens", "1000")
    try:
        stack.wait_ready()
        yield stack
    finally:
        end(stack)


@pytest.fixture
def client(both):
    with openai.OpenAI(base_url=f"{both.url}/v1", api_key="secret-of-the-client", max_retries=0) as client:
        yield client


def test_models_of_both_lanes_are_listed(client):
    limits = {model.id: model.max_model_len for model in client.models.list()}
    assert limits == {"longlane-tiny": 8192, vllm.MODEL: 2048}


def test_model_name_chooses_the_lane(client):
    for model in (vllm.MODEL, "longlane-tiny"):
        reply = client.chat.completions.create(model=model, messages=HELLO, max_tokens=8, temperature=0)
        assert reply.model == model and reply.usage.completion_tokens > 0


def test_the_two_engines_say_the_same(client):
    """Greedy text of the two implementations agrees until bfloat16 and float32 part ways; the first words do not."""
    replies = [
        client.chat.completions.create(
            model=model,
            messages=HELLO,
            max_tokens=8,
            temperature=0,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        for model in (vllm.MODEL, "longlane-tiny")
    ]
    words = [reply.choices[0].message.content.split()[:3] for reply in replies]
    assert len(words[0]) == 3 and words[0] == words[1]


def events(url: str, body: dict) -> list[dict | str]:
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


def test_stream_of_vllm_passes_unchanged(both, vllm_url):
    body = {"model": vllm.MODEL, "messages": HELLO, "max_tokens": 24, "temperature": 0, "stream": True}
    direct = events(f"{vllm_url}/v1/chat/completions", body)
    through = events(f"{both.url}/v1/chat/completions", body)
    for event in (*direct, *through):
        if isinstance(event, dict):
            event.pop("id", None), event.pop("created", None)
    assert through == direct


def test_error_of_vllm_passes_unchanged(client):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=vllm.MODEL, messages=HELLO, max_tokens=-3)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
CALL = {
    "model": vllm.MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    "max_tokens": 64,
    "temperature": 0,
    "chat_template_kwargs": {"enable_thinking": False},
}


def test_tool_call_of_vllm_passes(client):
    body = dict(CALL)
    more = {"chat_template_kwargs": body.pop("chat_template_kwargs")}
    (call,) = client.chat.completions.create(**body, extra_body=more).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_streamed_tool_call_is_the_whole_one(both, client):
    body = dict(CALL)
    more = {"chat_template_kwargs": body.pop("chat_template_kwargs")}
    (whole,) = client.chat.completions.create(**body, extra_body=more).choices[0].message.tool_calls
    deltas = [
        call
        for event in events(f"{both.url}/v1/chat/completions", CALL | {"stream": True})
        if isinstance(event, dict)
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls") or ()
    ]
    names = [call["function"]["name"] for call in deltas if call["function"].get("name")]
    assert names == ["get_weather"]
    text = "".join(call["function"].get("arguments") or "" for call in deltas)
    assert json.loads(text) == json.loads(whole.function.arguments)


def answer_of(url: str, path: str, body: dict) -> tuple[int, dict]:
    reply = httpx.post(url + path, json=body, timeout=60)
    return reply.status_code, reply.json()


TOO_LONG = {"model": vllm.MODEL, "messages": [{"role": "user", "content": "word " * 3000}], "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", TOO_LONG, 400, "maximum context length"),
        ("/v1/chat/completions", {"model": vllm.MODEL, "messages": [{"content": "no role"}]}, 400, "role"),
        ("/v1/embeddings", {"model": vllm.MODEL, "input": "hi"}, 404, ""),
    ],
    ids=["too long", "no role", "no embeddings"],
)
def test_refusals_of_vllm_pass_unchanged(both, vllm_url, path, body, status, words):
    direct = answer_of(vllm_url, path, body)
    assert answer_of(both.url, path, body) == direct
    assert direct[0] == status and words in json.dumps(direct[1])


def test_leaving_client_is_cancelled_in_vllm(both, vllm_url):
    body = {"model": vllm.MODEL, "messages": HELLO, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{both.url}/v1/chat/completions", json=body, timeout=60) as answer:
        next(answer.iter_bytes())
    time.sleep(0.2)

    def idle() -> bool:
        text = httpx.get(f"{vllm_url}/metrics").text
        return all(line.endswith(" 0.0") for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))

    wait_for(idle, 3.0, "vLLM let go of the request")
