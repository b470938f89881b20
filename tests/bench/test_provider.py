"""The stub provider enforces as it says and logs every arrival: otherwise its log could judge nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.calling import Caller, Provider
from tests.support.enforcing import Enforcer, FixedWindow, Rule, SlidingLog, TokenBucket
from tests.support.processes import Processes
from tests.support.provider import KeyConfig
from tests.support.windows import fullest

STEPS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=80)


def _passed(enforcer: Enforcer, steps: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    """The calls that came through, with their tokens; a step waits so many sixteenths."""
    now, times, tokens = 0.0, [], []
    for wait, amount in steps:
        now += wait / 16
        if enforcer.arrive(now, amount) <= 0:
            times.append(now)
            tokens.append(float(amount))
    return times, tokens


@given(STEPS)
def test_sliding_log_lets_no_window_pass(steps: list[tuple[int, int]]) -> None:
    """Requests and tokens together, over any arrivals."""
    rules = [Rule("requests", 7, 2.0), Rule("tokens", 12, 3.0)]
    times, tokens = _passed(Enforcer(rules), steps)
    assert fullest(times, 2.0) <= 7
    assert fullest(times, 3.0, tokens) <= 12


@given(STEPS)
def test_slices_hold_beside_the_window(steps: list[tuple[int, int]]) -> None:
    """A limit of 60 a minute in one-second slices lets one through in each whole second."""
    times, _ = _passed(Enforcer([Rule("requests", 60, 60.0, "token_bucket", 1.0)]), steps)
    assert len({int(at) for at in times}) == len(times)


@pytest.mark.parametrize("meter", [SlidingLog(3, 2.0), TokenBucket(3, 2.0), FixedWindow(3, 2.0)])
def test_the_wait_that_is_told_is_the_right_one(meter: SlidingLog | TokenBucket | FixedWindow) -> None:
    """A moment before it the call is refused, at its end it passes."""
    for _ in range(3):
        assert meter.wait_s(0.5, 1) == 0
        meter.take(0.5, 1)
    wait_s = meter.wait_s(0.5, 1)
    assert 0 < wait_s <= 2.0
    assert meter.wait_s(0.5 + wait_s - 0.001, 1) > 0
    assert meter.wait_s(0.5 + wait_s, 1) == pytest.approx(0, abs=1e-9)


def test_refused_calls_are_charged_where_asked() -> None:
    """Then one who keeps trying never gets through."""
    now = [n * 0.5 for n in range(20)]
    rule = [Rule("requests", 1, 2.0)]
    assert sum(Enforcer(rule).arrive(at, 0) <= 0 for at in [0.0]) == 1
    fair, harsh = Enforcer(rule), Enforcer(rule, charge_refused=True)
    assert sum(fair.arrive(at, 0) <= 0 for at in now) == 5
    assert sum(harsh.arrive(at, 0) <= 0 for at in now) == 1


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Provider]]:
    """Starts providers, and ends them with the test."""
    processes = Processes(tmp_path / "logs")

    def begin(keys: dict[str, KeyConfig]) -> Provider:
        return Provider.start(processes, keys, life_s=60)

    yield begin
    processes.close()


async def test_calls_are_logged_and_answered(start: Callable[..., Provider]) -> None:
    """The log has each arrival with its key, tag, tokens, cost and answer, refused ones too."""
    provider = start({"k": KeyConfig(rules=(Rule("requests", 3, 30.0),), latency_s=0.05)})
    caller = Caller(provider.port)
    began = time.monotonic()
    answers = await asyncio.gather(*(caller.call("k", tag=f"t/{n}", tokens=n, cost=0.25) for n in range(5)))
    caller.close()
    calls = await provider.log("k")
    assert sorted(answer.status for answer in answers) == [200, 200, 200, 429, 429]
    assert {answer.retry_after for answer in answers if answer.status == 429} <= {"30", "31"}
    assert sorted((call.tag, call.tokens, call.cost) for call in calls) == [(f"t/{n}", n, 0.25) for n in range(5)]
    assert all(began <= call.at <= call.ended <= time.monotonic() for call in calls)
    assert all(call.ended - call.at >= 0.04 for call in calls if call.status == 200)


async def test_outage_is_told_in_every_form(start: Callable[..., Provider]) -> None:
    """Seconds, a date that is not early, and junk that is sent as it is."""
    provider = start({})
    caller = Caller(provider.port)
    assert (await caller.call("k")).status == 200
    for form in ("seconds", "date", "0", "-1", "abc", "99999999"):
        ends = await provider.refuse("k", 20, form)
        answer = await caller.call("k")
        assert answer.status == 429
        match form:
            case "seconds":
                assert 19 <= int(answer.retry_after) <= 20
            case "date":
                left_s = parsedate_to_datetime(answer.retry_after).timestamp() - time.time()
                assert ends - time.monotonic() <= left_s <= 22
            case _:
                assert answer.retry_after == form
    await provider.refuse("k", 0)
    assert (await caller.call("k")).status == 200
    caller.close()
