"""How a limit follows what the provider bears: a factor per dimension that falls on refusals and grows back with care.

Plain additive increase and multiplicative decrease loses a tenth of the true rate where the configured one is too high:
a fifth is cut at each refusal and comes back in a minute, and each new refusal brings a pause of its own. So a factor
remembers where it was refused. A provider that keeps a log of starts refuses when its window is full, so what our own
window holds at that moment *is* its limit. The factor goes just below it, comes near it in halves, stays there, and
tries what lies above more and more rarely; a refusal of such a try costs one percent instead of twenty.
"""

from dataclasses import dataclass
from math import inf

import msgspec

from millstream.policy.limits import Adaptive

BOOKED_S = 0.5
"""A start that was booked before a decrease may still happen so much later; its refusal says nothing new."""
HALF = 0.5
"""What a `ramp` refusal leaves, and the part of the way to a ceiling that one step goes at most."""
KEPT = 0.4
"""A single refusal leaves at least so much of the factor."""
BELOW = 0.99
"""Where to go on after a refusal whose level is known: a little below it."""
NEAR = 0.999
"""Where to stay: so near a known ceiling that little is lost, and not in it."""
TRY = 0.01
"""How far above a known ceiling the first try goes; each that is borne doubles the next."""
ENOUGH = 0.04
"""A try so far above that was borne says that the provider's limit is another one now."""
WHOLE = 0.8
"""A window that holds so much of what is allowed was in use throughout, so its contents say what the provider bears."""
LONG = 0.1
"""A provider that says to wait for so much of a window counts over the window and not over a slice of it."""
RAREST = 16
"""So many times its first interval passes between two tries above the ceiling, at most."""


@dataclass(frozen=True, slots=True)
class Steps:
    """How a factor moves; see `Adaptive`."""

    least: float
    decrease: float
    increase: float
    every_s: float
    used_at_least: float
    window_s: float
    ramp: float
    ramp_every_s: float
    fast: float
    """Growth towards a level that was borne before may take so many ordinary steps at once."""

    @staticmethod
    def for_rate(rules: Adaptive, window_s: float) -> "Steps":
        """Of requests or tokens in windows of `window_s`."""
        return Steps(
            least=rules.min,
            decrease=rules.decrease,
            increase=rules.increase,
            every_s=rules.increase_every_s,
            used_at_least=rules.used_at_least,
            window_s=window_s,
            ramp=HALF if rules.ramp is None else rules.ramp,
            ramp_every_s=rules.ramp_every_s,
            fast=5.0,
        )

    @staticmethod
    def for_places(rules: Adaptive) -> "Steps":
        """Of concurrency, which falls on `overloaded` and grows while half of the places are in use."""
        return Steps(
            least=rules.min,
            decrease=0.7,
            increase=rules.increase,
            every_s=rules.increase_every_s,
            used_at_least=0.5,
            window_s=rules.increase_every_s,
            ramp=HALF,
            ramp_every_s=rules.ramp_every_s,
            fast=1.0,
        )


class SavedFactor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A factor in a snapshot; times are ages in seconds."""

    value: float = 1.0
    ceiling: float | None = None
    decreased_s: float | None = None
    moved_s: float = 0.0
    try_after_s: float | None = None
    ramp_base: float | None = None
    ramp_s: float = 0.0


class Factor:
    """What of a configured limit is in effect: `effective = configured x value`, with `value` in [min, 1].

    `now` and `started_at` are seconds of the same monotonic clock. Nothing here waits or pauses: a refusal's
    Retry-After is the key's own affair, and is only read here for what it says of the provider.
    """

    __slots__ = (
        "_above",
        "_before",
        "_borne",
        "_ceiling",
        "_decreased_at",
        "_moved_at",
        "_ramp_at",
        "_ramp_base",
        "_settled",
        "_steps",
        "_try_after_s",
        "_trying",
        "_unsure",
        "value",
    )

    def __init__(self, steps: Steps, now: float) -> None:
        self.value = 1.0
        self._steps = steps
        self._ceiling: float | None = None  # the level at which the provider refused
        self._decreased_at = -inf
        self._before = 1.0  # the value before the last decrease
        # The level of the last refusal, where the provider may count over a shorter time than our window.
        self._unsure: float | None = None
        self._borne = True  # a call that began after the last decrease was accepted
        self._moved_at = now  # since when it stands where it is, in use
        self._try_after_s = self._first_try_s
        self._settled = False  # the last refusal came where it was expected: small cuts are enough
        self._trying = False
        self._above = TRY  # how far above the ceiling the next try goes
        self._ramp_base: float | None = None  # growth is counted from here after a `ramp` refusal
        self._ramp_at = now

    @property
    def _first_try_s(self) -> float:
        return max(3 * self._steps.every_s, self._steps.window_s)

    def set_steps(self, steps: Steps) -> None:
        """Move by other rules from now on; what was learned stays."""
        self._steps = steps
        self.value = max(self.value, steps.least)
        self._try_after_s = max(self._try_after_s, self._first_try_s)

    def refused(
        self, now: float, started_at: float, *, level: float | None = None, retry_after_s: float | None = None
    ) -> bool:
        """Fall after a refusal (`throttled`; for places, `overloaded`), once per flight; True where the value changed.

        `level` is the part of the *configured* amount that our window held when the refused call began (charges that
        began after it left out); None where not known. Calls that began before the last decrease, or were booked by
        then, are of the same flight and say nothing new; nor does a provider that has accepted nothing since, as one
        whose window is still full.
        """
        if started_at <= self._decreased_at + BOOKED_S:
            return False
        if not self._borne:
            return self._still_full(now)
        before, ceiling = self.value, self._ceiling
        trusted = self._trusted(level, retry_after_s)
        self._unsure = level if trusted is None and level else None
        if self._trying and ceiling is not None:
            self._try_after_s = min(2 * self._try_after_s, RAREST * self._first_try_s)
            self._settled = True
            self._fall(now, BELOW * ceiling)  # what was borne for long, and a little less, so that the window empties
            return True
        rare = now - self._decreased_at >= self._steps.window_s / 2
        self._ceiling = before if trusted is None else min(before, trusted)
        near = ceiling is not None and abs(self._ceiling - ceiling) <= 0.1 * ceiling
        self._settled = near and (rare or self._settled)
        value = BELOW * self._ceiling
        self._fall(now, value if self._settled else min(value, self._steps.decrease * before))
        return self.value != before

    def _fall(self, now: float, value: float) -> None:
        self._before = self.value
        self._stand(now, max(value, KEPT * self.value))
        self._decreased_at, self._borne = now, False

    def _still_full(self, now: float) -> bool:
        """Fall further where refusals go on long after a decrease: the provider counts over the whole window."""
        before, level = self.value, self._unsure
        if level is None or now - self._decreased_at < LONG * self._steps.window_s:
            return False
        self._unsure = None
        self._ceiling = min(before, level)
        self._stand(now, min(before, max(KEPT * self._before, BELOW * level)))
        return self.value != before

    def _trusted(self, level: float | None, retry_after_s: float | None) -> float | None:
        """The level; None where the provider may count over less than our window, so that the level is not its limit."""
        if level is None or level <= 0:
            return None
        whole = level >= WHOLE * self.value
        long = retry_after_s is not None and retry_after_s >= LONG * self._steps.window_s
        return level if whole or long else None

    def _stand(self, now: float, value: float) -> None:
        self.value = min(1.0, max(self._steps.least, value))
        self._moved_at = now
        self._trying = False
        self._above = TRY

    def ramp(self, now: float, started_at: float) -> bool:
        """Fall by half because use grew too fast, once per flight, and grow slowly from here on."""
        if started_at <= self._decreased_at + BOOKED_S:
            return False
        before = self.value
        self._fall(now, HALF * before)
        self._ceiling, self._unsure, self._settled = None, None, False
        self._ramp_base, self._ramp_at = self.value, now
        return self.value != before

    def recover(self, now: float, at: float) -> None:
        """Begin again at `at` (of the configured amount) after the key's breaker was open, and grow back from there."""
        if self._ceiling is None:
            self._ceiling = self.value
        self._stand(now, min(self.value, at))

    def reset(self, now: float) -> None:
        """Forget all that was learned: the configured limit has changed, or an operator says so."""
        self._ceiling, self._ramp_base, self._unsure, self._settled = None, None, None, False
        self._decreased_at, self._borne = -inf, True
        self._try_after_s = self._first_try_s
        self._stand(now, 1.0)

    def grow(self, now: float, used_fraction: float, started_at: float | None = None) -> bool:
        """Take at most one step up, if it is time; True where the value changed.

        Call it whenever a call that began at `started_at` was accepted. `used_fraction` is the part of what is allowed
        *now* that is in use, over the last seconds rather than the whole window: what is not used is not known to be
        borne.
        """
        if (now if started_at is None else started_at) > self._decreased_at + BOOKED_S:
            self._borne = True
        if self.value >= 1.0:
            return False
        if used_fraction < self._steps.used_at_least:
            self._moved_at = now
            return False
        before = self.value
        ceiling = self._ceiling
        if ceiling is None:
            self._step(now, self._steps.increase)
        elif self._trying:
            self._grow_beyond(now, ceiling)
        elif self.value < NEAR * ceiling - 1e-3 * ceiling:
            self._step(now, min(HALF * (NEAR * ceiling - self.value), self._steps.fast * self._steps.increase))
        elif now - self._moved_at >= self._try_after_s:
            self._move(now, ceiling * (1 + self._above))
            self._trying = self.value > before
        if self.value >= 1.0:
            self._ceiling = self._ramp_base = None
            self._trying = False
        return self.value != before

    def _step(self, now: float, by: float) -> None:
        if now - self._moved_at >= self._steps.every_s:
            self._move(now, self.value + by)

    def _grow_beyond(self, now: float, ceiling: float) -> None:
        """Make a try that was borne for a whole window the new ceiling, and go twice as far beyond it the next time.

        After a few such tries the ceiling is forgotten, and growth is free again.
        """
        if now - self._moved_at < self._steps.window_s + self._steps.every_s:
            return
        self._try_after_s = self._first_try_s
        if self._above >= ENOUGH:
            self._ceiling, self._trying = None, False
            return
        self._ceiling = self.value
        self._above *= 2
        self._move(now, ceiling * (1 + self._above))

    def _move(self, now: float, value: float) -> None:
        if self._ramp_base is not None:
            if now - self._ramp_at >= self._steps.ramp_every_s:
                self._ramp_base, self._ramp_at = self.value, now
            value = min(value, self._ramp_base * (1 + self._steps.ramp))
        self.value = min(1.0, max(self.value, value))
        self._moved_at = now

    def snapshot(self, now: float) -> SavedFactor:
        """What a successor must know."""
        return SavedFactor(
            value=self.value,
            ceiling=self._ceiling,
            decreased_s=None if self._decreased_at == -inf else now - self._decreased_at,
            moved_s=now - self._moved_at,
            try_after_s=self._try_after_s,
            ramp_base=self._ramp_base,
            ramp_s=now - self._ramp_at,
        )

    def restore(self, saved: SavedFactor, elapsed_s: float, now: float) -> None:
        """Take up a predecessor's factor of `elapsed_s` ago; a try above the ceiling is begun anew."""
        ceiling = saved.ceiling
        at_most = 1.0 if ceiling is None else NEAR * ceiling
        self.value = min(1.0, max(self._steps.least, min(saved.value, at_most)))
        self._ceiling = ceiling
        self._decreased_at = -inf if saved.decreased_s is None else now - elapsed_s - saved.decreased_s
        self._moved_at = now - elapsed_s - saved.moved_s
        self._try_after_s = self._first_try_s if saved.try_after_s is None else saved.try_after_s
        self._ramp_base = saved.ramp_base
        self._ramp_at = now - elapsed_s - saved.ramp_s
        self._trying = False
        self._above = TRY
