"""/v1/messages through its SDK and event by event."""

import json

import anthropic
import pytest

from server.messages_protocol import MessagesRequest, chat_messages
from server.protocol import parse
from tests.server.live import NAME
from tests.server.raw import TOOLS as FUNCTIONS

PATH = "/v1/messages"
TOOLS = [
    {"name": tool["name"], "description": "d", "input_schema": tool.get("parameters", {"type": "object"})}
    for tool in FUNCTIONS
]


def ask(text: str, **fields) -> dict:
    return {"model": NAME, "max_tokens": 500, "messages": [{"role": "user", "content": text}], **fields}


def whole(live, text: str, **fields) -> dict:
    answer = live.post(ask(text, **fields), PATH)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(live, text: str, **fields) -> list[dict]:
    parts = [part for part in live.post(ask(text, stream=True, **fields), PATH).text.split("\n\n") if part]
    found = []
    for part in parts:
        name, data = part.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return [event for event in found if event["type"] != "ping"]


def joined(events: list[dict]) -> list[dict]:
    """Blocks as a client puts them together, with the order of events checked."""
    blocks: list[dict] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"], json=""))
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                delta, block = event["delta"], blocks[-1]
                kind = {"thinking_delta": "thinking", "signature_delta": "signature", "text_delta": "text"}
                if delta["type"] == "input_json_delta":
                    assert block["type"] == "tool_use"
                    block["json"] += delta["partial_json"]
                else:
                    field = kind[delta["type"]]
                    assert block["type"] == ("text" if field == "text" else "thinking")
                    block[field] += delta[field]
            case "content_block_stop":
                assert is_open
                is_open = False
    assert not is_open
    return blocks


def comparable(blocks: list[dict]) -> list[dict]:
    found = []
    for block in blocks:
        block = {key: value for key, value in block.items() if key not in ("id", "json")}
        found.append(block)
    return found


@pytest.fixture(scope="module")
def anthropic_client(live):
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        yield client


THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
ASKED = [
    ("hi", THINK),
    ("hi", {}),
    ("call the tool", {"tools": TOOLS, **THINK}),
    ("call twice", {"tools": TOOLS, **THINK}),
    ("stop here", {"stop_sequences": ["own fox"], **THINK}),
    ("only think", {"max_tokens": 3, **THINK}),
    ("emoji", THINK),
]


@pytest.mark.parametrize(("text", "fields"), ASKED)
def test_the_stream_joins_to_the_whole(live, text, fields):
    answer = whole(live, text, **fields)
    events = streamed(live, text, **fields)
    blocks = joined(events)
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    assert comparable(blocks) == comparable(answer["content"])
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    assert events[-2]["delta"]["stop_reason"] == answer["stop_reason"]
    assert events[-2]["delta"]["stop_sequence"] == answer["stop_sequence"]


@pytest.mark.parametrize(("kind", "first"), [("enabled", "thinking"), ("adaptive", "thinking"), ("disabled", "text")])
def test_thinking_is_of_three_kinds(live, kind, first):
    assert whole(live, "hi", thinking={"type": kind})["content"][0]["type"] == first
    answer = live.post(ask("hi", thinking={"type": f"{kind}?"}), PATH)
    assert answer.status_code == 400 and "thinking.type" in answer.json()["error"]["message"]


def test_the_order_of_a_thought_a_text_and_a_call(live):
    answer = whole(live, "call the tool", tools=TOOLS, **THINK)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][0]["thinking"] == "why"
    assert answer["content"][0]["signature"]
    assert answer["content"][2]["input"] == {"path": "/srv/a", "line": 12}
    assert answer["stop_reason"] == "tool_use"


def test_the_sdk_reads_both_forms(anthropic_client):
    asked = {
        "model": NAME,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "call the tool"}],
        "tools": TOOLS,
    }
    message = anthropic_client.messages.create(**asked, **THINK)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    with anthropic_client.messages.stream(**asked, **THINK) as stream:
        final = stream.get_final_message()
    assert final.content[2].input == {"path": "/srv/a", "line": 12}
    assert final.stop_reason == "tool_use"
    counted = anthropic_client.messages.count_tokens(model=NAME, messages=asked["messages"], tools=TOOLS, **THINK)
    assert counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens


def test_the_count_comes_at_once_and_the_split_at_the_end(live):
    text = "so many words to cache " * 60
    whole(live, text)
    count = live.post(ask(text), f"{PATH}/count_tokens").json()["input_tokens"]
    events = streamed(live, text)
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (count, 0)
    assert end["cache_read_input_tokens"] > 0
    assert end["input_tokens"] + end["cache_read_input_tokens"] == count
    assert end["output_tokens"] > 0


def test_pings_keep_the_stream_alive(live):
    text = live.post(ask("think long first", stream=True), PATH).text
    assert text.count('event: ping\ndata: {"type": "ping"}\n\n') >= 2
    assert text.startswith("event: message_start\n")


def test_stop_sequences_say_which(live):
    answer = whole(live, "stop here", stop_sequences=["zzz", "quick"], **THINK)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "quick")
    assert answer["content"][-1]["text"] == "The "


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": "x"}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error"),
        ({"model": "claude"}, 404, "not_found_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"tools": [{"name": "a<"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "die at once"}]}, 529, "overloaded_error"),
    ],
)
def test_errors_have_this_api_s_shape(live, fields, status, kind):
    live.wait_until(lambda: live.serving.state == "ready")
    answer = live.post({**ask("hi"), **fields}, PATH)
    assert answer.status_code == status
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"]["message"]
    live.wait_until(lambda: live.serving.state == "ready")


def test_a_prompt_over_the_limit(live):
    for path in (PATH, f"{PATH}/count_tokens"):
        body = live.post(ask("word " * 5000), path)
        assert body.status_code == 400
        message = body.json()["error"]["message"]
        assert message.startswith("prompt is too long: ")
        assert message.endswith(" tokens > 4096 maximum")


def test_an_error_after_the_headers_is_an_event(live):
    live.wait_until(lambda: live.serving.state == "ready")
    events = streamed(live, "die soon")
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert "message_stop" not in [event["type"] for event in events]
    live.wait_until(lambda: live.serving.state == "ready")


def converted(**fields):
    body, _ = parse(json.dumps(ask("x", **fields)).encode(), MessagesRequest)
    return chat_messages(body)


def test_history_takes_the_form_of_chat():
    turns = converted(
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "/"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a"}]},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such", "is_error": True},
                    {"type": "text", "text": "and now?"},
                ],
            },
            {"role": "system", "content": "late"},
        ],
    )
    assert [(turn.role, turn.content) for turn in turns] == [
        ("system", "be brief"),
        ("user", "look"),
        ("assistant", "I look."),
        ("tool", "a"),
        ("tool", "Error: no such"),
        ("user", "and now?"),
        ("system", "late"),
    ]
    assert turns[2].reasoning_content == "hm"
    assert turns[2].tool_calls[0].function.arguments == {"path": "/"}


def test_the_billing_line_is_dropped_and_nothing_like_it():
    lines = ["x-anthropic-billing-header: cc_version=2.1; cch=abc12;", "You are an agent."]
    blocks = [{"type": "text", "text": line} for line in lines]
    assert converted(system=blocks)[0].content == "You are an agent."
    blocks[0]["text"] += "\nmore"
    assert converted(system=blocks)[0].content.endswith("more\n\nYou are an agent.")


def test_server_tools_are_skipped(live):
    tools = [{"type": "web_search_20250305", "name": "web_search"}, *TOOLS]
    assert whole(live, "call the tool", tools=tools, **THINK)["stop_reason"] == "tool_use"
