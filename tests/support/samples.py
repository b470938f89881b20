"""One golden sample of every message, written by hand with every field filled, so that other languages see all of it.

`python -m tests.support.samples` rewrites `schemas/wire-samples/v1`; a test fails while that differs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from millstream_schemas import commands, events, infos, limit_states, permits
from millstream_schemas.codec import encode
from millstream_schemas.envelope import (
    Approval,
    Budget,
    Callback,
    Envelope,
    RetryPolicy,
    TraceContext,
    UsageEstimate,
)
from millstream_schemas.keys import content_hash, derive_key

FOLDER = Path(__file__).resolve().parents[2] / "schemas" / "wire-samples"
CURRENT = FOLDER / "v1"

KEY = derive_key("key", "acme", "note:42:summary")
ALIAS_KEY = derive_key("id", "acme", "task-42")
LANE = derive_key("lane", "acme", "llm\ntenant/acme")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
ACCEPTED_AT = 1778320800.25  # 2026-05-09T10:00:00.250Z

# The two forms of the task message that the wire was made for, as their producers write them.
ORIGINS_C_RESUME = """\
{"task_id": "task_01", "run_id": "run_01", "session_id": "sess_01", "task_type": "agent.resume", "idempotency_key": "run_01:step_4",
 "payload_ref": "object://payload/task_01.json", "attempt": 1, "priority": "normal", "deadline_at": "2026-05-09T10:05:00Z"}
"""
ORIGINS_C_RUN = """\
{"task_id": "task_01J", "task_type": "agent.run", "idempotency_key": "tenant:user:business_request_hash", "tenant_id": "t_123", "priority": "normal",
 "payload": {"agent_id": "refund_agent", "session_id": "ses_456", "input_ref": "blob://requests/abc"},
 "budget": {"max_attempts": 3, "max_runtime_seconds": 300, "max_cost_usd": 0.5},
 "retry_policy": {"strategy": "exponential_backoff", "base_seconds": 5, "max_seconds": 120, "jitter": true},
 "trace_context": {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "parent_span_id": "00f067aa0ba902b7"}}
"""

ENVELOPE = Envelope(
    task_type="notes.summarize",
    task_id="task-42",
    idempotency_key="note:42:summary",
    tenant_id="acme",
    queue="agent-run",
    run_id="run-7",
    session_id="session-3",
    parent_id="task-41",
    step="summarize",
    title="Summarise “Tide tables”",
    tags=["notes", "nightly"],
    payload=msgspec.Raw(
        b'{"note_id":42,"text":"Spring tides come at new moon and full moon.","weights":[0.5,1e-3,null]}'
    ),
    context=msgspec.Raw(b'{"conversation":[{"role":"user","content":"Keep it short."}]}'),
    priority="high",
    not_before=datetime(2026, 5, 9, 10, 1, tzinfo=UTC),
    deadline_at=datetime(2026, 5, 9, 18, 0, tzinfo=UTC),
    budget=Budget(max_attempts=5, max_runtime_seconds=300.0, max_cost_usd=0.5, max_tokens=50_000),
    retry_policy=RetryPolicy(
        strategy="linear",
        base_seconds=5.0,
        factor=1.5,
        max_seconds=120.0,
        jitter=False,
        retry_on=["http_429", "timeout"],
        fatal_on=["ContextTooLong"],
    ),
    attempt=1,
    usage_estimate=UsageEstimate(requests=1, tokens_in=1200, tokens_out=300, cost_usd=0.01),
    limits=["llm"],
    ordering_key="note:42",
    unique="in_flight",
    approval=Approval(required=True, reason="sends mail", expires_seconds=86400.0, remind_seconds=3600.0),
    pins={"model": "small-1", "dataset": "2026-05"},
    mode="dry_run",
    callback=Callback(url="https://hooks.example.com/tasks", events=["completed", "failed"]),
    trace_context=TraceContext(
        trace_id=TRACE_ID,
        parent_span_id=SPAN_ID,
        traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01",
        tracestate="vendor=1",
    ),
)
BY_REFERENCE = Envelope(
    task_type="notes.summarize",
    payload_ref="s3://notes/42.json",
    context_ref="object://contexts/42",
    delay_seconds=30.0,
)
CARD = events.Card(
    key=KEY,
    tenant_id="acme",
    task_id="task-42",
    queue="agent-run",
    task_type="notes.summarize",
    payload_hash=content_hash("notes.summarize", b'{"note_id":42}', None),
    origin=events.Cause(stream="MILL_INBOX", seq=1001),
    cause=events.Cause(stream="MILL_WORK", seq=2002),
    trace_id=TRACE_ID,
    priority="high",
    generation=2,
    attempt=3,
    errors=2,
    crashes=1,
    interruptions=1,
    throttles=4,
    release=3003,
    execution_id="x7k2m4",
    work_seq=2002,
    delivery=2,
    waiting_since=ACCEPTED_AT + 10,
    waiting_for="throttled",
)
TASK = events.TaskInfo(
    title="Summarise “Tide tables”",
    tags=["notes", "nightly"],
    run_id="run-7",
    session_id="session-3",
    parent_id="task-41",
    step="summarize",
    idempotency_key="note:42:summary",
    deadline_at=1778349600.0,
    max_attempts=5,
    limits=["llm"],
    payload_ref="s3://notes/42.json",
    payload_bytes=96,
    accepted_at=ACCEPTED_AT,
)
USAGE = events.Usage(tokens_in=1180, tokens_out=264, cost_usd=0.0081, runtime_s=2.75)
FAILURE = events.Failure(
    reason="error",
    error_type="ProviderError",
    message="429 Too Many Requests",
    classes=["ProviderError", "http_429"],
    traceback="Traceback (most recent call last):\n  …\nProviderError: 429 Too Many Requests",
    fingerprint="9f2c51d0",
    retry_after_s=12.0,
    path="$.payload.text",
)
ITEM = events.WorkItem(
    fence=3003,
    card=CARD,
    envelope=ENVELOPE,
    history=[
        events.AttemptRecord(
            attempt=2,
            reason="error",
            error_type="ProviderError",
            message="500 Internal Server Error",
            fingerprint="41aa07be",
            worker_id="worker-a",
            ended_at=ACCEPTED_AT + 8,
        )
    ],
    usage=USAGE,
    due_at=ACCEPTED_AT + 30,
    limits=["llm", "tenant/acme"],
    lane=LANE,
)

EVENTS = (
    events.Queued(card=CARD, task=TASK),
    events.Held(card=CARD, reason="limits", lane=LANE, limits=["llm", "tenant/acme"], task=TASK, again=True),
    events.Released(card=CARD),
    events.Scheduled(
        card=CARD, due_at=ACCEPTED_AT + 30, task=TASK, why="delayed", limits=["llm", "tenant/acme"], lane=LANE
    ),
    events.Retrying(card=CARD, due_at=ACCEPTED_AT + 30),
    events.Started(card=CARD, worker_id="worker-a"),
    events.Completed(card=CARD, result=msgspec.Raw(b'{"summary":"Moon, then tide."}'), usage=USAGE),
    events.AttemptFailed(card=CARD, failure=FAILURE, item=ITEM, usage=USAGE, worker_id="worker-a"),
    events.Parked(card=CARD, until=ACCEPTED_AT + 60, reason="throttled", item=ITEM, detail="llm", usage=USAGE),
    events.Interrupted(card=CARD, item=ITEM, usage=USAGE),
    events.Failed(card=CARD, reason="max_attempts", failure=FAILURE, task=TASK),
    events.Expired(card=CARD, task=TASK, detail="the deadline is before the earliest start"),
    events.Cancelled(card=CARD, by="operator", note="sent twice"),
    events.Alias(card=msgspec.structs.replace(CARD, key=ALIAS_KEY), points_to=KEY),
)
INFOS = (
    infos.Progress(key=KEY, fraction=0.4, message="2 of 5 pages", attempt=3),
    infos.Duplicate(key=KEY, inbox_seq=1002),
    infos.Conflict(key=KEY, inbox_seq=1003, detail="another payload"),
    infos.StaleOutcome(key=KEY, execution_id="x7k2m3", outcome="completed"),
    infos.UnknownFields(key=KEY, names=["colour"], clamped=["budget.max_attempts"]),
    infos.BudgetWarning(
        key=KEY, budget="tenant/acme", period="2026-05-09", spent=40.25, hard=50.0, price_version="2026-05"
    ),
)
COMMANDS = (
    commands.Cancel(tenant_id="acme", task_id="task-42", key=KEY, by="operator", note="sent twice"),
    commands.Replay(tenant_id="acme", task_id="task-42", key=KEY, by="operator", note="provider is back"),
)
SUBMIT_REPLIES = (
    commands.SubmitAccepted(
        task_id="task-42",
        key=KEY,
        tenant_id="acme",
        queue="agent-run",
        inbox_seq=1001,
        status_url="http://127.0.0.1:8420/v1/tasks/task-42?tenant=acme",
    ),
    commands.SubmitRejected(code="invalid_envelope", message="Expected `int` >= 1", path="$.budget.max_attempts"),
)
REJECTED_BROKEN_JSON = commands.SubmitRejected(
    code="invalid_envelope", message="JSON is malformed: invalid character", byte_offset=17
)
WORKER_INFO = commands.WorkerInfo(
    worker_id="worker-a",
    queues=["agent-run"],
    slots=8,
    handlers=[commands.HandlerInfo(task_type="notes.summarize", queue="agent-run", limits=["llm"], timeout_s=60.0)],
    running=[KEY],
    host="node-1",
    pid=4711,
    version="0.1.0",
    started_at=ACCEPTED_AT - 3600,
    seen_at=ACCEPTED_AT,
    draining=True,
)
DEAD_LETTER = events.DeadLetter(
    card=CARD,
    reason="max_attempts",
    failure=FAILURE,
    envelope=ENVELOPE,
    history=ITEM.history,
    usage=USAGE,
    failed_at=ACCEPTED_AT + 90,
)
UNREADABLE_KEY = derive_key("inbox", "acme", f"MILL_INBOX:1004:{ACCEPTED_AT:.6f}")
UNREADABLE = events.DeadLetter(
    card=events.Card(
        key=UNREADABLE_KEY,
        tenant_id="acme",
        task_id=UNREADABLE_KEY,
        queue="agent-run",
        task_type="",
        payload_hash="",
        origin=events.Cause(stream="MILL_INBOX", seq=1004),
        cause=events.Cause(stream="MILL_INBOX", seq=1004),
        trace_id=TRACE_ID,
    ),
    reason="invalid_envelope",
    failure=events.Failure(
        reason="fatal",
        error_type="invalid_envelope",
        message="Expected `object`, got `array` - at `$`",
        fingerprint="invalid_envelope:$",
        path="$",
    ),
    failed_at=ACCEPTED_AT,
    raw_base64="W10=",
    raw_bytes=2,
)
OBSERVED = permits.Observed(dimension="requests", limit=60, remaining=3, reset_s=42.0)
PERMIT_REQUESTS = (
    permits.Acquire(
        id="x7k2m4",
        worker="worker-a",
        keys=("llm", "tenant/acme"),
        n=2,
        requests=2,
        tokens_in=1200,
        tokens_out=300,
        cost_usd=0.01,
        model="small-1",
        wait_ms=5000,
        task=KEY,
        retry=True,
        epoch=3,
    ),
    permits.Settle(
        permit="3-1",
        outcome="throttled",
        requests=1,
        tokens_in=1180,
        tokens_out=264,
        cost_usd=0.0081,
        model="small-1",
        retry_after_s=12.0,
        observed=(OBSERVED,),
        keys=("llm",),
        reported=True,
    ),
    permits.Report(keys=("llm",), outcome="throttled", retry_after_s=12.0, observed=(OBSERVED,), started_ms_ago=850),
    permits.Return(permits=("3-2", "3-3")),
    permits.Renew(
        worker="worker-a", permits=(permits.HeldPermit(permit="3-1", keys=("llm",), cost_usd=0.01),), epoch=3
    ),
    permits.Cancel(id="x7k2m4"),
    permits.Limits(key="llm"),
    permits.Gates(pools=(permits.Pool(keys=("llm", "tenant/acme"), tokens_in=1200, tokens_out=300),)),
    permits.Operate(key="llm", operation="open", by="operator"),
)
PERMIT_REPLIES = (
    permits.Granted(
        leases=(permits.Lease("3-1", 120), permits.Lease("3-2", 140)),
        use_by_ms=300,
        lease_ms=30_000,
        epoch=3,
        held_ms=40,
    ),
    permits.Wait(retry_after_ms=4000, limiting_key="llm", reason="requests", epoch=3),
    permits.Denied(
        reason="budget_exhausted",
        epoch=3,
        key="tenant/acme",
        until_s=3600.0,
        detail="50.00 of 50.00 USD spent in 2026-05-09",
    ),
    permits.Settled(ended=1, epoch=3),
    permits.Renewed(lost=("2-9",), epoch=3),
    permits.GatesListing(
        items=(
            permits.Gate(
                keys=("llm", "tenant/acme"),
                open=False,
                reason="paused",
                limiting_key="llm",
                wait_s=11.5,
                rate_per_s=0.9,
                places=4,
                parts=(
                    permits.GatePart(requests=0.9, tokens=400.0),
                    permits.GatePart(tokens_in=60.0, tokens_out=20.0, places=4),
                ),
            ),
        ),
        epoch=3,
    ),
    permits.LimitsListing(
        items=(
            limit_states.LimitState(
                key="tenant/acme",
                dimensions=(
                    limit_states.DimensionState(
                        dimension="requests",
                        configured=60.0,
                        effective=48.0,
                        used=31.0,
                        window_s=60.0,
                        estimate_error=0.0,
                    ),
                    limit_states.DimensionState(
                        dimension="cost",
                        configured=50.0,
                        effective=50.0,
                        used=40.25,
                        reserved=0.5,
                        period="2026-05-09",
                        estimate_error=0.2,
                    ),
                ),
                in_use=2,
                waiting=7,
                granted_total=1234,
                throttled_total=5,
                paused_for_s=11.5,
                paused_reason="paused",
                paused_why="the provider asked for 12 s",
                breaker="half_open",
                shadow=True,
                would_have_waited=12,
                template="tenant/{tenant_id}",
            ),
        ),
        epoch=3,
        revision=7,
        fault="Expected a rate such as `600/min` - at `limits.llm.requests`",
        prices=(limit_states.PriceState(model="claude-big", tokens_in=5.0, tokens_out=25.0, version="2026-05"),),
        unknown=("search",),
    ),
)
SAID = permits.Said(epoch=3, began=True, keys=("llm",), closed=("llm",))


@dataclass(frozen=True)
class Group:
    """Samples of one JSON Schema, by the name that follows the group's in the file name."""

    schema: str
    type: Any
    samples: dict[str, Any]


def _by_tag(messages: tuple[Any, ...]) -> dict[str, Any]:
    return {str(message.__struct_config__.tag): message for message in messages}


GROUPS = (
    Group("envelope", Envelope, {"full": ENVELOPE, "by-reference": BY_REFERENCE, "minimal": Envelope(task_type="a")}),
    Group("event", events.Event, _by_tag(EVENTS)),
    Group("info", infos.Info, _by_tag(INFOS)),
    Group("work-item", events.WorkItem, {"full": ITEM}),
    Group("dead-letter", events.DeadLetter, {"full": DEAD_LETTER, "invalid-envelope": UNREADABLE}),
    Group("command", commands.Command, _by_tag(COMMANDS)),
    Group(
        "submit-reply", commands.SubmitReply, _by_tag(SUBMIT_REPLIES) | {"rejected-broken-json": REJECTED_BROKEN_JSON}
    ),
    Group("worker-info", commands.WorkerInfo, {"full": WORKER_INFO}),
    Group("permit-request", permits.PermitRequest, _by_tag(PERMIT_REQUESTS)),
    Group("permit-reply", permits.PermitReply, _by_tag(PERMIT_REPLIES)),
    Group("governor-said", permits.Said, {"full": SAID}),
)


def group_of(file_name: str) -> Group:
    """The group that a sample file belongs to; raises KeyError where there is none."""
    if file_name.startswith("origins-c-"):
        return GROUPS[0]
    return {group.schema: group for group in GROUPS}[file_name.split(".", maxsplit=1)[0]]


def documents() -> dict[str, bytes]:
    """File name → sample, formatted for reading; the two of the origins stay as they were written."""
    made = {
        f"{group.schema}.{name}.json": msgspec.json.format(encode(message), indent=2) + b"\n"
        for group in GROUPS
        for name, message in group.samples.items()
    }
    return made | {
        "origins-c-resume.json": ORIGINS_C_RESUME.encode(),
        "origins-c-run.json": ORIGINS_C_RUN.encode(),
    }


def write(folder: Path) -> None:
    """Make `folder` hold exactly the current samples."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = documents()
    for stray in folder.glob("*.json"):
        if stray.name not in wanted:
            stray.unlink()
    for name, content in wanted.items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    write(CURRENT)
    sys.stdout.write(f"{len(documents())} samples in {CURRENT}\n")
