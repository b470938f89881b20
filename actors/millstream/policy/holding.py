"""Where a task goes once its event is stored: to WORK, or to HELD for the releaser; at once, or by a timer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from millstream.policy.admit import instant
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import AttemptRecord, Card, Held, Queued, Retrying, Scheduled, Usage, WorkItem

FURTHEST = 7_258_118_400.0
"""The start of the year 2200. The server counts nanoseconds in 64 bits: a deadline beyond that needs no timer."""


@dataclass(frozen=True, slots=True)
class ToWork:
    """Publish `item` to WORK, at `due_at` (Unix seconds) where it is set.

    One with a lane and a `due_at` fires as a tick for the dispatcher instead.
    """

    item: WorkItem
    due_at: float | None


@dataclass(frozen=True, slots=True)
class ToHeld:
    """Publish `item` to HELD, at the end of its lane, or ahead of the lane where it ran or waited before (`again`).

    `deadline_at` (Unix seconds) asks for a timer beside it, which ends the task if it is still held then.
    """

    item: WorkItem
    again: bool
    deadline_at: float | None


Onward = ToWork | ToHeld
Forward = Queued | Held | Scheduled | Retrying
"""Events that are followed by a message to WORK or HELD."""


def held(card: Card, lane: str, limits: Sequence[str], *, again: bool) -> Held:
    """The event of a task that has its lane already."""
    return Held(card=card, reason="limits" if limits else "fairness", lane=lane, limits=list(limits), again=again)


def onward(
    event: Forward,
    fence: int,
    now: float,
    *,
    envelope: Envelope,
    history: Sequence[AttemptRecord] = (),
    usage: Usage | None = None,
    limits: Sequence[str] = (),
    lane: str = "",
) -> Onward:
    """The message that follows `event`, which stands at `fence`; `now` is when its cause came, in Unix seconds.

    Lane and limits are those of the event, so that a redelivery finds what was decided; a retry keeps the given ones.
    """
    due_at: float | None = None
    match event:
        case Queued():
            lane, limits = "", ()
        case Held():
            lane, limits = event.lane, event.limits
        case Scheduled():
            lane, limits, due_at = event.lane, event.limits, event.due_at
        case Retrying():
            due_at = event.due_at
        case _:
            assert_never(event)
    if due_at is not None and due_at <= now and not lane:
        due_at = None
    item = WorkItem(
        fence=fence,
        card=event.card,
        envelope=envelope,
        history=list(history) if history else [],
        usage=usage or Usage(),
        due_at=due_at or 0.0,
        limits=list(limits) if limits else [],
        lane=lane,
    )
    return ToHeld(item, event.again, timer(envelope)) if isinstance(event, Held) else ToWork(item, due_at)


def timer(envelope: Envelope) -> float | None:
    """When the timer of a held task's deadline is to fire; None without one."""
    deadline_at = instant(envelope.deadline_at, "$.deadline_at")
    return deadline_at if deadline_at is not None and deadline_at < FURTHEST else None
