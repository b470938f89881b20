"""Admission: what a submit becomes, and what it means when its task is there already."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec

from millstream.policy.metering import Metered, metering
from millstream.policy.trace import resolve_trace, traceparent
from millstream_schemas import events
from millstream_schemas.codec import InvalidEnvelope
from millstream_schemas.envelope import MAX_ATTEMPTS_CAP, MAX_WAIT_S, Budget, Envelope, RetryPolicy, TraceContext
from millstream_schemas.events import Card, Cause, Event, Held, Queued, Scheduled, TaskInfo
from millstream_schemas.keys import canonical_json, content_hash, derive_key
from millstream_schemas.lifecycle import TERMINAL_KINDS

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = 253_370_764_800.0  # the start of year 9999: later instants overflow in other zones


class QueueDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue fills in where an envelope says nothing."""

    max_attempts: int = 3
    max_runtime_seconds: float | None = None
    max_cost_usd: float | None = None
    max_tokens: int | None = None
    retry_policy: RetryPolicy = RetryPolicy()


@dataclass(frozen=True, slots=True)
class Submit:
    """A decoded submit with where and when the server accepted it. `accepted_at` in Unix seconds."""

    envelope: Envelope
    tenant: str
    queue: str
    stream: str
    seq: int
    accepted_at: float
    headers_traceparent: str | None = None
    headers_tracestate: str | None = None


FirstEvent = Queued | Held | Scheduled | events.Expired


@dataclass(frozen=True, slots=True)
class Admission:
    """The verdict on a submit: the first event to append at 0, and what the task is."""

    key: str
    alias_key: str | None
    envelope: Envelope
    card: Card
    event: FirstEvent
    due_at: float
    accepted_at: float
    unique_in_flight: bool
    clamped: tuple[str, ...]


def admit(
    submit: Submit, defaults: QueueDefaults, max_wait_s: float = MAX_WAIT_S, kinds: Sequence[Metered] = ()
) -> Admission:
    """What a submit becomes; `kinds` says how tasks like it are metered. Equal arguments always give the same answer.

    Raises InvalidEnvelope where fields contradict the subject, each other or the calendar.
    """
    envelope = submit.envelope
    check(envelope, submit.tenant, submit.queue)
    deadline = instant(envelope.deadline_at, "$.deadline_at")
    due_at = _due_at(envelope, submit.accepted_at, max_wait_s)
    clamped: list[str] = []
    full = _filled(submit, defaults, clamped)
    card = _card(submit, full)
    info = _info(full, submit, deadline)
    event: FirstEvent
    if deadline is not None and deadline <= max(submit.accepted_at, due_at):
        event = events.Expired(card=card, task=info, detail="the deadline is before the earliest start")
    else:
        event = _waiting(card, info, full, due_at if due_at > submit.accepted_at else None, kinds)
    return Admission(
        key=card.key,
        alias_key=_alias_key(envelope, submit.tenant),
        envelope=full,
        card=card,
        event=event,
        due_at=due_at,
        accepted_at=submit.accepted_at,
        unique_in_flight=envelope.unique == "in_flight",
        clamped=tuple(clamped),
    )


def _waiting(
    card: Card, info: TaskInfo, full: Envelope, due_at: float | None, kinds: Sequence[Metered]
) -> Queued | Held | Scheduled:
    metered = metering(full, kinds) if kinds or full.limits else None
    lane, limits = (metered.lane, list(metered.limits)) if metered else ("", [])
    if due_at is not None:
        return Scheduled(card=card, due_at=due_at, task=info, lane=lane, limits=limits)
    if metered is not None:
        return Held(card=card, reason=metered.reason, lane=lane, limits=limits, task=info)
    return Queued(card=card, task=info)


def check(envelope: Envelope, tenant: str, queue: str) -> None:
    """What can be said of a submit before it is sent.

    Raises InvalidEnvelope where fields contradict the subject, each other or the calendar, or ask for what this
    version cannot do.
    """
    _agrees(envelope.tenant_id, tenant, "tenant_id")
    _agrees(envelope.queue, queue, "queue")
    _one_of(envelope.payload, envelope.payload_ref, "payload")
    _one_of(envelope.context, envelope.context_ref, "context")
    if envelope.approval is not None and envelope.approval.required:
        raise InvalidEnvelope("Approvals are not supported by this version", "$.approval.required")
    if envelope.not_before is not None and envelope.delay_seconds is not None:
        raise InvalidEnvelope("Expected `not_before` or `delay_seconds`, got both", "$.delay_seconds")
    instant(envelope.deadline_at, "$.deadline_at")
    instant(envelope.not_before, "$.not_before")


def _agrees(given: str | None, subject: str, field: str) -> None:
    if given is not None and given != subject:
        raise InvalidEnvelope(f"Expected `{subject}` as in the subject, got `{given}`", f"$.{field}")


def _one_of(raw: msgspec.Raw, ref: str | None, field: str) -> None:
    if bytes(raw) and ref is not None:
        raise InvalidEnvelope(f"Expected `{field}` or `{field}_ref`, got both", f"$.{field}_ref")


def instant(value: datetime | None, path: str) -> float | None:
    """Unix seconds of a zoned instant; raises InvalidEnvelope outside the years 1970 to 9998."""
    if value is None:
        return None
    seconds = (value.replace(tzinfo=UTC) - _EPOCH).total_seconds() - (value.utcoffset() or timedelta()).total_seconds()
    if not 0 <= seconds < _LATEST:
        raise InvalidEnvelope("Expected an instant from 1970 to 9998", path)
    return seconds


def _due_at(envelope: Envelope, accepted_at: float, max_wait_s: float) -> float:
    if envelope.delay_seconds is not None:
        wait, path = envelope.delay_seconds, "$.delay_seconds"
    else:
        wait, path = (instant(envelope.not_before, "$.not_before") or accepted_at) - accepted_at, "$.not_before"
    if wait > max_wait_s:
        raise InvalidEnvelope(f"Expected a wait of at most {max_wait_s:.0f} seconds, got {wait:.0f}", path)
    return accepted_at + max(wait, 0.0)


def task_key(envelope: Envelope, tenant: str, stream: str, seq: int, accepted_at: float) -> str:
    """The key of a submit's task: by idempotency key, content (where `unique` asks), task id, or the message itself."""
    if envelope.idempotency_key is not None:
        return derive_key("key", tenant, envelope.idempotency_key)
    if envelope.unique is not None:
        content = content_hash(
            envelope.task_type,
            canonical_json(bytes(envelope.payload)),
            envelope.payload_ref,
            canonical_json(bytes(envelope.context)),
            envelope.context_ref,
        )
        return derive_key("content", tenant, content)
    if envelope.task_id is not None:
        return derive_key("id", tenant, envelope.task_id)
    return derive_key("inbox", tenant, f"{stream}:{seq}:{accepted_at:.6f}")


def _alias_key(envelope: Envelope, tenant: str) -> str | None:
    if envelope.task_id is None or (envelope.idempotency_key is None and envelope.unique is None):
        return None
    return derive_key("id", tenant, envelope.task_id)


def _filled(submit: Submit, defaults: QueueDefaults, clamped: list[str]) -> Envelope:
    envelope = submit.envelope
    given = envelope.budget
    attempts = given.max_attempts if given.max_attempts is not None else defaults.max_attempts
    if attempts > MAX_ATTEMPTS_CAP:
        clamped.append("budget.max_attempts")
    budget = Budget(
        max_attempts=min(attempts, MAX_ATTEMPTS_CAP),
        max_runtime_seconds=_or(given.max_runtime_seconds, defaults.max_runtime_seconds),
        max_cost_usd=_or(given.max_cost_usd, defaults.max_cost_usd),
        max_tokens=given.max_tokens if given.max_tokens is not None else defaults.max_tokens,
    )
    key = task_key(envelope, submit.tenant, submit.stream, submit.seq, submit.accepted_at)
    trace = resolve_trace(envelope.trace_context, submit.headers_traceparent, submit.headers_tracestate, key)
    return msgspec.structs.replace(
        envelope,
        task_id=envelope.task_id or key,
        tenant_id=submit.tenant,
        queue=submit.queue,
        budget=budget,
        retry_policy=envelope.retry_policy or defaults.retry_policy,
        attempt=None,
        trace_context=TraceContext(
            trace_id=trace.trace_id,
            parent_span_id=trace.parent_span_id or None,
            traceparent=traceparent(trace),
            tracestate=trace.tracestate or None,
        ),
    )


def _or(value: float | None, default: float | None) -> float | None:
    return default if value is None else value


def payload_hash(envelope: Envelope) -> str:
    """What two submits of one key must share not to be a conflict: type and input."""
    return content_hash(envelope.task_type, canonical_json(bytes(envelope.payload)), envelope.payload_ref)


def _card(submit: Submit, full: Envelope) -> Card:
    envelope = submit.envelope
    cause = Cause(stream=submit.stream, seq=submit.seq)
    return Card(
        key=task_key(envelope, submit.tenant, submit.stream, submit.seq, submit.accepted_at),
        tenant_id=submit.tenant,
        task_id=full.task_id or "",
        queue=submit.queue,
        task_type=envelope.task_type,
        payload_hash=payload_hash(envelope),
        origin=cause,
        cause=cause,
        trace_id=(full.trace_context.trace_id or "") if full.trace_context else "",
        priority=envelope.priority,
    )


def _info(full: Envelope, submit: Submit, deadline: float | None) -> TaskInfo:
    return TaskInfo(
        title=full.title or "",
        tags=full.tags,
        run_id=full.run_id,
        session_id=full.session_id,
        parent_id=full.parent_id,
        step=full.step,
        idempotency_key=full.idempotency_key,
        deadline_at=deadline,
        max_attempts=full.budget.max_attempts or 0,
        limits=full.limits,
        payload_ref=full.payload_ref,
        payload_bytes=len(bytes(full.payload)),
        accepted_at=submit.accepted_at,
    )


# --- the task is there already --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GoOn:
    """This very submit made the last event: publish what follows from it. `fence` is its sequence."""

    fence: int
    event: Queued | Held | Scheduled


@dataclass(frozen=True, slots=True)
class Done:
    """This submit was handled and its task has moved on: only the ack is missing."""


@dataclass(frozen=True, slots=True)
class Again:
    """Another submit of the same task: drop it and tell. `conflict`: it had another payload."""

    conflict: bool


@dataclass(frozen=True, slots=True)
class NewGeneration:
    """The task is over and its key is free again: append on `expect_seq` as `generation`."""

    expect_seq: int
    generation: int


@dataclass(frozen=True, slots=True)
class AppendFirst:
    """There is no event (any more): append at 0."""


Standing = GoOn | Done | Again | NewGeneration | AppendFirst


def standing(admission: Admission, last: Event | None, last_seq: int, last_at: float = 0.0) -> Standing:
    """What a submit means beside the last event of its task; the answer to a refused or unanswered first append.

    `last_at` is the stream's time stamp of the last event, Unix seconds. A submit that the server accepted while the
    task was in flight stays a duplicate for ever; only one that came after the end opens a new generation.
    """
    if last is None:
        return AppendFirst()
    kind = _kind(last)
    if last.card.origin == admission.card.origin:
        if isinstance(last, Queued | Held | Scheduled) and last.card.cause == admission.card.cause:
            return GoOn(last_seq, last)
        return Done()
    # Not "is over by now": what a redelivered submit means must not depend on when it is looked at.
    was_over = kind in TERMINAL_KINDS and last_at <= admission.accepted_at
    if admission.unique_in_flight and was_over:
        return NewGeneration(last_seq, last.card.generation + 1)
    return Again(conflict=last.card.payload_hash not in ("", admission.card.payload_hash))


def alias_blocks(alias_key_holder: Event, admission: Admission) -> bool:
    """True when the task id belongs to another task: the submit is a conflict."""
    if isinstance(alias_key_holder, events.Alias):
        return alias_key_holder.points_to != admission.key
    return alias_key_holder.card.key != admission.key


def in_generation(admission: Admission, generation: int) -> FirstEvent:
    """The admission's event for a later generation of its task."""
    card = msgspec.structs.replace(admission.card, generation=generation)
    return msgspec.structs.replace(admission.event, card=card)


def _kind(event: Event) -> str:
    return str(event.__struct_config__.tag)
