"""Commands: what a cancel and a replay do to a task in its present state."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from millstream.policy.holding import held
from millstream.policy.metering import Metering
from millstream_schemas.commands import Cancel
from millstream_schemas.events import Cancelled, Card, Cause, DeadLetter, Event, Failed, Held, Queued
from millstream_schemas.keys import derive_key, is_key
from millstream_schemas.lifecycle import TERMINAL_KINDS
from millstream_schemas.names import NOBODY


@dataclass(frozen=True, slots=True)
class Append:
    """Append `event` on `expect_seq`."""

    event: Cancelled | Queued | Held
    expect_seq: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """The command's event stands at `fence`: do what follows from it."""

    event: Cancelled | Queued | Held
    fence: int


@dataclass(frozen=True, slots=True)
class TooLate:
    """The command changes nothing any more."""

    why: str


Verdict = Append | GoOn | TooLate


def keys_of(tenant: str, task_id: str, key: str | None) -> tuple[str, ...]:
    """Where the life of a task may lie, most likely first: its known key, the hash of its id, the id as a key."""
    if key is not None:
        return (key,)
    by_id = derive_key("id", tenant, task_id)
    return (by_id, task_id) if is_key(task_id) else (by_id,)


def is_later_generation(last: Event | None) -> bool:
    """True when a redelivered command may have acted on an earlier generation: the verdicts then need `past`."""
    return last is not None and last.card.generation > 1


def cancel(command: Cancel, cause: Cause, last: Event | None, last_seq: int, past: Sequence[Event] = ()) -> Verdict:
    """A task without outcome ends as cancelled; a cancel that overtook its submit stands at 0.

    `past` is the whole life of the task, asked for by `is_later_generation`: a command acts once.
    """
    if last is None:
        return Append(Cancelled(card=_unseen(command, cause), by=command.by, note=command.note), 0)
    if isinstance(last, Cancelled) and last.card.cause == cause:
        return GoOn(last, last_seq)
    if _acted(cause, past):
        return TooLate("the command was carried out on an earlier generation")
    if last.__struct_config__.tag in TERMINAL_KINDS:
        return TooLate(f"the task is {last.__struct_config__.tag} already")
    card = msgspec.structs.replace(last.card, cause=cause)
    return Append(Cancelled(card=card, by=command.by, note=command.note), last_seq)


def _unseen(command: Cancel, cause: Cause) -> Card:
    return Card(
        key=command.key or derive_key("id", command.tenant_id, command.task_id),
        tenant_id=command.tenant_id,
        task_id=command.task_id,
        queue=NOBODY,
        task_type="",
        payload_hash="",
        origin=cause,
        cause=cause,
    )


def _acted(cause: Cause, past: Sequence[Event]) -> bool:
    return any(event.card.cause == cause for event in past)


def replay(
    cause: Cause,
    last: Event | None,
    last_seq: int,
    letter: DeadLetter | None,
    past: Sequence[Event] = (),
    metered: Metering | None = None,
) -> Verdict:
    """A dead letter runs again as the next generation of its task, with fresh counters.

    `past` as for `cancel`; `metered` says how the task is metered by now.
    """
    if isinstance(last, Queued | Held) and last.card.cause == cause:
        return GoOn(last, last_seq)
    if not isinstance(last, Failed):
        return TooLate("only a failed task can be replayed")
    if _acted(cause, past):
        return TooLate("the command was carried out on an earlier generation")
    if letter is None or letter.envelope is None:
        return TooLate("the dead letter holds no envelope to run")
    card = msgspec.structs.replace(
        last.card,
        cause=cause,
        generation=last.card.generation + 1,
        attempt=1,
        errors=0,
        crashes=0,
        interruptions=0,
        throttles=0,
        release=0,
        execution_id="",
        work_seq=0,
        delivery=0,
        waiting_since=0.0,
        waiting_for="",
    )
    if metered is not None:
        return Append(held(card, metered.lane, metered.limits, again=False), last_seq)
    return Append(Queued(card=card), last_seq)
