"""Reading packages into documents, and keeping only usable conversations of the teacher."""

import gzip
from random import Random

import pytest
import torch

from engine.embedded.corpus import clean_paragraph, define, read_corpus, read_small_talk
from engine.embedded.rows import keep_short_turns
from engine.embedded.sample_teacher import Script, conversations, draw
from engine.embedded.vocabulary import train_vocabulary

ENTRY = """absolute
    adj 1: perfect or complete or pure; "absolute loyalty";
           "absolute silence" [ant: {comparative}]
    2: not capable of being violated
    n 1: something that is conceived; "the absolute is silent" [syn: {x}]"""
GREETINGS = "categories:\n- greetings\nconversations:\n- - Hello\n  - Hi\n- - Alone\n"


def test_a_dictionary_entry_by_hand():
    assert define(ENTRY) == [
        "Absolute (adjective) means perfect or complete or pure. Absolute loyalty. Absolute silence.",
        "Absolute (noun) means something that is conceived. The absolute is silent.",
    ]


@pytest.mark.parametrize(
    ("paragraph", "expected"),
    [
        (
            "The :class:`~pkg.Thing` class holds\nwhat ``you`` give to it, and it returns all of it later.",
            "The pkg.Thing class holds what you give to it, and it returns all of it later.",
        ),
        (".. note:: a directive that is long enough to be a paragraph of its own, but is none", ""),
        (">>> print(1) and so on, which is code and not prose, whatever else the line may say", ""),
        ("Too short.", ""),
    ],
)
def test_paragraphs_of_documentation(paragraph, expected):
    assert clean_paragraph(paragraph) == expected


def test_every_document_is_read_once(tmp_path):
    for name in ("wn", "jargon", "devil"):
        (tmp_path / f"{name}.dict.dz").write_bytes(gzip.compress(ENTRY.encode()))
    pages = tmp_path / "python3.11" / "html" / "_sources" / "library"
    pages.mkdir(parents=True)
    (pages / "page.rst.txt").write_text("A sentence of the documentation that goes on. " * 8)
    texts = [document["text"] for document in read_corpus(tmp_path) if document["source"] == "python_docs"]
    assert len(texts) == 1


def test_missing_packages_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"wn\.dict\.dz"):
        list(read_corpus(tmp_path))


def test_small_talk_needs_an_answer(tmp_path):
    (tmp_path / "english").mkdir()
    (tmp_path / "english" / "greetings.yml").write_text(GREETINGS)
    assert read_small_talk(tmp_path) == [["Hello", "Hi"]]


@pytest.fixture(scope="module")
def tokenizer():
    return train_vocabulary(["user assistant system Hello there. What is a boat?"], 400)


def test_turns_are_kept_up_to_the_first_bad_one(tokenizer):
    good, endless, odd = "A boat floats.", "word " * 200, "日本語 " * 4
    assert keep_short_turns(["Why?", good, "And?", good, "?"], tokenizer) == ["Why?", good, "And?", good]
    assert keep_short_turns(["Why?", good, "And?", endless], tokenizer) == ["Why?", good]
    assert keep_short_turns(["Why?", odd], tokenizer) == []


def test_roles_alternate_in_sampled_rows(tokenizer):
    length = 160
    script = Script(tokenizer, 2, length, Random(0), "cpu")
    end, letter = tokenizer.token_to_id("<|im_end|>"), tokenizer.encode("a").ids[0]
    rows = []
    for position in range(length):
        # every sixth sampled token ends a turn
        sampled = torch.full((2,), end if position % 6 == 0 else letter)
        rows.append(script.next_tokens(sampled, position))
    for talk in conversations(torch.stack(rows, dim=1).numpy(), tokenizer):
        assert len(talk["talk"]) > 2
    text = tokenizer.decode(torch.stack(rows, dim=1)[0].tolist(), skip_special_tokens=False)
    roles = [turn.split("\n")[0] for turn in text.split("<|im_start|>")[1:]]
    assert roles[:5] == ["system", "user", "assistant", "user", "assistant"]


def test_drawing_is_nearly_greedy_when_cold():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    assert (draw(logits, torch.full((4,), 1e-6)) == logits.argmax(-1)).all()
