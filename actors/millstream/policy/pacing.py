"""Pacing: how often something may start, so that no window of time ever holds more than its limit.

`PacedLimiter` spaces starts evenly and gives no credit for idle time; `Meter` is that and the exact bound of a window
for one dimension (requests or tokens) of a limit.
"""

from __future__ import annotations

from math import ceil, inf
from typing import Any, Protocol, cast

from aiolimiter import AsyncLimiter

from millstream.policy.window_log import Charge, WindowLog

NOTHING_S = 1e-9
"""Differences below this are rounding, not time."""

MARGIN = 1 + 1e-6
"""Keeps sums of floats from letting the N+1st start slip into a window."""

KEPT = 0.98
"""Weight that earlier calls keep in the estimate's error with each call that follows."""


class Clock(Protocol):
    """Where a limiter reads the time: seconds that never go back."""

    def time(self) -> float: ...
    def is_closed(self) -> bool: ...


class ManualClock:
    """A clock that shows what it was last set to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def is_closed(self) -> bool:
        return False


def paced_rate(limit: float, window_s: float, tolerance_s: float, jitter_s: float) -> float:
    """Starts per second that keep any window of `window_s` at or below `limit`.

    `tolerance_s` is how far a start may run ahead of its place, `jitter_s` how far behind its grant.
    """
    return limit / ((window_s + tolerance_s + jitter_s) * MARGIN)


class PacedLimiter(AsyncLimiter):
    """aiolimiter's leaky bucket, which may go into debt and says how long to wait instead of being awaited.

    An admission takes its whole amount at once and the next one waits until that is paid off, so that amounts above
    the bucket's size are served as well. Rests on private names of aiolimiter 1.3 (a test watches them).
    """

    __slots__ = ("_tolerance_s",)

    def __init__(self, rate: float, clock: Clock, tolerance_s: float = 0.010) -> None:
        size = 1 + rate * tolerance_s
        super().__init__(size, size / rate)
        self._tolerance_s = tolerance_s
        self._event_loop = cast(Any, clock)  # the bucket asks its loop for nothing but the time
        self._last_check = clock.time()

    @property
    def rate(self) -> float:
        """Units per second."""
        return self._rate_per_sec

    def delay(self) -> float:
        """Seconds until one admission is allowed."""
        self._leak()
        return self._seconds_over(self._level)

    def delay_after(self, amount: float, ahead_s: float = 0.0) -> float:
        """Seconds until an admission is allowed, if `amount` were taken that begins in `ahead_s`."""
        self._leak()
        return self._seconds_over(self._level_after(amount, ahead_s))

    def _level_after(self, amount: float, ahead_s: float) -> float:
        return max(self._level, ahead_s * self._rate_per_sec) + amount

    def _seconds_over(self, level: float) -> float:
        over_s = (level + 1 - self.max_rate) / self._rate_per_sec
        return over_s if over_s > NOTHING_S else 0.0

    def take(self, amount: float, ahead_s: float = 0.0) -> None:
        """Admit `amount`, which begins `ahead_s` from now; the time until then cannot be used by anything else."""
        self._leak()
        self._level = self._level_after(amount, ahead_s)

    def debit(self, amount: float) -> None:
        """Charge `amount` that was used beyond what was taken."""
        self._leak()
        self._level += amount

    def credit(self, amount: float) -> float:
        """Lower the debt by `amount` that was taken and not used; returns the part beyond the debt, which is not kept."""
        self._leak()
        rest = max(0.0, amount - self._level)
        self._level = max(0.0, self._level - amount)
        return rest

    def set_rate(self, rate: float) -> None:
        """Change the rate from now on; the debt stays the same in seconds."""
        self._leak()
        self._level *= rate / self._rate_per_sec
        self._rate_per_sec = rate
        self.max_rate = 1 + rate * self._tolerance_s
        self.time_period = self.max_rate / rate

    def snapshot(self) -> float:
        """The debt in seconds."""
        self._leak()
        return self._level / self._rate_per_sec

    def restore(self, debt_s: float) -> None:
        """Take up a debt of `debt_s` seconds where it is larger than the present one."""
        self._leak()
        self._level = max(self._level, debt_s * self._rate_per_sec)


class Meter:
    """One dimension of a limit: starts are evenly paced, and no window ever holds more than `per_window`.

    `index` says which of a need's amounts it counts. After a large amount the next start may have to wait for the
    window as well as for the pace.

    Pace that was lost through no fault of the callers is made up for: when a start came later than pace and window
    allowed, because its acquire waited for another limit, and when a settle gives back more than the present debt. The
    next admissions are then charged that much less: at most the largest admission, and only for as long as it could
    have been used. Idle time earns nothing, and the bound of the window holds in any case.
    """

    __slots__ = (
        "_clock", "_jitter_s", "_owed", "_owed_at", "_ready_at", "_reserved", "_settled", "_tolerance_s", "index", "largest", "log",
        "pace", "per_window", "window_s",
    )  # fmt: skip

    def __init__(
        self,
        per_window: float,
        clock: Clock,
        *,
        window_s: float,
        tolerance_s: float,
        jitter_s: float,
        index: int = 0,
    ) -> None:
        self.index = index
        self.per_window = ceil(per_window)
        self.window_s = window_s
        self._tolerance_s = tolerance_s
        self._jitter_s = jitter_s
        self._clock = clock
        self.pace = PacedLimiter(self._rate_for(per_window), clock, tolerance_s)
        self.log = WindowLog((window_s + jitter_s) * MARGIN)
        self.largest = 0
        self._owed = 0.0
        self._owed_at = 0.0
        self._ready_at = 0.0  # when pace and window let the next one go
        self._reserved = 0.0
        self._settled = 0.0

    def _rate_for(self, per_window: float) -> float:
        return paced_rate(per_window, self.window_s, self._tolerance_s, self._jitter_s)

    def delay(self, amount: int) -> float:
        """Seconds until `amount` may be admitted; one that is larger than the limit is admitted into an empty window."""
        paced_s = self.pace.delay()
        limit = self.per_window
        if self.log.total + amount <= limit:  # a total with what has left the window is never too small
            return paced_s
        return max(paced_s, self.log.delay(amount, max(limit, amount), self._clock.time()))

    def leaves(self, amount: int, ahead_s: float, then: int, within_s: float) -> bool:
        """True when `then` can still be admitted in `within_s` after `amount` was admitted in `ahead_s`."""
        self.log.expire(self._clock.time())
        room = self.log.total + amount + then <= self.per_window
        return room and self.pace.delay_after(amount, ahead_s) <= within_s

    def take(self, amount: int, ahead_s: float, since: float = inf) -> Charge:
        """Admit `amount`, which begins in `ahead_s`; `since` is when its acquire began to wait (infinite: never)."""
        now = self._clock.time()
        self.log.expire(now)
        late_s = now + ahead_s - max(self._ready_at, since)
        if late_s > NOTHING_S or self._owed > 0:
            self._owe(late_s * self.pace.rate)
        paced = max(0.0, amount - self._owed)
        self._owed -= amount - paced
        self.pace.take(paced, ahead_s)
        self.largest = max(self.largest, amount)
        charge = self.log.add(now + ahead_s, amount)
        self._ready_at = now + self.delay(self.largest)  # a wait for the own window is no time lost: it owes nothing
        return charge

    def _owe(self, amount: float) -> None:
        """Charge the next admissions `amount` less; what is owed runs out at the rate at which it could be used."""
        now = self._clock.time()
        left = max(0.0, self._owed - (now - self._owed_at) * self.pace.rate)
        self._owed, self._owed_at = min(left + max(0.0, amount), float(self.largest)), now

    def correct(self, charge: Charge, actual: int) -> None:
        """Replace what was charged by what was used."""
        if actual > charge.amount:
            # More than a window of debt keeps nothing that the log does not keep, and would close the limit for days.
            most = max(0.0, (self.window_s - self.pace.snapshot()) * self.pace.rate)
            self.pace.debit(min(actual - charge.amount, most))
        elif actual < charge.amount:
            rest = self.pace.credit(charge.amount - actual)
            if rest > 0:
                self._owe(rest)
        self.log.change(charge, actual)

    def settle(self, charge: Charge, actual: int) -> None:
        """Replace an estimate by what a call took, and remember for a while how far it was off."""
        self._reserved = self._reserved * KEPT + charge.amount
        self._settled = self._settled * KEPT + actual
        if actual != charge.amount:
            self.correct(charge, actual)

    @property
    def estimate_error(self) -> float | None:
        """What was used over what was reserved, minus one; recent calls count more. None before the first settle."""
        return self._settled / self._reserved - 1 if self._reserved > 0 else None

    def set_limit(self, per_window: float) -> None:
        """Change the limit from now on; debt in seconds and what the window holds are kept."""
        self.per_window = ceil(per_window)
        self.pace.set_rate(self._rate_for(per_window))

    def used(self, now: float) -> int:
        """What was admitted in the last window."""
        return self.log.within(now, self.window_s)

    def used_fraction(self, now: float, over_s: float) -> float:
        """The part of what the pace allows that was used in the last `over_s` seconds, or in a few starts' time."""
        over_s = min(self.window_s, max(over_s, 3 * max(1, self.largest) / self.pace.rate))
        return self.log.within(now, over_s) / (self.pace.rate * over_s)

    def level(self, started_at: float, now: float) -> float | None:
        """What the window held at `started_at`, when a call began; None where less than half of it is still known."""
        amount, seconds = self.log.until(started_at, self.window_s, now)
        return amount * self.window_s / seconds if seconds >= self.window_s / 2 else None

    def idle(self) -> bool:
        """True where a new meter would do the same."""
        self.log.expire(self._clock.time())
        return self.log.total == 0 and self.pace.snapshot() == 0.0

    def forget_debt_over(self, seconds: float) -> None:
        """Cut the debt to `seconds`: in shadow mode nobody waits for it, so it would grow without bound."""
        self.pace.credit(max(0.0, self.pace.snapshot() - seconds) * self.pace.rate)

    def assume(self, since_s: float, until_s: float = 0.0) -> None:
        """Assume that a predecessor admitted as much as it could from `since_s` ago until `until_s` ago.

        As much as the pace allows, and one admission as large as the largest that is known.
        """
        now, rate = self._clock.time(), self.pace.rate
        largest = max(1, self.largest)
        span_s = min(max(0.0, since_s - until_s), self.log.span_s)
        amount = int(rate * span_s)
        parts = min(amount, 100)
        for part in range(parts):
            share = amount * (part + 1) // parts - amount * part // parts
            self.log.add(now - until_s - span_s + span_s * (part + 1) / parts, share)
        self.log.add(now - until_s, largest)
        self.pace.restore(largest / rate + self._tolerance_s - until_s)
