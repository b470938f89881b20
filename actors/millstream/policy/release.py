"""How much may be released now, and what the last event of a held task means for its entry in HELD."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from millstream.policy import decide, sweep
from millstream.policy.admit import instant
from millstream.policy.claim import history_lost
from millstream.policy.holding import timer
from millstream.policy.stops import Stop, held_up_s, in_line_s
from millstream.policy.supply import Need, need_of, parts
from millstream.policy.waiting import throttled_out
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
from millstream_schemas.permits import Gate, GatePart

MOST_RELEASED = 256
"""Most tasks of one queue that are released and not begun."""
AHEAD_S = 0.5
"""For so long a queue is supplied ahead."""
SILENT_S = 1.5
"""Once the governor has not answered for so long, pools with limits are closed."""
FIRST_PAUSE_S = 0.5
"""Of what released tasks are sent back for; doubles up to `LONGEST_PAUSE_S`."""
LONGEST_PAUSE_S = 300.0
NEWS = 0.1
"""A rate that has changed by no more than this part is no news."""

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


@dataclass(frozen=True, slots=True)
class Pause:
    """A pool, or a key, whose tasks were sent back by workers waits until then, each time twice as long as before."""

    until: float
    length_s: float


def paused(before: Pause | None, now: float) -> Pause:
    """The pause of a pool, or of a key, of which a released task was parked instead of started.

    Several that come back during one pause count once; a start, or news of the gate, ends it. So a pool that starts one
    task an hour does not have hundreds of them sent out and back meanwhile.
    """
    if before is None:
        return Pause(now + FIRST_PAUSE_S, FIRST_PAUSE_S)
    if now < before.until:
        return before
    length_s = min(2 * before.length_s, LONGEST_PAUSE_S)
    return Pause(now + length_s, length_s)


def is_news(before: Gate | None, gate: Gate | None) -> bool:
    """Whether a gate lets through noticeably more or less than before."""
    if before is None or gate is None:
        return before != gate
    return before.open != gate.open or bool(changed_keys(before, gate))


def changed_keys(before: Gate | None, gate: Gate | None) -> list[str]:
    """The keys of a gate that let through noticeably more or less than before, or because of which it opens.

    None of a gate that was not known before: that a pool is new says nothing of its keys.
    """
    if before is None or gate is None or (before.open == gate.open and before.parts == gate.parts != ()):
        return []
    was, found = dict(parts(before)), list[str]()
    for key, part in parts(gate):
        if (key in was and _differs(was[key], part)) or (gate.open and not before.open and key == before.limiting_key):
            found.append(key)
    return found


def _differs(before: GatePart, part: GatePart) -> bool:
    if before == part:
        return False
    if before.places != part.places:
        return True
    rates = ((before.requests, part.requests), (before.tokens, part.tokens))
    for one, other in (*rates, (before.tokens_in, part.tokens_in), (before.tokens_out, part.tokens_out)):
        if one is None or other is None:
            if one != other:
                return True
        elif abs(one - other) > NEWS * one:
            return True
    return False


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
    def need(self) -> Need:
        """What the task is likely to take of its limits."""
        return need_of(self.item.envelope.usage_estimate)

    @property
    def has_timer(self) -> bool:
        """Whether a timer of the server's was set beside it, which ends the task at its deadline."""
        return timer(self.item.envelope) is not None


Written = Released | Expired | Failed
"""What the releaser appends on a held event."""


def chosen(entry: Entry, now: float, stop: Stop | None = None) -> Released | Expired:
    """The event for an entry whose turn it is; `stop` is what is remembered of its pool's gate."""
    return _too_late(entry, now) or Released(card=_released(entry, in_line_s(stop, entry.at, now)))


def overdue(entry: Entry, now: float, max_throttle_s: float, stop: Stop | None) -> Expired | Failed | None:
    """The event that ends an entry which limits have held up for too long, None for one that may wait on.

    `stop` is what is remembered of its pool's gate. Whoever is in line waits on for as long as it takes.
    """
    expired = _too_late(entry, now)
    if expired is not None or stop is None or not entry.item.limits:
        return expired
    lasted_s = held_up_s(stop, entry.at, _throttled_since(entry), now)
    if lasted_s is None or lasted_s <= max_throttle_s:
        return None
    message = throttled_out(lasted_s, stop.detail)
    failure = Failure(reason="error", error_type="Throttled", message=message[:1024])
    return Failed(card=_ended(entry), reason="throttled_out", failure=failure)


def _throttled_since(entry: Entry) -> float:
    """When a worker sent the task back first, because of its limits; 0 where none did."""
    return entry.item.card.waiting_since if entry.item.card.waiting_for == "throttled" else 0.0


def lost(entry: Entry) -> Failed:
    """The end of a task whose events are gone: nobody can say any more whether it ran."""
    return Failed(card=_ended(entry), reason="history_lost", failure=history_lost())


def _too_late(entry: Entry, now: float) -> Expired | None:
    deadline = instant(entry.item.envelope.deadline_at, "$.deadline_at")
    if deadline is None or deadline > now:
        return None
    return Expired(card=_ended(entry), detail="the deadline passed while the task was held")


def _released(entry: Entry, in_line_s: float) -> Card:
    """The card of a release; the time for which a throttled task only stood in line is taken off its wait."""
    since = _throttled_since(entry)
    card = entry.item.card if since <= 0 else msgspec.structs.replace(entry.item.card, waiting_since=since + in_line_s)
    return msgspec.structs.replace(card, cause=entry.cause, release=0, execution_id="", work_seq=0, delivery=0)


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
    return sweep.is_overtaken(entry.item, last)


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
    if isinstance(owed, decide.GoOn) and isinstance(owed.event, Failed):
        return GoOn(owed.event, owed.fence)
    return Remove()


def work_item(entry: Entry, event: Released, fence: int) -> WorkItem:
    """The body of the WORK message of a released task."""
    return msgspec.structs.replace(entry.item, fence=fence, card=event.card)


def dead_letter(entry: Entry, event: Failed, failed_at: float) -> DeadLetter:
    """The whole of a task that failed while it was held."""
    return sweep.dead_letter(event, entry.item, failed_at)
