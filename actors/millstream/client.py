"""The client: submits tasks and waits for what becomes of them. It needs NATS alone, no actor must answer."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar, overload

import msgspec

from millstream.clock import SystemIds
from millstream.connecting import open_broker
from millstream.errors import (
    InvalidName,
    InvalidTask,
    NoAnswer,
    PayloadTooLarge,
    ResultTimeout,
    StoreFull,
    TaskConflict,
    TaskFailed,
)
from millstream.policy.admit import check, payload_hash, task_key
from millstream.policy.durations import Duration, seconds
from millstream.policy.results import NotEncodable, encode_strictly
from millstream.ports import Broker, Ids, Outgoing, Published, Refused, Stored
from millstream.settings import Settings, from_environment
from millstream_schemas.codec import InvalidEnvelope, UnknownMessage, decode_envelope, decode_event, encode
from millstream_schemas.commands import Cancel
from millstream_schemas.envelope import MAX_ENVELOPE_BYTES, Envelope
from millstream_schemas.events import Cancelled, Cause, Completed, Event, Expired, Failed
from millstream_schemas.lifecycle import TERMINAL_KINDS
from millstream_schemas.names import DEFAULT_QUEUE, DEFAULT_TENANT, Names, is_token

T = TypeVar("T")

FEED_WAIT_S = 1.0
ADMISSION_POLL_S = 0.05


@dataclass(frozen=True)
class Handle:
    """A submitted task. Iterating over it yields its events from the first to the last."""

    client: "Client" = field(repr=False)
    task_id: str
    key: str
    tenant: str
    queue: str
    inbox_seq: int
    envelope: Envelope = field(repr=False)

    @overload
    async def result(self, timeout: Duration | None = None) -> Any: ...

    @overload
    async def result(self, timeout: Duration | None = None, *, into: type[T]) -> T: ...

    async def result(self, timeout: Duration | None = None, *, into: Any = Any) -> Any:
        """The handler's result once the task is completed.

        Raises TaskFailed where it ends otherwise, TaskConflict where its key or id belongs to a task with another
        input, and ResultTimeout after `timeout`; the task goes on then.
        """
        try:
            async with asyncio.timeout(None if timeout is None else seconds(timeout)):
                last = await self._last_event()
        except TimeoutError:
            raise ResultTimeout(f"task {self.task_id} has no outcome after {timeout}") from None
        if isinstance(last, Completed):
            return msgspec.json.decode(bytes(last.result) or b"null", type=into)
        raise TaskFailed(self.task_id, str(last.__struct_config__.tag), _error_text(last))

    async def _last_event(self) -> Event:
        last: Event | None = None
        mine = ("", payload_hash(self.envelope))
        async for last in self:
            # A key that is free again after the end may have named another input before.
            if last.card.payload_hash not in mine and not self._key_frees:
                break
        assert last is not None
        if last.card.payload_hash not in mine:
            raise TaskConflict(self.task_id)
        return last

    @property
    def _key_frees(self) -> bool:
        return self.envelope.unique == "in_flight"

    async def cancel(self, note: str = "") -> None:
        """Ask for the task to end; returns once the request is stored."""
        command = Cancel(tenant_id=self.tenant, task_id=self.task_id, key=self.key, by="client", note=note)
        subject = self.client.names.control("cancel", self.tenant)
        _stored(await self.client.broker.publish(Outgoing(subject=subject, body=encode(command))))

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events()

    async def _events(self) -> AsyncIterator[Event]:
        names = self.client.names
        feed = await self.client.broker.feed(names.events_stream, [names.life(self.tenant, self.key)], 0)
        try:
            while True:
                for record in await feed.take(100, FEED_WAIT_S):
                    try:
                        event = decode_event(record.body)
                    except UnknownMessage:
                        continue
                    yield event
                    if _is_over(event) and await self._ends_here(event, record.seq):
                        return
        finally:
            await feed.close()

    async def _ends_here(self, event: Event, seq: int) -> bool:
        """Whether a terminal event is this task's, and not that of an earlier one whose key was free again."""
        inbox = self.client.names.inbox_stream
        if not self._key_frees or event.card.origin == Cause(stream=inbox, seq=self.inbox_seq):
            return True
        broker, names = self.client.broker, self.client.names
        while await broker.get(inbox, self.inbox_seq) is not None:  # noqa: ASYNC110 - nobody tells of an ack
            await asyncio.sleep(ADMISSION_POLL_S)
        last = await broker.last(names.events_stream, names.life(self.tenant, self.key))
        return last is None or last.seq <= seq


def _is_over(event: Event) -> bool:
    return event.__struct_config__.tag in TERMINAL_KINDS


SendOptions = dict[str, Any]


class Client:
    """Submits tasks over one connection. Made by `App.connect` or `Client.open`."""

    def __init__(self, broker: Broker, names: Names, ids: Ids | None = None) -> None:
        self.broker = broker
        self.names = names
        self._ids = ids or SystemIds()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str | None = None, *, name: str = "client", settings: Settings | None = None
    ) -> "AsyncGenerator[Client]":
        """Connect, and close at the end of the block."""
        chosen = settings or from_environment()
        broker = await open_broker(chosen, name, url=url)
        try:
            yield cls(broker, chosen.names)
        finally:
            await broker.close()

    async def send(self, task_type: str, payload: Any = None, **options: Any) -> Handle:
        """Submit one task and return once it is stored.

        Options: queue, tenant, task_id, idempotency_key, priority, delay (seconds or "30s"), not_before, deadline_at,
        title, tags, run_id, session_id, parent_id, step, context, context_ref, payload_ref, budget, retry_policy,
        usage_estimate, limits, unique, pins, mode, trace_context.
        Raises InvalidTask, InvalidName or PayloadTooLarge before anything is sent; StoreFull where the inbox is
        full; NoAnswer where the server did not answer, in which case the task may be stored: sending again with the
        same `idempotency_key` or `task_id` is safe.
        """
        envelope, tenant, queue = self._build(task_type, payload, options)
        answer = await self.broker.publish(self._outgoing(envelope, tenant, queue))
        return self._handle(envelope, tenant, queue, answer)

    async def send_many(self, task_type: str, payloads: Sequence[Any], **options: Any) -> list[Handle]:
        """Submit many tasks of one type, pipelined; raises for the first that was not stored."""
        built = [self._build(task_type, payload, options) for payload in payloads]
        answers = await self.broker.publish_all([self._outgoing(*one) for one in built])
        return [self._handle(*one, answer) for one, answer in zip(built, answers, strict=True)]

    def _build(self, task_type: str, payload: Any, options: SendOptions) -> tuple[Envelope, str, str]:
        fields = dict(options)
        tenant = fields.pop("tenant", None) or DEFAULT_TENANT
        queue = fields.pop("queue", None) or DEFAULT_QUEUE
        for what, value in (("tenant", tenant), ("queue", queue)):
            if not is_token(value):
                raise InvalidName(what, value)
        delay = fields.pop("delay", None)
        if delay is not None:
            fields["delay_seconds"] = _delay_s(delay)
        fields = {name: value for name, value in fields.items() if value is not None}
        if not any(fields.get(name) for name in ("task_id", "idempotency_key", "unique")):
            fields["task_id"] = self._ids.new()
        if payload is not None:
            fields["payload"] = payload
        for name in ("not_before", "deadline_at"):
            value = fields.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                fields[name] = _moment(value, f"$.{name}")
        return _checked({"task_type": task_type, **fields}, tenant, queue), tenant, queue

    def _outgoing(self, envelope: Envelope, tenant: str, queue: str) -> Outgoing:
        return Outgoing(subject=self.names.submit(tenant, queue), body=encode(envelope))

    def _handle(self, envelope: Envelope, tenant: str, queue: str, answer: Published) -> Handle:
        stored = _stored(answer)
        key = task_key(envelope, tenant, "", 0, 0.0)
        return Handle(self, envelope.task_id or key, key, tenant, queue, stored.seq, envelope)


def _delay_s(given: Any) -> float:
    try:
        return seconds(given)
    except ValueError as error:
        raise InvalidTask(str(error), "$.delay_seconds") from None


def _moment(given: float, path: str) -> datetime:
    try:
        return datetime.fromtimestamp(given, UTC)
    except (ValueError, OverflowError, OSError):
        raise InvalidTask(f"Expected Unix seconds of the years 1970 to 9998, got `{given}`", path) from None


def _checked(fields: dict[str, Any], tenant: str, queue: str) -> Envelope:
    """The envelope of a task, checked by the same decoder and rules that the dispatcher uses."""
    body = encode_strictly(fields)
    if isinstance(body, NotEncodable):
        raise InvalidTask(body.message, body.path)
    if len(body) > MAX_ENVELOPE_BYTES:
        raise PayloadTooLarge(len(body), MAX_ENVELOPE_BYTES)
    try:
        envelope, unknown = decode_envelope(body)
        check(envelope, tenant, queue)
    except InvalidEnvelope as error:
        raise InvalidTask(error.message, error.path) from None
    if unknown:
        raise InvalidTask(f"Unknown option `{unknown[0]}`", f"$.{unknown[0]}")
    return envelope


def _stored(answer: Published) -> Stored:
    if isinstance(answer, Stored):
        return answer
    if isinstance(answer, Refused):
        raise StoreFull(f"the server refused the message: {answer.description}")
    raise NoAnswer("the server did not answer in time; the message may be stored")


def _error_text(event: Event) -> str:
    match event:
        case Failed():
            return f"{event.failure.error_type}: {event.failure.message}".strip(": ")
        case Expired():
            return event.detail
        case Cancelled():
            return event.note
        case _:
            return ""


__all__ = ["Client", "Handle", "SendOptions"]
