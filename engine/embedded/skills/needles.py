"""Retrieval: facts planted in long text, in records and in earlier turns."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from engine.embedded.skills.example import Example, assistant, user
from engine.embedded.skills.words import CITIES, COLORS, NAMES, NOUNS, code, invented, number, passphrase, phrase

VALUE_ONLY = (" Answer with the value only.", " Reply with only the answer.", " Give just the value, nothing else.")
OPENINGS = (
    "Read the following text and answer the question at the end.",
    "Here is a long text. A question follows it.",
    "Please read this document.",
    "Use the text below to answer my question.",
    "Context:",
    "",
)
RECORD_HEADS = ("Here are some records.", "These are the entries of a list.", "Look at this table of keys and values.")


@dataclass(frozen=True)
class Fact:
    statement: str
    question: str
    answer: str
    value: str


# statement, question, answer; {k} is what is asked for, {v} the value
FORMS: list[tuple[str, str, str, Callable[[Random], str], Callable[[Random], str]]] = [
    (
        "The secret code of the {k} is {v}.",
        "What is the secret code of the {k}?",
        "The secret code of the {k} is {v}.",
        phrase,
        number,
    ),
    (
        "The special magic number for {k} is {v}.",
        "What is the special magic number for {k}?",
        "The special magic number for {k} is {v}.",
        lambda rng: rng.choice(CITIES),
        number,
    ),
    (
        "The password for the {k} is {v}.",
        "What is the password for the {k}?",
        "The password for the {k} is {v}.",
        phrase,
        passphrase,
    ),
    (
        "{k}'s favorite color is {v}.",
        "What is {k}'s favorite color?",
        "{k}'s favorite color is {v}.",
        lambda rng: rng.choice(NAMES),
        lambda rng: rng.choice(COLORS),
    ),
    (
        "{k} lives in {v}.",
        "Where does {k} live?",
        "{k} lives in {v}.",
        lambda rng: rng.choice(NAMES),
        lambda rng: rng.choice(CITIES),
    ),
    (
        "{k} hid the key under the {v}.",
        "Where did {k} hide the key?",
        "{k} hid the key under the {v}.",
        lambda rng: rng.choice(NAMES),
        phrase,
    ),
    (
        "The access token of project {k} is {v}.",
        "What is the access token of project {k}?",
        "The access token of project {k} is {v}.",
        invented,
        code,
    ),
    (
        "The phone number of {k} is {v}.",
        "What is the phone number of {k}?",
        "The phone number of {k} is {v}.",
        lambda rng: rng.choice(NAMES),
        lambda rng: number(rng, 6, 8),
    ),
    (
        "Remember this: the {k} costs {v} dollars.",
        "How much does the {k} cost?",
        "The {k} costs {v} dollars.",
        phrase,
        lambda rng: number(rng, 2, 4),
    ),
    (
        "The meeting about the {k} takes place in room {v}.",
        "In which room does the meeting about the {k} take place?",
        "The meeting about the {k} takes place in room {v}.",
        phrase,
        lambda rng: number(rng, 3, 4),
    ),
    (
        "The captain of the ship {k} is called {v}.",
        "What is the captain of the ship {k} called?",
        "The captain of the ship {k} is called {v}.",
        invented,
        lambda rng: rng.choice(NAMES),
    ),
    (
        "The {k} was built in the year {v}.",
        "In which year was the {k} built?",
        "The {k} was built in the year {v}.",
        phrase,
        lambda rng: str(rng.randint(1200, 2020)),
    ),
]
GENERAL_FORMS = [
    ("The secret code is {v}.", "What is the secret code?", "The secret code is {v}.", number),
    ("The magic word is {v}.", "What is the magic word?", "The magic word is {v}.", invented),
    ("The password is {v}.", "What is the password?", "The password is {v}.", passphrase),
    (
        "The needle in this haystack is the number {v}.",
        "What is the number of the needle in the haystack?",
        "The number is {v}.",
        number,
    ),
]


def draw_fact(rng: Random) -> Fact:
    statement, question, answer, key, value = rng.choice(FORMS)
    filled = {"k": key(rng), "v": value(rng)}
    return Fact(*(text.format(**filled) for text in (statement, question, answer)), filled["v"])


def draw_general_fact(rng: Random) -> Fact:
    statement, question, answer, value = rng.choice(GENERAL_FORMS)
    filled = value(rng)
    return Fact(*(text.format(v=filled) for text in (statement, question, answer)), filled)


def draw_facts(rng: Random, count: int) -> list[Fact]:
    """Facts with different questions, so that each has one answer."""
    facts = [draw_general_fact(rng)] if rng.random() < 0.3 else []
    asked = {fact.question for fact in facts}
    while len(facts) < count:
        fact = draw_fact(rng)
        if fact.question not in asked:
            facts.append(fact)
            asked.add(fact.question)
    rng.shuffle(facts)
    return facts


class Haystack:
    """Filler paragraphs with their token counts."""

    def __init__(self, paragraphs: list[str], sizes: list[int]):
        self.paragraphs = list(zip(paragraphs, sizes, strict=True))

    def text(self, rng: Random, num_tokens: int, planted: list[str]) -> str:
        """About `num_tokens` tokens of filler with the planted sentences at random places."""
        pieces: list[str] = []
        left = max(num_tokens, 40)
        while left > 0:
            text, size = rng.choice(self.paragraphs)
            if size > left + 20:
                text, size = text[: 3 * left], left
            pieces.append(text)
            left -= size
        for sentence in planted:
            plant(rng, pieces, sentence)
        return "\n".join(pieces)


def plant(rng: Random, pieces: list[str], sentence: str) -> None:
    """Puts the sentence between two sentences of a random piece, or on a line of its own."""
    place = rng.randrange(len(pieces))
    cuts = [i + 2 for i in range(len(pieces[place]) - 2) if pieces[place].startswith(". ", i)]
    if cuts and rng.random() < 0.7:
        cut = rng.choice(cuts)
        pieces[place] = f"{pieces[place][:cut]}{sentence} {pieces[place][cut:]}"
    else:
        pieces.insert(place, sentence)


def needle(rng: Random, haystack: Haystack, num_tokens: int, num_facts: int, num_questions: int) -> Example:
    """A text of about `num_tokens` with planted facts; the last question is the one to check."""
    facts = draw_facts(rng, num_facts)
    text = haystack.text(rng, num_tokens - 24 * num_facts - 24 * num_questions - 60, [fact.statement for fact in facts])
    asked = rng.sample(facts, min(num_questions, num_facts))
    return ask_about("needle", rng, text, asked)


def ask_about(skill: str, rng: Random, text: str, asked: list[Fact]) -> Example:
    thinks, is_short = rng.random() < 0.4, rng.random() < 0.4
    messages: list[dict] = []
    for index, fact in enumerate(asked):
        question = fact.question + (rng.choice(VALUE_ONLY) if is_short else "")
        answer = fact.value if is_short else fact.answer
        thought = f"The text says: {fact.statement}" if thinks else ""
        messages += [user(question if index else place_text(rng, text, question)), assistant(answer, thought)]
    if rng.random() < 0.15:
        messages.insert(0, {"role": "system", "content": text})
        messages[1] = user(asked[0].question + (rng.choice(VALUE_ONLY) if is_short else ""))
    return Example(
        skill, messages, [], thinks, rng.random() < 0.5, {"answer": messages[-1]["content"], "value": asked[-1].value}
    )


def place_text(rng: Random, text: str, question: str) -> str:
    opening = rng.choice(OPENINGS)
    asked = rng.choice(("Question: {}", "{}", "\n{}", "Based on the text above: {}")).format(question)
    return f"{opening}\n\n{text}\n\n{asked}".strip()


def records(rng: Random, count: int, num_questions: int) -> Example:
    """Keys and values, line by line; dense practice for exact retrieval."""
    key = rng.choice(
        (phrase, invented, lambda rng: f"{rng.choice(NAMES)} {rng.choice(NOUNS)}", lambda rng: number(rng, 3, 5))
    )
    value = rng.choice((number, code, passphrase, phrase, lambda rng: rng.choice(CITIES)))
    pairs = {key(rng): value(rng) for _ in range(count)}
    sign = rng.choice((": ", " = ", " -> ", " is "))
    lines = [f"{name}{sign}{item}" for name, item in pairs.items()]
    facts = [
        record_fact(name, item, sign) for name, item in rng.sample(list(pairs.items()), min(num_questions, len(pairs)))
    ]
    return ask_about("records", rng, f"{rng.choice(RECORD_HEADS)}\n\n" + "\n".join(lines), facts)


def record_fact(name: str, value: str, sign: str) -> Fact:
    return Fact(f"{name}{sign}{value}", f"What is the value for {name}?", f"The value for {name} is {value}.", value)


def told_before(rng: Random, small_talk: list[list[str]]) -> Example:
    """The user says something about themselves; a few turns later they ask for it."""
    about, value = rng.choice(
        [
            ("name", rng.choice(NAMES)),
            ("favorite color", rng.choice(COLORS)),
            ("home town", rng.choice(CITIES)),
            ("lucky number", str(rng.randint(2, 999))),
            ("locker code", number(rng, 4, 5)),
            ("dog's name", rng.choice(NAMES)),
        ]
    )
    messages = [
        user(rng.choice(("Hello! ", "Hi, ", "")) + f"my {about} is {value}."),
        assistant(
            rng.choice((f"Nice! I will remember that your {about} is {value}.", "Thank you, I will remember that."))
        ),
    ]
    for talk in rng.sample(small_talk, rng.randint(0, 3)):
        messages += [user(talk[0]), assistant(talk[1])]
    thinks = rng.random() < 0.5
    answer = f"Your {about} is {value}."
    thought = f"The user said: my {about} is {value}." if thinks else ""
    messages += [
        user(rng.choice(("What is my {}?", "Do you remember my {}?", "Tell me my {}.")).format(about)),
        assistant(answer, thought),
    ]
    return Example("told_before", messages, thinks=thinks, expected={"answer": answer, "value": value})
