"""Free text for training: reads unpacked Debian and PyPI packages into plain documents."""

import argparse
import gzip
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

# source name -> licence, as the package's own copyright file states it
LICENCES = {
    "wordnet": "WordNet 3.0 licence (Debian dict-wn)",
    "python_docs": "PSF-2.0 (Debian python3-doc)",
    "jargon": "public domain (Debian dict-jargon)",
    "devil": "public domain (Debian dict-devil)",
    "small_talk": "BSD-3-Clause (PyPI chatterbot-corpus)",
}
HELD_OUT_EVERY = 50
KINDS = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}


def read_corpus(root: Path) -> Iterator[dict]:
    """Yields {"source", "text", "held_out"} for every document under the unpacked packages in `root`."""
    readers = {"wordnet": read_wordnet, "python_docs": read_python_docs, "jargon": read_jargon, "devil": read_devil}
    for source, reader in readers.items():
        for index, text in enumerate(reader(root)):
            yield {"source": source, "text": text, "held_out": index % HELD_OUT_EVERY == 0}


def read_dictionary(root: Path, name: str) -> str:
    return gzip.decompress(find_file(root, f"{name}.dict.dz").read_bytes()).decode("utf-8", "replace")


def find_file(root: Path, name: str) -> Path:
    found = next(root.rglob(name), None)
    if found is None:
        raise FileNotFoundError(f"{name} is not under {root}; unpack the packages that README.md lists there")
    return found


def read_wordnet(root: Path, entries_per_document: int = 12) -> Iterator[str]:
    entries = re.split(r"\n(?=\S)", read_dictionary(root, "wn"))
    # synonyms repeat one meaning: kept once, so that held-out documents share none with the rest
    by_meaning = {sentence.partition(" means ")[2]: sentence for entry in entries for sentence in define(entry)}
    sentences = list(by_meaning.values())
    for start in range(0, len(sentences), entries_per_document):
        yield "\n".join(sentences[start : start + entries_per_document])


def define(entry: str) -> list[str]:
    """One dictionary entry as sentences; entries without a usage example are left out."""
    word, _, body = entry.partition("\n")
    senses = re.split(r"(?<!\S)(?:(n|v|adj|adv) )?\d+: ", " ".join(body.split()))
    kind, sentences = "", []
    for marker, meaning in zip(senses[1::2], senses[2::2], strict=True):
        kind = KINDS.get(marker, kind)
        meaning = re.sub(r"\s*\[[^\]]*\]", "", meaning).strip()
        examples = re.findall(r'"([^"]{12,})"', meaning)
        meaning = meaning.split('; "')[0].strip('; "')
        if examples and meaning:
            sentences.append(f"{word.capitalize()} ({kind}) means {meaning}. {sentence_case(examples)}")
    return sentences


def sentence_case(examples: list[str]) -> str:
    return " ".join(text[0].upper() + text[1:].rstrip(".") + "." for text in examples)


def read_python_docs(root: Path) -> Iterator[str]:
    # a set: the pattern finds a file once for every way through its folders, and each text must be read once
    for path in sorted(set(root.rglob("python3*/html/_sources/**/*.rst.txt"))):
        text = "\n\n".join(filter(None, map(clean_paragraph, re.split(r"\n\s*\n", path.read_text("utf-8", "replace")))))
        yield from split_text(text)


def clean_paragraph(paragraph: str) -> str:
    """A paragraph of prose with reStructuredText roles removed, or "" for code, tables and directives."""
    if re.match(r"\s*(\.\.|>>>|:|[=\-~^*#+|]{3,})", paragraph) or "::" in paragraph:
        return ""
    text = re.sub(r":[\w:+-]+:`[~!]?([^`<]*?)(?: ?<[^`>]*>)?`", r"\1", " ".join(paragraph.split()))
    text = text.replace("``", "").replace("\\", "")
    letters = sum(character.isalpha() or character == " " for character in text)
    return text if len(text) > 60 and letters > 0.88 * len(text) else ""


def read_jargon(root: Path) -> Iterator[str]:
    text = read_dictionary(root, "jargon").replace("{", "").replace("}", "")
    yield from split_text(unwrap(plain_quotes(text)))


def read_devil(root: Path) -> Iterator[str]:
    yield from split_text(unwrap(plain_quotes(read_dictionary(root, "devil"))))


def plain_quotes(text: str) -> str:
    return text.translate(str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''"))


def unwrap(text: str) -> str:
    return "\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))


def split_text(text: str, size: int = 3000) -> Iterator[str]:
    """Cuts at line ends into pieces of about `size` characters."""
    piece = ""
    for line in text.split("\n"):
        if len(piece) > size:
            yield piece.strip()
            piece = ""
        piece += line + "\n"
    if len(piece.strip()) > 200:
        yield piece.strip()


def read_small_talk(root: Path) -> list[list[str]]:
    """Conversations of alternating user and assistant lines."""
    lines, talks = [], []
    for path in sorted(find_file(root, "english/greetings.yml").parent.glob("*.yml")):
        lines += html.unescape(path.read_text("utf-8")).split("\n")
    for line in lines:
        if line.startswith("- - "):
            talks.append([line[4:].strip("\"' ")])
        elif line.startswith("  - ") and talks:
            talks[-1].append(line[4:].strip("\"' "))
    return [talk for talk in talks if len(talk) >= 2 and all(talk) and len(" ".join(talk)) < 600]


def read_json_lines(path: Path) -> list[dict]:
    with path.open() as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="directory with the unpacked packages")
    parser.add_argument("output", type=Path, help="JSON lines file to write")
    arguments = parser.parse_args()
    with arguments.output.open("w") as output:
        for document in read_corpus(arguments.root):
            output.write(json.dumps(document) + "\n")
        for talk in read_small_talk(arguments.root):
            output.write(json.dumps({"source": "small_talk", "talk": talk, "held_out": False}) + "\n")


if __name__ == "__main__":
    main()
