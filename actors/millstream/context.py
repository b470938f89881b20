"""What a handler is given beside its payload."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from millstream.errors import CallerError
from millstream.policy.admit import instant
from millstream.policy.durations import Duration, seconds
from millstream.policy.limits import check_template, fill, is_template
from millstream.policy.metering import fields_of
from millstream.policy.start import model_of
from millstream.policy.texts import clean
from millstream_schemas.envelope import Envelope, Mode, Name
from millstream_schemas.events import Usage, WorkItem
from millstream_schemas.keys import derive_key
from millstream_schemas.permits import MAX_KEYS

if TYPE_CHECKING:
    import httpx

    from millstream.calls import Calls, LimitedCall


class HandleLike(Protocol):
    """A submitted task, as `spawn` returns it."""

    @property
    def task_id(self) -> str: ...


class TaskLike(Protocol):
    """A handler that a child task may be submitted to."""

    @property
    def task_type(self) -> str: ...

    @property
    def queue(self) -> str: ...


Report = Callable[[float, str], None]
Send = Callable[..., Awaitable[HandleLike]]
_MOST = 10**12


@dataclass
class Used:
    """What was reported as used so far."""

    tokens_in: int = 0
    tokens_out: int = 0
    cost_usd: float = 0.0

    def add(self, tokens_in: int, tokens_out: int, cost_usd: float) -> None:
        """Add amounts; what is below 0, or absurdly large, is clamped: an event must be able to carry it."""
        self.tokens_in += min(_MOST, max(0, int(tokens_in)))
        self.tokens_out += min(_MOST, max(0, int(tokens_out)))
        self.cost_usd += min(float(_MOST), max(0.0, float(cost_usd)))

    def with_runtime(self, runtime_s: float) -> Usage:
        """The usage of the whole execution."""
        return Usage(tokens_in=self.tokens_in, tokens_out=self.tokens_out, cost_usd=self.cost_usd, runtime_s=runtime_s)


def _limit_keys(given: tuple[str, ...], envelope: Envelope) -> tuple[str, ...]:
    """The keys that a handler names, templates filled in; raises CallerError for one that can be no limit's."""
    for key in given:
        _check_text("key", key)
        try:
            check_template(key)
        except ValueError as error:
            raise CallerError(f"key {key!r:.200} of `ctx.limit`: {error}") from None
    keys = given
    if len(given) > 1 or any(is_template(key) for key in given):
        fields = fields_of(envelope)
        keys = tuple(sorted({fill(key, fields) for key in given}))
    if len(keys) > MAX_KEYS:
        raise CallerError(f"`ctx.limit` takes 1 to {MAX_KEYS} keys, got {keys!r:.200}")
    for key in keys:
        try:
            msgspec.convert(key, Name)
        except msgspec.ValidationError:
            raise CallerError(
                f"key {key!r:.200} of `ctx.limit`: expected 1 to 128 characters, and no control characters"
            ) from None
    return keys


def _check_text(what: str, given: object) -> None:
    try:
        if isinstance(given, str):
            given.encode()
            return
    except UnicodeEncodeError:
        pass
    raise CallerError(f"{what} {given!r:.200} of `ctx.limit`: expected a text that UTF-8 can encode")


@dataclass
class Context:
    """One execution of a task: what it is, how it may report, and how it starts others."""

    item: WorkItem
    execution_id: str
    report: Report
    send: Send
    used: Used = field(default_factory=Used)
    spawned: int = 0
    calls: "Calls | None" = None

    @cached_property
    def log(self) -> "logging.LoggerAdapter[logging.Logger]":
        """A logger whose lines carry the task, the attempt and the trace."""
        fields = {"task_id": self.item.card.task_id, "attempt": self.attempt, "trace_id": self.item.card.trace_id}
        return logging.LoggerAdapter(logging.getLogger("millstream.task"), fields)

    @property
    def task(self) -> Envelope:
        """The task as its producer sent it, defaults filled in."""
        return self.item.envelope

    @property
    def task_id(self) -> str:
        return self.item.card.task_id

    @property
    def attempt(self) -> int:
        """1 for the first attempt."""
        return self.item.card.attempt

    @property
    def deadline(self) -> float | None:
        """Unix seconds after which the task must not start, or None."""
        return instant(self.item.envelope.deadline_at, "$.deadline_at")

    @property
    def mode(self) -> Mode:
        return self.item.envelope.mode

    @property
    def traceparent(self) -> str | None:
        """The W3C header that goes with calls to other services."""
        trace = self.item.envelope.trace_context
        return trace.traceparent if trace is not None else None

    def context(self, into: Any = Any) -> Any:
        """The task's `context`, decoded as the given type; None where it has none."""
        raw = bytes(self.item.envelope.context)
        return msgspec.json.decode(raw, type=into) if raw else None

    def progress(self, fraction: float, message: str = "") -> None:
        """Tell how far the work is, from 0 to 1; cheap, may be lost, may be called from any thread."""
        self.report(min(1.0, max(0.0, float(fraction))), clean(str(message), 512))  # in this order, NaN becomes 0

    def usage(self, *, tokens_in: int = 0, tokens_out: int = 0, cost_usd: float = 0.0) -> None:
        """Add to what this execution has used; it counts against the budget and settles the permit.

        What is below 0, or absurdly large, is clamped: an event must be able to carry it.
        """
        self.used.add(tokens_in, tokens_out, cost_usd)

    def limit(
        self,
        key: str,
        *more: str,
        requests: int = 1,
        tokens: int = 0,
        tokens_in: int = 0,
        tokens_out: int = 0,
        cost_usd: float = 0.0,
        model: str | None = None,
        wait: Duration = "5m",
    ) -> "LimitedCall":
        """A permit for one call: `async with ctx.limit("llm", tokens_in=900) as grant:`, or `with` in a sync handler.

        Keys may be templates (`anthropic/{pins.model}`). The amounts are reserved, `tokens` (of both kinds together) as
        tokens that go in; it cannot stand beside `tokens_in` or `tokens_out`. `grant.usage(...)` says afterwards
        what was really used, and an exception that leaves the block tells the limit what the service answered. `model`
        (default: `pins.model`) chooses the prices. Waits up to `wait`, while the task keeps its slot. Raises LimitReached
        (a Throttled: it parks the task) where the governor expects a longer wait, BudgetExhausted where a budget is used
        up, Fatal for an amount that the limit can never allow, and CallerError for arguments that make no permit.
        """
        calls = self._open_calls()
        if tokens and (tokens_in or tokens_out):
            raise CallerError("`ctx.limit` takes `tokens`, or `tokens_in` and `tokens_out`, not both")
        keys = _limit_keys((key, *more), self.item.envelope)
        if model is not None:
            _check_text("model", model)
        try:
            wait_s = seconds(wait)
        except ValueError as error:
            raise CallerError(f"`wait` of `ctx.limit`: {error}") from None
        return calls.limited(
            keys,
            wait_s,
            requests=requests,
            tokens_in=tokens or tokens_in,
            tokens_out=tokens_out,
            cost_usd=cost_usd,
            model=model_of(self.item) if model is None else model,
        )

    @property
    def http(self) -> "httpx.AsyncClient":
        """An HTTP client for async handlers that reports to the limits what the service answered.

        An answer counts for the limits of the innermost open `ctx.limit`, else for those of the task's own permit. Where
        its exception (`raise_for_status`) leaves the handler, the answer decides whether the task waits or the attempt
        has failed. Each execution has one client, closed at its end.
        """
        return self._open_calls().http

    def _open_calls(self) -> "Calls":
        if self.calls is None:
            raise CallerError(
                "`ctx.limit` and `ctx.http` work inside a worker only: this context has no governor to ask"
            )
        return self.calls

    async def spawn(self, task: "str | TaskLike", payload: Any = None, **options: Any) -> HandleLike:
        """Submit a child task, by handler or by task type, in this task's run and trace.

        A second execution submits the same child again: children are told apart by type and order of `spawn`, or by
        an `idempotency_key` of your own.
        """
        self.spawned += 1
        card, envelope = self.item.card, self.item.envelope
        if isinstance(task, str):
            task_type = task
        else:
            task_type = task.task_type
            options.setdefault("queue", task.queue)
        seed = f"{card.key}:{card.generation}:{task_type}:{self.spawned}"
        options.setdefault("idempotency_key", derive_key("content", card.tenant_id, seed))
        options.setdefault("parent_id", card.task_id)
        options.setdefault("run_id", envelope.run_id)
        options.setdefault("session_id", envelope.session_id)
        options.setdefault("tenant", card.tenant_id)
        options.setdefault("trace_context", envelope.trace_context)
        return await self.send(task_type, payload, **options)
