"""What a newcomer does: start the stack, point the OpenAI SDK at it, break things."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest

from tests.e2e.stack import ROOT, answers, descendants, end, free_port, start_stack, wait_for

MODEL = "longlane-tiny"
HELLO = [{"role": "user", "content": "Hello! Who are you?"}]


@pytest.fixture
def client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="anything", max_retries=0, timeout=60) as client:
        yield client


def test_start_says_what_a_user_needs(stack):
    printed = stack.text()
    assert f"127.0.0.1:{stack.gateway_port}" in printed
    assert "curl" in printed and "OpenAI(" in printed and MODEL in printed
    assert "cpu" in printed.lower() or "cuda" in printed.lower()
    assert "any key" in printed
    assert "short lane" in printed


def test_printed_curl_works(stack):
    match = re.search(r"^\s*(curl (?:.*\\\n)*.*)$", stack.text(), re.MULTILINE)
    assert match, stack.text()
    done = subprocess.run(["bash", "-c", match[1]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and '"choices"' in done.stdout, done.stdout + done.stderr


def test_printed_sdk_snippet_works(stack):
    printed = stack.text()
    snippet = printed[printed.index("from openai import") :]
    lines = []
    for line in snippet.splitlines():
        if (
            lines
            and line
            and not line.startswith((" ", "from", "client", "reply", "print", "for", "stream", ")", "import"))
        ):
            break
        lines.append(line)
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr


def test_chat_is_readable_and_stops_by_itself(client):
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=300, temperature=0)
    text = reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    words = re.findall(r"[A-Za-z]{2,}", text)
    assert len(words) >= 3, text
    assert reply.usage.completion_tokens > 0
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_streamed_equals_whole(client):
    arguments = {"model": MODEL, "messages": HELLO, "max_tokens": 120, "temperature": 0, "seed": 7}
    whole = client.chat.completions.create(**arguments)
    stream = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_five_at_once_equal_five_alone(stack):
    prompts = [f"Say something about the number {n}." for n in range(5)]

    async def ask(client, prompt):
        reply = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=40, temperature=0
        )
        return reply.choices[0].message.content

    async def both():
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
            return together, [await ask(client, prompt) for prompt in prompts]

    together, alone = asyncio.run(both())
    assert together == alone


@pytest.mark.parametrize("path", ["/v1", "/long-context/v1", "/chat/v1"])
def test_every_lane_answers(stack, path):
    with openai.OpenAI(base_url=f"{stack.url}{path}", api_key="x", max_retries=0) as client:
        reply = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
        assert reply.usage.completion_tokens <= 4
        models = {model.id: model for model in client.models.list()}
        assert models[MODEL].max_model_len == 8192


BAD = {
    "json": (b'{"model":', "JSON"),
    "nesting": (b"[" * 100_000, None),
    "unknown model": ({"model": "gpt-9", "messages": HELLO}, MODEL),
    "no messages": ({"model": MODEL}, "messages"),
    "empty messages": ({"model": MODEL, "messages": []}, "messages"),
    "wrong type": ({"model": MODEL, "messages": HELLO, "temperature": "hot"}, "temperature"),
    "out of range": ({"model": MODEL, "messages": HELLO, "top_p": 7}, "top_p"),
    "too long": (
        {"model": MODEL, "messages": [{"role": "user", "content": "word " * 9_000}]},
        "maximum context length",
    ),
    "top_logprobs alone": ({"model": MODEL, "messages": HELLO, "top_logprobs": 3, "stream": True}, "top_logprobs"),
    "role": ({"model": MODEL, "messages": [{"role": "wizard", "content": "x"}]}, "role"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_says_what_to_change(stack, case):
    body, word = BAD[case]
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", headers=headers, timeout=30, **content)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"] and error["type"]
    assert word is None or word in error["message"]


def gauge(stack, name: str) -> float:
    text = httpx.get(f"{stack.server_url}/metrics", timeout=10).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_leaving_client_stops_its_generation(stack):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4000, "stream": True, "logit_bias": {}}
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=30) as answer:
        next(answer.iter_bytes())
    wait_for(lambda: gauge(stack, "vllm:num_requests_running") == 0, 2.0, "the engine let go of the request")


def test_metrics_stand_on_the_admin_port(stack):
    assert answers(f"http://127.0.0.1:{stack.admin_port}/metrics")
    assert httpx.get(f"{stack.url}/metrics").status_code == 404


def test_taken_port_is_named_before_anything_starts(stack):
    again = subprocess.run(
        [
            sys.executable,
            "-m",
            "router.local",
            "--router-port",
            str(stack.gateway_port),
            "--server-port",
            str(free_port()),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert again.returncode == 1
    told = again.stdout + again.stderr
    assert str(stack.gateway_port) in told and "--router-port" in told
    assert "Traceback" not in told


def test_killed_engine_fails_its_requests_and_comes_back():
    stack = start_stack("--max-model-len", "8192")
    try:
        stack.wait_ready()
        with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
            arguments = {"model": MODEL, "messages": HELLO, "temperature": 1.5, "max_tokens": 6000}
            stream = client.chat.completions.create(**arguments, stream=True, extra_body={"min_tokens": 6000})
            next(iter(stream))
            os.kill(stack.engine_pid(), signal.SIGKILL)
            with pytest.raises(openai.APIError):
                for _ in stream:
                    pass
            wait_for(lambda: answers(f"{stack.server_url}/ready"), 60.0, "the engine came back")
            wait_for(lambda: answers(f"{stack.url}/ready"), 30.0, "the gateway saw it")
            reply = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
            assert reply.usage.completion_tokens > 0
    finally:
        end(stack)


def test_ctrl_c_ends_everything():
    stack = start_stack("--max-model-len", "4096")
    try:
        stack.wait_ready()
        below = descendants(stack.process.pid)
        started = time.monotonic()
        assert stack.stop() == 0, stack.text()
        assert time.monotonic() - started < 15
        assert "Traceback" not in stack.text()
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in below), 5.0, "every process ended")
    finally:
        end(stack)
