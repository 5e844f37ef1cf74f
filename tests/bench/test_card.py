"""The list of what a card has to be asked runs as it says, and names programs and flags that there are."""

import json
import re
import subprocess
import sys

import pytest

from tests.bench.card import CHECKS, LAST, MEASUREMENTS, Run, groups, run_one

RUNS = (*CHECKS, *MEASUREMENTS, LAST)
PROGRAMS = sorted({re.match(r"(-m )?\S+", run.arguments)[0] for run in MEASUREMENTS})


def ended(tmp_path, code, most_s=20.0, left_s=60.0):
    (tmp_path / "run.py").write_text(code)
    return run_one(Run("run", most_s, str(tmp_path / "run.py") + " {35b}"), {"35b": "model"}, tmp_path, left_s)


def test_what_a_run_prints_and_how_it_ends(tmp_path):
    assert ended(tmp_path, "import sys; print(sys.argv[1]); sys.exit(3)").status == 3
    assert (tmp_path / "run.log").read_text() == "model\n"


def test_a_run_ends_with_its_time_and_takes_along_what_it_started(tmp_path):
    code = "import subprocess, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)"
    assert ended(tmp_path, code, most_s=3.0).status is None
    started = (tmp_path / "run.log").read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", "-p", started], capture_output=True, text=True).stdout.strip()
    assert state == "" or state.startswith("Z")


def test_a_run_that_would_not_get_far_is_passed_over(tmp_path):
    assert ended(tmp_path, "print(1)", most_s=20.0, left_s=5.0) is None
    assert not (tmp_path / "run.log").exists()


def test_checks_share_the_card_and_nothing_else_does():
    assert [len(group) for group in groups(RUNS)] == [len(CHECKS)] + [1] * (len(MEASUREMENTS) + 1)
    assert len({run.name for run in RUNS}) == len(RUNS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_flags_are_those_of_their_programs(program):
    shown = subprocess.run([sys.executable, *program.split(), "--help"], capture_output=True, text=True, check=True)
    asked = {
        flag
        for run in MEASUREMENTS
        if run.arguments.startswith(program)
        for flag in re.findall(r"--[\w-]+", run.arguments)
    }
    assert asked and asked <= set(re.findall(r"--[\w-]+", shown.stdout)), json.dumps(sorted(asked))
