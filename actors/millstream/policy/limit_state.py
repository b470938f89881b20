"""One limit and all that the governor knows about it: pace, window, places in use, pause."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from millstream.policy.pacing import Charge, Clock, Meter
from millstream_schemas.permits import LimitKey, LimitState, WaitReason

FOREVER_S = float("inf")
_GOLDEN = 0.6180339887
"""Its multiples spread evenly over the unit interval."""

Positive = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a key allows; None does not limit. A call counts from its start. In a table of limits the key is its name."""

    key: Annotated[str, Meta(max_length=128)] = ""
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    concurrency: Positive | None = None


def named(limits: Mapping[str, Limit]) -> tuple[Limit, ...]:
    """The limits of a table, each with its name as its key."""
    return tuple(msgspec.structs.replace(limit, key=key) for key, limit in limits.items())


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How the governor grants, in seconds unless the name says otherwise.

    The window bound rests on `use_by_s` and `network_s`: a call starts at most their sum after its place.
    """

    window_s: float = 60.0
    tolerance_s: float = 0.010
    use_by_s: float = 0.750
    network_s: float = 0.250
    book_s: float = 0.200
    """How far ahead a start may be booked; a booked start cannot be revoked."""
    lease_s: float = 30.0
    remember_s: float = 60.0
    """How long an acquire's id gets the same answer, and a settled permit is known as settled."""
    slot_retry_s: float = 1.0
    """What a `Wait` says when places free up at no known time."""
    relearn_s: float = 15.0
    """How long a governor that follows a killed one grants no places, until workers have renewed theirs."""
    unseen_s: float = 3.0
    """How old the last snapshot of a killed governor can be, and so how much of its grants it does not show."""
    line_s: float = 60.0
    """How far ahead those who are turned away are told to come back, one after the other."""
    throttle_base_s: float = 1.0
    throttle_cap_s: float = 60.0
    max_waiting_per_key: int = 1024
    max_waiting: int = 8192

    @property
    def jitter_s(self) -> float:
        """How much later than its place a call may start."""
        return self.use_by_s + self.network_s


@dataclass(frozen=True, slots=True)
class Need:
    """What one acquire takes from each of its keys."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Obstacle:
    """How long a key stands in the way, in seconds, and by which of its limits."""

    seconds: float
    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Taken:
    """What a permit charged to one key."""

    requests: Charge | None
    tokens: Charge | None


class SavedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key's debts (seconds), window contents (age in seconds, amount) and pause (seconds left) in a snapshot."""

    key: LimitKey
    request_debt_s: float = 0.0
    token_debt_s: float = 0.0
    requests: tuple[tuple[float, int], ...] = ()
    tokens: tuple[tuple[float, int], ...] = ()
    largest_tokens: int = 0
    largest_requests: int = 0
    pause_s: float = 0.0


@dataclass(slots=True, eq=False)
class KeyState:
    """The state of one key. Times are those of the shared clock."""

    limit: Limit
    rules: Rules
    clock: Clock
    requests: Meter | None = None
    tokens: Meter | None = None
    in_use: set[str] = field(default_factory=set[str])
    waiting: int = 0
    paused_until: float = 0.0
    slots_closed_until: float = 0.0
    throttles_in_a_row: int = 0
    granted_total: int = 0
    throttled_total: int = 0
    line_until: float = 0.0
    """The last time at which somebody who was turned away was told to come back."""
    turned_away: int = 0

    def __post_init__(self) -> None:
        self.set_limit(self.limit)

    def set_limit(self, limit: Limit) -> None:
        """Change what the key allows; debt, window, pause and places in use stay."""
        self.limit = limit
        self.requests = self._meter(self.requests, limit.requests_per_minute)
        self.tokens = self._meter(self.tokens, limit.tokens_per_minute)

    def _meter(self, meter: Meter | None, per_window: int | None) -> Meter | None:
        if per_window is None:
            return None
        if meter is not None:
            meter.set_limit(per_window)
            return meter
        rules = self.rules
        return Meter(
            per_window,
            self.clock,
            window_s=rules.window_s,
            tolerance_s=rules.tolerance_s,
            jitter_s=rules.jitter_s,
        )

    def fits(self, need: Need) -> bool:
        """False where one acquire asks for more than a whole window allows."""
        too_many = self.requests is not None and need.requests > self.requests.per_window
        too_large = self.tokens is not None and need.tokens > self.tokens.per_window
        return not (too_many or too_large)

    def place_in_line(self, now: float, earliest: float, interval_s: float) -> float:
        """When one more who is turned away should come back: an interval after the one before.

        A line longer than `line_s` is not promised, since a limit may be raised or a pause end: who comes late in it
        is told to look again within its second half.
        """
        self.turned_away += 1
        longest_s = self.rules.line_s
        back_at = max(earliest, self.line_until + interval_s)
        if back_at <= max(earliest, now + longest_s):
            self.line_until = back_at
            return back_at
        spread = (self.turned_away * _GOLDEN) % 1.0
        return max(earliest, now + longest_s * (0.5 + spread / 2))

    def obstacle(self, need: Need, now: float) -> Obstacle:
        """What keeps `need` from being taken, longest first; 0 seconds where nothing does."""
        longest = Obstacle(0.0, self._usual_reason)
        if self.paused_until > now:
            longest = Obstacle(self.paused_until - now, "paused")
        if self.limit.concurrency is not None:
            seconds = FOREVER_S if len(self.in_use) >= self.limit.concurrency else self.slots_closed_until - now
            if seconds > longest.seconds:
                longest = Obstacle(seconds, "concurrency")
        if self.requests is not None and (seconds := self.requests.delay(need.requests)) > longest.seconds:
            longest = Obstacle(seconds, "requests")
        if self.tokens is not None and (seconds := self.tokens.delay(need.tokens)) > longest.seconds:
            longest = Obstacle(seconds, "tokens")
        return longest

    @property
    def _usual_reason(self) -> WaitReason:
        """Why one waits here behind others."""
        if self.requests is not None:
            return "requests"
        return "tokens" if self.tokens is not None else "concurrency"

    def leaves(self, need: Need, ahead_s: float, older: Need, within_s: float) -> bool:
        """True when taking `need` in `ahead_s` does not put off `older`, which waits for another key, over `within_s`."""
        if self.limit.concurrency is not None and len(self.in_use) + 2 > self.limit.concurrency:
            return False
        if self.requests is not None and not self.requests.leaves(need.requests, ahead_s, older.requests, within_s):
            return False
        return self.tokens is None or self.tokens.leaves(need.tokens, ahead_s, older.tokens, within_s)

    def interval_s(self, need: Need) -> float:
        """Seconds between two such needs at the paced rate."""
        by_requests = need.requests / self.requests.pace.rate if self.requests is not None else 0.0
        by_tokens = need.tokens / self.tokens.pace.rate if self.tokens is not None else 0.0
        return max(by_requests, by_tokens)

    def take(self, permit: str, need: Need, ahead_s: float) -> Taken:
        """Charge `need` to a permit that begins in `ahead_s`, and give it a place."""
        self.in_use.add(permit)
        self.granted_total += 1
        requests = self.requests.take(need.requests, ahead_s) if self.requests is not None else None
        tokens = self.tokens.take(need.tokens, ahead_s) if self.tokens is not None else None
        return Taken(requests, tokens)

    def correct(self, taken: Taken, requests: int | None, tokens: int | None) -> None:
        """Replace what a permit reserved by what it used; None keeps the reservation."""
        if self.requests is not None and taken.requests is not None and requests is not None:
            self.requests.correct(taken.requests, requests)
        if self.tokens is not None and taken.tokens is not None and tokens is not None:
            self.tokens.correct(taken.tokens, tokens)

    def throttle(self, retry_after_s: float | None, now: float) -> None:
        """Pause after a provider's refusal, by its hint or else twice as long each time; a pause never gets shorter."""
        self.throttled_total += 1
        if retry_after_s is None:
            if self.paused_until > now:
                return  # another call of the same flight: what it says is known
            doublings = min(self.throttles_in_a_row, 16)
            retry_after_s = min(self.rules.throttle_cap_s, self.rules.throttle_base_s * 2.0**doublings)
            self.throttles_in_a_row += 1
        self.paused_until = max(self.paused_until, now + retry_after_s)

    def shown(self, now: float) -> LimitState:
        """The state as listed."""
        paused = self.paused_until > now
        effective = None if self.requests is None else self.requests.pace.rate * 60.0
        return LimitState(
            key=self.limit.key,
            requests_per_minute=self.limit.requests_per_minute,
            tokens_per_minute=self.limit.tokens_per_minute,
            concurrency=self.limit.concurrency,
            in_use=len(self.in_use),
            waiting=self.waiting,
            effective_per_minute=0.0 if paused and effective is not None else effective,
            paused_until_s=round(self.paused_until - now, 3) if paused else None,
            granted_total=self.granted_total,
            throttled_total=self.throttled_total,
        )

    def distrust(self) -> None:
        """Let one interval pass before the first start, because a predecessor may have granted one just now."""
        if self.requests is not None:
            self.requests.forget_nothing(0.0)

    def saved(self, now: float) -> SavedKey:
        """What must outlive this process."""
        requests, tokens = self.requests, self.tokens
        return SavedKey(
            key=self.limit.key,
            request_debt_s=requests.pace.snapshot() if requests is not None else 0.0,
            token_debt_s=tokens.pace.snapshot() if tokens is not None else 0.0,
            requests=tuple(requests.log.ages(now)) if requests is not None else (),
            tokens=tuple(tokens.log.ages(now)) if tokens is not None else (),
            largest_requests=requests.largest if requests is not None else 0,
            largest_tokens=tokens.largest if tokens is not None else 0,
            pause_s=max(0.0, self.paused_until - now),
        )

    def restore(self, saved: SavedKey, elapsed_s: float, now: float, *, clean: bool) -> None:
        """Take up a predecessor's state of `elapsed_s` ago; not `clean` adds what it may have granted since."""
        self.paused_until = max(self.paused_until, now + saved.pause_s - elapsed_s)
        for meter, debt_s, ages, largest in (
            (self.requests, saved.request_debt_s, saved.requests, saved.largest_requests),
            (self.tokens, saved.token_debt_s, saved.tokens, saved.largest_tokens),
        ):
            if meter is None:
                continue
            for age_s, amount in ages:
                meter.log.add(now - age_s - elapsed_s, amount)
            meter.pace.restore(debt_s - elapsed_s)
            meter.largest = max(meter.largest, largest)
            if not clean:
                meter.forget_nothing(self.rules.unseen_s)
        if not clean:
            self.slots_closed_until = now + self.rules.relearn_s
