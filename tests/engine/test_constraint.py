"""Constraints through real engines: what comes out keeps to the grammar, whatever the model would rather say."""

import json
import random
import re

import pytest
from llguidance import LLMatcher, LLParserLimits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.checkpoint_dir import EMBEDDED_DIR
from engine.constraint import (
    Constraints,
    Matcher,
    Refusals,
    Thought,
    ThoughtPlace,
    byte_alphabet,
    check_constraint,
    load_vocabulary,
)
from engine.errors import SamplingError
from engine.request import Constraint, EngineInfo, ThoughtLimit
from engine.validation import check_request
from tests.engine.checkpoints import MOE, Geometry, write_checkpoint
from tests.engine.runtime import drain, engine, generate, request

GEOMETRY = Geometry(vocab_size=320)
END, ALSO_END = 310, 311
ADDED = {END: "<|im_end|>", ALSO_END: "<|endoftext|>", 312: "<tool_call>", 313: "</tool_call>", 315: "</think>"}
MERGES = ['" :', "t r", "tr ue", "u e", "} }", "a b", "< /", '{ "']
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "é\n"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "count", "flags", "note"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = f"start: json\njson: %json {json.dumps(SCHEMA)}\n"
AFTER_THOUGHT = f"start: thought json\nthought[lazy]: /(?s:.*)<\\/think>/\njson: %json {json.dumps(SCHEMA)}\n"


def write_tokenizer(directory):
    """Bytes, a few merges, and added tokens at the family's kind of ids."""
    vocab = {char: ord(byte) for char, byte in byte_alphabet().items()}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    for pair in sorted(merges, key=lambda pair: len("".join(pair))):
        vocab.setdefault("".join(pair), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, sorted(merges, key=lambda pair: len("".join(pair)))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {token_id: f"<|unused_{token_id}|>" for token_id in range(len(vocab), END)} | {314: "<think>"} | ADDED
    for _, name in sorted(names.items()):
        tokenizer.add_tokens([AddedToken(name, special=name.startswith("<|"), normalized=False)])
    assert tokenizer.token_to_id("</think>") == 315
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def random_dir(tmp_path_factory):
    return write_tokenizer(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), MOE, GEOMETRY))


def start(directory, num_drafts, is_ahead=None):
    return engine(directory, is_ahead, num_drafts=num_drafts, kv_cache_tokens=8192, max_num_requests=4)


@pytest.fixture(scope="module", params=[(0, False), (3, False), (3, True)], ids=["plain", "drafting", "ahead"])
def core(request, random_dir):
    return start(random_dir, *request.param)


@pytest.fixture(scope="module")
def tokenizer(random_dir):
    return Tokenizer.from_file(str(random_dir / "tokenizer.json"))


def constrained(name, grammar=JSON, prompt=(1, 2, 3), **sampling):
    fields = {"max_tokens": 300, "stop_token_ids": (END,), "constraint": Constraint(grammar, "response_format")}
    return request(name, prompt, **fields | sampling)


def spell(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def check_value(value):
    assert list(value) == ["kind", "count", "flags", "note"]
    assert value["kind"] in ("cat", "dog", "é\n")
    assert type(value["count"]) is int and 0 <= value["count"] <= 99
    assert len(value["flags"]) <= 3 and all(type(flag) is bool for flag in value["flags"])
    assert len(value["note"]) <= 6


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_random_model_writes_what_the_schema_says(core, tokenizer, temperature):
    for seed in range(0, 12, 4):
        asked = [
            constrained(f"{seed + i}", prompt=(seed, i), temperature=temperature, seed=seed + i, top_p=1 - i / 10)
            for i in range(4)
        ]
        for each in asked:
            core.add(each)
        for output in drain(core).values():
            assert output.finish_reason == "stop"
            check_value(json.loads(spell(tokenizer, output.token_ids)))


def test_drafts_change_no_token(random_dir):
    plain, drafting = start(random_dir, 0), start(random_dir, 3)
    wanted = [
        constrained(str(seed), prompt=(seed,), temperature=seed % 3 / 2, seed=seed, presence_penalty=seed % 2)
        for seed in range(5)
    ]
    wanted += [constrained("thought", AFTER_THOUGHT, temperature=1.0, seed=1)]
    wanted += [request("free", (4, 5), temperature=1.0, seed=3, max_tokens=60)]
    for each in wanted:
        assert generate(plain, each) == generate(drafting, each)
    expected = generate(plain, *wanted)
    assert generate(drafting, *wanted) == expected
    assert drafting.stats().num_accepted_tokens > 0
    assert generate(start(random_dir, 3, is_ahead=True), *wanted) == expected


def test_a_thought_is_free_and_the_rest_is_not(core, tokenizer):
    # a bias makes the model close its thought sooner or later
    asked = [
        constrained(str(seed), AFTER_THOUGHT, temperature=1.5, seed=seed, logit_bias={315: 4.0}) for seed in range(8)
    ]
    for each in asked:
        core.add(each)
    outputs = drain(core)
    thoughts = set()
    for output in outputs.values():
        thought, _, answer = spell(tokenizer, output.token_ids).partition("</think>")
        thoughts.add(thought)
        assert output.finish_reason == "stop"
        check_value(json.loads(answer))
    assert len(thoughts) > 4


def test_neighbours_are_left_alone(core):
    free = request("free", (7, 8, 9), temperature=1.0, seed=2, max_tokens=40)
    alone = generate(core, free)
    assert generate(core, constrained("a", temperature=1.0, seed=1), free)[1] == alone[0]


def test_the_output_ends_only_where_the_grammar_may(core, tokenizer):
    grammar = 'start: "ab" ("ab")*\n'
    both = (END, ALSO_END)
    bias = {END: 100, ALSO_END: 100}
    early = constrained("early", grammar, stop_token_ids=both, logit_bias=bias)
    assert spell(tokenizer, generate(core, early)[0]) == "ab"
    late = constrained("late", grammar, stop_token_ids=both, logit_bias=bias, min_tokens=3)
    assert spell(tokenizer, generate(core, late)[0]) == "ababab"
    # nothing may follow: the minimum gives way
    whole = constrained("whole", 'start: "ab"\n', min_tokens=9)
    assert spell(tokenizer, generate(core, whole)[0]) == "ab"


def test_a_limit_cuts_and_closes_nothing(core, tokenizer):
    core.add(constrained("cut", max_tokens=5))
    output = drain(core)["cut"]
    assert output.finish_reason == "length" and len(output.token_ids) == 5
    with pytest.raises(ValueError):
        json.loads(spell(tokenizer, output.token_ids))


def test_text_that_is_forced_comes_as_its_own_tokens(core, tokenizer):
    made = generate(core, constrained("frame", 'start: "<tool_call>\\nab"\n'))[0]
    assert made == [
        312,
        10,
        tokenizer.token_to_id("ab"),
    ]


def test_logprobs_are_numbers(core):
    core.add(constrained("a", logprobs=3, temperature=1.0, seed=1))
    output = drain(core)["a"]
    assert len(output.logprobs) == len(output.token_ids) > 0
    assert all(-1e4 < entry.logprob <= 0 for entry in output.logprobs)


def test_an_abort_leaves_no_matcher(random_dir):
    core = start(random_dir, 3)
    for name in "abcdef":
        core.add(constrained(name, temperature=1.0, seed=1))
    core.step()
    for name in "abcdef":
        core.abort(name)
    assert all(output.finish_reason == "abort" for output in drain(core).values())
    assert len(core._constraints) == 0


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_an_aborted_id_may_be_given_again_at_once(core, steps):
    """A pass in flight still has tokens of the one that it stood for before."""
    wanted = constrained("a", temperature=1.5, seed=3, max_tokens=40)
    expected = generate(core, wanted)
    core.add(constrained("a", prompt=(9, 8, 7, 6), temperature=1.5, seed=4))
    for _ in range(steps):
        core.step()
    core.abort("a")
    assert generate(core, wanted) == expected


def test_a_constraint_that_gives_out_cuts_the_output(core, monkeypatch):
    core.add(constrained("a", temperature=1.0, seed=1))
    core.step()
    monkeypatch.setattr(core._constraints.get("a"), "has_failed", True)
    assert drain(core)["a"].finish_reason == "abort"


@pytest.mark.parametrize(
    "grammar, word",
    [
        ('start: json\njson: %json {"not": {"type": "string"}}\n', '"not"'),
        ('start: json\njson: %json {"type": "string", "pattern": "(?=a)b"}\n', "look-ahead"),
        ('start: json\njson: %json {"$ref": "#/$defs/x"}\n', "/$defs/x"),
        ("start: nowhere\n", "nowhere"),
        (
            'start: head json\nhead: "a"\nother: "b"\njson: %json {"type": "array", "uniqueItems": true}\n',
            "uniqueItems",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_reason(grammar, word):
    info = EngineInfo("dir", 2048, 320, "cpu", 0, 4, 2048)
    with pytest.raises(SamplingError, match="response_format cannot be applied") as caught:
        check_request(constrained("a", grammar), info)
    assert word in str(caught.value) and not re.search(r"%json|[0-9] \|", str(caught.value))
    assert caught.value.param == "response_format"


def properties(count):
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(count)}}
    return f"start: json\njson: %json {json.dumps(schema)}\n"


@pytest.mark.parametrize(
    "grammar, limit",
    [
        (properties(3000), "limit for this grammar: 10000"),
        (properties(1), None),
        (f"{properties(1)}// {'x' * 131_072}", "at most 131072"),
    ],
)
def test_a_grammar_has_a_greatest_size_which_its_refusal_names(grammar, limit):
    if limit is None:
        check_constraint(Constraint(grammar))
        return
    with pytest.raises(SamplingError, match=limit) as caught:
        check_constraint(Constraint(grammar, "tools"))
    assert caught.value.param == "tools"
    assert len(str(caught.value)) < 200


def test_what_compiles_can_be_followed(random_dir):
    """The rows of a parser grow with the number of properties that may come next."""
    vocabulary = load_vocabulary(random_dir, 320)
    constraints = Constraints(random_dir, 320)
    constraints.add(constrained("a", properties(1000)))
    matcher = constraints.get("a")
    for token_id in vocabulary.tokenize_str('{"p999": "x"'):
        assert matcher.mask(()).allows(token_id)
        matcher.advance([token_id])
    assert matcher.mask(()) is not None
    assert not matcher.has_failed


def test_refusals_are_remembered_without_the_grammars():
    refusals = Refusals(2)
    for count in (1, 2, 3000, 3):
        assert bool(refusals.of(properties(count))) == (count == 3000)
    assert sum(map(len, refusals._known)) == 2 * 32


def test_a_grammar_whose_first_mask_fails_is_refused(random_dir, monkeypatch):
    monkeypatch.setattr("engine.constraint.grammar_limits", lambda: LLParserLimits(step_max_items=1))
    constraints = Constraints(random_dir, 320)
    with pytest.raises(SamplingError, match="cannot be applied"):
        constraints.add(constrained("a", properties(400)))
    assert len(constraints) == 0


def test_a_constraint_needs_an_end():
    with pytest.raises(SamplingError, match="needs a stop id"):
        check_request(constrained("a", stop_token_ids=()), EngineInfo("dir", 2048, 320, "cpu", 0, 4, 2048))
    check_constraint(Constraint(JSON))


def test_a_checkpoint_without_spellings_refuses_constraints(tmp_path):
    constraints = Constraints(tmp_path, 320)
    with pytest.raises(SamplingError, match=r"tokenizer\.json"):
        constraints.add(constrained("a"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SamplingError, match="is not a tokenizer"):
        constraints.add(constrained("a"))
    constraints.add(request("b", (1,)))
    assert len(constraints) == 0


def test_an_engine_that_is_ready_has_read_the_spellings(random_dir, monkeypatch):
    """Read at the first request they would hold up all others, for seconds with a vocabulary of usual size."""
    core = engine(random_dir, max_model_len=256)

    def read(*_):
        raise AssertionError("read again, or too late")

    monkeypatch.setattr("engine.constraint.load_vocabulary", read)
    core.add(constrained("a"))


@pytest.fixture(scope="module", params=[0, 3])
def trained(request):
    config = {"kv_cache_tokens": 8192, "max_num_requests": 4, "num_drafts": request.param}
    return engine(EMBEDDED_DIR, **config)


def test_the_trained_model_at_a_high_temperature(trained):
    tokenizer = Tokenizer.from_file(str(EMBEDDED_DIR / "tokenizer.json"))
    text = "<|im_start|>user\nDescribe an animal as JSON.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    ends = (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))
    for head, grammar in ((text, AFTER_THOUGHT), (text + "\n</think>\n\n", JSON)):
        prompt = tokenizer.encode(head).ids
        for seed in range(4):
            bias = {tokenizer.token_to_id("</think>"): 5.0}
            name = f"{seed}"
            trained.add(
                constrained(
                    name, grammar, prompt, temperature=1.5, seed=seed, stop_token_ids=ends, logit_bias=bias,
                    max_tokens=600,
                )
            )  # fmt: skip
        for output in drain(trained).values():
            assert output.finish_reason == "stop"
            check_value(json.loads(spell(tokenizer, output.token_ids).rpartition("</think>")[2]))


def limit_of(tokenizer, max_tokens, grammar=None):
    end = tuple(tokenizer.encode("\n</think>").ids)
    return Constraint(grammar, "budget", ThoughtLimit(max_tokens, end, "</think>"))


def thought_of(tokenizer, token_ids):
    ids = list(token_ids)
    return ids[: ids.index(tokenizer.token_to_id("</think>")) + 1]


@pytest.mark.parametrize("budget", [0, 7])
def test_a_thought_ends_when_its_budget_is_spent(core, tokenizer, budget):
    # without the end of its thought the model would never say it
    fields = {"temperature": 1.0, "logit_bias": {315: -100}}
    for seed in range(2):
        free = limit_of(tokenizer, budget)
        made = generate(core, request(f"{seed}", (1,), seed=seed, constraint=free, max_tokens=40, **fields))[0]
        assert thought_of(tokenizer, made)[budget:] == tokenizer.encode("\n</think>").ids
        assert len(made) == 40
        bound = limit_of(tokenizer, budget, AFTER_THOUGHT)
        made = generate(core, constrained("bound", seed=seed, **fields | {"constraint": bound}))[0]
        # a character of several tokens is finished first
        assert len(thought_of(tokenizer, made)) <= budget + 2 + 3
        check_value(json.loads(spell(tokenizer, made).rpartition("</think>")[2]))


def test_a_thought_that_ends_by_itself_is_left_alone(core, tokenizer):
    asked = {"temperature": 1.0, "seed": 4, "logit_bias": {315: 6.0}, "max_tokens": 60}
    free = generate(core, request("free", (1, 2), **asked))[0]
    limited = request("limited", (1, 2), **asked, constraint=limit_of(tokenizer, 59))
    assert 315 in free and generate(core, limited)[0] == free
    # spelled in other tokens it is an end as well
    spelled = Thought(limit_of(tokenizer, 3).thought, lambda ids: bytes(ids))
    place = spelled.after(ThoughtPlace(), b"</thin")
    assert spelled.forced(place) is not None
    assert not spelled.after(place, b"k>").is_open and spelled.forced(spelled.after(place, b"k>")) is None


def test_budgets_and_drafts_change_no_token(random_dir, tokenizer):
    plain, drafting = start(random_dir, 0), start(random_dir, 3)
    for seed in range(3):
        constraint = limit_of(tokenizer, 5 + seed, AFTER_THOUGHT if seed % 2 else None)
        each = constrained("a", temperature=seed / 2, seed=seed, constraint=constraint, max_tokens=80)
        assert generate(plain, each) == generate(drafting, each)


def test_masks_after_drafts_are_those_of_a_matcher_that_saw_them(random_dir, tokenizer):
    vocabulary = load_vocabulary(random_dir, GEOMETRY.vocab_size)
    random_of = random.Random(1)

    def fresh():
        return Matcher(LLMatcher(vocabulary, LLMatcher.grammar_from_lark(AFTER_THOUGHT), log_level=0), 320, [END])

    for text in ('hm <</think>{"kind":"cat","count":7,"flags":[true,false],"note":"ab"}', "</think>{"):
        token_ids = tokenizer.encode(text).ids
        matcher, taken = fresh(), 0
        while taken < len(token_ids):
            for length in random_of.sample(range(5), 5):
                drafts = tuple(token_ids[taken : taken + length])
                other = fresh()
                other.advance([*token_ids[:taken], *drafts])
                assert (matcher.mask(drafts).words == other.mask(()).words).all()
                assert matcher.mask((*drafts, 300)) is None
            step = random_of.randint(1, 3)
            matcher.advance(token_ids[taken : taken + step])
            taken += step
        assert not matcher.has_failed
