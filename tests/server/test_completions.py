"""Bare prompts, token ids, and /generate."""

import pytest

from tests.server.live import NAME
from tests.server.test_errors import refusal

PATH = "/v1/completions"
PROMPT = "<|im_start|>user\nstop here<|im_end|>\n<|im_start|>assistant\n"
TEXT = "</think>\n\nThe quick brown fox jumps"


def complete(live, **fields) -> dict:
    answer = live.post({"model": NAME, "prompt": PROMPT, **fields}, PATH)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(live, **fields) -> dict[int, dict]:
    choices: dict[int, dict] = {}
    *chunks, done = live.stream({"model": NAME, "prompt": PROMPT, **fields}, PATH)
    assert done == "[DONE]"
    for chunk in chunks:
        for choice in chunk["choices"]:
            made = choices.setdefault(choice["index"], {"text": "", "finishes": [], "tokens": [], "offsets": []})
            made["text"] += choice["text"]
            made["finishes"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            made["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
            made["offsets"] += (choice["logprobs"] or {}).get("text_offset", [])
    return choices


def test_text_comes_as_the_model_wrote_it(live):
    answer = live.openai.completions.create(model=NAME, prompt=PROMPT)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0
    parts = live.openai.completions.create(model=NAME, prompt=PROMPT, stream=True)
    assert "".join(part.choices[0].text for part in parts) == TEXT


@pytest.mark.parametrize("fields", [{}, {"stop": "own fox"}, {"max_tokens": 3}, {"n": 2}, {"logprobs": 2}])
def test_the_stream_joins_to_the_whole(live, fields):
    whole = complete(live, **fields)
    for index, made in streamed(live, **fields).items():
        choice = whole["choices"][index]
        assert (made["text"], made["finishes"]) == (choice["text"], [choice["finish_reason"]])
        if "logprobs" in fields:
            assert made["tokens"] == choice["logprobs"]["tokens"]
            assert made["offsets"] == choice["logprobs"]["text_offset"]
            starts = choice["logprobs"]["text_offset"]
            assert all(TEXT[at:].startswith(token) for at, token in zip(starts, made["tokens"], strict=True))


def test_several_prompts_have_choices_in_order(live):
    answer = complete(live, prompt=[PROMPT, PROMPT.replace("stop here", "hi")], n=2)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [TEXT, TEXT, "hm\n</think>\n\nHello, world", "hm\n</think>\n\nHello, world"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_token_ids_are_a_prompt_too(live):
    ids = live.post({"prompt": PROMPT}, "/tokenize").json()["tokens"]
    one, listed = complete(live, prompt=ids), complete(live, prompt=[ids, ids])
    assert one["choices"][0]["text"] == TEXT
    assert one["usage"]["prompt_tokens"] == len(ids)
    assert listed["usage"]["prompt_tokens"] == 2 * len(ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [5, 10**9]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"prompt": [5] * 4096}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 50}, "top_logprobs"),
        ({"n": 100}, "n"),
        ({"prompt": ["a"] * 13, "n": 5}, "n"),
    ],
)
def test_wrong_prompts_are_refused_in_words(live, fields, param):
    for stream in (False, True):
        error = refusal(live.post({"model": NAME, "prompt": PROMPT, "stream": stream, **fields}, PATH))
        assert error["param"] == param


def test_tokenize_and_back(live):
    text = "Hello 日本 🧑‍🚀 <|im_start|>x"
    answer = live.post({"prompt": text, "return_token_strs": True}, "/tokenize").json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    assert "<|im_start|>" in answer["token_strs"]
    assert live.post({"tokens": answer["tokens"]}, "/detokenize").json() == {"prompt": text}


def test_messages_are_tokenised_as_chat_would(live):
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    count = live.post({"model": NAME, "messages": messages}, "/tokenize").json()["count"]
    chat = live.post({"model": NAME, "messages": messages}).json()
    assert chat["usage"]["prompt_tokens"] == count


def test_wrong_tokens_are_refused(live):
    refusal(live.post({}, "/tokenize"))
    refusal(live.post({"prompt": "a", "messages": []}, "/tokenize"))
    refusal(live.post({"tokens": [-1]}, "/detokenize"))
    refusal(live.post({"tokens": "a"}, "/detokenize"))
    refusal(live.post({"prompt": "a", "model": "other"}, "/tokenize"), 404)


def test_generate_answers_with_its_speed(live):
    answer = live.post({"prompt": "count slowly", "max_tokens": 20}, "/generate").json()
    assert answer["text"].startswith("tick tick")
    assert (answer["finish_reason"], answer["completion_tokens"]) == ("length", 20)
    assert 20 < answer["tok_s"] < 110
    assert 0 < answer["ttft_ms"] < answer["latency_ms"]
    assert live.post({"prompt": "hi"}, "/generate").json()["reasoning"] == "hm"
    raw = live.post({"prompt": PROMPT, "raw": True, "stop": "quick"}, "/generate").json()
    assert raw["text"] == "</think>\n\nThe "


def test_generate_keeps_its_limits(live):
    assert refusal(live.post({"prompt": "word " * 5000}, "/generate"))["code"] == "context_length_exceeded"
    assert refusal(live.post({"prompt": "hi", "max_tokens": 0}, "/generate"))["param"] == "max_tokens"
    assert refusal(live.post({"prompt": "hi", "stream": True}, "/generate"))["code"] == "unsupported_parameter"
    assert refusal(live.post({"prompt": "hi", "n": 2}, "/generate"))["param"] == "n"
    refusal(live.post({"max_tokens": 3}, "/generate"))


def test_a_form_is_asked_for_in_chat_only(live):
    for path in (PATH, "/generate"):
        for fields in ({"response_format": {"type": "json_object"}}, {"guided_json": {"type": "object"}}):
            error = refusal(live.post({"model": NAME, "prompt": PROMPT, **fields}, path))
            assert (error["code"], error["param"]) == ("unsupported_parameter", next(iter(fields)))
            assert "chat completions" in error["message"]
    assert complete(live, response_format={"type": "text"}, structured_outputs=None)
