"""What the model server counts: units in a sliding window, and calls by answer. Plain objects; time is an argument."""

from __future__ import annotations

import math
from collections import deque

MINUTE_S = 60.0


class SlidingWindow:
    """At most `limit` units in any half-open window of `window_s` seconds; time is the caller's and never goes back."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit if limit > 0 else math.inf
        self._window_s = window_s
        self._taken: deque[tuple[float, int]] = deque()
        self._sum = 0

    def wait_s(self, now: float, cost: int) -> float:
        """Return the seconds until `cost` fits: 0 for at once, infinity for never."""
        self._forget(now)
        if cost > self._limit:
            return math.inf
        over = self._sum + cost - self._limit
        for taken_at, units in self._taken:
            if over <= 0:
                break
            over -= units
            if over <= 0:
                return taken_at + self._window_s - now
        return 0.0

    def take(self, now: float, cost: int) -> None:
        """Count `cost` units at `now`, whether they fit or not."""
        self._taken.append((now, cost))
        self._sum += cost

    def used(self, now: float) -> int:
        """Return the units inside the window that ends now."""
        self._forget(now)
        return self._sum

    def full_refill_s(self, now: float) -> float:
        """Return the seconds until nothing is left in the window."""
        self._forget(now)
        return self._taken[-1][0] + self._window_s - now if self._taken else 0.0

    def _forget(self, now: float) -> None:
        while self._taken and now >= self._taken[0][0] + self._window_s:
            self._sum -= self._taken.popleft()[1]


class Stats:
    """Counts every call at its arrival, answered or refused, with the most that fell into any 60 s."""

    def __init__(self) -> None:
        self.by_status: dict[int, int] = {}
        self.calls = 0
        self.max_calls_in_any_minute = 0
        self.tokens = 0
        self._minute = SlidingWindow(0, MINUTE_S)

    def arrived(self, now: float) -> None:
        """Count one call; the fullest window always ends at an arrival, so looking at arrivals is exact."""
        self.calls += 1
        self._minute.take(now, 1)
        self.max_calls_in_any_minute = max(self.max_calls_in_any_minute, self._minute.used(now))

    def answered(self, status: int) -> None:
        """Count one answer."""
        self.by_status[status] = self.by_status.get(status, 0) + 1

    def snapshot(self) -> dict[str, int]:
        """Return all counts; `calls` minus the others is what is in flight."""
        return {
            "calls": self.calls,
            "ok": self.by_status.get(200, 0),
            "status_400": self.by_status.get(400, 0),
            "status_429": self.by_status.get(429, 0),
            "status_500": self.by_status.get(500, 0),
            "tokens": self.tokens,
            "max_calls_in_any_minute": self.max_calls_in_any_minute,
        }
