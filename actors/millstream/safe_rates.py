"""What may start without the governor while none answers, for limits that allow it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from millstream.policy.limits import ByKey, Limit, compiled, named
from millstream.policy.pacing import ManualClock, PacedLimiter
from millstream.settings import Settings
from millstream_schemas.topology import LEADER_TTL_S

UNREACHABLE = "governor_unreachable"
"""The reason that is told where no governor answers."""

SAFE_AFTER_S = LEADER_TTL_S + 1.0
"""A governor that is silent for longer has not been followed by another: only then a worker starts by itself."""


class SafeRates:
    """One pace for each limit, evenly, as configured at the moment. Nothing else counts while nobody can count it."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._read: Mapping[str, Limit] | None = None
        self._limits: ByKey[Limit] = ByKey()
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

    def rate_of(self, keys: Iterable[str]) -> float | None:
        """Calls a second that one worker may start on all of `keys` by itself; None where one of them forbids it."""
        rates = [self._rate(key) for key in keys]
        found = [rate for rate in rates if rate is not None]
        return min(found, default=None) if len(found) == len(rates) else None

    def _rate(self, key: str) -> float | None:
        limit = self._limit(key)
        if limit is None or limit.on_governor_down != "safe_rate":
            return None
        safe = compiled(limit).safe_rate
        return None if safe is None else safe.amount / safe.window_s

    def _pace(self, key: str) -> PacedLimiter | None:
        rate = self._rate(key)
        if rate is None:
            return None
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
            self._limits = ByKey((limit.key, limit) for limit in named(limits))
        return self._limits.find(key)
