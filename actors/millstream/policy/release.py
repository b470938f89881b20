"""How much may be released now, and what the last event of a held task means for its entry in HELD."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import msgspec

from millstream.policy import decide
from millstream.policy.admit import instant
from millstream.policy.holding import timer
from millstream_schemas.events import (
    Card,
    Cause,
    DeadLetter,
    Event,
    Expired,
    Failed,
    Failure,
    Released,
    WorkItem,
)
from millstream_schemas.permits import Gate

MOST_RELEASED = 256
"""Of one queue, released and not begun."""
AHEAD_S = 0.5
"""For so long a pool and a queue are supplied ahead."""
SILENT_S = 1.5
"""A governor that has said nothing for so long is not there: pools with limits are closed."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 300.0
NEWS = 0.1

BEGUN_KINDS = ("started", "completed", "parked", "attempt_failed", "interrupted", "failed", "expired", "cancelled")
"""Events that a released task may be followed by: it no longer waits in WORK."""


# --- how many ---------------------------------------------------------------------------------------


def queue_room(slots: int, starts: int, waiting: int) -> int:
    """How many more tasks of a queue may be released.

    `slots` are those of live workers, `starts` counts the last half second, `waiting` are released and not begun.
    """
    if slots <= 0:
        return 0
    return max(0, min(MOST_RELEASED, 2 * slots + starts) - waiting)


def pool_room(gate: Gate | None, waiting: int) -> int | None:
    """How many more tasks of a pool may be released, None for any number; none while no gate is known."""
    if gate is None or not gate.open:
        return 0
    bounds: list[int] = []
    if gate.rate_per_s is not None:
        bounds.append(ceil(gate.rate_per_s * AHEAD_S) + 1)
    if gate.places is not None:
        bounds.append(max(gate.places, 1))
    return max(0, min(bounds) - waiting) if bounds else None


@dataclass(frozen=True, slots=True)
class Pause:
    """A pool whose tasks were sent back by workers waits until then, each time twice as long as before."""

    until: float
    length_s: float


def paused(before: Pause | None, now: float) -> Pause:
    """The pause of a pool of which a released task was parked instead of started.

    Several that come back together count once. So a pool that starts one task an hour does not have hundreds of them
    sent out and back meanwhile; a start, or news of its gate, ends it.
    """
    if before is None:
        return Pause(now + FIRST_PAUSE_S, FIRST_PAUSE_S)
    if now < before.until:
        return before
    length_s = min(2 * before.length_s, LONGEST_PAUSE_S)
    return Pause(now + length_s, length_s)


def is_news(before: Gate | None, gate: Gate | None) -> bool:
    """Whether a gate lets through noticeably more or less than before."""
    if before is None or gate is None or before.open != gate.open or before.places != gate.places:
        return before != gate
    if before.rate_per_s is None or gate.rate_per_s is None:
        return before.rate_per_s != gate.rate_per_s
    return abs(before.rate_per_s - gate.rate_per_s) > NEWS * before.rate_per_s


def cost(gate: Gate | None) -> float:
    """What one task of a pool weighs in fair order."""
    return gate.cost_weight if gate is not None and 0 < gate.cost_weight < float("inf") else 1.0


# --- what becomes of an entry -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of HELD: where it lies, since when, and the task. `at` in Unix seconds by the server's clock."""

    lane: str
    stream: str
    seq: int
    at: float
    item: WorkItem

    @property
    def cause(self) -> Cause:
        return Cause(stream=self.stream, seq=self.seq)

    @property
    def has_timer(self) -> bool:
        """Whether a timer of the server's was set beside it, which ends the task at its deadline."""
        return timer(self.item.envelope) is not None


Written = Released | Expired | Failed
"""What the releaser appends on a held event."""


def chosen(entry: Entry, now: float) -> Released | Expired:
    """The event for an entry whose turn it is."""
    return _too_late(entry, now) or Released(card=_released(entry))


def overdue(entry: Entry, now: float, max_throttle_s: float) -> Expired | Failed | None:
    """The event that ends an entry which has waited for too long, None for one that may wait on."""
    expired = _too_late(entry, now)
    if expired is not None:
        return expired
    card = entry.item.card
    throttled = card.waiting_for == "throttled" and card.waiting_since > 0
    since = min(card.waiting_since, entry.at) if throttled else entry.at
    if not entry.item.limits or now - since <= max_throttle_s:
        return None
    message = f"throttled for {now - since:.0f} s by {', '.join(entry.item.limits)}"
    failure = Failure(reason="error", error_type="Throttled", message=message[:1024])
    return Failed(card=_ended(entry), reason="throttled_out", failure=failure)


def lost(entry: Entry) -> Failed:
    """The end of a task whose events are gone: nobody can say any more whether it ran."""
    failure = Failure(reason="history_lost", message="the events of this task are gone")
    return Failed(card=_ended(entry), reason="history_lost", failure=failure)


def _too_late(entry: Entry, now: float) -> Expired | None:
    deadline = instant(entry.item.envelope.deadline_at, "$.deadline_at")
    if deadline is None or deadline > now:
        return None
    return Expired(card=_ended(entry), detail="the deadline passed while the task was held")


def _released(entry: Entry) -> Card:
    return msgspec.structs.replace(
        entry.item.card, cause=entry.cause, release=0, execution_id="", work_seq=0, delivery=0
    )


def _ended(entry: Entry) -> Card:
    return msgspec.structs.replace(entry.item.card, cause=entry.cause)


@dataclass(frozen=True, slots=True)
class Append:
    """Append `event` on `expect_seq`."""

    event: Written
    expect_seq: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """The event of this entry stands at `fence`: do what follows from it, then remove the entry."""

    event: Written
    fence: int


@dataclass(frozen=True, slots=True)
class Remove:
    """The task has moved on without this entry: only remove it."""


Standing = Append | GoOn | Remove


def is_overtaken(entry: Entry, last: Event | None) -> bool:
    """True when a later generation has begun: whether a dead letter is still owed, only the history says."""
    return last is not None and last.card.generation > entry.item.card.generation


def standing(
    entry: Entry, wanted: Written, last: Event | None, last_seq: int, past: Sequence[tuple[int, Event]] = ()
) -> Standing:
    """What the last event of a task means for an entry whose append was refused or not answered.

    `past` is the life of the task with sequences, asked for by `is_overtaken`.
    """
    if last is None:
        return Append(lost(entry), 0)
    if isinstance(last, Released | Expired | Failed) and last.card.cause == entry.cause:
        return GoOn(last, last_seq)
    if last_seq == entry.item.fence:
        return Append(wanted, last_seq)
    owed = decide.owed(entry.cause, past)
    return (
        GoOn(owed.event, owed.fence) if isinstance(owed, decide.GoOn) and isinstance(owed.event, Failed) else Remove()
    )


def work_item(entry: Entry, event: Released, fence: int) -> WorkItem:
    """The body of the WORK message of a released task."""
    return msgspec.structs.replace(entry.item, fence=fence, card=event.card)


def dead_letter(entry: Entry, event: Failed, failed_at: float) -> DeadLetter:
    """The whole of a task that failed while it was held."""
    item = entry.item
    return DeadLetter(
        card=event.card,
        reason=event.reason,
        failure=event.failure,
        envelope=item.envelope,
        history=item.history,
        usage=item.usage,
        failed_at=failed_at,
    )
