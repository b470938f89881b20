"""Claim and commit: who may run a task, and whose outcome counts.

JetStream fences nothing: a late ack is accepted, a delivery count may start anew. So every worker asks the last
event of the task, and these rules say what that event means for the delivery it holds.
"""

from dataclasses import dataclass

import msgspec

from millstream_schemas.events import (
    AttemptFailed,
    Cancelled,
    Card,
    Cause,
    Completed,
    Event,
    Expired,
    Failed,
    Failure,
    Interrupted,
    Parked,
    Started,
    WorkItem,
)
from millstream_schemas.lifecycle import RELEASING_KINDS


class Hold(msgspec.Struct, frozen=True):
    """A delivery of WORK in a worker's hand. `execution_id` is fresh for every delivery."""

    item: WorkItem
    execution_id: str
    worker_id: str
    work_stream: str
    work_seq: int
    delivery: int


Outcome = Completed | AttemptFailed | Parked | Interrupted | Cancelled


# --- claim ----------------------------------------------------------------------------------------


class Claim(msgspec.Struct, frozen=True):
    """Append `event` on `expect_seq`; its PubAck is the fence of the outcome."""

    event: Started
    expect_seq: int


class Claimed(msgspec.Struct, frozen=True):
    """The claim stands at `fence`: run."""

    fence: int
    event: Started


@dataclass(frozen=True, slots=True)
class Silence:
    """Another execution holds this delivery: send nothing for it, no ack, nak, term or heartbeat."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """The task has moved on: ack the delivery and drop it."""


@dataclass(frozen=True, slots=True)
class HistoryLost:
    """The task has no event any more: append this failure at 0, never run."""

    event: AttemptFailed


def history_lost() -> Failure:
    """The failure of a task that has no event any more, so that nobody can say whether it ran."""
    return Failure(reason="history_lost", message="the events of this task are gone")


ClaimVerdict = Claim | Claimed | Silence | Superseded | HistoryLost


def first_claim(hold: Hold) -> Claim:
    """What to append before anything was read: the message itself names the releasing event."""
    return Claim(_started(hold, hold.item.card.crashes), hold.item.fence)


def claim(hold: Hold, last: Event | None, last_seq: int) -> ClaimVerdict:
    """What the last event means for a claim that was refused or not answered."""
    if last is None:
        return HistoryLost(failed(hold, hold.item.card.crashes, history_lost()))
    if isinstance(last, Started) and last.card.execution_id == hold.execution_id:
        return Claimed(last_seq, last)
    ground = _ground(hold, last, last_seq)
    if isinstance(ground, Silence | Superseded):
        return ground
    return Claim(_started(hold, ground.crashes), ground.seq)


MAX_CRASHES = 3
"""So many executions without an end are the task's own fault."""

SUSPECT_DELIVERY = 3
"""From this delivery on a task runs alone among its like: who only happened to be beside the culprit is soon cleared."""


def is_suspect(hold: Hold) -> bool:
    """True for a task that may be what ends workers."""
    return hold.delivery >= SUSPECT_DELIVERY


def given_up(hold: Hold, claim: Claim) -> AttemptFailed | None:
    """The end, in the place of one more claim, of a task whose executions have never come to theirs."""
    crashes = claim.event.card.crashes
    if crashes < MAX_CRASHES:
        return None
    message = f"{crashes} executions came to no end: the worker was killed, or lost its lease"
    fingerprint = f"worker_crashed:{hold.item.card.task_type}"
    failure = Failure(reason="worker_crashed", error_type="WorkerCrashed", message=message, fingerprint=fingerprint)
    return failed(hold, crashes, failure)


class _Ground(msgspec.Struct, frozen=True):
    """The event that may be appended on, and the crashes counted up to it."""

    seq: int
    crashes: int


def _ground(hold: Hold, last: Event, last_seq: int) -> _Ground | Silence | Superseded:
    card = last.card
    if last_seq == hold.item.fence and last.__struct_config__.tag in RELEASING_KINDS:
        return _Ground(last_seq, card.crashes)
    if not isinstance(last, Started) or card.release != hold.item.fence or card.work_seq != hold.work_seq:
        return Superseded()
    if card.delivery >= hold.delivery:  # the holder's delivery is as new as mine, or the count was lost
        return Silence()
    return _Ground(last_seq, card.crashes + 1)


# --- commit ---------------------------------------------------------------------------------------


class Append(msgspec.Struct, frozen=True):
    """Append the outcome on `expect_seq`. `crashes` is what its card has to count."""

    expect_seq: int
    crashes: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The outcome stands: ack."""


CommitVerdict = Append | Committed | Silence | Superseded


def commit(hold: Hold, last: Event | None, last_seq: int) -> CommitVerdict:
    """What the last event means for an outcome that was refused or not answered, after a claim."""
    if last is None:
        return Append(0, hold.item.card.crashes)
    if _stands(hold, last):
        return Committed()
    if isinstance(last, Started) and last.card.execution_id == hold.execution_id:
        return Append(last_seq, last.card.crashes)
    if isinstance(last, Started) and last.card.release == hold.item.fence:
        return Silence()
    return Superseded()


def hand_back(hold: Hold, last: Event | None, last_seq: int) -> CommitVerdict:
    """What the last event means for an outcome appended without a claim: expired, parked, handed back."""
    if last is None:
        return Append(0, hold.item.card.crashes)
    if _stands(hold, last):
        return Committed()
    if isinstance(last, Started) and last.card.execution_id == hold.execution_id:  # an unanswered claim stands
        return Append(last_seq, last.card.crashes)
    ground = _ground(hold, last, last_seq)
    if isinstance(ground, Silence | Superseded):
        return ground
    return Append(ground.seq, ground.crashes)


def _stands(hold: Hold, last: Event) -> bool:
    """Whether `last` is the outcome of this execution, or the end that was decided on it.

    The card of a running execution also stands on events that others append to it (a cancel, a sweeper's end), so
    the id alone does not say; the cause does: an outcome's is the delivery, a decision's is the outcome.
    """
    if isinstance(last, Started) or last.card.execution_id != hold.execution_id:
        return False
    by_delivery = last.card.cause == Cause(stream=hold.work_stream, seq=hold.work_seq)
    return by_delivery != isinstance(last, Failed | Expired)


# --- the events that a worker writes --------------------------------------------------------------


def card_of(hold: Hold, crashes: int) -> Card:
    """The state card of an event that `hold` writes."""
    return msgspec.structs.replace(
        hold.item.card,
        cause=Cause(stream=hold.work_stream, seq=hold.work_seq),
        release=hold.item.fence,
        execution_id=hold.execution_id,
        work_seq=hold.work_seq,
        delivery=hold.delivery,
        crashes=crashes,
    )


def _started(hold: Hold, crashes: int) -> Started:
    card = msgspec.structs.replace(card_of(hold, crashes), waiting_since=0.0, waiting_for="")
    return Started(card=card, worker_id=hold.worker_id)


_ERRORS = frozenset({"error", "timeout", "fatal", "payload_mismatch", "result_not_encodable", "result_too_large"})


def failed(hold: Hold, crashes: int, failure: Failure) -> AttemptFailed:
    """The event of a failed attempt; only an error of the handler's counts as one."""
    card = card_of(hold, crashes)
    if failure.reason in _ERRORS:
        card = msgspec.structs.replace(card, errors=card.errors + 1)
    return AttemptFailed(card=card, failure=failure, item=hold.item, worker_id=hold.worker_id)


def with_crashes(outcome: Outcome, crashes: int) -> Outcome:
    """The same outcome on a card that counts `crashes`."""
    if outcome.card.crashes == crashes:
        return outcome
    return msgspec.structs.replace(outcome, card=msgspec.structs.replace(outcome.card, crashes=crashes))
