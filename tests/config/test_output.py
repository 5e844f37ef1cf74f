"""Programs whose output is read to its end, in part, or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from config.keys import Key, digest, write_keys
from config.output import UNREAD, while_read

ROOT = Path(__file__).parent.parent.parent
HELPFUL = ("engine.plan", "engine.bench", "engine.convert", "server", "router", "router.local", "router.keys")


def unread_pipe():
    """The end to write to of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def run_unread(*arguments, has_unread_errors=False):
    # lines are held until there are many, as they are unless somebody asks for something else
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    writing = unread_pipe()
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environ,
            stdout=writing,
            stderr=writing if has_unread_errors else subprocess.PIPE,
            text=True,
            timeout=100,
        )
    finally:
        os.close(writing)


@pytest.mark.parametrize("module", HELPFUL)
def test_help_that_nobody_reads_ends_without_a_word(module):
    ended = run_unread("-m", module, "--help")
    assert (ended.returncode, ended.stderr) == (UNREAD, "")


def test_a_table_that_nobody_reads_ends_without_a_word(tmp_path):
    keys = [Key(name=f"key{number}", sha256=digest(str(number))) for number in range(3)]
    file = tmp_path / "keys.toml"
    write_keys(file, keys)
    for arguments in (("engine.plan", "--memory", "1TiB"), ("router.keys", "list", "--file", str(file))):
        ended = run_unread("-m", *arguments)
        assert (ended.returncode, ended.stderr) == (UNREAD, "")


def test_neither_do_words_of_failure_that_nobody_reads():
    assert run_unread("-m", "engine.plan", "--memory", "1GiB", has_unread_errors=True).returncode == UNREAD
    assert run_unread("-m", "engine.plan", "--no-such-flag", has_unread_errors=True).returncode == UNREAD
    # where standard error has readers, they are told
    assert "It does not fit" in run_unread("-m", "engine.plan", "--memory", "1GiB").stderr


def test_more_than_a_pipe_holds_ends_as_soon_as_its_reader_leaves():
    program = "import sys; from config.output import while_read\ndef main():\n    while True: print('x' * 100)\n"
    command = [sys.executable, "-c", program + "sys.exit(while_read(main))"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "x" * 100 + "\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == UNREAD


def test_what_is_read_ends_as_the_program_says():
    assert while_read(lambda: 3) == 3
    assert while_read(lambda code: sys.exit(code), "in words") == "in words"
    with pytest.raises(ZeroDivisionError):
        while_read(lambda: 1 // 0)


def test_other_broken_pipes_are_no_matter_of_what_is_printed():
    writing = unread_pipe()
    with pytest.raises(BrokenPipeError):
        while_read(lambda: os.write(writing, b"x"))
    os.close(writing)
