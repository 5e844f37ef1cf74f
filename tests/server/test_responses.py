"""/v1/responses through the SDK and event by event."""

import json

import openai
import pytest
from openai.types.responses import Response

from server.errors import NotFoundError
from server.protocol import ChatMessage, parse
from server.response_store import KeptResponse, ResponseStore
from server.responses_protocol import ResponsesRequest, function_names, function_tools, input_messages
from tests.server.conftest import PATCH
from tests.server.live import NAME
from tests.server.raw import TOOLS as FUNCTIONS
from tests.server.test_errors import refusal

PATH = "/v1/responses"
TOOLS = [{"type": "function", **tool} for tool in FUNCTIONS]

CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}


def ask(text: str, **fields) -> dict:
    return {"model": NAME, "input": text, **fields}


def whole(live, text: str, **fields) -> dict:
    answer = live.post(ask(text, **fields), PATH)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


def streamed(live, text: str, **fields) -> list[dict]:
    answer = live.post(ask(text, stream=True, **fields), PATH)
    assert answer.status_code == 200, answer.text
    found = []
    for part in filter(None, answer.text.split("\n\n")):
        name, data = part.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(output: list[dict]) -> list[dict]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]


ASKED = [
    ("hi", {}),
    ("call the tool", {"tools": TOOLS}),
    ("call twice", {"tools": TOOLS}),
    ("cut the call", {"tools": TOOLS, "max_output_tokens": 20}),
    ("only think", {"max_output_tokens": 3}),
    ("emoji", {}),
    ("write the patch", {"tools": [CUSTOM]}),
    ("cut the patch", {"tools": [CUSTOM], "max_output_tokens": 30}),
]


@pytest.mark.parametrize(("text", "fields"), ASKED)
def test_the_stream_ends_with_the_whole_answer(live, text, fields):
    answer = whole(live, text, **fields)
    events = streamed(live, text, **fields)
    final = events[-1]
    assert final["type"] == f"response.{answer['status']}"
    assert without_ids(final["response"]["output"]) == without_ids(answer["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["response"]["output"]


@pytest.mark.parametrize(("text", "fields"), ASKED)
def test_deltas_join_to_what_their_items_hold(live, text, fields):
    made: dict[int, str] = {}
    for event in streamed(live, text, **fields):
        if event["type"].endswith(".delta"):
            made[event["output_index"]] = made.get(event["output_index"], "") + event["delta"]
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            called = [item[field] for field in ("arguments", "input") if field in item]
            held = called[0] if called else item["content"][0]["text"]
            assert made[event["output_index"]] == held


@pytest.mark.parametrize(("text", "fields"), ASKED)
def test_parts_are_announced_before_their_text(live, text, fields):
    """The SDK for Node puts the answer together from the events and throws where a part is not there."""
    items: list[dict] = []
    for event in streamed(live, text, **fields):
        match event["type"]:
            case "response.output_item.added":
                items.append(event["item"])
            case "response.content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                assert event["type"] == f"response.{part['type']}.delta"
                part["text"] += event["delta"]
            case "response.content_part.done":
                assert items[event["output_index"]]["content"][event["content_index"]] == event["part"]
            case "response.output_item.done":
                assert items[event["output_index"]].get("content") == event["item"].get("content")


def test_the_order_of_events(live):
    kinds = [event["type"] for event in streamed(live, "call the tool", tools=TOOLS)]
    assert [kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_the_sdk_reads_both_forms(live):
    answer = live.openai.responses.create(model=NAME, input="call the tool", tools=TOOLS)
    assert answer.output_text == "I'll check."
    assert json.loads(answer.output[-1].arguments) == {"path": "/srv/a", "line": 12}
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    with live.openai.responses.stream(model=NAME, input="hi") as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.status) == ("Hello, world", "completed")


def test_a_conversation_goes_on_by_id_or_by_items(live):
    first = live.openai.responses.create(model=NAME, input="call the tool", tools=TOOLS, instructions="be brief")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "a.py"}
    by_id = live.openai.responses.create(
        model=NAME, previous_response_id=first.id, input=[output], tools=TOOLS, instructions="be brief"
    )
    items = [{"role": "user", "content": "call the tool"}, *(item.model_dump() for item in first.output), output]
    by_items = live.openai.responses.create(model=NAME, input=items, tools=TOOLS, instructions="be brief", store=False)
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    assert by_id.output_text == by_items.output_text == "Hello, world"
    with pytest.raises(openai.NotFoundError, match="not kept"):
        live.openai.responses.create(model=NAME, previous_response_id=by_items.id, input="more")


def test_heartbeats_are_events(live):
    events = streamed(live, "think long first")
    assert [event["type"] for event in events].count("response.in_progress") >= 3


def test_a_full_context_is_an_event_when_streamed(live):
    created, failed = streamed(live, "word " * 5000)
    assert (created["type"], failed["type"]) == ("response.created", "response.failed")
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
    error = refusal(live.post(ask("word " * 5000), PATH))
    assert error["code"] == "context_length_exceeded"


def test_errors_after_the_headers(live):
    live.wait_until(lambda: live.serving.state == "ready")
    events = streamed(live, "die soon")
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"]
    # what was produced is told once more, as far as it came
    (item,) = events[-1]["response"]["output"]
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", deltas)
    assert deltas.startswith("one")
    live.wait_until(lambda: live.serving.state == "ready")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 7}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning_effort"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "clock", "tools": {}}]}, "tools[0]"),
    ],
)
def test_wrong_requests_are_refused_in_words(live, fields, param):
    for stream in (False, True):
        answer = live.post({**ask("hi"), "stream": stream, **fields}, PATH)
        assert refusal(answer, 404 if "previous_response_id" in fields else 400)["param"] == param


def test_tools_that_a_server_would_run_are_skipped(live):
    tools = [{"type": "web_search"}, {"type": "local_shell"}, *TOOLS]
    answer = whole(live, "call twice", tools=tools)
    assert [item["type"] for item in answer["output"]] == ["function_call", "function_call"]


def test_free_text_is_called_with_as_it_is(live):
    """Byte for byte, in events of its own."""
    tools = [{"type": "web_search"}, CUSTOM, *TOOLS]
    events = streamed(live, "write the patch", tools=tools)
    item = events[-1]["response"]["output"][-1]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert "arguments" not in item and item["id"].startswith("ctc_")
    about = [
        event for event in events if event.get("item_id") == item["id"] or event.get("item", {}).get("id") == item["id"]
    ]
    kinds = [event["type"].removeprefix("response.") for event in about]
    assert kinds[0] == "output_item.added" and about[0]["item"]["input"] == ""
    assert set(kinds[1:-2]) == {"custom_tool_call_input.delta"} and len(kinds) > 5
    assert kinds[-2:] == ["custom_tool_call_input.done", "output_item.done"]
    assert "".join(event["delta"] for event in about[1:-2]) == about[-2]["input"] == PATCH
    assert [tool["type"] for tool in events[-1]["response"]["tools"]] == ["custom", "function", "function"]


def test_free_text_that_the_limit_cut_stays_as_far_as_it_came(live):
    answer = whole(live, "cut the patch", tools=[CUSTOM], max_output_tokens=30)
    assert answer["status"] == answer["output"][-1]["status"] == "incomplete"
    assert 0 < len(answer["output"][-1]["input"]) < len(PATCH)
    assert PATCH.startswith(answer["output"][-1]["input"])


def test_free_text_goes_on_in_a_conversation(live):
    first = whole(live, "write the patch", tools=[CUSTOM])
    call = first["output"][-1]
    done = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "hi"}
    kept = whole(live, "", tools=[CUSTOM], previous_response_id=first["id"], input=[done])
    said = {"role": "user", "content": "write the patch"}
    sent = whole(live, "", tools=[CUSTOM], input=[said, *first["output"], done])
    assert kept["usage"]["input_tokens"] == sent["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_a_choice_may_name_a_tool_of_free_text(live):
    chosen = {"type": "custom", "name": "apply_patch"}
    answer = whole(live, "write the patch", tools=[CUSTOM], tool_choice=chosen)
    assert answer["output"][-1]["type"] == "custom_tool_call"
    assert refusal(live.post(ask("x", tools=TOOLS, tool_choice=chosen), PATH))["param"] == "tool_choice"
    nameless = {"type": "custom", "format": {"type": "text"}}
    assert refusal(live.post(ask("x", tools=[nameless]), PATH))["param"] == "tools[0].function.name"


def test_a_name_stands_for_one_kind_of_tool(live):
    both = [CUSTOM, {"type": "function", "name": "apply_patch"}]
    assert refusal(live.post(ask("x", tools=both), PATH))["param"] == "tools"
    spaces = [CUSTOM, {"type": "namespace", "name": "other", "description": "x", "tools": both[1:]}]
    assert whole(live, "write the patch", tools=spaces)["output"][-1]["type"] == "custom_tool_call"


def test_a_grammar_is_told_to_the_model():
    (tool,) = function_tools([CUSTOM], function_names([CUSTOM]))
    assert tool["function"]["description"].startswith("Edits files.\n")
    assert CUSTOM["format"]["definition"] in tool["function"]["description"]
    assert tool["function"]["parameters"]["required"] == ["input"]


def in_namespace(name: str, *tools: dict) -> dict:
    members = [*tools, {"type": "custom", "name": "x"}]
    return {"type": "namespace", "name": name, "description": "grouped", "tools": members}


@pytest.mark.parametrize("stream", [False, True])
def test_functions_in_namespaces_are_called_by_both_names(live, stream):
    """As agents declare sub-agents and the tools of other servers."""
    tools = [{"type": "web_search"}, *TOOLS[:1], in_namespace("clock", TOOLS[1])]
    if stream:
        answer = streamed(live, "call twice", tools=tools)[-1]["response"]
    else:
        answer = whole(live, "call twice", tools=tools)
    assert [(item["namespace"], item["name"]) for item in answer["output"]] == [("clock", "get_time")] * 2
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace"]
    edits = whole(live, "call the tool", tools=tools)["output"]
    assert [item.get("namespace") for item in edits if item["type"] == "function_call"] == [None]


def test_equal_names_in_namespaces_are_told_apart():
    both = [in_namespace("near", TOOLS[1]), in_namespace("far", TOOLS[1]), *TOOLS]
    names = function_names(both)
    shown = [tool["function"]["name"] for tool in function_tools(both, names)]
    assert shown == ["near__get_time", "near__x", "far__get_time", "far__x", "edit", "get_time"]
    assert names.freeform == {"near__x", "far__x"}
    assert names.called("far__get_time") == {"name": "get_time", "namespace": "far"}
    assert names.called("get_time") == {"name": "get_time"}
    call = {"type": "function_call", "call_id": "c", "namespace": "far", "name": "get_time", "arguments": "{}"}
    gone = call | {"namespace": "gone", "name": "ls"}
    body, _ = parse(json.dumps({"input": [call, gone]}).encode(), ResponsesRequest)
    (turn,) = input_messages(body.input, names)
    assert [made.function.name for made in turn.tool_calls] == ["far__get_time", "ls"]


def test_items_become_turns():
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "diff"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "full"}]},
        {"type": "function_call", "call_id": "c3", "name": "ls", "arguments": "{}"},
    ]
    body, _ = parse(json.dumps({"input": items}).encode(), ResponsesRequest)
    turns = input_messages(body.input, function_names(None))
    assert [turn.role for turn in turns] == ["developer", "user", "assistant", "tool", "tool", "assistant"]
    assert (turns[2].reasoning_content, len(turns[2].tool_calls)) == ("short", 2)
    assert turns[2].tool_calls[1].function.arguments == {"input": "diff"}
    assert (turns[5].reasoning_content, turns[5].content, len(turns[5].tool_calls)) == ("full", "", 1)


def test_the_store_is_bounded_and_private():
    store = ResponseStore(max_responses=2, max_chars=100)
    for name in "abc":
        store.put("t", name, kept("x" * 10))
    for find in (store.messages, store.body, store.delete):
        for tenant, name in (("t", "a"), ("other", "c")):
            with pytest.raises(NotFoundError):
                find(tenant, name)
    assert store.messages("t", "c")
    store.put("t", "d", kept("x" * 93))
    assert len(store) == 1
    store.put("t", "e", kept("x" * 99))
    assert len(store) == 0
    # what is deleted makes room
    for name in "fg":
        store.put("t", name, kept("x" * 90))
        store.delete("t", name)
    assert len(store) == 0


def kept(text: str) -> KeptResponse:
    return KeptResponse([ChatMessage("user", text)], b"{}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_kept_response_is_shown_and_forgotten(live, stream):
    if stream:
        made = live.openai.responses.create(model=NAME, input="hi", stream=True)
        answer = [event for event in made if event.type == "response.completed"][-1].response
    else:
        answer = live.openai.responses.create(model=NAME, input="hi")
    assert live.openai.responses.retrieve(answer.id) == answer
    with pytest.raises(openai.BadRequestError, match="background"):
        live.openai.responses.cancel(answer.id)
    assert refusal(live.http.get(f"{PATH}/{answer.id}?stream=true"))["param"] == "stream"
    forgotten = live.http.delete(f"{PATH}/{answer.id}")
    assert forgotten.json() == {"id": answer.id, "object": "response", "deleted": True}
    for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        error = refusal(live.http.request(method, f"{PATH}/{answer.id}{rest}"), 404)
        assert (error["param"], error["code"]) == ("response_id", "not_found")
    with pytest.raises(openai.NotFoundError):
        live.openai.responses.create(model=NAME, input="more", previous_response_id=answer.id)


def test_what_is_not_to_be_kept_cannot_be_shown(live):
    answer = whole(live, "hi", store=False)
    assert refusal(live.http.get(f"{PATH}/{answer['id']}"), 404)
    assert live.http.put(f"{PATH}/{answer['id']}").headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize("field", ["conversation", "prompt"])
@pytest.mark.parametrize("value", [{"id": "x_1"}, "x_1"])
def test_what_is_kept_nowhere_is_refused(live, field, value):
    error = refusal(live.post(ask("hi", **{field: value}), PATH))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert live.post(ask("hi", **{field: None}), PATH).status_code == 200


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"role": "system", "content": "x"}], "input"),
        ([{"role": "king", "content": "x"}], "input.role"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input.content[0]"),
        ("word " * 5000, "input"),
        ("".join(map(chr, range(0xFDD0, 0xFDF0))), "input"),
    ],
)
def test_errors_name_the_input(live, items, param):
    error = refusal(live.post(ask(items), PATH))
    assert error["param"] == param
    assert "your messages" not in error["message"] and "messages:" not in error["message"]
