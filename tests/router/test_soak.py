"""The soak on a small scale: the full one is `python -m tests.bench.soak`, its result in tests/bench/results."""

import os

import pytest

from tests.bench.gateway import Target, resident_mb
from tests.bench.soak import Soak, parser, soak


@pytest.mark.timeout(120)
def test_memory_is_flat_and_aborts_leave_nothing(capsys):
    small = ["--requests", "600", "--aborts", "200", "--conversations", "100", "--at-once", "16"]
    assert soak(parser().parse_args(small)) == []
    assert "all at zero" in capsys.readouterr().out


def test_growth_is_told():
    arguments = parser().parse_args(["--tolerance-mb", "0"])
    one = Soak(Target("http://127.0.0.1:1", {}, os.getpid()), "http://127.0.0.1:2", arguments)
    one._compare_memory(20, resident_mb(os.getpid()) - 5)
    (problem,) = one.problems
    assert "memory grew by" in problem
