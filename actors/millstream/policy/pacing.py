"""Pacing: how often something may start, so that no window of time ever holds more than its limit.

`PacedLimiter` spaces starts evenly and gives no credit for idle time; `WindowLog` is the exact bound for amounts
larger than one, which spacing alone cannot give; `Meter` is both for one dimension (requests or tokens) of a limit.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import Any, Protocol, cast

from aiolimiter import AsyncLimiter

NOTHING_S = 1e-9
"""Differences below this are rounding, not time."""

MARGIN = 1 + 1e-6
"""Keeps sums of floats from letting the N+1st start slip into a window."""


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
    """aiolimiter's leaky bucket, asked for times instead of waited on, which may go into debt.

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

    def credit(self, amount: float) -> None:
        """Give back what was taken and not used; never more than the debt, so that no idle credit arises."""
        self._leak()
        self._level = max(0.0, self._level - amount)

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


class Charge:
    """What one admission put into a log: a time, an amount, and whether the log still counts it."""

    __slots__ = ("amount", "at", "counted")

    def __init__(self, at: float, amount: int) -> None:
        self.at = at
        self.amount = amount
        self.counted = True

    def __lt__(self, other: Charge) -> bool:
        return self.at < other.at


class WindowLog:
    """The exact amount admitted over the last `span_s` seconds."""

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self.total = 0
        self._charges: deque[Charge] = deque()

    def expire(self, now: float) -> None:
        """Forget what lies `span_s` or more in the past."""
        while self._charges and self._charges[0].at + self.span_s <= now:
            charge = self._charges.popleft()
            charge.counted = False
            self.total -= charge.amount

    def delay(self, amount: int, limit: int, now: float) -> float:
        """Seconds until `amount` more fits under `limit`; infinite where it never does."""
        self.expire(now)
        excess = self.total + amount - limit
        if excess <= 0:
            return 0.0
        for charge in self._charges:
            excess -= charge.amount
            if excess <= 0:
                return max(0.0, charge.at + self.span_s - now)
        return float("inf")

    def add(self, at: float, amount: int) -> Charge:
        """Count `amount` as admitted at `at`, which may lie in the future."""
        charge = Charge(at, amount)
        if self._charges and at < self._charges[-1].at:
            insort(self._charges, charge)
        else:
            self._charges.append(charge)
        self.total += amount
        return charge

    def change(self, charge: Charge, amount: int) -> None:
        """Let `charge` weigh `amount` from now on; without effect once it left the log."""
        if charge.counted:
            self.total += amount - charge.amount
        charge.amount = amount

    def ages(self, now: float) -> list[tuple[float, int]]:
        """Age in seconds (negative: in the future) and amount of all that counts, at most one entry per 1/100 span."""
        self.expire(now)
        grain_s = self.span_s / 100
        merged: list[tuple[float, int]] = []
        for charge in reversed(self._charges):  # youngest first: merging makes the rest younger, never older
            age = now - charge.at
            if merged and age - merged[-1][0] < grain_s:
                merged[-1] = (merged[-1][0], merged[-1][1] + charge.amount)
            else:
                merged.append((age, charge.amount))
        merged.reverse()
        return merged


class Meter:
    """One dimension of a limit: evenly paced, and never more than `per_window` in any window.

    A large amount may make its successor wait for the window as well as for the pace.
    """

    def __init__(self, per_window: int, clock: Clock, *, window_s: float, tolerance_s: float, jitter_s: float) -> None:
        self.per_window = per_window
        self._window_s = window_s
        self._tolerance_s = tolerance_s
        self._jitter_s = jitter_s
        self._clock = clock
        self.pace = PacedLimiter(self._rate_for(per_window), clock, tolerance_s)
        self.log = WindowLog((window_s + jitter_s) * MARGIN)
        self.largest = 0

    def _rate_for(self, per_window: int) -> float:
        return paced_rate(per_window, self._window_s, self._tolerance_s, self._jitter_s)

    def delay(self, amount: int) -> float:
        """Seconds until `amount` may be admitted; infinite where it is more than a window holds."""
        return max(self.pace.delay(), self.log.delay(amount, self.per_window, self._clock.time()))

    def leaves(self, amount: int, ahead_s: float, then: int, within_s: float) -> bool:
        """True when taking `amount` in `ahead_s` does not keep `then` from being taken in `within_s`."""
        self.log.expire(self._clock.time())
        room = self.log.total + amount + then <= self.per_window
        return room and self.pace.delay_after(amount, ahead_s) <= within_s

    def take(self, amount: int, ahead_s: float) -> Charge:
        """Admit `amount`, which begins in `ahead_s`."""
        self.pace.take(amount, ahead_s)
        self.largest = max(self.largest, amount)
        return self.log.add(self._clock.time() + ahead_s, amount)

    def correct(self, charge: Charge, actual: int) -> None:
        """Replace what was charged by what was used."""
        if actual > charge.amount:
            self.pace.debit(actual - charge.amount)
        else:
            self.pace.credit(charge.amount - actual)
        self.log.change(charge, actual)

    def set_limit(self, per_window: int) -> None:
        """Change the limit from now on; debt in seconds and what the window holds are kept."""
        self.per_window = per_window
        self.pace.set_rate(self._rate_for(per_window))

    def forget_nothing(self, unseen_s: float) -> None:
        """Assume that a predecessor admitted as much as it could in the last `unseen_s` seconds, up to this moment."""
        largest = max(1, self.largest)
        unseen = min(self.per_window, largest + int(self.pace.rate * unseen_s) + 1)
        self.log.add(self._clock.time(), max(1, unseen))
        self.pace.restore(largest / self.pace.rate + self._tolerance_s)
