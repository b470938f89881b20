"""How a task looks as JSON. Times are RFC 3339 in UTC; nothing here is HTML."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import quote

import msgspec

from millstream.tracker.model import Attempt, Change, TaskError, TaskRow, short
from millstream.tracker.snapshot import Batch
from millstream_schemas.names import DEFAULT_TENANT

MAX_RESULT_SHOWN_BYTES: Final = 64 * 1024
"""A longer result is left out of the task and read at its own address."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST: Final = 253_402_300_799.0
_encode: Final = msgspec.json.Encoder().encode

Json = dict[str, Any]


def rfc3339(at: float | None) -> str | None:
    """An instant in UTC with milliseconds."""
    if at is None:
        return None
    moment = _EPOCH + timedelta(milliseconds=round(min(max(at, 0.0), _LAST) * 1000))
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def task_url(row: TaskRow) -> str:
    """Where the task is found; with its tenant where that is not the default one."""
    path = f"/v1/tasks/{quote(row.task_id, safe='')}"
    return path if row.tenant_id == DEFAULT_TENANT else f"{path}?tenant={row.tenant_id}"


def summary(row: TaskRow) -> Json:
    """A task in a list: no result, no attempts, no timeline, no traceback."""
    return {
        "task_id": row.task_id,
        "key": row.key,
        "state": row.state,
        "task_type": row.task_type,
        "queue": row.queue,
        "tenant_id": row.tenant_id,
        "priority": row.priority,
        "title": row.title,
        "tags": row.tags,
        "run_id": row.run_id,
        "session_id": row.session_id,
        "parent_id": row.parent_id,
        "step": row.step,
        "attempt": row.attempt,
        "max_attempts": row.max_attempts,
        "errors": row.errors,
        "crashes": row.crashes,
        "interruptions": row.interruptions,
        "throttles": row.throttles,
        "generation": row.generation,
        "trace_id": row.trace_id,
        "error": None if row.error is None else _error(row, row.error),
        "progress": None if row.progress is None else _progress(row),
        "usage": _usage(row),
        "inbox_seq": row.inbox_seq,
        "created_at": rfc3339(row.created_at),
        "started_at": rfc3339(row.started_at),
        "ended_at": rfc3339(row.ended_at),
        "due_at": rfc3339(row.due_at),
        "deadline_at": rfc3339(row.deadline_at),
        "since": rfc3339(row.since),
        "waits_for": row.waits_for,
        "held_at": rfc3339(row.held_at),
        "held_s": round(row.held_s, 3),
        "worker_id": row.worker_id,
        "seq": row.seq,
        "status_url": task_url(row),
    }


def task(row: TaskRow, lines: Sequence[Change], result: bytes | None) -> Json:
    """The whole task."""
    shown = summary(row)
    if row.error is not None:
        whole = {"message": row.error.message, "traceback": row.error.traceback, "path": row.error.path}
        shown["error"] = _error(row, row.error) | whole
    shown |= {
        "execution_id": row.execution_id,
        "idempotency_key": row.idempotency_key,
        "limits": row.limits,
        "lane": row.lane,
        "payload_ref": row.payload_ref,
        "payload_bytes": row.payload_bytes,
        "attempts": [_attempt(each) for each in row.attempts],
        "infos": {
            "duplicates": row.duplicates,
            "conflicts": row.conflicts,
            "stale_outcomes": row.stale_outcomes,
            "unknown_fields": row.unknown_fields,
            "clamped": row.clamped,
        },
        "timeline": [_line(line) for line in lines],
        "result": None,
    }
    if result is not None:
        if len(result) <= MAX_RESULT_SHOWN_BYTES:
            shown["result"] = msgspec.Raw(result)
        else:
            shown["result_url"] = f"/v1/tasks/{row.key}/result"
        shown["result_bytes"] = len(result)
    return shown


def _error(row: TaskRow, error: TaskError) -> Json:
    return {
        "reason": row.reason or error.reason,
        "cause": error.reason,
        "type": error.type,
        "message": short(error.message),
        "fingerprint": error.fingerprint,
    }


def _progress(row: TaskRow) -> Json | None:
    if row.progress is None:
        return None
    return {"fraction": row.progress.fraction, "message": row.progress.message, "at": rfc3339(row.progress.at)}


def _usage(row: TaskRow) -> Json:
    used = row.usage
    return {
        "tokens_in": used.tokens_in,
        "tokens_out": used.tokens_out,
        "cost_usd": used.cost_usd,
        "runtime_s": round(used.runtime_s, 6),
    }


def _attempt(attempt: Attempt) -> Json:
    return {
        "attempt": attempt.attempt,
        "generation": attempt.generation,
        "execution_id": attempt.execution_id,
        "worker_id": attempt.worker_id,
        "started_at": rfc3339(attempt.started_at),
        "ended_at": rfc3339(attempt.ended_at),
        "outcome": attempt.outcome or "running",
        "reason": attempt.reason,
        "error_type": attempt.error_type,
        "message": attempt.message,
        "fingerprint": attempt.fingerprint,
    }


def _line(line: Change) -> Json:
    entry = line.entry
    return {
        "seq": entry.seq,
        "at": rfc3339(entry.at),
        "kind": entry.kind,
        "state": entry.state,
        "attempt": entry.attempt,
        "detail": entry.detail,
        "info": line.info,
    }


def event_frame(change: Change) -> bytes:
    """One server-sent event, complete: what happened, to which task. Its id is the sequence in the stream."""
    row, entry = change.row, change.entry
    data = _encode(
        {
            "seq": entry.seq,
            "at": rfc3339(entry.at),
            "kind": entry.kind,
            "state": entry.state,
            "attempt": entry.attempt,
            "detail": entry.detail,
            "task_id": row.task_id,
            "key": row.key,
            "tenant_id": row.tenant_id,
            "queue": row.queue,
            "task_type": row.task_type,
            "title": row.title,
            "priority": row.priority,
            "run_id": row.run_id,
            "generation": row.generation,
            "trace_id": row.trace_id,
            "created_at": rfc3339(row.created_at),
        }
    )
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (entry.seq, b"info" if change.info else b"task", data)


def snapshot(queue: str, batch: Batch, rows: Sequence[TaskRow]) -> Json:
    """The active batch of a queue with the tasks that a person looks at first."""
    return {
        "queue": queue,
        "began_at": rfc3339(batch.began_at),
        "total": batch.total,
        "queued": batch.queued,
        "processing": batch.processing,
        "completed": batch.completed,
        "failed": batch.failed,
        "tasks": [_watched(row) for row in rows],
    }


def _watched(row: TaskRow) -> Json:
    return {
        "task_id": row.task_id,
        "key": row.key,
        "tenant_id": row.tenant_id,
        "task_type": row.task_type,
        "title": row.title,
        "state": row.state,
        "attempt": row.attempt,
        "error": None if row.error is None else row.error.message or row.error.type or row.error.reason,
        "progress": _progress(row),
        "created_at": rfc3339(row.created_at),
        "started_at": rfc3339(row.started_at),
        "ended_at": rfc3339(row.ended_at),
        "due_at": rfc3339(row.due_at),
    }
