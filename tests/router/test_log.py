"""What a client sends never becomes a line or a field of its own."""

import json
import logging

import pytest

from router.log import JsonFormatter, TextFormatter


def record(message="request", **fields):
    made = logging.LogRecord("longlane.router", logging.INFO, "x.py", 1, message, (), None)
    made.fields = fields
    return made


@pytest.mark.parametrize("forged", ["/a\ngateway: request status=200", "/a\x1b[2J", "/a\u2028b", "/a\rb", "/a\x85b"])
def test_control_characters_are_escaped(forged):
    for line in (TextFormatter().format(record(path=forged)), TextFormatter().format(record(forged))):
        assert line.isprintable() and len(line.splitlines()) == 1
    assert json.loads(JsonFormatter().format(record(path=forged)))["path"] == forged


def test_a_value_is_one_word_and_plain_where_it_can_be():
    line = TextFormatter().format(record(path="/a status=200", status=404, key=None, lane="long"))
    assert line == 'gateway: request path="/a status=200" status=404 lane=long'
