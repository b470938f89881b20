"""What a provider's log shows of a limit: the fullest window of all, bins, shares and gaps. Exact, and free of I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise


def fullest(times: Sequence[float], window_s: float, amounts: Sequence[float] | None = None) -> float:
    """The most that falls into any half-open window of `window_s` seconds; each time counts 1, or its amount.

    Exact: a fullest window can be moved until it begins at an arrival, so only those are looked at. What lies exactly
    `window_s` after another is not in one window with it.
    """
    counted = amounts if amounts is not None else [1.0] * len(times)
    arrivals = sorted(zip(times, counted, strict=True))
    most = inside = 0.0
    first = 0
    for at, amount in arrivals:
        inside += amount
        while at - arrivals[first][0] >= window_s:
            inside -= arrivals[first][1]
            first += 1
        most = max(most, inside)
    return most


def bins(times: Iterable[float], start: float, end: float, width_s: float = 0.1) -> list[int]:
    """How many of `times` fall into each bin of `width_s` seconds from `start` up to `end`."""
    counts = [0] * max(0, math.ceil((end - start) / width_s))
    for at in times:
        if start <= at < end:
            counts[min(int((at - start) / width_s), len(counts) - 1)] += 1
    return counts


def between(times: Iterable[float], start: float, end: float) -> list[float]:
    """Those of `times` in the half-open interval, in order."""
    return sorted(at for at in times if start <= at < end)


def utilisation(
    times: Sequence[float],
    limit: float,
    window_s: float,
    start: float,
    end: float,
    amounts: Sequence[float] | None = None,
) -> float:
    """Used over allowed from `start` to `end`: 1.0 is the whole limit."""
    counted = amounts if amounts is not None else [1.0] * len(times)
    used = sum(amount for at, amount in zip(times, counted, strict=True) if start <= at < end)
    return used / (limit * (end - start) / window_s)


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1.0 where all shares are equal, 1/n where one has everything."""
    squares = sum(share * share for share in shares)
    return 1.0 if squares == 0 else sum(shares) ** 2 / (len(shares) * squares)


def longest_gap(times: Iterable[float], start: float, end: float) -> float:
    """The longest stretch from `start` to `end` in which nothing happened, its edges included."""
    edges = [start, *between(times, start, end), end]
    return max(later - earlier for earlier, later in pairwise(edges))


def resumed_after(times: Iterable[float], moment: float, within_s: float) -> float:
    """Seconds from `moment` to the end of the longest gap that lies in the `within_s` seconds after it.

    What was granted before a leader died may still begin: so the first arrival afterwards says nothing.
    """
    seen = [moment, *between(times, moment, moment + within_s)]
    if len(seen) == 1:
        return math.inf
    gaps = [(later - earlier, later) for earlier, later in pairwise(seen)]
    tail = moment + within_s - seen[-1]
    longest, ends = max(gaps)
    return math.inf if tail > longest else ends - moment


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """How many of the half-open spans from begin to end overlap at the worst instant."""
    marks: list[tuple[float, int]] = []
    for begin, end in spans:
        marks += [(begin, 1), (end, -1)]
    most = now = 0
    for _, change in sorted(marks):  # an end sorts before a begin of the same instant
        now += change
        most = max(most, now)
    return most


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which `part` (0 to 1) of `values` lie, by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(part * len(ordered)) - 1))]
