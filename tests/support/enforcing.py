"""The three ways in which providers enforce a limit, one-second slices beside them; time is always an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

How = Literal["sliding_log", "token_bucket", "fixed_window"]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At most `amount` requests or tokens in `window_s`, enforced as `how` says; in slices of `slice_s` too, if set."""

    dimension: Literal["requests", "tokens"]
    amount: int
    window_s: float
    how: How = "sliding_log"
    slice_s: float | None = None


class Meter(Protocol):
    """One rule's count."""

    def wait_s(self, now: float, cost: float) -> float:
        """Seconds until `cost` would be let through: 0 for at once."""
        ...

    def take(self, now: float, cost: float) -> None:
        """Count `cost`, whether it fits or not."""
        ...


class SlidingLog:
    """Exactly at most `amount` in any half-open window."""

    def __init__(self, amount: float, window_s: float) -> None:
        self._amount, self._window_s = amount, window_s
        self._log: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def wait_s(self, now: float, cost: float) -> float:
        while self._log and now - self._log[0][0] >= self._window_s:
            self._sum -= self._log.popleft()[1]
        over = self._sum + cost - self._amount
        for at, taken in self._log:
            if over <= 0:
                return 0.0
            over -= taken
            if over <= 0:
                return at + self._window_s - now
        return 0.0 if over <= 0 else math.inf

    def take(self, now: float, cost: float) -> None:
        self._log.append((now, cost))
        self._sum += cost


class TokenBucket:
    """Full at first, refilled all the time, never beyond `amount`."""

    def __init__(self, amount: float, window_s: float) -> None:
        self._amount, self._per_s = amount, amount / window_s
        self._left, self._at = amount, -math.inf

    def wait_s(self, now: float, cost: float) -> float:
        self._left = min(self._amount, self._left + (now - self._at) * self._per_s)
        self._at = now
        if cost > self._amount:
            return math.inf
        return max(0.0, (cost - self._left) / self._per_s)

    def take(self, now: float, cost: float) -> None:
        self.wait_s(now, cost)
        self._left = max(-self._amount, self._left - cost)


class FixedWindow:
    """Counts anew at each whole multiple of the window on the provider's clock."""

    def __init__(self, amount: float, window_s: float) -> None:
        self._amount, self._window_s = amount, window_s
        self._number, self._used = -1, 0.0

    def wait_s(self, now: float, cost: float) -> float:
        number = int(now // self._window_s)
        if number != self._number:
            self._number, self._used = number, 0.0
        if self._used + cost <= self._amount:
            return 0.0
        return math.inf if cost > self._amount else (number + 1) * self._window_s - now

    def take(self, now: float, cost: float) -> None:
        self.wait_s(now, cost)
        self._used += cost


_KINDS: dict[How, type[SlidingLog | TokenBucket | FixedWindow]] = {
    "sliding_log": SlidingLog,
    "token_bucket": TokenBucket,
    "fixed_window": FixedWindow,
}


class Enforcer:
    """All rules of one key: a call passes all of them or is refused; a refused one is charged where so asked."""

    def __init__(self, rules: Sequence[Rule], *, charge_refused: bool = False) -> None:
        self._meters: list[tuple[str, Meter]] = []
        self._charge_refused = charge_refused
        for rule in rules:
            self._meters.append((rule.dimension, _KINDS[rule.how](rule.amount, rule.window_s)))
            if rule.slice_s is not None:
                part = max(1.0, rule.amount * rule.slice_s / rule.window_s)
                self._meters.append((rule.dimension, FixedWindow(part, rule.slice_s)))

    def arrive(self, now: float, tokens: int) -> float:
        """0 where the call passes, else the seconds until it would."""
        costs = [(meter, 1.0 if dimension == "requests" else float(tokens)) for dimension, meter in self._meters]
        wait_s = max((meter.wait_s(now, cost) for meter, cost in costs), default=0.0)
        if wait_s <= 0 or self._charge_refused:
            for meter, cost in costs:
                meter.take(now, cost)
        return wait_s
