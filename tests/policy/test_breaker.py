"""The breaker: opens on faults and never on rate refusals, tries with single calls, closes step by step."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.breaker import PROBES, Breaker, SavedBreaker
from millstream.policy.limits import BreakerRules
from millstream_schemas.permits import OutcomeClass


def opened(now: float = 100.0) -> Breaker:
    """A breaker that five faults in a row have opened at `now`."""
    breaker = Breaker(BreakerRules())
    for _ in range(4):
        assert breaker.note("fault", now) is None
    assert breaker.note("fault", now) == "open"
    return breaker


def test_it_opens_on_five_faults_in_a_row() -> None:
    """Small pools have no twenty results in half a minute."""
    breaker = opened()
    assert breaker.state(104.9) == "open"
    assert breaker.may_start(104.9) == "no"
    assert breaker.wait_s(101.0) == pytest.approx(4.0)


def test_it_opens_when_half_of_twenty_results_in_half_a_minute_fail() -> None:
    """Not at nineteen results, and not for results that are older."""
    breaker = Breaker(BreakerRules())
    for number in range(19):
        assert breaker.note("overloaded" if number % 2 else "ok", 100.0 + number / 10) is None
    assert breaker.note("overloaded", 102.0) == "open"

    slow = Breaker(BreakerRules())
    for number in range(60):
        assert slow.note("overloaded" if number % 2 else "ok", 100.0 + 2 * number) is None


@pytest.mark.parametrize("outcome", ["throttled", "ramp", "quota", "error", "unknown"])
def test_rate_refusals_and_our_own_errors_never_count(outcome: OutcomeClass) -> None:
    """A hundred of them leave it closed, and they do not hide faults either."""
    breaker = Breaker(BreakerRules())
    for _ in range(100):
        assert breaker.note(outcome, 100.0) is None
    for _ in range(4):
        breaker.note("fault", 100.0)
        breaker.note(outcome, 100.0)
    assert breaker.note("fault", 100.0) == "open"


def test_one_success_ends_a_row_of_faults() -> None:
    """A few faults among many successes are everyday life."""
    breaker = Breaker(BreakerRules())
    for number in range(100):
        assert breaker.note("ok" if number % 5 == 4 else "fault" if number % 5 < 2 else "client", 100.0) is None


def test_it_tries_with_one_call_then_two_then_four_and_closes() -> None:
    """Each stage begins after all of the one before went well."""
    breaker = opened()
    for stage, wanted in enumerate(PROBES):
        probes: list[int] = []
        while breaker.may_start(106.0) == "probe":
            probes.append(breaker.begin_probe())
        assert len(probes) == wanted
        for at, probe in enumerate(probes):
            last = stage == len(PROBES) - 1 and at == wanted - 1
            assert breaker.note("ok", 106.0, probe=probe) == ("closed" if last else None)
    assert breaker.may_start(106.0) == "yes"


@pytest.mark.parametrize("outcome", ["fault", "overloaded", "unknown"])
def test_any_failed_probe_opens_it_again_for_twice_as_long(outcome: OutcomeClass) -> None:
    """5, 10, 20 seconds, at most two minutes."""
    breaker, now = opened(), 100.0
    for seconds in (5, 10, 20, 40, 80, 120, 120):
        assert breaker.state(now + seconds - 0.01) == "open"
        now += seconds
        assert breaker.state(now) == "half_open"
        assert breaker.note(outcome, now, probe=breaker.begin_probe()) == "open"


def test_a_probe_whose_lease_runs_out_has_failed() -> None:
    """Else a half-open key would wait for ever for a worker that is gone."""
    breaker = opened()
    probe = breaker.begin_probe()
    assert breaker.may_start(106.0) == "no"
    assert breaker.wait_s(106.0) == float("inf")
    assert breaker.note("unknown", 136.0, probe=probe) == "open"
    assert breaker.state(145.0) == "open"


@pytest.mark.parametrize("throttled", [True, False])
def test_a_probe_that_says_nothing_makes_room_for_another(throttled: bool) -> None:
    """Returned unused, or refused for rate: neither a success nor a failure."""
    breaker = opened()
    probe = breaker.begin_probe()
    if throttled:
        assert breaker.note("throttled", 106.0, probe=probe) is None
    else:
        breaker.probe_returned(probe)
    assert breaker.may_start(106.0) == "probe"
    assert breaker.state(106.0) == "half_open"


def test_late_results_do_not_decide_over_a_key_that_is_being_tried() -> None:
    """Calls from before it opened, and probes of an earlier try, come too late."""
    breaker = opened()
    early = breaker.begin_probe()
    second = breaker.begin_probe()
    assert breaker.note("fault", 106.0, probe=early) == "open"
    assert breaker.note("ok", 117.0) is None
    assert breaker.note("fault", 117.0) is None
    assert breaker.note("fault", 117.0, probe=second) is None
    assert breaker.state(117.0) == "half_open"
    assert breaker.may_start(117.0) == "probe"


def test_jitter_spreads_the_end_of_an_opening() -> None:
    """The caller draws it; it adds up to a tenth."""
    breaker = Breaker(BreakerRules(consecutive=1))
    breaker.note("fault", 100.0, jitter=0.5)
    assert breaker.wait_s(100.0) == pytest.approx(5.25)


def test_an_operator_has_the_last_word() -> None:
    """Forced open stays open, disabled lets all pass, auto begins anew."""
    breaker = opened()
    assert breaker.force("open", 101.0) == "forced_open"
    assert breaker.may_start(1e6) == "no"
    assert breaker.wait_s(1e6) == float("inf")
    assert breaker.note("ok", 102.0) is None
    assert breaker.force("disable", 103.0) == "disabled"
    for _ in range(50):
        assert breaker.note("fault", 103.0) is None
    assert breaker.may_start(103.0) == "yes"
    assert breaker.force("auto", 104.0) == "closed"
    assert breaker.force("auto", 104.0) is None
    assert breaker.force("resume", 104.0) is None
    for _ in range(4):
        breaker.note("fault", 104.0)
    assert breaker.note("fault", 104.0) == "open"


def test_a_successor_goes_on_where_the_breaker_stood() -> None:
    """Open for the rest of its time, with its doublings; half open begins its probes anew; counts are kept."""
    breaker = opened()
    breaker.note("fault", 105.0, probe=breaker.begin_probe())
    successor = Breaker(BreakerRules())
    successor.restore(breaker.snapshot(106.0), 2.0, 1000.0)
    assert successor.wait_s(1000.0) == pytest.approx(7.0)
    assert successor.may_start(1007.0) == "probe"
    assert successor.note("fault", 1007.0, probe=successor.begin_probe()) == "open"
    assert successor.wait_s(1007.0) == pytest.approx(20.0)

    counting = Breaker(BreakerRules())
    for number in range(19):
        counting.note("overloaded" if number % 2 else "ok", 100.0)
    successor.restore(counting.snapshot(101.0), 1.0, 500.0)
    assert successor.state(500.0) == "closed"
    assert successor.note("overloaded", 500.0) == "open"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["call", "end", "return", "lose", "force", "restart"]),
        st.sampled_from(["ok", "throttled", "fault", "overloaded", "unknown", "client"]),
        st.sampled_from(["open", "auto", "disable", "resume"]),
        st.floats(0.0, 40.0),
        st.integers(0, 7),
    ),
    max_size=80,
)


@given(EVENTS)
def test_a_key_can_always_come_back(events: list[tuple[str, OutcomeClass, str, float, int]]) -> None:
    """Whatever happened, once all calls have ended and an operator lets go, successes close it within minutes."""
    breaker, now = Breaker(BreakerRules(consecutive=2)), 0.0
    calls: list[int | None] = []
    for kind, outcome, operation, seconds, pick in events:
        now += seconds
        if kind == "call" and (admission := breaker.may_start(now)) != "no":
            calls.append(breaker.begin_probe() if admission == "probe" else None)
        elif kind == "force":
            breaker.force(operation, now)  # type: ignore[arg-type]
        elif kind == "restart":
            saved = msgspec.json.decode(msgspec.json.encode(breaker.snapshot(now)), type=SavedBreaker)
            breaker = Breaker(BreakerRules(consecutive=2))
            calls[:] = [None] * len(calls)
            breaker.restore(saved, 1.0, now)
        elif kind in ("end", "return", "lose") and calls:
            probe = calls.pop(pick % len(calls))
            if kind == "end":
                breaker.note(outcome, now, probe=probe)
            elif probe is not None:
                breaker.probe_returned(probe) if kind == "return" else breaker.note("unknown", now, probe=probe)
    for probe in calls:
        breaker.note("throttled", now, probe=probe)
    if breaker.state(now) in ("forced_open", "disabled"):
        breaker.force("auto", now)
    for _ in range(sum(PROBES) + 1):
        if breaker.state(now) == "closed":
            break
        now += breaker.wait_s(now)
        assert breaker.may_start(now) == "probe"
        breaker.note("ok", now, probe=breaker.begin_probe())
    assert breaker.state(now) == "closed"
