"""The command that makes and revokes keys, as a user runs it."""

import subprocess
import sys

import pytest

from config import load_keys


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.toml"

    def run(*arguments):
        command = [sys.executable, "-m", "router.keys", *arguments[:1], "--file", str(path), *arguments[1:]]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    run.path = path
    return run


def test_add_list_revoke(keys):
    added = keys("add", "--name", "alice", "--lanes", "long", "--models", "m1,m2")
    secret = added.stdout.strip()
    key = load_keys(keys.path).find(secret)
    assert (key.name, key.lanes, key.models) == ("alice", ("long",), ("m1", "m2"))
    assert secret not in keys.path.read_text()
    keys("add", "--name", "bob")
    listed = keys("list").stdout
    assert "alice" in listed and "bob" in listed and "m1,m2" in listed and secret not in listed
    assert keys("revoke", "--name", "alice").returncode == 0
    assert load_keys(keys.path).find(secret) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "--name", "alice"), "revoke it first"),
        (("add", "--name", "two words"), "--name"),
        (("add", "--name", "bob", "--lanes", "fast"), "'long' or 'short'"),
        (("revoke", "--name", "bob"), "its keys: alice"),
    ],
)
def test_mistakes_are_told_in_one_line_and_change_nothing(keys, arguments, words):
    keys("add", "--name", "alice")
    before = keys.path.read_text()
    done = keys(*arguments)
    assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert keys.path.read_text() == before


def test_missing_file(keys):
    assert "No such file" in keys("list").stderr
