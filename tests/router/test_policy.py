import hashlib
import math
from collections import Counter

import pytest

from config import Upstream
from router.policy import Rule, order, rendezvous
from router.worker import Health, Worker

CHAT = "/v1/chat/completions"
PREFIXES = [f"conversation {number}".encode() for number in range(2000)]


def worker(name, healthy=True, in_flight=0, weight=1.0):
    return Worker(Upstream(name=name, url="http://x", lane="long", weight=weight), Health(healthy), in_flight)


def names(workers, **rule):
    return [one.name for one in order(workers, 0.0, Rule(**rule))]


def owner(workers, prefix):
    return names(workers, by="affinity", prefix=prefix, slack=3)[0]


def test_least_loaded_healthy_worker_first():
    workers = [worker("a", in_flight=2), worker("b", healthy=False), worker("c"), worker("d", None), worker("e")]
    assert names(workers) == ["c", "d", "e", "a"]
    # a worker of twice the weight carries twice as much
    assert names([worker("a", in_flight=2), worker("b", in_flight=3, weight=2)]) == ["b", "a"]


def test_turns_pass_over_who_is_away():
    workers = [worker("a"), worker("b", healthy=False), worker("c")]
    assert [names(workers, by="round_robin", turn=turn)[0] for turn in range(4)] == ["a", "c", "a", "c"]
    assert names([worker("b", healthy=False)], by="round_robin") == []


def test_prefixes_spread_by_weight():
    workers = [worker("a"), worker("b"), worker("c", weight=2)]
    share = Counter(owner(workers, prefix) for prefix in PREFIXES)
    for name, expected in (("a", 500), ("b", 500), ("c", 1000)):
        # four standard deviations of a fair draw
        assert abs(share[name] - expected) < 4 * math.sqrt(expected * (1 - expected / 2000))


def test_only_the_prefixes_of_the_worker_that_left_move():
    workers = [worker(name) for name in "abcd"]
    before = {prefix: owner(workers, prefix) for prefix in PREFIXES}
    workers[1].health = Health(False)
    after = {prefix: owner(workers, prefix) for prefix in PREFIXES}
    assert all(after[prefix] == name for prefix, name in before.items() if name != "b")
    # and they go to all the others, not to one neighbour
    assert {after[prefix] for prefix, name in before.items() if name == "b"} == set("acd")


def test_owner_is_left_once_it_is_far_busier_than_the_least_loaded():
    workers = [worker("a", in_flight=1), worker("b", in_flight=1)]
    prefix = next(prefix for prefix in PREFIXES if owner(workers, prefix) == "a")
    workers[0].in_flight = 4
    assert names(workers, by="affinity", prefix=prefix, slack=3) == ["a", "b"]
    workers[0].in_flight = 5
    assert names(workers, by="affinity", prefix=prefix, slack=3) == ["b", "a"]


def test_without_a_prefix_the_load_decides():
    assert names([worker("a", in_flight=1), worker("b")], by="affinity", slack=3) == ["b", "a"]


def test_score_is_the_formula():
    word = hashlib.blake2b(b"p\0a", digest_size=8).hexdigest()
    u = (int(word, 16) + 0.5) / 2**64
    assert rendezvous(b"p", "a", 3.0) == pytest.approx(-3 / math.log(u))


def test_conversations_stay_and_spread(gateway, upstream, client):
    engines = [upstream() for _ in range(3)]
    more = [Upstream(name=f"e{i}", url=one.url, lane="long") for i, one in enumerate(engines)]
    url = gateway(more=more).url + CHAT
    homes = {}
    for number in range(12):
        turns = [{"role": "system", "content": "s"}, {"role": "user", "content": f"task {number}"}]
        for step in range(3):
            turns.append({"role": "assistant", "content": f"step {step}"})
            client.post(url, json={"model": "tiny", "messages": turns})
            at = [
                index
                for index, one in enumerate(engines)
                if one.requests and one.requests[-1].json["messages"] == turns
            ]
            homes.setdefault(number, set()).update(at)
    assert all(len(home) == 1 for home in homes.values())
    assert set().union(*homes.values()) == {0, 1, 2}
