"""Copying, counting, sorting and small sums."""

from collections.abc import Callable
from random import Random

from engine.embedded.skills.example import Example, answered
from engine.embedded.skills.words import ANIMALS, CITIES, COLORS, FOODS, NAMES, code, invented, listed, number, word

COPY_REQUESTS = (
    "Repeat the following text exactly:\n{}",
    "Copy this text:\n{}",
    "Write this again, word for word: {}",
    "Repeat after me: {}",
    "Echo: {}",
    "Say exactly this and nothing else: {}",
)
SAY_REQUESTS = ("Say {}.", "Reply with exactly: {}", "Reply with the word {} and nothing else.", "Just answer with {}.")


def copy_text(rng: Random, paragraphs: list[tuple[str, int]]) -> Example:
    source = rng.choice(
        (
            lambda: clip(rng.choice(paragraphs)[0], rng.randint(20, 400)),
            lambda: " ".join(word(rng) for _ in range(rng.randint(2, 30))),
            lambda: " ".join(invented(rng) for _ in range(rng.randint(2, 20))),
            lambda: " ".join(number(rng, 1, 6) for _ in range(rng.randint(2, 15))),
            lambda: ", ".join(code(rng) for _ in range(rng.randint(1, 10))),
        )
    )
    text = source()
    return answered("copy", rng, rng.choice(COPY_REQUESTS).format(text), text, "I have to repeat the text exactly.")


def clip(text: str, size: int) -> str:
    """The first `size` characters or fewer, up to a space."""
    line = text.split("\n")[0].strip()
    return line if len(line) <= size else line[:size].rsplit(" ", 1)[0]


def say_word(rng: Random) -> Example:
    text = rng.choice((word, invented, code, lambda rng: number(rng, 1, 6)))(rng)
    return answered("copy", rng, rng.choice(SAY_REQUESTS).format(text), text, f"I should say {text}.")


def draw_list(rng: Random, low: int, high: int) -> list[str]:
    pool = rng.choice((NAMES, CITIES, COLORS, FOODS, ANIMALS))
    return rng.sample(pool, rng.randint(low, min(high, len(pool))))


def count_items(rng: Random) -> Example:
    items = draw_list(rng, 1, 9)
    question = rng.choice(
        (
            "How many items are in this list: {}?",
            "Count the words in this list: {}",
            "How many words are here? {}",
        )
    ).format(", ".join(items))
    counted = ", ".join(f"{index} {item}" for index, item in enumerate(items, 1))
    answer = f"There are {len(items)} items." if len(items) > 1 else "There is 1 item."
    return answered("count", rng, question, answer, f"I count: {counted}.", value=str(len(items)))


def count_word(rng: Random) -> Example:
    target, *others = rng.sample(FOODS, 4)
    items = [target] * rng.randint(1, 5) + [rng.choice(others) for _ in range(rng.randint(1, 5))]
    rng.shuffle(items)
    times = items.count(target)
    question = f'How many times does "{target}" appear in this list: {", ".join(items)}?'
    answer = f"The word {target} appears {times} time{'s' if times > 1 else ''}."
    return answered("count", rng, question, answer, f"I look for {target}: {times}.", value=str(times))


def sort_words(rng: Random) -> Example:
    items = draw_list(rng, 3, 7)
    question = rng.choice(
        (
            "Sort these words alphabetically: {}",
            "Put this list in alphabetical order: {}",
            "Alphabetize: {}",
        )
    ).format(", ".join(items))
    return answered("sort", rng, question, ", ".join(sorted(items)), "I sort the words by their first letters.")


def sort_numbers(rng: Random) -> Example:
    items = rng.sample(range(1, rng.choice((20, 100, 1000))), rng.randint(3, 7))
    is_descending = rng.random() < 0.3
    order = (
        "from largest to smallest" if is_descending else rng.choice(("in ascending order", "from smallest to largest"))
    )
    question = f"Sort these numbers {order}: {', '.join(map(str, items))}"
    answer = ", ".join(map(str, sorted(items, reverse=is_descending)))
    return answered("sort", rng, question, answer, f"I put the numbers {order}.")


def count_up(rng: Random) -> Example:
    first = rng.choice((1, 1, 1, rng.randint(1, 30)))
    last = first + rng.randint(2, 14)
    question = rng.choice(("Count from {} to {}.", "List the numbers from {} to {}.")).format(first, last)
    return answered(
        "count_up", rng, question, ", ".join(map(str, range(first, last + 1))), f"I count from {first} to {last}."
    )


def small_sum(rng: Random) -> Example:
    a, b = rng.randint(0, rng.choice((9, 20, 99))), rng.randint(0, rng.choice((9, 20, 99)))
    sign, result = rng.choice((("+", a + b), ("-", a - b))) if a >= b else ("+", a + b)
    question = rng.choice(("What is {}?", "Calculate {}.", "How much is {}?")).format(f"{a} {sign} {b}")
    return answered("sum", rng, question, f"{a} {sign} {b} = {result}", f"I compute {a} {sign} {b}.", value=str(result))


def pick_one(rng: Random) -> Example:
    """First, last or n-th of a short list."""
    items = draw_list(rng, 3, 6)
    place, index = rng.choice((("first", 0), ("last", -1), ("second", 1), ("third", 2)))
    question = f"Which is the {place} item in this list: {listed(items)}?"
    return answered("pick", rng, question, f"The {place} item is {items[index]}.", f"The list is {', '.join(items)}.")


def draw_list_skill(rng: Random, paragraphs: list[tuple[str, int]]) -> Example:
    makers: list[Callable[[Random], Example]] = [
        say_word,
        count_items,
        count_word,
        sort_words,
        sort_words,
        sort_numbers,
        sort_numbers,
        count_up,
        small_sum,
        pick_one,
    ]
    return copy_text(rng, paragraphs) if rng.random() < 0.25 else rng.choice(makers)(rng)
