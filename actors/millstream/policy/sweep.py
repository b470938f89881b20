"""The end of work that was delivered as often as it may be: whether its task still waits for it, and what is due then."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from millstream.policy import decide
from millstream_schemas.events import Cause, DeadLetter, Event, Failed, Failure, WorkItem
from millstream_schemas.lifecycle import TERMINAL_KINDS


@dataclass(frozen=True, slots=True)
class End:
    """The task still waits: append `event` on `expect_seq`, then keep its dead letter."""

    event: Failed
    expect_seq: int


@dataclass(frozen=True, slots=True)
class Bury:
    """The end stands as `event`: keep its dead letter."""

    event: Failed


@dataclass(frozen=True, slots=True)
class Nothing:
    """The task has moved on: the work message is all that is left."""


Verdict = End | Bury | Nothing


def is_overtaken(item: WorkItem, last: Event | None) -> bool:
    """True when a later generation has begun: whether a dead letter is still owed, only the history says."""
    return last is not None and last.card.generation > item.card.generation


def end_of_work(
    item: WorkItem, cause: Cause, last: Event | None, last_seq: int, past: Sequence[tuple[int, Event]] = ()
) -> Verdict:
    """What the last event means for a work message at its delivery limit; `cause` names that message.

    `past` is the life of the task with sequences, asked for by `is_overtaken`.
    """
    owed = decide.owed(cause, past)
    if isinstance(owed, decide.GoOn) and isinstance(owed.event, Failed):
        return Bury(owed.event)
    if last is None or (last.card.release or last_seq) != item.fence:
        return Nothing()
    if isinstance(last, Failed) and last.card.cause == cause:
        return Bury(last)
    if last.__struct_config__.tag in TERMINAL_KINDS:
        return Nothing()
    failure = Failure(
        reason="worker_crashed",
        error_type="WorkerCrashed",
        message=f"no execution came to an end; last by delivery {last.card.delivery}",
        fingerprint=f"worker_crashed:{item.card.task_type}",
    )
    card = msgspec.structs.replace(last.card, cause=cause)
    return End(Failed(card=card, reason="worker_crashed", failure=failure), last_seq)


def dead_letter(event: Failed, item: WorkItem, now: float) -> DeadLetter:
    """The whole of a task that ended so, for inspection and replay."""
    return DeadLetter(
        card=event.card,
        reason=event.reason,
        failure=event.failure,
        envelope=item.envelope,
        history=item.history,
        usage=item.usage,
        failed_at=now,
    )
