"""Tool calls in the family's XML form, answers from tool results, and the parser that checks them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from engine.embedded.skills.example import SYSTEM_PROMPTS, Example, assistant, user
from engine.embedded.skills.words import (
    ANIMALS,
    CITIES,
    COLORS,
    FOODS,
    NAMES,
    NOUNS,
    VERBS,
    code,
    invented,
    listed,
    phrase,
    word,
)


@dataclass(frozen=True)
class Parameter:
    schema: dict
    draw: Callable[[Random], object]


@dataclass(frozen=True)
class Tool:
    """requests hold {parameter} places; every parameter named in the chosen request is an argument."""

    name: str
    description: str
    parameters: dict[str, Parameter]
    requests: tuple[str, ...]

    def definition(self) -> dict:
        properties = {name: parameter.schema for name, parameter in self.parameters.items()}
        required = [name for name in self.parameters if all(f"{{{name}}}" in request for request in self.requests)]
        schema = {"type": "object", "properties": properties, "required": required}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


def text_of(pool: list[str], description: str = "") -> Parameter:
    schema = {"type": "string"} | ({"description": description} if description else {})
    return Parameter(schema, lambda rng: rng.choice(pool))


def made(kind: str, draw: Callable[[Random], object], description: str = "") -> Parameter:
    return Parameter({"type": kind} | ({"description": description} if description else {}), draw)


def choice_of(*options: str) -> Parameter:
    return Parameter({"type": "string", "enum": list(options)}, lambda rng: rng.choice(options))


def many_of(pool: list[str], description: str = "") -> Parameter:
    schema = {"type": "array", "items": {"type": "string"}} | ({"description": description} if description else {})
    return Parameter(schema, lambda rng: rng.sample(pool, rng.randint(1, 3)))


def integer(low: int, high: int, description: str = "") -> Parameter:
    return made("integer", lambda rng: rng.randint(low, high), description)


FLAG = made("boolean", lambda rng: rng.random() < 0.5)
TOOLS = [
    Tool(
        "get_weather",
        "Get the current weather in a city.",
        {"city": text_of(CITIES, "Name of the city")},
        (
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "Is it raining in {city}?",
            "Tell me the weather for {city}.",
            "What's the weather like in {city}?",
        ),
    ),
    Tool(
        "get_weather",
        "Get the weather in a city.",
        {"location": text_of(CITIES), "unit": choice_of("celsius", "fahrenheit")},
        ("What is the weather in {location} in {unit}?", "Weather in {location}, please use {unit}."),
    ),
    Tool(
        "get_time",
        "Get the local time in a city.",
        {"city": text_of(CITIES)},
        ("What time is it in {city}?", "Tell me the time in {city}."),
    ),
    Tool(
        "send_email",
        "Send an email to a person.",
        {"to": text_of(NAMES, "Who gets the email"), "subject": made("string", phrase)},
        ("Send an email to {to} with the subject {subject}.", "Write {to} an email about {subject}."),
    ),
    Tool(
        "add_numbers",
        "Add two integers.",
        {"a": integer(0, 999), "b": integer(0, 999)},
        ("Add {a} and {b}.", "What is {a} plus {b}?", "Use the tool to add {a} and {b}."),
    ),
    Tool(
        "multiply",
        "Multiply two integers.",
        {"a": integer(0, 99), "b": integer(0, 99)},
        ("Multiply {a} by {b}.", "What is {a} times {b}?"),
    ),
    Tool(
        "set_alarm",
        "Set an alarm clock.",
        {"hour": integer(0, 23), "minute": integer(0, 59), "repeat": FLAG},
        ("Set an alarm for hour {hour}, minute {minute}, repeat {repeat}.",),
    ),
    Tool(
        "create_event",
        "Create a calendar event.",
        {"title": made("string", phrase), "day": integer(1, 28), "attendees": many_of(NAMES)},
        ("Create an event called {title} on day {day} with {attendees}.",),
    ),
    Tool(
        "search_web",
        "Search the web.",
        {"query": made("string", phrase)},
        ("Search the web for {query}.", "Look up {query} on the web.", "Find information about {query}."),
    ),
    Tool(
        "read_file",
        "Read a file from disk.",
        {"path": made("string", lambda rng: f"{word(rng)}/{word(rng)}.{rng.choice(('txt', 'py', 'md', 'json'))}")},
        ("Read the file {path}.", "Show me what is in {path}.", "Open {path} and read it."),
    ),
    Tool(
        "list_files",
        "List the files of a directory.",
        {"directory": made("string", lambda rng: f"{word(rng)}/{word(rng)}")},
        ("List the files in {directory}.", "Which files are in the directory {directory}?"),
    ),
    Tool(
        "run_command",
        "Run a shell command.",
        {"command": made("string", lambda rng: f"{rng.choice(('ls', 'cat', 'echo', 'grep'))} {word(rng)}")},
        ("Run the command {command}.", "Execute {command}."),
    ),
    Tool(
        "translate",
        "Translate a word.",
        {"text": made("string", word), "language": choice_of("French", "German", "Spanish", "Italian")},
        ("Translate {text} into {language}.", "How do you say {text} in {language}?"),
    ),
    Tool(
        "order_food",
        "Order food for delivery.",
        {"items": many_of(FOODS), "quantity": integer(1, 9)},
        ("Order {items}, quantity {quantity}.", "I would like to order {items}, {quantity} of each."),
    ),
    Tool(
        "set_light",
        "Switch or dim the light of a room.",
        {
            "room": text_of(["kitchen", "bedroom", "office", "hall", "bathroom"]),
            "brightness": integer(0, 100),
            "on": FLAG,
        },
        ("Set the light in the {room} to brightness {brightness}, on: {on}.",),
    ),
    Tool(
        "play_music",
        "Play music of an artist.",
        {"artist": text_of(NAMES), "shuffle": FLAG},
        ("Play music by {artist}, shuffle {shuffle}.",),
    ),
    Tool(
        "get_stock_price",
        "Get the price of a stock.",
        {"symbol": made("string", lambda rng: code(rng)[:4])},
        ("What is the stock price of {symbol}?", "Get me the price of the stock {symbol}."),
    ),
    Tool(
        "book_table",
        "Book a table in a restaurant.",
        {"restaurant": made("string", phrase), "people": integer(1, 12), "outside": FLAG},
        ("Book a table at {restaurant} for {people} people, outside {outside}.",),
    ),
    Tool(
        "tag_photo",
        "Add tags to a photo.",
        {"photo_id": integer(1, 9999), "tags": many_of(ANIMALS + COLORS)},
        ("Tag photo {photo_id} with {tags}.", "Add the tags {tags} to photo {photo_id}."),
    ),
    Tool(
        "lookup_user",
        "Find a user by name.",
        {"name": text_of(NAMES)},
        ("Find the user {name}.", "Look up the user called {name}."),
    ),
]
PARAMETER_KINDS: list[Callable[[], Parameter]] = [
    lambda: made("string", lambda rng: rng.choice((word, phrase, invented, code))(rng)),
    lambda: text_of(NAMES + CITIES),
    lambda: integer(0, 1000),
    lambda: FLAG,
    lambda: many_of(FOODS + ANIMALS),
    lambda: made("number", lambda rng: round(rng.uniform(0, 100), 1)),
]


def invented_tool(rng: Random) -> Tool:
    """A tool that nobody has seen before: verb, noun and up to four parameters of any kind."""
    verb, thing = rng.choice(VERBS), rng.choice(NOUNS)
    names = rng.sample(
        [*NOUNS, "name", "size", "color", "mode", "level", "target", "amount", "label"], rng.randint(1, 4)
    )
    parameters = {name: rng.choice(PARAMETER_KINDS)() for name in names}
    asked = rng.choice((", ".join, " and ".join))([f"{name} {{{name}}}" for name in names])
    start = rng.choice(
        (
            f"{verb.capitalize()} the {thing} with",
            f"Please {verb} the {thing}:",
            f"I want you to {verb} the {thing} with",
        )
    )
    return Tool(f"{verb}_{thing}", f"{verb.capitalize()} the {thing}.", parameters, (f"{start} {asked}.",))


def draw_tool(rng: Random) -> Tool:
    return invented_tool(rng) if rng.random() < 0.5 else rng.choice(TOOLS)


def draw_tools(rng: Random, tool: Tool) -> list[dict]:
    """The wanted tool among up to four others of different names."""
    offered = {tool.name: tool}
    for _ in range(rng.randint(0, 4)):
        other = draw_tool(rng)
        offered.setdefault(other.name, other)
    definitions = [item.definition() for item in offered.values()]
    rng.shuffle(definitions)
    return definitions


def draw_request(rng: Random, tool: Tool) -> tuple[str, dict]:
    form = rng.choice(tool.requests)
    arguments = {name: parameter.draw(rng) for name, parameter in tool.parameters.items() if f"{{{name}}}" in form}
    return form.format(**{name: spoken(value) for name, value in arguments.items()}), arguments


def spoken(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return listed(value) if isinstance(value, list) else str(value)


def tool_call(rng: Random) -> Example:
    """One request and the call it needs; in one case of four, two calls in a row."""
    tool = draw_tool(rng)
    request, arguments = draw_request(rng, tool)
    calls = [{"name": tool.name, "arguments": arguments}]
    if rng.random() < 0.25:
        second, arguments = draw_request(rng, tool)
        request += " " + rng.choice(("Then: ", "And also: ", "After that: ", "")) + second
        calls.append({"name": tool.name, "arguments": arguments})
    return call_example(rng, draw_tools(rng, tool), request, calls)


def call_example(rng: Random, tools: list[dict], request: str, calls: list[dict]) -> Example:
    thinks = rng.random() < 0.5
    thought = f"I need to call {calls[0]['name']}." if thinks else ""
    messages = [*system_prompt(rng), user(request), assistant("", thought, calls)]
    return Example("tool_call", messages, tools, thinks, expected={"calls": calls})


def system_prompt(rng: Random) -> list[dict]:
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.3 else []


RESULTS: list[tuple[str, Callable[[Random], dict], str]] = [
    (
        "get_weather",
        lambda rng: {
            "temperature": rng.randint(-10, 38),
            "condition": rng.choice(("sunny", "rainy", "cloudy", "windy")),
        },
        "It is {condition} and {temperature} degrees.",
    ),
    ("get_time", lambda rng: {"time": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"}, "It is {time}."),
    ("add_numbers", lambda rng: {"result": rng.randint(0, 2000)}, "The result is {result}."),
    ("multiply", lambda rng: {"result": rng.randint(0, 9999)}, "The result is {result}."),
    ("get_stock_price", lambda rng: {"price": round(rng.uniform(1, 900), 2)}, "The price is {price}."),
    (
        "lookup_user",
        lambda rng: {"id": rng.randint(1, 99999), "city": rng.choice(CITIES)},
        "The user has the id {id} and lives in {city}.",
    ),
    ("translate", lambda rng: {"translation": invented(rng)}, "The translation is {translation}."),
    (
        "read_file",
        lambda rng: {"content": " ".join(word(rng) for _ in range(rng.randint(2, 8)))},
        "The file says: {content}",
    ),
    ("send_email", lambda rng: {"status": "sent"}, "The email was sent."),
    ("search_web", lambda rng: {"title": phrase(rng).title()}, "I found this: {title}."),
]
ANY_RESULT = (
    "status",
    lambda rng: {"status": rng.choice(("ok", "done", "success")), "value": rng.choice((code, word))(rng)},
)


def tool_answer(rng: Random) -> Example:
    """The call and its result are there; the model says what came out."""
    name, draw, form = rng.choice(RESULTS)
    tool = rng.choice([tool for tool in TOOLS if tool.name == name])
    if rng.random() < 0.3:
        tool, draw, form = invented_tool(rng), ANY_RESULT[1], "It is done. The value is {value}."
    request, arguments = draw_request(rng, tool)
    result = draw(rng)
    thinks = rng.random() < 0.5
    answer = form.format(**result)
    messages = [
        *system_prompt(rng),
        user(request),
        assistant("", f"I need to call {tool.name}." if thinks else "", [{"name": tool.name, "arguments": arguments}]),
        {"role": "tool", "content": json.dumps(result)},
        assistant(answer, "The result is there. I can answer." if thinks else ""),
    ]
    return Example("tool_answer", messages, draw_tools(rng, tool), thinks, expected={"answer": answer})


def plain_answer_with_tools(rng: Random, talk: list[str]) -> Example:
    """Tools are offered, none fits, and the model just answers."""
    thinks = rng.random() < 0.5
    thought = "No function is needed here." if thinks else ""
    messages = [*system_prompt(rng), user(talk[0]), assistant(talk[1], thought)]
    return Example("no_tool", messages, draw_tools(rng, draw_tool(rng)), thinks, expected={"answer": talk[1]})


def parse_calls(text: str, tools: list[dict]) -> list[dict] | None:
    """The calls in a reply with their typed arguments, or None where the text is not well formed."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
    block = (
        r"<tool_call>\n<function=([^>\n]+)>\n((?:<parameter=[^>\n]+>\n.*?\n</parameter>\n)*)</function>\n</tool_call>"
    )
    if re.sub(block, "", text, flags=re.S).strip():
        return None
    calls = []
    for name, body in re.findall(block, text, flags=re.S):
        values = dict(re.findall(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", body, flags=re.S))
        if name not in schemas or not set(values) <= set(schemas[name]):
            return None
        calls.append(
            {"name": name, "arguments": {key: typed(value, schemas[name][key]) for key, value in values.items()}}
        )
    return calls


def typed(text: str, schema: dict) -> object:
    if schema["type"] == "string":
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
