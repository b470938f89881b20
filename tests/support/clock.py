"""A clock that stands still until a test moves it, and ids that count."""

from __future__ import annotations

START_S = 1_800_000_000.0


class VirtualClock:
    """Both clocks at once: Unix seconds from a round start, and a monotonic one from zero."""

    def __init__(self, start_s: float = START_S) -> None:
        self._start_s = start_s
        self._passed_s = 0.0
        self._stepped_s = 0.0

    def now(self) -> float:
        """Unix seconds."""
        return self._start_s + self._passed_s + self._stepped_s

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        return self._passed_s

    def advance(self, seconds: float) -> None:
        """Let time pass; never backwards."""
        assert seconds >= 0, f"time passes forwards, not by {seconds:g} s"
        self._passed_s += seconds

    def step(self, seconds: float) -> None:
        """Set the wall clock, forwards or back, as an operator or NTP may; the monotonic one does not notice."""
        self._stepped_s += seconds


class CountingIds:
    """Ids in order (`id-1`, `id-2`…) and one fixed "random" number, so that a test can say what comes next."""

    def __init__(self, uniform: float = 0.5) -> None:
        self._count = 0
        self._uniform = uniform

    def new(self) -> str:
        """The next id."""
        self._count += 1
        return f"id-{self._count}"

    def uniform(self) -> float:
        """The number given at the start."""
        return self._uniform
