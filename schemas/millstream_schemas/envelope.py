"""The task envelope: what a producer in any language publishes, as a frozen struct with its constraints."""

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# Bounds. They stand in the JSON Schema, so a producer can check before it publishes.
MAX_ENVELOPE_BYTES = 256 * 1024
MAX_NESTING = 64
MAX_WAIT_S = 90 * 86400.0
MAX_ATTEMPTS_CAP = 1000
MAX_TEXT_CHARS = 1024
MAX_COST_USD = 1e9
MAX_COUNT = 10**12

Priority = Literal["high", "normal", "low"]
Mode = Literal["live", "replay", "dry_run"]
Unique = Literal["history", "in_flight"]
Strategy = Literal["exponential_backoff", "linear", "fixed", "none"]

# Patterns end with \Z, because $ lets a line break pass at the end; the JSON Schema says $, which is strict there.
Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z", description="allowed in a subject as it stands")]
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
Key = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
LaneKey = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Uri = Annotated[str, Meta(min_length=1, max_length=2048, pattern=r"^[A-Za-z][A-Za-z0-9+.-]*://[^\x00-\x20\x7f]*\Z")]
Instant = Annotated[datetime, Meta(tz=True, description="RFC 3339 with a zone")]
Seconds = Annotated[float, Meta(ge=0, le=MAX_WAIT_S, description="seconds")]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


NO_JSON = msgspec.Raw(b"")
"""Stands for a raw JSON member that is absent; it is left out when encoded."""


def _version_1() -> int:
    return 1


V1: int = msgspec.field(default_factory=_version_1)
"""The version of a message. A plain default would be left out with the others, and `v` stands on every message."""


class TraceContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the task comes from, as W3C text or as two ids; a bad one starts a new trace, it never fails a task."""

    trace_id: Text | None = None
    parent_span_id: Text | None = None
    traceparent: Text | None = None
    tracestate: Text | None = None


class Budget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a task may use over all its attempts; unset fields take the queue's defaults."""

    max_attempts: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    max_runtime_seconds: Annotated[float, Meta(gt=0, le=MAX_WAIT_S)] | None = None
    max_cost_usd: Annotated[float, Meta(ge=0, le=MAX_COST_USD)] | None = None
    max_tokens: Count | None = None


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long to wait between attempts, and which error classes are worth one."""

    strategy: Strategy = "exponential_backoff"
    base_seconds: Seconds = 1.0
    factor: Annotated[float, Meta(gt=0, le=1e6)] = 2.0
    max_seconds: Seconds = 300.0
    jitter: bool = True
    retry_on: Annotated[list[Name], Meta(max_length=64)] | None = None
    fatal_on: Annotated[list[Name], Meta(max_length=64)] | None = None


class UsageEstimate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one attempt is likely to use; reserved at the governor before it starts."""

    requests: Count | None = None
    tokens_in: Count | None = None
    tokens_out: Count | None = None
    cost_usd: Annotated[float, Meta(ge=0, le=MAX_COST_USD)] | None = None


class Approval(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a person must agree before the task runs."""

    required: bool = False
    reason: Text | None = None
    expires_seconds: Seconds | None = None
    remind_seconds: Seconds | None = None


class Callback(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where to report the outcome."""

    url: Uri
    events: Annotated[list[Name], Meta(max_length=16)] | None = None


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One task as its producer wrote it; only `task_type` is required.

    `payload` and `context` stay raw JSON: Millstream carries them unread.
    """

    task_type: Name
    v: Annotated[int, Meta(ge=1, le=1)] = 1
    task_id: Name | None = None
    idempotency_key: Key | None = None
    tenant_id: Token | None = None
    queue: Token | None = None
    run_id: Name | None = None
    session_id: Name | None = None
    parent_id: Name | None = None
    step: Name | None = None
    title: Text | None = None
    tags: Annotated[list[Name], Meta(max_length=32)] = []
    payload: msgspec.Raw = NO_JSON
    payload_ref: Uri | None = None
    context: msgspec.Raw = NO_JSON
    context_ref: Uri | None = None
    priority: Priority = "normal"
    not_before: Instant | None = None
    delay_seconds: Seconds | None = None
    deadline_at: Instant | None = None
    budget: Budget = Budget()
    retry_policy: RetryPolicy | None = None
    attempt: int | None = None
    usage_estimate: UsageEstimate | None = None
    limits: Annotated[list[Name], Meta(max_length=16)] = []
    ordering_key: LaneKey | None = None
    unique: Unique | None = None
    approval: Approval | None = None
    pins: dict[Name, Text] | None = None
    mode: Mode = "live"
    callback: Callback | None = None
    trace_context: TraceContext | None = None
