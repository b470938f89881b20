"""The judge's arithmetic is right: each scan against a slow and obvious one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.windows import (
    bins,
    fullest,
    jain,
    longest_gap,
    most_at_once,
    percentile,
    resumed_after,
    utilisation,
)

# Sixteenths are exact in binary: an arrival exactly one window after another must be told from one just before it.
MOMENTS = st.integers(0, 400).map(lambda n: n / 16)
ARRIVALS = st.lists(st.tuples(MOMENTS, st.integers(1, 50)), max_size=60)
WINDOWS = st.integers(1, 96).map(lambda n: n / 16)


def _by_force(arrivals: list[tuple[float, int]], window_s: float) -> float:
    """Every window that begins at an arrival, summed anew."""
    return max((sum(a for t, a in arrivals if begin <= t < begin + window_s) for begin, _ in arrivals), default=0)


@given(ARRIVALS, WINDOWS)
def test_fullest_window_equals_the_brute_force(arrivals: list[tuple[float, int]], window_s: float) -> None:
    """Over any arrivals, in any order, with and without amounts."""
    times = [at for at, _ in arrivals]
    amounts = [float(amount) for _, amount in arrivals]
    assert fullest(times, window_s, amounts) == _by_force(arrivals, window_s)
    assert fullest(times, window_s) == _by_force([(at, 1) for at in times], window_s)


@given(ARRIVALS, WINDOWS, MOMENTS)
def test_no_window_anywhere_holds_more(arrivals: list[tuple[float, int]], window_s: float, begin: float) -> None:
    """A window that begins at no arrival is not fuller than the fullest that was found."""
    times = [at for at, _ in arrivals]
    assert sum(begin <= at < begin + window_s for at in times) <= fullest(times, window_s)


def test_window_is_half_open() -> None:
    """What lies exactly one window later is outside."""
    assert fullest([0.0, 1.0], 1.0) == 1
    assert fullest([0.0, 0.999], 1.0) == 2
    assert fullest([], 1.0) == 0


@given(st.lists(MOMENTS, max_size=80))
def test_bins_lose_nothing(times: list[float]) -> None:
    """All that happened from start to end is in one bin."""
    counts = bins(times, 1.0, 20.0)
    assert len(counts) == 190
    assert sum(counts) == sum(1.0 <= at < 20.0 for at in times)


@given(st.lists(st.tuples(MOMENTS, MOMENTS), max_size=40))
def test_most_at_once_equals_the_brute_force(pairs: list[tuple[float, float]]) -> None:
    """The worst instant is the beginning of a span."""
    spans = [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]]
    worst = max((sum(b <= begin < e for b, e in spans) for begin, _ in spans), default=0)
    assert most_at_once(spans) == worst


def test_shares_gaps_and_use() -> None:
    """One small case of each, by hand."""
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert longest_gap([1.0, 2.0, 5.0], 0.0, 6.0) == 3.0
    assert longest_gap([], 0.0, 6.0) == 6.0
    assert utilisation([0.5 * n for n in range(20)], 100, 10.0, 0.0, 10.0) == pytest.approx(0.2)
    assert percentile([5.0, 1.0, 3.0], 0.5) == 3.0
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0


def test_time_of_recovery_is_the_end_of_the_longest_gap() -> None:
    """Late arrivals right after the moment do not count as recovery; none at all is never."""
    assert resumed_after([10.0, 10.1, 10.2, 13.5, 13.6], 10.05, 8.0) == math.inf  # the gap that follows is longer
    assert resumed_after([10.1, 10.2, 13.5, 14.0, 15.0, 17.0], 10.0, 8.0) == pytest.approx(3.5)
    assert resumed_after([], 10.0, 8.0) == math.inf
