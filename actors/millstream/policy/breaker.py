"""A key's circuit breaker: closed while calls succeed, open after many faults, half open while single calls try it.

Refusals for rate (`throttled`, `ramp`, `quota`) never count: the provider works, and says so.
"""

from collections import deque
from math import inf
from typing import Literal

import msgspec

from millstream.policy.limits import BreakerRules
from millstream_schemas.limit_states import BreakerState
from millstream_schemas.permits import Operation, OutcomeClass

Admission = Literal["yes", "probe", "no"]

PROBES = (1, 2, 4)
"""How many calls may try a half-open key, stage by stage; it closes when all of the last stage went well."""
JITTER = 0.1
"""By how much of its time, at most, an open breaker stays open longer."""

FAILED: frozenset[OutcomeClass] = frozenset({"fault", "overloaded"})
WORKED: frozenset[OutcomeClass] = frozenset({"ok", "client", "too_large"})
"""A refusal of the request itself comes from a provider that works. All other outcomes say nothing."""


class SavedBreaker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A breaker in a snapshot; `open_left_s` may be below zero."""

    state: BreakerState = "closed"
    open_left_s: float = 0.0
    openings: int = 0
    in_a_row: int = 0
    counts: tuple[tuple[float, int, int], ...] = ()
    """Age in seconds, results, failures."""


class Breaker:
    """Says whether calls of a key may start. `now` is monotonic seconds.

    Use: `may_start(now)`; where it says "probe", the one permit that is granted then is a probe: `probe = begin_probe()`
    and hand that number back with `note` (`unknown` where its lease ran out) or `probe_returned` (not used).
    """

    __slots__ = (
        "_counts",
        "_half_open",
        "_in_a_row",
        "_mode",
        "_open_until",
        "_openings",
        "_rules",
        "_succeeded",
        "_term",
        "_under_way",
    )

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._mode: Literal["closed", "open", "forced_open", "disabled"] = "closed"
        self._open_until = 0.0
        self._openings = 0  # since it was closed last
        self._in_a_row = 0
        self._counts: deque[list[float]] = deque()  # [begin of a slice, results, failures]
        self._half_open = 0  # the stage of probing
        self._succeeded = 0
        self._under_way = 0
        self._term = 0  # of probing: what a probe of an earlier term says is too late

    def set_rules(self, rules: BreakerRules) -> None:
        """Go by other rules from now on; the state stays."""
        self._rules = rules

    def state(self, now: float) -> BreakerState:
        """The state as shown."""
        if self._mode != "open":
            return self._mode
        return "open" if now < self._open_until else "half_open"

    @property
    def forced_open(self) -> bool:
        """True while an operator keeps it open."""
        return self._mode == "forced_open"

    def may_start(self, now: float) -> Admission:
        """Whether one more call may start now, and whether it is a probe."""
        state = self.state(now)
        if state in ("closed", "disabled"):
            return "yes"
        if state == "half_open" and self._under_way + self._succeeded < PROBES[self._half_open]:
            return "probe"
        return "no"

    def wait_s(self, now: float) -> float:
        """Seconds until a start may be possible: 0 now; infinite where an operator or a probe's end must come first."""
        if self.may_start(now) != "no":
            return 0.0
        return self._open_until - now if self.state(now) == "open" else inf

    def begin_probe(self) -> int:
        """A probe was granted; the number to hand back with its end."""
        self._under_way += 1
        return self._term

    def note(
        self, outcome: OutcomeClass, now: float, *, probe: int | None = None, jitter: float = 0.0
    ) -> BreakerState | None:
        """Take in how a call ended; returns the new state, None where it did not change.

        After "closed" the owner sets the rates' factors to `rules.recover_at`. `jitter` in [0, 1) spreads the time that
        a breaker stays open. `unknown` fails a probe, since its connection was lost; otherwise it says nothing.
        """
        if probe is not None:
            return self._note_probe(outcome, now, probe, jitter)
        if self._mode != "closed" or (outcome not in FAILED and outcome not in WORKED):
            return None
        failed = outcome in FAILED
        self._count(now, failed)
        if outcome == "fault":
            self._in_a_row += 1
        elif not failed:
            self._in_a_row = 0
        if failed and (self._in_a_row >= self._rules.consecutive or self._too_many(now)):
            return self._open(now, jitter)
        return None

    def _note_probe(self, outcome: OutcomeClass, now: float, probe: int, jitter: float) -> BreakerState | None:
        if probe != self._term or self.state(now) != "half_open":
            return None
        self._under_way -= 1
        if outcome in FAILED or outcome == "unknown":
            return self._open(now, jitter)
        if outcome not in WORKED:
            return None
        self._succeeded += 1
        if self._succeeded < PROBES[self._half_open]:
            return None
        self._succeeded = 0
        self._half_open += 1
        if self._half_open < len(PROBES):
            return None
        self._close()
        return "closed"

    def probe_returned(self, probe: int) -> None:
        """A probe was not used: another may take its place."""
        if probe == self._term and self._under_way > 0:
            self._under_way -= 1

    def force(self, operation: Operation, now: float) -> BreakerState | None:
        """Do what an operator says: `open`, `disable`, or `auto` (closed, and left to itself); the new state if it changed."""
        before = self.state(now)
        if operation == "open":
            self._close()
            self._mode = "forced_open"
        elif operation == "disable":
            self._close()
            self._mode = "disabled"
        elif operation == "auto" and self._mode != "closed":
            self._close()
        after = self.state(now)
        return after if after != before else None

    def _count(self, now: float, failed: bool) -> None:
        slice_s = self._rules.window_s / 30
        self._expire(now)
        if not self._counts or now - self._counts[-1][0] >= slice_s:
            self._counts.append([now, 0, 0])
        self._counts[-1][1] += 1
        self._counts[-1][2] += failed

    def _expire(self, now: float) -> None:
        while self._counts and now - self._counts[0][0] >= self._rules.window_s:
            self._counts.popleft()

    def _too_many(self, now: float) -> bool:
        self._expire(now)
        results = sum(one[1] for one in self._counts)
        failures = sum(one[2] for one in self._counts)
        return results >= self._rules.min_calls and failures >= self._rules.ratio * results

    def _open(self, now: float, jitter: float) -> BreakerState:
        seconds = min(self._rules.open_max_s, self._rules.open_s * 2.0 ** min(self._openings, 30))
        openings = self._openings + 1
        self._close()
        self._openings = openings
        self._mode = "open"
        self._open_until = now + seconds * (1 + JITTER * jitter)
        return "open"

    def _close(self) -> None:
        self._mode = "closed"
        self._openings = self._in_a_row = self._half_open = self._succeeded = self._under_way = 0
        self._counts.clear()
        self._term += 1

    def snapshot(self, now: float) -> SavedBreaker:
        """What a successor must know."""
        return SavedBreaker(
            state=self.state(now),
            open_left_s=self._open_until - now if self._mode == "open" else 0.0,
            openings=self._openings,
            in_a_row=self._in_a_row,
            counts=tuple((now - at, int(results), int(failures)) for at, results, failures in self._counts),
        )

    def restore(self, saved: SavedBreaker, elapsed_s: float, now: float) -> None:
        """Take up a predecessor's state of `elapsed_s` ago; a half-open one begins its probes anew."""
        self._close()
        self._mode = "open" if saved.state == "half_open" else saved.state
        self._open_until = now + saved.open_left_s - elapsed_s
        self._openings = saved.openings
        self._in_a_row = saved.in_a_row
        self._counts = deque([now - elapsed_s - age, results, failures] for age, results, failures in saved.counts)
        self._expire(now)
