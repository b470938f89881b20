"""What the tracker knows of a task: one row, one line of its timeline, one attempt. Times are Unix seconds.

The structs cannot form cycles, and many are kept: `gc=False` spares the collector, which would stop the loop, the walk.
Rows are kept in the file as arrays, half as large as with the names of their fields: their order is part of the format,
which `schema.USER_VERSION` counts.
"""

from typing import Literal

import msgspec

from millstream_schemas.events import Usage
from millstream_schemas.lifecycle import State


class TaskError(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Why the last attempt, or the task, failed."""

    reason: str
    type: str = ""
    message: str = ""
    fingerprint: str = ""
    traceback: str = ""
    path: str | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One execution: from its claim to its outcome. `ended_at` is None while it runs."""

    attempt: int
    started_at: float | None
    generation: int = 1
    execution_id: str = ""
    worker_id: str = ""
    ended_at: float | None = None
    outcome: str = ""
    """`completed`, `failed`, `parked`, `interrupted`, `cancelled`, or `lost` where another execution took over."""
    reason: str = ""
    error_type: str = ""
    message: str = ""
    fingerprint: str = ""


class TaskProgress(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What the running handler said last."""

    fraction: float
    message: str
    at: float


class TaskRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One task as its events have left it. `n` is the sequence of its first event, and orders all tasks."""

    n: int
    seq: int
    """Sequence of the last event or info that was folded in."""
    key: str
    tenant_id: str
    task_id: str
    queue: str
    state: State
    task_type: str = ""
    priority: str = "normal"
    payload_hash: str = ""
    trace_id: str = ""
    generation: int = 1
    attempt: int = 1
    max_attempts: int = 0
    errors: int = 0
    crashes: int = 0
    interruptions: int = 0
    throttles: int = 0
    title: str = ""
    tags: list[str] = []
    run_id: str | None = None
    session_id: str | None = None
    parent_id: str | None = None
    step: str | None = None
    idempotency_key: str | None = None
    limits: list[str] = []
    """Its pool of limit keys where it is metered, else those that its producer named."""
    payload_ref: str | None = None
    payload_bytes: int = 0
    deadline_at: float | None = None
    inbox_seq: int | None = None
    created_at: float = 0.0
    since: float = 0.0
    """When the task came into its present state."""
    started_at: float | None = None
    """Start of the last execution of this generation."""
    ended_at: float | None = None
    due_at: float | None = None
    waits_for: str = ""
    """Why a scheduled task waits, as the dispatcher said it."""
    worker_id: str = ""
    execution_id: str = ""
    reason: str = ""
    """How a failed task ended: the reason of its dead letter."""
    error: TaskError | None = None
    has_result: bool = False
    usage: Usage = Usage()
    progress: TaskProgress | None = None
    attempts: list[Attempt] = []
    duplicates: int = 0
    conflicts: int = 0
    stale_outcomes: int = 0
    unknown_fields: list[str] = []
    clamped: list[str] = []
    lane: str = ""
    """The lane in which it waits, or waited before its release; empty for a plain task."""
    again: bool = False
    """It ran or waited before, so it goes before the others of its lane."""
    held_seq: int = 0
    """Sequence of its last `held` event: the order within a lane."""
    held_at: float | None = None
    """Since when it is held; None while it is not."""
    held_s: float = 0.0
    """How long this generation was held before, all its turns together."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line of a timeline: an event or an info, and the state of the task after it."""

    seq: int
    at: float
    kind: str
    state: State
    attempt: int
    detail: str = ""


Verdict = Literal["folded", "illegal", "stale"]


class Step(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one message makes of a row. `result` is the JSON of a completed task, kept apart from the row."""

    row: TaskRow
    entry: Entry
    verdict: Verdict = "folded"
    result: bytes | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A folded message for those who follow: a line of a timeline, and its task as it was then or is by now."""

    row: TaskRow
    entry: Entry
    info: bool


def lane_of(row: TaskRow) -> str:
    """The full name of a held task's lane: with queue and priority, as each class of a queue has lanes of its own."""
    return f"{row.queue}/{row.priority}/{row.lane}"


def pool_of(row: TaskRow) -> str:
    """The name of a held task's pool: its limits, or its queue where that is fair and has no limits."""
    return "\n".join(row.limits) or f"/{row.queue}"


class Counts(msgspec.Struct, kw_only=True):
    """How many messages were folded since the start, and how many could not be."""

    folded: int = 0
    skipped: int = 0
    """Of a kind or version that a newer peer wrote."""
    illegal: int = 0
    """Not possible in the state that the task was in; kept in its timeline."""
    orphaned: int = 0
    """Infos of a task whose events are gone."""


def short(text: str, limit: int = 512) -> str:
    """`text`, cut to `limit` characters with a mark where it was longer."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
