from config import Upstream
from router.worker import Health, Worker, judge


def states(*checks, health=None):
    health = health or Health()
    seen = []
    for is_ok in checks:
        health = judge(health, is_ok, "why")
        seen.append(health.healthy)
    return seen


def test_first_check_decides_then_two_are_needed():
    assert states(True, False, True, False, False) == [True, True, True, True, False]
    assert states(False, True, True) == [False, False, True]
    assert states(True, False, False, True, False, True, True) == [True, True, False, False, False, False, True]


def test_reason_of_a_fall_is_kept():
    health = judge(judge(judge(Health(), True, "ready"), False, "refused"), False, "refused")
    assert health == Health(False, 0, "refused")
    assert judge(health, True, "ready").reason == "refused"


def worker(name, healthy=True, in_flight=0):
    return Worker(Upstream(name=name, url="http://x", lane="long"), Health(healthy), in_flight)


def test_configured_models_need_no_check():
    named = Worker(Upstream(name="v", url="http://x", lane="short", models=("m",)))
    assert named.candidate().models == {"m": None}
    named.cards = {"m": {"id": "m", "max_model_len": 8}, "other": {"id": "other"}}
    assert named.candidate().models == {"m": 8}
    assert worker("a").candidate().models is None


def test_lease_is_given_back_after_a_failure():
    one = worker("a")
    try:
        with one.lease():
            assert one.in_flight == 1
            raise RuntimeError
    except RuntimeError:
        assert one.in_flight == 0
