"""JSON objects for a given schema, and the check that decides whether a reply is one."""

import json
from collections.abc import Callable
from random import Random

from engine.embedded.skills.example import Example, answered
from engine.embedded.skills.words import ADJECTIVES, CITIES, COLORS, FOODS, NAMES, NOUNS, code, listed, phrase, word

SCALARS = {"string": str, "boolean": bool}
SUFFIXES = ("name", "count", "code", "size", "kind", "total", "label", "status", "flag", "level")

# field name -> (schema, value, how a text says it)
Field = tuple[dict, Callable[[Random], object], str]
STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
STRINGS = {"type": "array", "items": {"type": "string"}}
FIELDS: dict[str, Field] = {
    "name": (STRING, lambda rng: rng.choice(NAMES), "The name is {}."),
    "age": (INTEGER, lambda rng: rng.randint(1, 99), "The age is {}."),
    "city": (STRING, lambda rng: rng.choice(CITIES), "The city is {}."),
    "country": (
        STRING,
        lambda rng: rng.choice(("France", "Norway", "Japan", "Kenya", "Peru", "Canada")),
        "The country is {}.",
    ),
    "email": (STRING, lambda rng: f"{rng.choice(NAMES).lower()}@example.com", "The email is {}."),
    "title": (STRING, lambda rng: f"The {phrase(rng).title()}", "The title is {}."),
    "year": (INTEGER, lambda rng: rng.randint(1900, 2026), "The year is {}."),
    "price": (NUMBER, lambda rng: round(rng.uniform(1, 200), 2), "The price is {}."),
    "rating": (NUMBER, lambda rng: round(rng.uniform(0, 5), 1), "The rating is {}."),
    "in_stock": (BOOLEAN, lambda rng: rng.random() < 0.5, "In stock: {}."),
    "is_active": (BOOLEAN, lambda rng: rng.random() < 0.5, "Active: {}."),
    "color": (STRING, lambda rng: rng.choice(COLORS), "The color is {}."),
    "tags": (STRINGS, lambda rng: [word(rng) for _ in range(rng.randint(1, 3))], "The tags are {}."),
    "ingredients": (STRINGS, lambda rng: rng.sample(FOODS, rng.randint(1, 4)), "The ingredients are {}."),
    "quantity": (INTEGER, lambda rng: rng.randint(1, 500), "The quantity is {}."),
    "id": (INTEGER, lambda rng: rng.randint(1, 99999), "The id is {}."),
    "job": (
        STRING,
        lambda rng: rng.choice(("teacher", "doctor", "baker", "pilot", "farmer", "engineer")),
        "The job is {}.",
    ),
    "animal": (STRING, lambda rng: rng.choice(("cat", "dog", "horse", "bird")), "The animal is {}."),
    "answer": (STRING, lambda rng: word(rng), "The answer is {}."),
    "done": (BOOLEAN, lambda rng: rng.random() < 0.5, "Done: {}."),
}
MAKERS: dict[str, Callable[[Random], object]] = {
    "string": lambda rng: rng.choice((word, phrase, code))(rng),
    "integer": lambda rng: rng.randint(0, 999),
    "number": lambda rng: round(rng.uniform(0, 100), 1),
    "boolean": lambda rng: rng.random() < 0.5,
}


def draw_field(rng: Random) -> tuple[str, Field]:
    """A known field, or one with a made-up name or a closed list of values."""
    chance = rng.random()
    if chance < 0.6:
        name = rng.choice(list(FIELDS))
        return name, FIELDS[name]
    name = f"{rng.choice(NOUNS)}_{rng.choice(SUFFIXES)}"
    said = f"The {name.replace('_', ' ')} is {{}}."
    if chance < 0.72:
        options = rng.sample(rng.choice((COLORS, ADJECTIVES, FOODS)), rng.randint(2, 4))
        return name, (STRING | {"enum": options}, lambda rng: rng.choice(options), said)
    kind = rng.choice(list(MAKERS))
    return name, ({"type": kind}, MAKERS[kind], said)


def draw_fields(rng: Random, count: int) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    while len(fields) < count:
        name, field = draw_field(rng)
        fields[name] = field
    return fields


def object_schema(rng: Random, fields: dict[str, Field]) -> dict:
    schema = {
        "type": "object",
        "properties": {name: field[0] for name, field in fields.items()},
        "required": list(fields),
    }
    return schema | ({"additionalProperties": False} if rng.random() < 0.5 else {})


def draw_values(rng: Random, fields: dict[str, Field]) -> dict:
    return {name: field[1](rng) for name, field in fields.items()}


def spoken(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return listed(value) if isinstance(value, list) else str(value)


def json_object(rng: Random) -> Example:
    """A schema, mostly with a text that holds the values; the answer is one line of JSON."""
    fields = draw_fields(rng, rng.randint(1, 5))
    schema, values = object_schema(rng, fields), draw_values(rng, fields)
    if rng.random() < 0.2:
        return nested_object(rng, schema, values, fields)
    return schema_example(rng, schema, values, says(rng, fields, values))


def says(rng: Random, fields: dict[str, Field], values: dict) -> str:
    sentences = [fields[name][2].format(spoken(value)) for name, value in values.items()]
    rng.shuffle(sentences)
    return " ".join(sentences)


def nested_object(rng: Random, schema: dict, values: dict, fields: dict[str, Field]) -> Example:
    key = rng.choice(("person", "address", "item", "order", "details", "owner"))
    inner_fields = draw_fields(rng, rng.randint(1, 3))
    inner = draw_values(rng, inner_fields)
    schema["properties"] = schema["properties"] | {key: object_schema(rng, inner_fields)}
    schema["required"] = [*schema["required"], key]
    text = f"{says(rng, fields, values)} About the {key}: {says(rng, inner_fields, inner)}"
    return schema_example(rng, schema, values | {key: inner}, text)


def schema_example(rng: Random, schema: dict, values: dict, text: str) -> Example:
    written = json.dumps(schema, indent=rng.choice((None, None, 2)))
    with_text = rng.choice(
        (
            "Extract the data from the text as JSON for this schema:\n{schema}\n\nText: {text}",
            "Schema:\n{schema}\n\n{text}\n\nReturn one JSON object that matches the schema.",
            "{text}\n\nAnswer in JSON that matches this schema: {schema}",
            "Convert to JSON. {text}\nThe schema is {schema}",
        )
    )
    without_text = rng.choice(
        (
            "Write a JSON object that is valid for this schema:\n{schema}",
            "Give me an example as JSON for the schema {schema}",
            "Reply only with JSON that matches this schema: {schema}",
        )
    )
    is_given = rng.random() < 0.75
    form = with_text if is_given else without_text
    thought = f"I need the fields {', '.join(schema['properties'])}."
    question = form.format(schema=written, text=text)
    return answered("json", rng, question, json.dumps(values), thought, schema=schema, is_given=is_given)


def plain_json(rng: Random) -> Example:
    """JSON is asked for without a schema; the fields are named in words."""
    fields = draw_fields(rng, rng.randint(1, 4))
    values = draw_values(rng, fields)
    names = listed([f'"{name}"' for name in fields]) if rng.random() < 0.5 else listed(list(fields))
    form = rng.choice(
        (
            "{text} Answer as a JSON object with {names}.",
            "Return a JSON object with the keys {names}. {text}",
            "Reply in JSON with the fields {names}: {text}",
        )
    )
    text = says(rng, fields, values)
    question = form.format(text=text, names=names)
    return answered("plain_json", rng, question, json.dumps(values), f"I answer in JSON with {', '.join(fields)}.")


def matches_schema(text: str, schema: dict) -> bool:
    """Is the text one JSON value that the schema allows?"""
    try:
        return fits(json.loads(text), schema)
    except json.JSONDecodeError:
        return False


def fits(value: object, schema: dict) -> bool:
    """The part of JSON Schema that the skill uses: type, enum, items, properties, required, additionalProperties."""
    if "enum" in schema and value not in schema["enum"]:
        return False
    kind = schema["type"]
    if kind == "object":
        return isinstance(value, dict) and fits_object(value, schema)
    if kind == "array":
        return isinstance(value, list) and all(fits(item, schema["items"]) for item in value)
    if kind in SCALARS:
        return isinstance(value, SCALARS[kind])
    accepted = int if kind == "integer" else (int, float)
    return isinstance(value, accepted) and not isinstance(value, bool)


def fits_object(value: dict, schema: dict) -> bool:
    properties = schema["properties"]
    is_closed = schema.get("additionalProperties") is False
    if not set(schema["required"]) <= set(value) or (is_closed and not set(value) <= set(properties)):
        return False
    return all(fits(item, properties[name]) for name, item in value.items() if name in properties)
