"""The life of a task as events: a tagged union, each with version `v`.

Every life-cycle event holds a whole state card, so the last event alone says all that the next decision needs.
Times are Unix seconds as float; the time of an event is its time stamp in the stream.
"""

from typing import Literal

import msgspec

from millstream_schemas.envelope import NO_JSON, V1, Envelope, Priority

FailureReason = Literal[
    "error",
    "timeout",
    "fatal",
    "expired",
    "budget_exhausted",
    "history_lost",
    "unknown_task_type",
    "payload_mismatch",
    "result_not_encodable",
    "result_too_large",
    "worker_crashed",
]
FinalReason = Literal[
    "max_attempts",
    "fatal",
    "budget_exhausted",
    "worker_crashed",
    "throttled_out",
    "invalid_envelope",
    "rejected",
    "history_lost",
    "unknown_queue",
    "unknown_task_type",
]
ParkReason = Literal["throttled", "snoozed", "no_handler"]
HeldReason = Literal["limits", "fairness"]
"""Why a task is released by the releaser alone: it needs permits, or its queue is shared fairly between tenants."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The message that made the author write: its stream and sequence there."""

    stream: str
    seq: int


class Card(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole state of a task at one event. Written by the author of the event only."""

    key: str
    tenant_id: str
    task_id: str
    queue: str
    task_type: str
    payload_hash: str
    origin: Cause
    """The submit that made the task (INBOX), or the command that stood in for it."""
    cause: Cause
    trace_id: str = ""
    priority: Priority = "normal"
    generation: int = 1
    attempt: int = 1
    errors: int = 0
    crashes: int = 0
    interruptions: int = 0
    throttles: int = 0
    release: int = 0
    """Sequence of the releasing event this follows from; 0 on a releasing event, whose own sequence it is."""
    execution_id: str = ""
    work_seq: int = 0
    delivery: int = 0
    waiting_since: float = 0.0
    """When the wait that `waiting_for` names began; 0 while there is none."""
    waiting_for: str = ""


class TaskInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What people look for in a task; told once, with its first event."""

    title: str = ""
    tags: list[str] = []
    run_id: str | None = None
    session_id: str | None = None
    parent_id: str | None = None
    step: str | None = None
    idempotency_key: str | None = None
    deadline_at: float | None = None
    max_attempts: int = 0
    limits: list[str] = []
    payload_ref: str | None = None
    payload_bytes: int = 0
    accepted_at: float = 0.0


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What executions of a task used, added up."""

    tokens_in: int = 0
    tokens_out: int = 0
    cost_usd: float = 0.0
    runtime_s: float = 0.0


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why an attempt failed; texts are cleaned and cut by the worker."""

    reason: FailureReason
    error_type: str = ""
    message: str = ""
    classes: list[str] = []
    """Names that `retry_on` and `fatal_on` are matched against: exception types, `http_429`, `timeout`…"""
    traceback: str = ""
    fingerprint: str = ""
    retry_after_s: float | None = None
    path: str | None = None
    """JSON path of the first fault, where the input did not fit."""


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One past attempt, for the dead letter and for people."""

    attempt: int
    reason: str
    error_type: str = ""
    message: str = ""
    fingerprint: str = ""
    worker_id: str = ""
    ended_at: float = 0.0


class WorkItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a WORK message: the envelope with what the system knows of the task."""

    fence: int
    """Sequence of the releasing event: the claim is appended by compare-and-set on it."""
    card: Card
    envelope: Envelope
    v: int = V1
    history: list[AttemptRecord] = []
    usage: Usage = Usage()
    due_at: float = 0.0
    limits: list[str] = []
    """The limit keys that the dispatcher found for the task: its pool. A worker adds those of its own handler."""
    lane: str = ""
    """Where the task waits in HELD; empty for a plain task, which is released to WORK at once."""


class Deadline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of an `expire` tick: the task that is to end if `fence` is still its last event."""

    tenant_id: str
    key: str
    fence: int
    v: int = V1


# --- life cycle: each moves a task --------------------------------------------------------------


class Queued(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="queued"):
    """Accepted, or handed back: released to WORK at once."""

    card: Card
    v: int = V1
    task: TaskInfo | None = None


class Scheduled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="scheduled"):
    """Waits for `due_at`: a delayed submit, or a task parked by throttling."""

    card: Card
    due_at: float
    v: int = V1
    task: TaskInfo | None = None
    why: str = ""
    limits: list[str] = []
    lane: str = ""
    """Set where the task will be held when it is due, with `limits` as its pool."""


class Held(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="held"):
    """Ready, and waits in HELD for its turn: the releaser appends `released` on this event."""

    card: Card
    reason: HeldReason
    lane: str
    v: int = V1
    limits: list[str] = []
    task: TaskInfo | None = None
    again: bool = False
    """It ran or waited before (a retry, a park, an interruption), and goes before those of its lane that did not."""


class Released(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="released"):
    """The releaser chose it: it goes to WORK. Its cause is its entry in HELD."""

    card: Card
    v: int = V1


class Retrying(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="retrying"):
    """A failed attempt gets another at `due_at`; the jitter was drawn once and stands here."""

    card: Card
    due_at: float
    v: int = V1


class Started(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="started"):
    """A worker claimed the task; a second one of the same release is a takeover after a lost lease."""

    card: Card
    worker_id: str
    v: int = V1


class Completed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="completed"):
    """The outcome of a good execution."""

    card: Card
    v: int = V1
    result: msgspec.Raw = NO_JSON
    usage: Usage = Usage()


class AttemptFailed(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="attempt_failed"
):
    """An attempt ended without a result; the dispatcher decides what follows."""

    card: Card
    failure: Failure
    v: int = V1
    item: WorkItem | None = None
    usage: Usage = Usage()
    worker_id: str = ""


class Parked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="parked"):
    """A worker gave the task back until `until`, at no cost in attempts."""

    card: Card
    until: float
    reason: ParkReason
    item: WorkItem
    v: int = V1
    detail: str = ""
    usage: Usage = Usage()


class Interrupted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="interrupted"):
    """A worker handed the task back because it is stopping."""

    card: Card
    item: WorkItem
    v: int = V1
    usage: Usage = Usage()


class Failed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="failed"):
    """The end without a result; a dead letter follows."""

    card: Card
    reason: FinalReason
    failure: Failure
    v: int = V1
    task: TaskInfo | None = None


class Expired(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="expired"):
    """The deadline passed before a start; no dead letter."""

    card: Card
    v: int = V1
    task: TaskInfo | None = None
    detail: str = ""


class Cancelled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="cancelled"):
    """Ended by command."""

    card: Card
    v: int = V1
    by: str = ""
    note: str = ""


class Alias(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="alias"):
    """Stands under the hash of a task id and points to the task that its idempotency key named."""

    card: Card
    points_to: str
    v: int = V1


LifeEvent = (
    Queued
    | Held
    | Released
    | Scheduled
    | Retrying
    | Started
    | Completed
    | AttemptFailed
    | Parked
    | Interrupted
    | Failed
    | Expired
    | Cancelled
)
"""Events that move a task."""

Event = LifeEvent | Alias


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A failed task as the DLQ keeps it: everything needed to understand it and to run it again."""

    card: Card
    reason: FinalReason
    failure: Failure
    v: int = V1
    envelope: Envelope | None = None
    history: list[AttemptRecord] = []
    usage: Usage = Usage()
    failed_at: float = 0.0
    raw_base64: str | None = None
    """The submit's bytes (capped) where they could not be decoded."""
    raw_bytes: int | None = None
