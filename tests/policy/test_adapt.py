"""Adaptation: a limit that is set too high finds what the provider bears, and stays there without hitting it again."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.adapt import BOOKED_S, NEAR, Factor, SavedFactor, Steps
from millstream.policy.limits import Adaptive
from millstream.policy.pacing import ManualClock, PacedLimiter, paced_rate
from tests.support.enforcing import Enforcer, How, Rule

Hint = Literal["exact", "whole_seconds", "none"]
JITTER_S = 0.4
STEPS = Steps.for_rate(Adaptive(), 60.0)


def full(steps: Steps = STEPS) -> Factor:
    """A factor at one, at second 100."""
    return Factor(steps, 100.0)


# --- a fleet at a provider, in virtual time ------------------------------------------------------------


@dataclass
class Fleet:
    """Calls as fast as the adapted pace allows, at a provider that refuses, until `end_s`; nobody waits for real."""

    true: int
    window_s: float
    configured: int
    latency_s: float = 0.2
    how: How = "sliding_log"
    hint: Hint = "whole_seconds"
    charge_refused: bool = False
    seed: int = 1
    changes: dict[float, int] = field(default_factory=dict[float, int])
    arrivals: list[tuple[float, bool]] = field(default_factory=list[tuple[float, bool]])

    def __post_init__(self) -> None:
        self.factor = Factor(Steps.for_rate(Adaptive(), self.window_s), 0.0)
        self._clock = ManualClock()
        self._pace = PacedLimiter(self._rate(), self._clock)
        self._starts: deque[float] = deque()
        self._provider = self._enforcing(self.true)
        self._paused_until = 0.0
        self._in_a_row = 0
        self._random = random.Random(self.seed)

    def _enforcing(self, amount: int) -> Enforcer:
        return Enforcer([Rule("requests", amount, self.window_s, self.how)], charge_refused=self.charge_refused)

    def _rate(self) -> float:
        return paced_rate(self.configured * self.factor.value, self.window_s, 0.010, JITTER_S)

    def run(self, end_s: float) -> None:
        """Go on until `end_s`."""
        answers: list[tuple[float, int, float, float]] = []
        numbers = count()
        while self._clock.now < end_s:
            start = max(self._clock.now + self._pace.delay(), self._paused_until)
            if answers and answers[0][0] <= start:
                at, _, began, wait_s = heapq.heappop(answers)
                self._clock.now = max(self._clock.now, at)
                self._answered(began, wait_s)
                continue
            self._clock.now = start
            self._pace.take(1)
            self._starts.append(start)
            for moment in [one for one in self.changes if one <= start]:
                self._provider = self._enforcing(self.changes.pop(moment))
            arrives = start + self._random.uniform(0.001, 0.020)
            wait_s = self._provider.arrive(arrives, 0)
            self.arrivals.append((arrives, wait_s <= 0))
            took_s = self.latency_s * (self._random.uniform(0.5, 1.5) if wait_s <= 0 else 0.2)
            heapq.heappush(answers, (arrives + took_s, next(numbers), start, wait_s))

    def _answered(self, began: float, wait_s: float) -> None:
        now = self._clock.now
        if wait_s <= 0:
            self._in_a_row = 0
            lately = sum(1 for at, _ in self.arrivals[-200:] if at > now - 2.0)
            changed = self.factor.grow(now, min(lately, 200) / min(200, 2.0 * self._pace.rate), began)
        else:
            changed = self._refused(began, wait_s)
        if changed:
            self._pace.set_rate(self._rate())

    def _refused(self, began: float, wait_s: float) -> bool:
        now = self._clock.now
        hint: float | None = None if self.hint == "none" else wait_s
        if hint is not None and self.hint == "whole_seconds":
            hint = max(1.0, math.ceil(hint))
        if hint is not None:
            self._paused_until = max(self._paused_until, now + hint)
        elif self._paused_until <= now:
            self._paused_until = now + min(60.0, 2.0**self._in_a_row)
            self._in_a_row += 1
        while self._starts and self._starts[0] <= now - self.window_s - JITTER_S:
            self._starts.popleft()
        level = sum(start <= began for start in self._starts) / self.configured
        return self.factor.refused(now, began, level=level, retry_after_s=hint)

    def seen(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """Calls let through over the true limit, and the part that was refused."""
        results = [passed for at, passed in self.arrivals if begin_s <= at < end_s]
        passed = sum(results)
        return passed / (self.true * (end_s - begin_s) / self.window_s), 1 - passed / len(results)


@pytest.mark.parametrize("charge_refused", [False, True])
@pytest.mark.parametrize("latency_s", [0.05, 1.0])
@pytest.mark.parametrize("hint", ["exact", "whole_seconds"])
@pytest.mark.parametrize(("true", "window_s"), [(600, 60.0), (3000, 60.0), (100, 10.0)])
def test_a_limit_set_twice_too_high_costs_little_after_a_minute(
    true: int, window_s: float, hint: Hint, latency_s: float, charge_refused: bool
) -> None:
    """Over five minutes after sixty seconds: 97 % of what the provider allows, and at most one percent refused."""
    fleet = Fleet(true, window_s, 2 * true, latency_s, hint=hint, charge_refused=charge_refused)
    fleet.run(360.0)
    goodput, refused = fleet.seen(60.0, 360.0)
    print(f"{true}/{window_s:g} s, {hint}, {latency_s} s: goodput {goodput:.4f}, refused {refused:.4f}")
    assert goodput >= 0.97
    assert refused <= 0.01


@pytest.mark.parametrize("how", ["sliding_log", "token_bucket", "fixed_window"])
@pytest.mark.parametrize("hint", ["whole_seconds", "none"])
@pytest.mark.parametrize("times", [1.3, 2, 4])
def test_every_way_of_counting_is_found_out_whatever_the_hint(how: How, hint: Hint, times: float) -> None:
    """Buckets, fixed minutes and answers without Retry-After end near the true limit as well, a little later."""
    fleet = Fleet(600, 60.0, int(600 * times), how=how, hint=hint)
    fleet.run(480.0)
    goodput, refused = fleet.seen(180.0, 480.0)
    assert goodput >= 0.965
    assert refused <= 0.01


def test_a_limit_that_is_right_is_used_whole() -> None:
    """Where the provider allows what is configured, nothing is refused and the factor stays at one."""
    fleet = Fleet(600, 60.0, 600)
    fleet.run(240.0)
    assert all(passed for _, passed in fleet.arrivals)
    assert fleet.factor.value == 1.0


def test_a_limit_that_the_provider_raises_is_used_again() -> None:
    """What was learned is tried again and again: after a raise the factor is back within minutes."""
    fleet = Fleet(300, 60.0, 600, changes={150.0: 600})
    fleet.run(150.0)
    assert fleet.factor.value < 0.55
    fleet.run(900.0)
    assert fleet.factor.value > 0.95


# --- single steps ---------------------------------------------------------------------------------------


def test_one_flight_of_refusals_counts_once() -> None:
    """Calls that began before the decrease, or were booked by then, say nothing new."""
    factor = full()
    assert factor.refused(101.0, 100.5)
    assert factor.value == pytest.approx(0.8)
    for began in (100.2, 100.9, 101.0, 101.0 + BOOKED_S):
        assert not factor.refused(102.0, began)
    assert factor.value == pytest.approx(0.8)


def test_a_provider_that_accepts_nothing_after_a_decrease_is_not_cut_again() -> None:
    """Its window is full still; only after something passed does a refusal say that the pace is too high."""
    factor = full()
    factor.refused(101.0, 100.5, level=0.9)
    value = factor.value
    assert not factor.refused(103.0, 102.5, level=0.9)
    factor.grow(104.0, 1.0, started_at=103.5)
    assert factor.refused(105.0, 104.5)
    assert factor.value < value


def test_a_full_window_tells_the_true_limit_at_once() -> None:
    """A long Retry-After belongs to a provider that counts over the window, so our window's contents are its limit."""
    factor = full()
    factor.refused(130.0, 129.9, level=0.55, retry_after_s=30.0)
    assert factor.value == pytest.approx(0.5445)
    assert factor.snapshot(130.0).ceiling == 0.55


def test_a_refusal_by_a_slice_says_nothing_of_the_window() -> None:
    """Two calls in the first second, refused for a second, do not make the limit two a minute."""
    factor = full()
    factor.refused(101.0, 100.9, level=0.01, retry_after_s=1.0)
    assert factor.value == pytest.approx(0.8)


def test_growth_is_a_step_per_interval_and_only_while_in_use() -> None:
    """Two percent of the configured amount in ten seconds; what is not used is not known to be borne."""
    factor = full()
    factor.ramp(100.0, 100.0)
    assert factor.value == 0.5
    assert not factor.grow(109.9, 1.0)
    assert factor.grow(110.0, 1.0)
    assert factor.value == pytest.approx(0.52)
    assert not factor.grow(120.0, 0.5)
    assert not factor.grow(129.0, 1.0)
    assert factor.grow(130.0, 0.7)


def test_growth_stops_just_below_a_known_ceiling() -> None:
    """It comes near in halves and waits there for a whole interval before it tries what lies above."""
    factor = full()
    factor.refused(130.0, 129.9, level=0.5, retry_after_s=30.0)
    for second in range(131, 186):
        factor.grow(float(second), 1.0)
        assert factor.value <= 0.5
    assert factor.value == pytest.approx(NEAR * 0.5, abs=1e-3)
    for second in range(186, 260):
        factor.grow(float(second), 1.0)
    assert factor.value > 0.5


def test_a_refused_try_goes_back_to_what_was_borne_and_makes_tries_rarer() -> None:
    """Not a fifth is lost, only the way back; the next try comes after twice the time."""
    factor = full()
    factor.refused(130.0, 129.9, level=0.5, retry_after_s=30.0)
    tries: list[float] = []
    for second in range(131, 1600):
        now, before = float(second), factor.value
        factor.grow(now, 1.0)
        if factor.value > 0.5 >= before:
            tries.append(now)
            assert factor.refused(now + 1.0, now + 0.9, level=0.5)
            assert factor.value == pytest.approx(0.495)
    waits = [later - earlier for earlier, later in pairwise(tries)]
    assert len(waits) >= 3
    assert all(later > 1.5 * earlier for earlier, later in pairwise(waits))


def test_after_a_ramp_refusal_growth_is_capped() -> None:
    """Half at once, then at most half as much again per quarter of an hour."""
    factor = full()
    factor.ramp(100.0, 100.0)
    highest = 0.0
    for second in range(101, 1000):
        factor.grow(float(second), 1.0)
        highest = max(highest, factor.value)
    assert highest == pytest.approx(0.75)
    for second in range(1000, 1400):
        factor.grow(float(second), 1.0)
    assert factor.value > 0.9


def test_the_factor_stays_between_its_least_and_one() -> None:
    """However often a provider refuses, something still flows."""
    factor = full()
    for number in range(100):
        now = 200.0 + 10 * number
        factor.grow(now - 1, 1.0)
        factor.refused(now, now - 0.1, level=0.001)
    assert factor.value == pytest.approx(0.05, abs=0.06)
    assert factor.value >= 0.05


def test_places_fall_on_overload_and_grow_slowly_while_half_of_them_are_in_use() -> None:
    """Concurrency: times 0.7, then small steps, guarded by use."""
    factor = full(Steps.for_places(Adaptive()))
    factor.refused(101.0, 100.5)
    assert factor.value == pytest.approx(0.7)
    assert not factor.grow(120.0, 0.4)
    assert factor.grow(131.0, 0.5)
    assert factor.value == pytest.approx(0.72)


def test_recovery_after_a_breaker_begins_low_and_comes_back() -> None:
    """No burst: a quarter, then steps towards what was borne before."""
    factor = full()
    factor.recover(100.0, 0.25)
    assert factor.value == 0.25
    seen = [factor.value]
    for second in range(101, 400):
        factor.grow(float(second), 1.0)
        seen.append(factor.value)
    assert max(later - earlier for earlier, later in pairwise(seen)) <= 0.1 + 1e-9
    assert factor.value == 1.0


def test_a_new_configured_limit_forgets_what_was_learned() -> None:
    """A factor is a part of what is configured; of another amount it says nothing."""
    factor = full()
    factor.refused(130.0, 129.9, level=0.5, retry_after_s=30.0)
    factor.reset(131.0)
    assert (factor.value, factor.snapshot(131.0).ceiling) == (1.0, None)
    assert factor.refused(131.2, 131.1)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["refused", "grow", "ramp", "recover"]),
        st.floats(0.0, 100.0),
        st.one_of(st.none(), st.floats(0.0, 3.0)),
        st.one_of(st.none(), st.floats(0.0, 200.0)),
    ),
    max_size=60,
)


@given(MOVES)
def test_whatever_happens_the_factor_is_in_range_and_outlives_a_restart(
    moves: list[tuple[str, float, float | None, float | None]],
) -> None:
    """In [min, 1] at every step, never up on a refusal, never down on growth; a snapshot loses no caution."""
    factor, now = full(), 100.0
    for kind, seconds, level, hint in moves:
        now += seconds
        before = factor.value
        if kind == "refused":
            factor.refused(now, now - seconds / 2, level=level, retry_after_s=hint)
            assert factor.value <= before
        elif kind == "grow":
            factor.grow(now, level if level is not None else 1.0, now - seconds / 2)
            assert before <= factor.value <= before + 0.1 + 1e-9
        elif kind == "ramp":
            factor.ramp(now, now)
            assert factor.value <= before
        else:
            factor.recover(now, 0.25)
        assert 0.05 <= factor.value <= 1.0
        saved = msgspec.json.decode(msgspec.json.encode(factor.snapshot(now)), type=SavedFactor)
        successor = Factor(STEPS, now + 5)
        successor.restore(saved, 5.0, now + 5)
        assert successor.value <= factor.value + 1e-9
