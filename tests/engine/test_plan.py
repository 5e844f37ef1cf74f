import json
import sys

import pytest

from config import ConfigError
from engine.plan import PlanConfig, demand_of, main, report
from engine.planner import largest_context

FOUR = {"recipe": "w4", "codec": "rk4v4-e8", "requests": 4, "embedding": "host"}


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["engine.plan", *arguments])
    return main()


def test_the_table_ends_with_what_is_left(monkeypatch, capsys):
    arguments = "--recipe w4 --codec rk4v4-e8 --requests 4 --context 262144 --mtp off --embedding host --memory 24GiB"
    assert run(monkeypatch, *arguments.split()) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith("4 requests of 262144 tokens, 16384 blocks, weights w4, KV rk4v4-e8, MTP off")
    assert "(host)" in lines[0]
    names, counts = zip(*((line[:30].strip(), int(line[30:48].replace(",", ""))) for line in lines), strict=True)
    assert names[-3:] == ("all", "of", "left")
    assert sum(counts[1:-3]) == counts[-3] == counts[-2] - counts[-1]
    assert counts[-2] == 24 * 2**30


def test_what_does_not_fit_is_refused_with_what_would(capsys):
    demand = demand_of(PlanConfig(**FOUR, context=262_144, snapshots="1GiB"))
    assert report(demand, 20 * 2**30, as_json=True) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert not found["fits"]
    assert found["num_bytes"] == sum(s["num_bytes"] for s in found["shares"] if s["place"] == "device") > 20 * 2**30
    assert f"4 requests fit with a context of {largest_context(demand, 20 * 2**30)} each" in err
    assert "snapshot_bytes 0 (frees 0.98 GiB)" in err


def test_positions_beyond_the_limit_are_asked_for():
    with pytest.raises(ConfigError, match=r"set it to 262144 or less, or --yarn=true"):
        demand_of(PlanConfig(context=1_010_000))
    assert demand_of(PlanConfig(context=1_010_000, yarn=True)).context == 1_010_000
    assert demand_of(PlanConfig(yarn=True)).context == 1_010_000
    with pytest.raises(ConfigError, match="set it to 1010000 or less"):
        demand_of(PlanConfig(context=1_010_001, yarn=True))


def test_a_checkpoint_takes_the_place_of_a_profile(monkeypatch, capsys):
    assert run(monkeypatch, "--checkpoint", "longlane-tiny", "--context", "4096", "--memory", "2GiB") == 0
    assert "weights as stored" in capsys.readouterr().out
    assert run(monkeypatch, "--checkpoint", "longlane-tiny", "--profile", "27b") == 2
    assert "either profile or checkpoint" in capsys.readouterr().err
    assert run(monkeypatch, "--checkpoint", "/nowhere") == 2


def test_no_drafts_means_no_mtp():
    assert demand_of(PlanConfig(drafts=0)) == demand_of(PlanConfig(mtp="off"))
