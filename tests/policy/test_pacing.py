"""Pacing: even starts, exact windows, no credit for idle time."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from aiolimiter import AsyncLimiter
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.pacing import ManualClock, Meter, PacedLimiter, paced_rate
from millstream.policy.window_log import WindowLog


def limiter(rate: float = 10.0) -> tuple[PacedLimiter, ManualClock]:
    """A limiter and the clock that it reads."""
    clock = ManualClock(100.0)
    return PacedLimiter(rate, clock), clock


def test_aiolimiter_still_has_the_private_names_that_pacing_rests_on() -> None:
    """A new aiolimiter that renames its insides fails here, not in a fleet."""
    plain = AsyncLimiter(5, 2)
    assert (plain._level, plain._last_check, plain._rate_per_sec) == (0.0, 0.0, 2.5)
    plain._event_loop = ManualClock(4.0)  # type: ignore[assignment]
    plain._level, plain._last_check = 4.0, 3.0
    plain._leak()
    assert (plain._level, plain._last_check) == (1.5, 4.0)
    assert (plain.max_rate, plain.time_period) == (5, 2)
    assert plain.has_capacity(3.5)
    assert not plain.has_capacity(3.6)


async def test_the_bucket_still_works_as_a_plain_limiter() -> None:
    """What is inherited keeps its meaning: an acquire that fits does not wait."""
    paced = PacedLimiter(1000.0, asyncio.get_running_loop())
    await asyncio.wait_for(paced.acquire(1), 5)
    assert paced.delay() == 0.0  # the tolerance: a few starts at this rate
    assert paced.snapshot() > 0


def test_starts_are_spaced_evenly() -> None:
    """At ten a second each start waits for its tenth of a second."""
    paced, clock = limiter()
    starts: list[float] = []
    for _ in range(20):
        clock.now += paced.delay()
        starts.append(clock.now)
        paced.take(1)
    gaps = [later - earlier for earlier, later in pairwise(starts[1:])]
    assert gaps == pytest.approx([0.1] * 18)


def test_a_large_amount_is_admitted_at_once_and_paid_off_by_its_successor() -> None:
    """Debt: 5000 units at 1000 a second put the next start off by five seconds."""
    paced, _ = limiter(1000.0)
    assert paced.delay() == 0.0
    paced.take(5000)
    assert paced.delay() == pytest.approx(4.99, abs=1e-3)
    paced.credit(3000)
    assert paced.delay() == pytest.approx(1.99, abs=1e-3)
    paced.debit(1000)
    assert paced.delay() == pytest.approx(2.99, abs=1e-3)


def test_a_change_of_rate_keeps_the_debt_in_seconds() -> None:
    """Halving the rate must not double the wait that was promised."""
    paced, clock = limiter(1000.0)
    paced.take(2000)
    before = paced.snapshot()
    paced.set_rate(500.0)
    assert paced.snapshot() == pytest.approx(before)
    clock.now += 1.0
    assert paced.snapshot() == pytest.approx(before - 1.0)
    assert paced.rate == 500.0


def test_credit_and_idle_time_never_become_a_burst() -> None:
    """After an hour without use, and a gift beyond all debt, the second start still waits."""
    paced, clock = limiter()
    paced.take(1)
    paced.credit(1000)
    clock.now += 3600
    assert paced.delay() == 0.0
    paced.take(1)
    assert paced.delay() > 0.08


def test_a_restored_debt_only_ever_adds() -> None:
    """What a predecessor owed is owed on; a smaller debt changes nothing."""
    paced, _ = limiter()
    paced.restore(3.0)
    assert paced.snapshot() == pytest.approx(3.0)
    paced.restore(1.0)
    paced.restore(-5.0)
    assert paced.snapshot() == pytest.approx(3.0)


def test_a_start_booked_ahead_blocks_the_time_until_then() -> None:
    """Nobody may start between now and a booked start, else two would follow each other too closely."""
    paced, _ = limiter()
    paced.take(1, ahead_s=0.2)
    assert paced.delay() == pytest.approx(0.29)


@given(
    limit=st.integers(1, 200),
    idles=st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.003, 0.2, 5.0, 61.0]), min_size=1, max_size=400),
    late=st.lists(st.floats(0, 0.35), min_size=1, max_size=17),
)
def test_no_window_holds_more_than_the_limit(limit: int, idles: list[float], late: list[float]) -> None:
    """Whatever the pauses in demand and however late each start is, every window of a minute keeps the limit."""
    clock = ManualClock()
    paced = PacedLimiter(paced_rate(limit, 60.0, 0.010, 0.35), clock)
    starts: list[float] = []
    for number, idle in enumerate(idles):
        clock.now += idle
        clock.now += paced.delay()
        paced.take(1)
        starts.append(clock.now + late[number % len(late)])
    starts.sort()
    assert all(starts[i + limit] - starts[i] >= 60.0 for i in range(len(starts) - limit))


def test_a_window_log_says_exactly_when_there_is_room() -> None:
    """Room comes when enough of the oldest has left the window, not before."""
    log = WindowLog(60.0)
    log.add(0.0, 40)
    log.add(10.0, 50)
    assert log.delay(10, 100, 20.0) == 0.0
    assert log.delay(11, 100, 20.0) == 40.0
    assert log.delay(60, 100, 20.0) == 50.0
    assert log.delay(101, 100, 20.0) == float("inf")
    assert log.delay(50, 100, 60.0) == 0.0
    assert log.total == 50


def test_a_charge_that_left_the_window_can_be_corrected_without_effect() -> None:
    """A settle that comes after the window must not make the sum negative."""
    log = WindowLog(60.0)
    charge = log.add(0.0, 40)
    log.change(charge, 10)
    assert log.total == 10
    log.expire(60.0)
    log.change(charge, 0)
    assert log.total == 0


@given(st.lists(st.tuples(st.floats(0, 70), st.integers(0, 50)), max_size=300), st.floats(60, 80))
def test_a_saved_log_never_forgets_and_never_makes_older(charges: list[tuple[float, int]], now: float) -> None:
    """The short form of a log holds at least as much as the log itself, at any later time."""
    log, copy = WindowLog(60.0), WindowLog(60.0)
    for at, amount in sorted(charges):
        log.add(at, amount)
    ages = log.ages(now)
    assert len(ages) <= 350
    for age, amount in ages:
        copy.add(now - age, amount)
    for later in (0.0, 7.0, 30.0, 55.0, 61.0):
        log.expire(now + later)
        copy.expire(now + later - 1e-6)  # rounding
        assert copy.total >= log.total


@given(st.data())
def test_a_meter_keeps_the_window_for_amounts_of_any_size(data: st.DataObject) -> None:
    """Amounts up to the whole limit, corrected up to their estimate: no window holds more than the limit."""
    clock = ManualClock()
    meter = Meter(100, clock, window_s=60.0, tolerance_s=0.01, jitter_s=0.35)
    spent: list[tuple[float, int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        amount = data.draw(st.integers(0, 100))
        clock.now += data.draw(st.sampled_from([0.0, 0.0, 1.0, 59.0]))
        clock.now += meter.delay(amount)
        charge = meter.take(amount, 0.0)
        if data.draw(st.booleans()):
            amount = data.draw(st.integers(0, amount))
            meter.correct(charge, amount)
        spent.append((clock.now + data.draw(st.sampled_from([0.0, 0.35])), amount))
    spent.sort()
    for start, _ in spent:
        assert sum(amount for at, amount in spent if start <= at < start + 60.0) <= 100


def meter(per_window: float = 6000, window_s: float = 60.0, index: int = 1) -> tuple[Meter, ManualClock]:
    """A meter of tokens and its clock."""
    clock = ManualClock(1000.0)
    return Meter(per_window, clock, window_s=window_s, tolerance_s=0.01, jitter_s=0.4, index=index), clock


def test_what_a_settle_gives_back_too_late_is_owed_for_a_moment() -> None:
    """The wait was in vain: the next admission is charged less, but not after an idle time."""
    for after_s, expected_s in ((0.0, 5.0), (2.5, 7.5), (30.0, 10.0)):
        tokens, clock = meter()
        charge = tokens.take(1000, 0.0)
        clock.now += tokens.delay(1000)
        tokens.correct(charge, 500)
        clock.now += after_s
        tokens.take(1000, 0.0)
        assert tokens.pace.delay() == pytest.approx(expected_s, abs=0.15)


def test_time_that_was_waited_for_something_else_is_made_up_for() -> None:
    """The window, or another limit, held one back that the pace would have let go: what follows comes sooner."""
    for waited_since_s, expected_s in ((None, 10.0), (4.0, 6.0), (20.0, 0.0)):
        tokens, clock = meter()
        tokens.take(1000, 0.0)
        clock.now += tokens.delay(1000) + 20.0
        tokens.take(1000, 0.0) if waited_since_s is None else tokens.take(1000, 0.0, clock.now - waited_since_s)
        assert tokens.pace.delay() == pytest.approx(expected_s, abs=0.15)


def test_what_is_made_up_for_never_passes_the_window() -> None:
    """It only brings the pace back to what the window allows."""
    tokens, clock = meter()
    since = clock.now
    tokens.take(3000, 0.0, since)
    assert tokens.delay(3001) == pytest.approx(60.4, abs=0.01)
    clock.now += tokens.delay(3001)
    tokens.take(3001, 0.0, since)
    assert tokens.delay(1) == pytest.approx(0.0, abs=1.0)
    assert tokens.delay(3000) == pytest.approx(60.4, abs=0.01)


def test_an_amount_over_what_is_in_effect_goes_alone() -> None:
    """A limit that was lowered must not shut out what it allowed as configured."""
    tokens, clock = meter(per_window=100)
    tokens.take(10, 0.0)
    tokens.set_limit(20.5)
    assert tokens.per_window == 21
    wait_s = tokens.delay(90)
    assert 59 <= wait_s <= 61
    clock.now += wait_s
    assert tokens.delay(90) == 0.0


def test_an_assumed_gap_is_as_full_as_the_pace_allows_and_leaves_room_for_it() -> None:
    """A successor counts all that may have been admitted unseen, and can go on at the same pace."""
    tokens, clock = meter(per_window=600, index=0)
    tokens.assume(3.0)
    assert tokens.used(clock.now) == pytest.approx(29, abs=2)
    assert 0.1 <= tokens.delay(1) <= 0.12
    full, clock = meter(per_window=600, index=0)
    for step in range(596):
        full.log.add(clock.now - 3.0 - 60.4 * (1 - step / 596), 1)
    full.assume(3.0)
    assert full.delay(1) < 0.5


def test_a_log_of_a_fast_limit_stays_small() -> None:
    """A million admissions in a window are some thousands of entries, and none is forgotten too early."""
    log = WindowLog(60.0)
    for step in range(100_000):
        log.add(step * 0.0005, 1)
    assert len(log._cells) < 20_000
    log.expire(60.0 + 24.9)
    assert 50_200 <= log.total <= 50_300
    assert log.within(85.0, 60.0) <= log.total


def test_the_level_of_a_window_is_what_it_held_when_a_call_began() -> None:
    """Later admissions are left out; where most of that window is forgotten nothing is said."""
    requests, clock = meter(per_window=600, index=0)
    for _ in range(300):
        requests.take(1, 0.0)
        clock.now += 0.1
    began = clock.now
    for _ in range(100):
        requests.take(1, 0.0)
        clock.now += 0.1
    assert requests.level(began, clock.now) == pytest.approx(300, abs=10)
    assert requests.used_fraction(clock.now, 5.0) == pytest.approx(1.0, abs=0.05)
    clock.now += 55
    assert requests.used_fraction(clock.now, 5.0) == 0.0
    assert requests.level(clock.now - 40, clock.now) is None


def test_the_error_of_estimates_is_remembered_for_a_while() -> None:
    """Calls that take a fifth more than reserved say 0.2; a request's count is no estimate."""
    tokens, _ = meter()
    assert tokens.estimate_error is None
    for _ in range(50):
        tokens.settle(tokens.take(10, 0.0), 12)
    assert tokens.estimate_error == pytest.approx(0.2)
    for _ in range(300):
        tokens.settle(tokens.take(10, 0.0), 10)
    assert tokens.estimate_error == pytest.approx(0.0, abs=0.01)


def test_a_debt_that_nobody_waits_for_can_be_cut() -> None:
    """Down to so many seconds, and never up."""
    tokens, _ = meter()
    tokens.take(60_000, 0.0)
    tokens.forget_debt_over(60.0)
    assert tokens.pace.snapshot() == pytest.approx(60.0)
    tokens.forget_debt_over(600.0)
    assert tokens.pace.snapshot() == pytest.approx(60.0)
