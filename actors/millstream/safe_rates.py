"""What a worker may start by itself while no governor answers, for limits that allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millstream.policy.limits import Limit, compiled, is_template, matcher, named
from millstream.policy.pacing import ManualClock, PacedLimiter
from millstream.settings import Settings


class SafeRates:
    """One pace for each limit, evenly, as configured at the moment. Nothing else counts while nobody can count it."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._read: Mapping[str, Limit] | None = None
        self._exact: dict[str, Limit] = {}
        self._templates: list[tuple[Limit, Callable[[str], object]]] = []
        self._clock = ManualClock()
        self._paces: dict[str, PacedLimiter] = {}

    def take(self, keys: tuple[str, ...], requests: int, within_s: float, now: float) -> float | None:
        """Seconds until a call may start, which it then must; None where a key forbids it, or it takes too long."""
        self._clock.now = max(self._clock.now, now)
        paces = [self._pace(key) for key in keys]
        found = [pace for pace in paces if pace is not None]
        if len(found) < len(keys):
            return None
        wait_s = max((pace.delay() for pace in found), default=0.0)
        if wait_s > within_s:
            return None
        for pace in found:
            pace.take(requests, wait_s)
        return wait_s

    def _pace(self, key: str) -> PacedLimiter | None:
        limit = self._limit(key)
        if limit is None or limit.on_governor_down != "safe_rate":
            return None
        safe = compiled(limit).safe_rate
        if safe is None:
            return None
        rate = safe.amount / safe.window_s
        pace = self._paces.get(key)
        if pace is None:
            pace = self._paces[key] = PacedLimiter(rate, self._clock)
        elif pace.rate != rate:
            pace.set_rate(rate)
        return pace

    def _limit(self, key: str) -> Limit | None:
        """The limit of a key: by its own name, else the first template that it fits."""
        limits = self._settings().limits
        if limits is not self._read:
            self._read = limits
            table = named(limits)
            self._exact = {limit.key: limit for limit in table if not is_template(limit.key)}
            self._templates = [(limit, matcher(limit.key).match) for limit in table if is_template(limit.key)]
        exact = self._exact.get(key)
        if exact is not None:
            return exact
        return next((limit for limit, fits in self._templates if fits(key)), None)
