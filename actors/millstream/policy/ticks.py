"""Ticks: what a timer of the dispatcher's means beside the last event of its task."""

from dataclasses import dataclass

import msgspec

from millstream.policy.claim import history_lost
from millstream.policy.holding import Onward, held, onward
from millstream_schemas.events import AttemptFailed, Cause, Deadline, Event, Expired, Held, WorkItem
from millstream_schemas.lifecycle import RELEASING_KINDS


@dataclass(frozen=True, slots=True)
class Append:
    """Append `event` on `expect_seq`."""

    event: Held | Expired | AttemptFailed
    expect_seq: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """The tick's own event stands at `fence`: publish the entry in HELD."""

    event: Held
    fence: int


@dataclass(frozen=True, slots=True)
class Done:
    """The task has moved on, or what the tick asked for stands: only the ack is missing."""


Verdict = Append | GoOn | Done


def first_hold(item: WorkItem, cause: Cause) -> Append:
    """What to append before anything was read: the tick itself names the event that set its timer."""
    # Only a task that ran or waited for a limit before goes ahead of its lane, not one that waited for its first start.
    again = item.card.cause != item.card.origin
    card = msgspec.structs.replace(item.card, cause=cause)
    return Append(held(card, item.lane, item.limits, again=again), item.fence)


def hold(item: WorkItem, cause: Cause, last: Event | None, last_seq: int) -> Verdict:
    """What the last event means for a task that is due, after a first append that was refused or not answered."""
    if last is None:
        return Append(_lost(item, cause), 0)
    if last_seq == item.fence and last.__struct_config__.tag in RELEASING_KINDS:
        return first_hold(item, cause)
    if isinstance(last, Held) and last.card.cause == cause:
        return GoOn(last, last_seq)
    return Done()


def follow_up(event: Held, fence: int, item: WorkItem) -> Onward:
    """The message that the event of a `hold` tick, stored at `fence`, has to be followed by."""
    return onward(event, fence, item.due_at, envelope=item.envelope, history=item.history, usage=item.usage)


def expire(deadline: Deadline, cause: Cause, last: Event | None, last_seq: int) -> Append | Done:
    """What the last event means at a deadline: only a task that is held ends; one that was released is its worker's."""
    if not isinstance(last, Held) or last_seq != deadline.fence:
        return Done()
    card = msgspec.structs.replace(last.card, cause=cause)
    return Append(Expired(card=card, detail="the deadline passed while the task was held"), last_seq)


def _lost(item: WorkItem, cause: Cause) -> AttemptFailed:
    """A task whose events are gone takes the way of a lost execution, which ends in a dead letter."""
    card = msgspec.structs.replace(item.card, cause=cause, release=item.fence)
    return AttemptFailed(card=card, failure=history_lost(), item=item)
