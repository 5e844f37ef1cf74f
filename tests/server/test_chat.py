"""Chat completions through the OpenAI SDK and over plain sockets."""

import json

import openai
import pytest
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageCustomToolCall

from tests.server.conftest import PATCH
from tests.server.live import NAME, running
from tests.server.raw import TOOLS as FUNCTIONS
from tests.server.raw import call

TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


# the field of a call's object by the type of the call
CALLED_WITH = {"function": "arguments", "custom": "input"}
CUSTOM = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "*** Begin Patch"'}},
    },
}


def ask(text: str, **fields) -> dict:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **fields}


def whole(live, text: str, **fields) -> dict:
    answer = live.post(ask(text, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def joined(chunks: list) -> dict:
    """Message and finish reason per choice, made of a stream as a client makes them."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            made = choices.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": [], "finishes": []})
            delta = choice["delta"]
            made["content"] += delta.get("content") or ""
            made["reasoning"] += delta.get("reasoning_content") or ""
            assert delta.get("reasoning_content") == delta.get("reasoning")
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(made["calls"])
                    kind, name = part["type"], part[part["type"]]["name"]
                    assert part[kind] == {"name": name, CALLED_WITH[kind]: ""}
                    made["calls"].append({"id": part["id"], "type": kind, "name": name, "arguments": ""})
                else:
                    call = made["calls"][part["index"]]
                    assert set(part) == {"index", call["type"]}
                    ((field, text),) = part[call["type"]].items()
                    assert field == CALLED_WITH[call["type"]]
                    call["arguments"] += text
            if choice["finish_reason"]:
                made["finishes"].append(choice["finish_reason"])
    return choices


def message_of(choice: dict) -> dict:
    message = choice["message"]
    calls = message.get("tool_calls", [])
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [(call[call["type"]]["name"], call[call["type"]][CALLED_WITH[call["type"]]]) for call in calls],
        "finish": choice["finish_reason"],
    }


PROMPTS = [
    ("hi", {}),
    ("call the tool", {"tools": TOOLS}),
    ("call the tool", {"tools": TOOLS, "tool_choice": "none"}),
    ("call the tool", {}),
    ("call twice", {"tools": TOOLS}),
    ("call in characters", {"tools": TOOLS}),
    ("cut the call", {"tools": TOOLS, "max_tokens": 20}),
    ("write the patch", {"tools": [CUSTOM, *TOOLS], "n": 2}),
    ("cut the patch", {"tools": [CUSTOM], "max_tokens": 30}),
    ("only think", {"max_tokens": 3}),
    ("stop here", {"stop": "own fox"}),
    ("stop here", {"stop": ["zzz", "quick"]}),
    ("emoji", {}),
    ("end by limit", {}),
    ("hi", {"n": 3}),
]


@pytest.mark.parametrize(("text", "fields"), PROMPTS)
def test_the_stream_joins_to_the_whole_answer(live, text, fields):
    answer = whole(live, text, **fields)
    chunks = live.stream(ask(text, **fields))
    assert chunks[-1] == "[DONE]"
    for index, made in joined(chunks).items():
        expected = message_of(answer["choices"][index])
        assert len(made["finishes"]) == 1
        assert {
            "content": made["content"],
            "reasoning": made["reasoning"],
            "calls": [(call["name"], call["arguments"]) for call in made["calls"]],
            "finish": made["finishes"][0],
        } == expected
    assert len(joined(chunks)) == len(answer["choices"]) == fields.get("n", 1)


def test_the_sdk_reads_an_answer(live):
    answer = live.openai.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hi"}], seed=1)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello, world", "stop")
    assert choice.message.reasoning_content == choice.message.reasoning == "hm"
    assert answer.usage.prompt_tokens == 11
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_sdk_accumulates_a_stream_with_tools(live):
    with live.openai.chat.completions.stream(
        model=NAME, messages=[{"role": "user", "content": "call the tool"}], tools=TOOLS
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    made = final.choices[0].message.tool_calls[0].function
    assert (made.name, json.loads(made.arguments)) == ("edit", {"path": "/srv/a", "line": 12})
    assert final.choices[0].finish_reason == "tool_calls"


def test_every_chunk_is_complete(live):
    for fields in ({}, {"stream_options": {"include_usage": True}}, {"tools": TOOLS}):
        for chunk in live.stream(ask("call the tool", **fields)):
            if chunk != "[DONE]":
                assert {"id", "object", "created", "model", "choices"} <= set(chunk)
                assert chunk["object"] == "chat.completion.chunk"
                ChatCompletionChunk.model_validate(chunk, strict=True)


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": None}, {}])
def test_usage_comes_only_when_asked_for(live, options):
    chunks = live.stream(ask("hi", stream_options=options))
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_usage_comes_last_and_alone(live):
    *chunks, last, done = live.stream(ask("hi", stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == whole(live, "hi")["usage"]


def test_tool_calls_are_numbered(live):
    calls = joined(live.stream(ask("call twice", tools=TOOLS)))[0]["calls"]
    assert [call["name"] for call in calls] == ["get_time", "get_time"]
    assert len({call["id"] for call in calls}) == 2


def test_parallel_calls_can_be_turned_off(live):
    answer = whole(live, "call twice", tools=TOOLS, parallel_tool_calls=False)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_an_answer_of_calls_has_no_content(live):
    assert whole(live, "call twice", tools=TOOLS)["choices"][0]["message"]["content"] is None


def test_a_cut_call_is_no_call_to_execute(live):
    choice = whole(live, "cut the call", tools=TOOLS, max_tokens=20)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"old": "one two')


def test_thinking_alone_still_finishes(live):
    choice = whole(live, "only think", max_tokens=3)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "thinking and thinking"


def test_thinking_off_comes_as_content(live):
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        message = whole(live, "only think", **fields)["choices"][0]["message"]
        assert message["content"] == "thinking and thinking and thinking"
        assert "reasoning_content" not in message


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_output_limit(live, field):
    answer = whole(live, "hi", **{field: 2})
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_output_limit_beyond_the_context_is_clamped(live):
    assert whole(live, "hi", max_tokens=1_000_000)["choices"][0]["finish_reason"] == "stop"


def test_null_is_absent(live):
    nulls = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "max_tokens",
        "tools",
        "tool_choice",
        "logit_bias",
        "logprobs",
    ]
    nulls += ["stream", "stream_options", "response_format", "user", "audio", "reasoning_effort", "parallel_tool_calls"]
    expected = message_of(whole(live, "hi")["choices"][0])
    assert message_of(whole(live, "hi", **dict.fromkeys(nulls))["choices"][0]) == expected
    assert message_of(whole(live, "hi", tools=[], tool_choice=None)["choices"][0]) == expected
    assert message_of(whole(live, "hi", tool_choice="auto")["choices"][0]) == expected


def test_other_tool_types_are_skipped(live):
    tools = [{"type": "web_search"}, {"type": "code_interpreter", "custom": {}}, *TOOLS]
    assert whole(live, "call the tool", tools=tools)["choices"][0]["finish_reason"] == "tool_calls"


def custom_calls(message) -> list[tuple[str, str, str]]:
    return [(made.type, made.custom.name, made.custom.input) for made in message.tool_calls]


def test_the_sdk_reads_a_call_with_free_text(live):
    """Byte for byte, whole and streamed."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "write the patch"}], "tools": [CUSTOM, *TOOLS]}
    (choice,) = live.openai.chat.completions.create(**body).choices
    assert isinstance(choice.message.tool_calls[0], ChatCompletionMessageCustomToolCall)
    assert custom_calls(choice.message) == [("custom", "apply_patch", PATCH)]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So.")
    made: dict = {}
    with live.openai.chat.completions.create(**body, stream=True) as stream:
        for chunk in stream:
            accumulate_delta(made, chunk.choices[0].delta.to_dict())
    (call,) = made["tool_calls"]
    assert call["custom"] == {"name": "apply_patch", "input": PATCH}
    assert (call["type"], set(call)) == ("custom", {"index", "id", "type", "custom"})
    with live.openai.chat.completions.stream(**body) as helper:
        list(helper)
        held = helper.current_completion_snapshot.choices[0].message.tool_calls[0]
    assert (held.id.startswith("call_"), held.type, held.custom) == (True, "custom", call["custom"])


def test_free_text_that_the_limit_cut_stays_as_far_as_it_came(live):
    choice = whole(live, "cut the patch", tools=[CUSTOM], max_tokens=30)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert 0 < len(call["custom"]["input"]) < len(PATCH) and PATCH.startswith(call["custom"]["input"])


def test_free_text_goes_on_in_a_conversation(live):
    """A call in the history reads as the model wrote it, and what came of it follows."""
    asked = {"role": "user", "content": "write the patch"}
    message = whole(live, "write the patch", tools=[CUSTOM])["choices"][0]["message"]
    done = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "hi"}
    body = {"model": NAME, "messages": [asked, message, done], "tools": [CUSTOM]}
    answer = live.post(body)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello, world", answer.text
    shown = live.post(body, "/tokenize").json()
    assert shown["count"] == answer.json()["usage"]["prompt_tokens"]
    prompt = live.post({"tokens": shown["tokens"]}, "/detokenize").json()["prompt"]
    assert call("apply_patch", input=PATCH) in prompt
    assert "Edits files." in prompt and 'start: \\"*** Begin Patch\\"' in prompt


def test_a_choice_may_name_a_tool_of_free_text(live):
    chosen = {"type": "custom", "custom": {"name": "apply_patch"}}
    for choice in (chosen, "required"):
        made = whole(live, "write the patch", tools=[CUSTOM], tool_choice=choice)["choices"][0]
        assert [call["type"] for call in made["message"]["tool_calls"]] == ["custom"]
    off = whole(live, "write the patch", tools=[CUSTOM], tool_choice="none")["choices"][0]
    assert off["finish_reason"] == "stop" and "tool_calls" not in off["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}}}, "tool_choice"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [*TOOLS[:1], {"type": "custom", "custom": {"description": "x"}}]}, "tools[1].custom.name"),
        ({"tools": [*TOOLS[:1], {"type": "custom", "custom": {"name": "edit"}}]}, "tools[1].custom.name"),
    ],
)
def test_wrong_tools_of_free_text_are_refused_in_words(live, fields, param):
    answer = live.post(ask("hi", **fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_call_in_the_history_has_the_object_of_its_type(live):
    for made, missing in (({"type": "custom"}, "custom"), ({"id": "x"}, "function")):
        turns = [*ask("hi")["messages"], {"role": "assistant", "tool_calls": [made]}]
        answer = live.post({"model": NAME, "messages": turns})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"messages[1].tool_calls[0].{missing}"


def test_logprobs_stand_beside_their_tokens(live):
    answer = whole(live, "stop here", logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in content) == "</think>\n\nThe quick brown fox jumps"
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [0.0, -9999.0]
    streamed = live.stream(ask("stop here", logprobs=True, top_logprobs=2))
    parts = [choice["logprobs"] for chunk in streamed[:-1] for choice in chunk["choices"]]
    assert [entry for part in parts if part for entry in part["content"]] == content
    assert (
        whole(live, "hi", logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    )
    assert whole(live, "hi")["choices"][0]["logprobs"] is None


def test_line_separators_are_escaped_on_the_wire(live):
    raw = live.post({**ask("emoji"), "stream": True}).content
    assert not any(separator.encode() in raw for separator in ("\u2028", "\u2029", "\x85"))
    assert len(raw.decode().splitlines()) == raw.count(b"\n")
    assert whole(live, "emoji")["choices"][0]["message"]["content"] == "🧑‍🚀 日本 a\u2028b\u2029c\x85d"


def test_a_repeated_prompt_says_what_was_cached(live):
    text = "the same long words again and again " * 40
    first, second = whole(live, text), whole(live, text)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["usage"]["prompt_tokens"]
    assert cached % 64 == 0


def test_the_checkpoint_s_defaults_fill_what_the_request_leaves_open(live):
    from server.chat import plan_chat
    from server.protocol import ChatRequest, parse
    from server.sampling import sampling_params

    model = live.serving.model

    def params(**fields):
        body, _ = parse(json.dumps(ask("hi", **fields)).encode(), ChatRequest)
        plan_chat(body, model)
        return sampling_params(
            body, model.files.sampling, max_tokens=5, vocab_size=248_077, stop_token_ids=(1, 2), logprobs=None
        )

    plain = params()
    assert (plain.temperature, plain.top_k, plain.top_p, plain.seed) == (0.7, 20, 0.8, None)
    assert plain.stop_token_ids == (1, 2)
    asked = params(
        temperature=0,
        top_k=-1,
        top_p=1,
        min_p=0.1,
        seed=-5,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"7": -100},
        stop_token_ids=[9],
        ignore_eos=True,
        min_tokens=3,
    )
    assert (asked.temperature, asked.top_k, asked.top_p, asked.min_p) == (0, 0, 1, 0.1)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (1, -1, 1.1)
    assert (asked.seed, asked.logit_bias, asked.stop_token_ids, asked.min_tokens) == (2**63 - 5, {7: -100}, (9,), 3)


def test_models_show_their_limits(live):
    (card,) = live.http.get("/v1/models").json()["data"]
    assert card["id"] == NAME
    assert card["max_model_len"] == card["context_length"] == card["context_window"] == 4096
    assert card["default_max_tokens"] == 4095
    assert live.openai.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="serves 'scripted-model'"):
        live.openai.models.retrieve("other")


def test_an_engine_that_aborts_finishes_the_choice(live):
    from engine import TokenEvent
    from server.choice import Choice
    from tests.server.raw import rules

    choice = Choice(rules(), live.serving.model.files.vocabulary)
    assert choice.push(TokenEvent("r", (104, 105))).finish_reason is None
    assert choice.push(TokenEvent("r", finish_reason="abort")).finish_reason == "length"
    assert choice.push(TokenEvent("r", (104,), finish_reason="stop")).events == []


@pytest.mark.parametrize("ends", [True, False])
def test_a_switch_says_whether_a_call_ends_the_thought(checkpoint, tmp_path, ends):
    raw = "let me look\n" + call("get_time") + "\n"
    with running(checkpoint, [{"output": raw}], tmp_path, calls_end_thought=ends) as live:
        answer = message_of(whole(live, "hi", tools=TOOLS)["choices"][0])
        made = joined(live.stream(ask("hi", tools=TOOLS)))[0]
    assert answer["calls"] == ([("get_time", "{}")] if ends else [])
    assert answer["finish"] == ("tool_calls" if ends else "stop")
    assert answer["reasoning"] == ("let me look" if ends else raw)
    assert made["reasoning"] == answer["reasoning"]
    assert len(made["calls"]) == len(answer["calls"])
