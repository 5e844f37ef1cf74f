"""What a program does when nobody reads what it prints any more, as behind `| head`: it ends without a word."""

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import TextIO

# what a shell says of a program that this signal ended
UNREAD = 128 + signal.SIGPIPE


def while_read(main: Callable[..., int], *arguments: object) -> int | str | None:
    """Runs a program, for `sys.exit`: what `main` returns, or UNREAD when what it prints has no reader any more.

    The signal's own effect is not asked for: it would end a server whose client has left as well.
    """
    try:
        status = _status(main, arguments)
        # what is still held would be written too late to notice
        for stream in _streams():
            stream.flush()
        return status
    except BrokenPipeError:
        unread = [stream for stream in _streams() if _has_no_reader(stream)]
        if not unread:
            raise
        for stream in unread:
            _discard(stream)
        return UNREAD


def _status(main: Callable[..., int], arguments: tuple[object, ...]) -> int | str | None:
    try:
        return main(*arguments)
    except SystemExit as end:
        # a parser of arguments ends the program by itself once it has printed its help
        return end.code


def _streams() -> list[TextIO]:
    """Those that are open: a program may be started without."""
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None]


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    # errors are told whatever is asked for
    poll.register(stream, 0)
    return bool(poll.poll(0))


def _discard(stream: TextIO) -> None:
    """What it still holds goes nowhere, also when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
