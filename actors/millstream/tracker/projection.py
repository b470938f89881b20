"""The projection: what an event or an info makes of a task's row. Pure; nothing that comes in is fatal."""

from typing import Any, assert_never

from msgspec.structs import replace

from millstream.tracker.lines import Fields, detail_of, on_info
from millstream.tracker.model import Attempt, Entry, Step, TaskError, TaskRow, Verdict, short
from millstream_schemas.events import (
    AttemptFailed,
    Cancelled,
    Card,
    Completed,
    Event,
    Expired,
    Failed,
    Failure,
    Held,
    Interrupted,
    LifeEvent,
    Parked,
    Queued,
    Released,
    Retrying,
    Scheduled,
    Started,
    TaskInfo,
    Usage,
)
from millstream_schemas.infos import Info
from millstream_schemas.lifecycle import TERMINAL, TRANSITIONS, State, state_after

MAX_ATTEMPTS_SHOWN = 50
Waiting = Queued | Held | Released | Scheduled | Retrying
_NOTHING_USED = Usage()


def kind_of(message: Event | Info) -> str:
    """The tag of an event or info: `queued`, `progress`…"""
    return str(type(message).__struct_config__.tag)


def apply(row: TaskRow | None, event: LifeEvent, seq: int, at: float, inbox_stream: str) -> Step:
    """The row after `event`, which the stream holds at `seq` since `at`.

    An event that the life cycle does not list for the row's state goes into the timeline and changes nothing else.
    """
    kind = kind_of(event)
    verdict, state = _judge(row, event, kind)
    detail = short(detail_of(event))
    if verdict != "folded" and row is not None:
        entry = Entry(
            seq=seq, at=at, kind=kind, state=row.state, attempt=event.card.attempt, detail=f"{verdict}: {detail}"
        )
        return Step(row=replace(row, seq=seq), entry=entry, verdict=verdict)
    card = event.card
    base = row if row is not None else _blank(card, state, seq, at)
    since = at if row is None or row.state != state else row.since
    after = _with_card(base, card, state, since, seq, inbox_stream)
    if base.held_at is not None:
        after = replace(after, held_at=None, held_s=base.held_s + max(at - base.held_at, 0.0))
    if card.generation != base.generation:
        after = _begun_anew(after, card)
    task: TaskInfo | None = getattr(event, "task", None)
    if task is not None:
        after = _with_task(after, task)
    after = _on_kind(after, event, at)
    entry = Entry(seq=seq, at=at, kind=kind, state=state, attempt=event.card.attempt, detail=detail)
    result = bytes(event.result) or b"null" if type(event) is Completed else None
    return Step(row=after, entry=entry, verdict=verdict, result=result)


def apply_info(row: TaskRow, info: Info, seq: int, at: float) -> Step:
    """The row after an info; its state never moves."""
    fields, detail = on_info(row, info, at)
    entry = Entry(seq=seq, at=at, kind=kind_of(info), state=row.state, attempt=row.attempt, detail=short(detail))
    return Step(row=replace(row, **fields, seq=seq), entry=entry)


def _judge(row: TaskRow | None, event: LifeEvent, kind: str) -> tuple[Verdict, State]:
    if row is None:
        listed = TRANSITIONS[None].get(kind)
        return ("folded", listed) if listed is not None else ("illegal", state_after(kind))
    generation = event.card.generation
    if generation < row.generation:
        return "stale", row.state
    if row.state in TERMINAL and generation == row.generation:
        return "illegal", row.state
    if row.state not in TERMINAL and generation > row.generation:
        return "folded", state_after(kind)  # the end of the generation before is gone from the stream
    state = TRANSITIONS[row.state].get(kind)
    return ("illegal", row.state) if state is None else ("folded", state)


def _blank(card: Card, state: State, seq: int, at: float) -> TaskRow:
    return TaskRow(
        n=seq,
        seq=seq,
        key=card.key,
        tenant_id=card.tenant_id,
        task_id=card.task_id,
        queue=card.queue,
        state=state,
        generation=card.generation,
        created_at=at,
    )


def _with_card(row: TaskRow, card: Card, state: State, since: float, seq: int, inbox_stream: str) -> TaskRow:
    return replace(
        row,
        state=state,
        since=since,
        seq=seq,
        queue=card.queue,
        priority=card.priority,
        generation=card.generation,
        attempt=card.attempt,
        errors=card.errors,
        crashes=card.crashes,
        interruptions=card.interruptions,
        throttles=card.throttles,
        payload_hash=card.payload_hash,
        task_type=card.task_type,
        trace_id=card.trace_id or row.trace_id,
        inbox_seq=card.origin.seq if card.origin.stream == inbox_stream else row.inbox_seq,
    )


def _begun_anew(row: TaskRow, card: Card) -> TaskRow:
    return replace(
        row,
        task_id=card.task_id,
        started_at=None,
        ended_at=None,
        due_at=None,
        waits_for="",
        worker_id="",
        execution_id="",
        reason="",
        error=None,
        has_result=False,
        progress=None,
        usage=_NOTHING_USED,
        lane="",
        held_s=0.0,
    )


def _with_task(row: TaskRow, task: TaskInfo) -> TaskRow:
    return replace(
        row,
        title=task.title,
        tags=task.tags,
        run_id=task.run_id,
        session_id=task.session_id,
        parent_id=task.parent_id,
        step=task.step,
        idempotency_key=task.idempotency_key,
        deadline_at=task.deadline_at,
        max_attempts=task.max_attempts,
        limits=task.limits,
        payload_ref=task.payload_ref,
        payload_bytes=task.payload_bytes,
        created_at=task.accepted_at or row.created_at,
    )


def _on_kind(row: TaskRow, event: LifeEvent, at: float) -> TaskRow:
    card = event.card
    match event:
        case Queued() | Held() | Released() | Scheduled() | Retrying():
            return _on_waiting(row, event, at)
        case Started():
            return _started(row, event, at)
        case Completed():
            closed, used = _close(row, card, at, outcome="completed"), _plus(row.usage, event.usage)
            return _ended(row, at, attempts=closed, error=None, has_result=True, usage=used)
        case AttemptFailed():
            closed = _close(row, card, at, outcome="failed", failure=event.failure, worker_id=event.worker_id)
            return replace(row, error=_error(event.failure), attempts=closed, usage=_plus(row.usage, event.usage))
        case Parked():
            closed = _close(row, card, at, outcome="parked", reason=event.reason, message=event.detail)
            used = _plus(row.usage, event.usage)
            return replace(row, due_at=event.until, waits_for=event.reason, attempts=closed, usage=used)
        case Interrupted():
            closed = _close(row, card, at, outcome="interrupted", reason="shutdown")
            return replace(row, due_at=None, attempts=closed, usage=_plus(row.usage, event.usage))
        case Failed():
            closed = _close(row, card, at, outcome="failed", failure=event.failure)
            return _ended(row, at, reason=event.reason, error=_error(event.failure), attempts=closed)
        case Expired():
            error = TaskError(reason="expired", message=short(event.detail))
            return _ended(row, at, error=error, attempts=_close(row, card, at, outcome="expired"))
        case Cancelled():
            said = event.note or (f"cancelled by {event.by}" if event.by else "cancelled")
            error = TaskError(reason="cancelled", message=short(said))
            return _ended(row, at, error=error, attempts=_close(row, card, at, outcome="cancelled"))
        case _:
            assert_never(event)


def _ended(row: TaskRow, at: float, **more: Any) -> TaskRow:
    return replace(row, ended_at=at, due_at=None, waits_for="", progress=None, **more)


def _on_waiting(row: TaskRow, event: Waiting, at: float) -> TaskRow:
    match event:
        case Queued():
            return replace(row, due_at=None, waits_for="", worker_id="", progress=None, lane="")
        case Held():
            return _held(row, event, at)
        case Released():
            return row
        case Scheduled():
            fields: Fields = {
                "due_at": event.due_at,
                "waits_for": short(event.why),
                "worker_id": "",
                "lane": event.lane,
            }
            return replace(row, **fields, limits=event.limits or row.limits)
        case Retrying():
            return replace(row, due_at=event.due_at, waits_for="", worker_id="", progress=None)
        case _:
            assert_never(event)


def _held(row: TaskRow, event: Held, at: float) -> TaskRow:
    return replace(
        row,
        due_at=None,
        waits_for="",
        worker_id="",
        progress=None,
        lane=event.lane,
        again=event.again,
        limits=event.limits or row.limits,
        held_seq=row.seq,
        held_at=at,
    )


def _started(row: TaskRow, event: Started, at: float) -> TaskRow:
    opened = Attempt(
        attempt=event.card.attempt,
        started_at=at,
        generation=event.card.generation,
        execution_id=event.card.execution_id,
        worker_id=event.worker_id,
    )
    closed = _close(row, event.card, at, outcome="lost", reason="lease_lost")
    return replace(
        row,
        started_at=at,
        due_at=None,
        waits_for="",
        worker_id=event.worker_id,
        execution_id=event.card.execution_id,
        progress=None,
        attempts=[*closed, opened][-MAX_ATTEMPTS_SHOWN:],
    )


def _close(
    row: TaskRow,
    card: Card,
    at: float,
    *,
    outcome: str,
    failure: Failure | None = None,
    worker_id: str = "",
    reason: str = "",
    message: str = "",
) -> list[Attempt]:
    is_open = bool(row.attempts) and row.attempts[-1].ended_at is None
    if not is_open and (failure is None or not worker_id):
        return row.attempts
    told: Fields = {"outcome": outcome, "ended_at": at, "reason": reason, "message": short(message)}
    if failure is not None:
        told["reason"] = failure.reason
        told["error_type"] = short(failure.error_type, 256)
        told["message"] = short(failure.message)
        told["fingerprint"] = failure.fingerprint
    if is_open:
        return [*row.attempts[:-1], replace(row.attempts[-1], **told)]
    unclaimed = Attempt(
        attempt=card.attempt,
        started_at=None,
        generation=card.generation,
        execution_id=card.execution_id,
        worker_id=worker_id,
    )
    return [*row.attempts, replace(unclaimed, **told)][-MAX_ATTEMPTS_SHOWN:]


def _error(failure: Failure) -> TaskError:
    return TaskError(
        reason=failure.reason,
        type=short(failure.error_type, 256),
        message=short(failure.message, 8192),
        fingerprint=failure.fingerprint,
        traceback=short(failure.traceback, 8192),
        path=failure.path,
    )


def _plus(before: Usage, used: Usage) -> Usage:
    if before == _NOTHING_USED:
        return used
    return Usage(
        tokens_in=before.tokens_in + used.tokens_in,
        tokens_out=before.tokens_out + used.tokens_out,
        cost_usd=before.cost_usd + used.cost_usd,
        runtime_s=before.runtime_s + used.runtime_s,
    )
