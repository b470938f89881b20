"""The dispatcher's parts over the in-memory broker: what is left over by crashes, and what is never guessed."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from millstream.clock import SystemClock, SystemIds
from millstream.configuration import Configuration
from millstream.dispatcher import Dispatcher
from millstream.dispatcher.actor import each
from millstream.dispatcher.admission import Admitter
from millstream.dispatcher.advisories import Sweeper
from millstream.dispatcher.context import Bells
from millstream.dispatcher.decisions import Decider
from millstream.dispatcher.submit import SubmitService
from millstream.dispatcher.ticks import Ticker
from millstream.errors import BrokerError
from millstream.ports import Broker, Delivery, Outgoing, Published, Refused
from millstream_schemas.codec import decode_submit_reply, decode_work_item, encode
from millstream_schemas.commands import HandlerInfo, SubmitAccepted, SubmitRejected, WorkerInfo
from millstream_schemas.envelope import MAX_ENVELOPE_BYTES
from millstream_schemas.events import AttemptFailed, Failure, Parked, WorkItem
from tests.support.millrace import Mill, millrace
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Watched:
    """A broker that remembers what is acked and told, and refuses to append the kinds in `full_for`."""

    def __init__(self, target: Broker) -> None:
        self._target = target
        self.acked: list[Delivery] = []
        self.told: list[tuple[str, bytes]] = []
        self.full_for: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def ack(self, deliveries: list[Delivery]) -> None:
        """Remember."""
        self.acked += deliveries

    def tell(self, subject: str, body: bytes = b"") -> None:
        """Remember."""
        self.told.append((subject, body))

    async def publish(self, outgoing: Outgoing) -> Published:
        """Store, or refuse as a full store does."""
        return (await self.publish_all([outgoing]))[0]

    async def publish_all(self, outgoing: list[Outgoing]) -> list[Published]:
        """As `publish`."""
        answers: list[Published] = []
        for one in outgoing:
            full = one.subject.rpartition(".")[2] in self.full_for
            answers.append(Refused(10047, "no room") if full else await self._target.publish(one))
        return answers


def watch(mill: Mill) -> Watched:
    """Let the dispatcher's parts work over a watched broker."""
    watched: Any = Watched(mill.broker)
    journal = replace(mill.journal, broker=watched)
    mill.dispatcher = replace(mill.dispatcher, broker=watched, control=watched, journal=journal)
    found: Watched = watched
    return found


async def in_work(mill: Mill, task_type: str = "echo") -> WorkItem:
    """A task that was released to WORK."""
    handle = await mill.client.send(task_type, {"a": 1})
    await mill.admit()
    record = await mill.broker.last(mill.names.work_stream, mill.names.work_of_key(handle.key))
    assert record is not None
    return decode_work_item(record.body)


def advisory(mill: Mill, stream: str, seq: int) -> Delivery:
    """What the server tells of a message at its delivery limit."""
    body = msgspec.json.encode({"stream": stream, "consumer": "c", "stream_seq": seq, "deliveries": 50})
    return Delivery("$JS.EVENT.ADVISORY", body, {}, mill.names.advisory_stream, "c", 1, 1, 0.0, 0, "token")


def sweeper(mill: Mill) -> Sweeper:
    """The part that acts on advisories."""
    return Sweeper(mill.dispatcher, Admitter(mill.dispatcher), Decider(mill.dispatcher), Ticker(mill.dispatcher))


async def failed_attempt(mill: Mill, item: WorkItem) -> int:
    """The sequence of an event that waits for a decision."""
    failure = Failure(reason="error", error_type="E", classes=["E"])
    answer = await mill.journal.append(AttemptFailed(card=item.card, failure=failure, item=item), item.fence)
    return getattr(answer, "seq", 0)


async def test_a_decision_at_its_delivery_limit_is_made_and_only_the_advisory_is_acked() -> None:
    """The event itself was not lent: an ack of it would have no subject, for which a server ends the connection."""
    mill = await millrace()
    item = await in_work(mill)
    seq = await failed_attempt(mill, item)
    watched = watch(mill)
    told = advisory(mill, mill.names.events_stream, seq)
    await sweeper(mill).handle(told)
    assert (await mill.kinds(item.card.key))[-1] == "retrying"
    assert watched.acked == [told]


async def test_an_advisory_stays_until_the_decision_that_it_asks_for_is_stored() -> None:
    """Nothing else would ever bring the event back."""
    mill = await millrace()
    item = await in_work(mill)
    seq = await failed_attempt(mill, item)
    watched = watch(mill)
    watched.full_for = {"retrying"}
    told = advisory(mill, mill.names.events_stream, seq)
    await sweeper(mill).handle(told)
    assert watched.acked == []
    watched.full_for = set()
    await sweeper(mill).handle(told)
    assert watched.acked == [told]


async def test_work_at_its_delivery_limit_waits_for_room_in_the_store() -> None:
    """The end of the task is refused: the advisory comes again, and nobody asks in a circle until then."""
    mill = await millrace()
    item = await in_work(mill)
    record = await mill.broker.last(mill.names.work_stream, mill.names.work_of_key(item.card.key))
    assert record is not None
    watched = watch(mill)
    watched.full_for = {"failed"}
    told = advisory(mill, mill.names.work_stream, record.seq)
    await sweeper(mill).handle(told)
    assert watched.acked == []
    watched.full_for = set()
    await sweeper(mill).handle(told)
    assert watched.acked == [told]
    assert (await mill.kinds(item.card.key))[-1] == "failed"


async def test_the_dead_letter_of_work_at_its_limit_is_kept_although_the_task_was_submitted_again() -> None:
    """The end stood, its letter was refused, and the key was free again before the advisory came back."""
    mill = await millrace()
    again: dict[str, Any] = {"idempotency_key": "one", "unique": "in_flight"}
    handle = await mill.client.send("echo", None, **again)
    await mill.admit()
    record = await mill.broker.last(mill.names.work_stream, mill.names.work_of_key(handle.key))
    assert record is not None
    letter = mill.names.dlq("default", "default", handle.key, 1)
    watched = watch(mill)
    watched.full_for = {"1"}  # the last part of the letter's subject
    told = advisory(mill, mill.names.work_stream, record.seq)
    await sweeper(mill).handle(told)
    assert (await mill.kinds(handle.key), watched.acked) == (["queued", "failed"], [])
    await mill.client.send("echo", None, **again)
    await mill.admit()
    assert await mill.kinds(handle.key) == ["queued", "failed", "queued"]
    assert await mill.broker.last(mill.names.dlq_stream, letter) is None
    watched.full_for, watched.acked = set(), []
    await sweeper(mill).handle(told)
    assert watched.acked == [told]
    assert await mill.broker.last(mill.names.dlq_stream, letter) is not None
    (left,) = await mill.broker.history(mill.names.work_stream, mill.names.work_of_key(handle.key))
    assert decode_work_item(left.body).card.generation == 2


async def test_a_task_does_not_end_as_unknown_before_the_registry_was_read() -> None:
    """A dispatcher that has just started knows of no worker; that says nothing about the workers."""
    mill = await millrace()
    item = await in_work(mill)
    long_ago = SystemClock().now() - 7200
    card = msgspec.structs.replace(item.card, waiting_since=long_ago, waiting_for="no_handler")
    parked = Parked(card=card, until=0.0, reason="no_handler", item=msgspec.structs.replace(item, card=card))
    await mill.journal.append(parked, item.fence)
    await mill.decide()
    assert await mill.kinds(item.card.key) == ["queued", "parked", "scheduled"]


async def test_many_delayed_tasks_of_one_moment_ring_one_bell() -> None:
    """So a flood of retries costs neither memory nor a walk over all of them ten times a second."""
    mill = await millrace()
    item = await in_work(mill)
    watched: Any = Watched(mill.broker)
    clock = SystemClock()
    bells = Bells(watched, mill.names, clock)
    due_at = clock.now() + 0.15
    for _ in range(10_000):
        bells.ring_at(due_at, item)
    bells.ring_at(due_at + 3000, item)
    assert len(bells.due) == 2
    bells.ring_due()
    assert watched.told == []

    def rung() -> bool:
        bells.ring_due()
        return bool(watched.told)

    await wait_until(rung, "the bell")
    assert clock.now() >= due_at
    assert watched.told == [(mill.names.bell("default"), b"normal")]
    assert len(bells.due) == 1


async def test_a_faulty_command_leaves_its_neighbours_done_once() -> None:
    """One by one they are tried again only when none of them is still at work."""
    mill = await millrace()
    at_work: list[int] = []

    async def handle(delivery: Delivery) -> None:
        assert delivery.seq not in at_work, "handled twice at a time"
        at_work.append(delivery.seq)
        try:
            if delivery.seq == 0:
                raise BrokerError("no")
            await mill.broker.flush()
        finally:
            at_work.remove(delivery.seq)

    deliveries = [advisory(mill, "S", seq) for seq in range(4)]
    deliveries = [msgspec.structs.replace(one, seq=seq) for seq, one in enumerate(deliveries)]
    with pytest.raises(BrokerError):
        await each(handle)(deliveries)
    assert at_work == []


async def test_a_status_url_is_a_url_whatever_the_task_id_holds() -> None:
    """A producer may name its tasks as it likes."""
    mill = await millrace()
    body = encode({"task_type": "echo", "task_id": "a/b?c=1#ü", "tenant_id": "acme"})
    reply = decode_submit_reply(await SubmitService(mill.dispatcher).answer(body))
    assert isinstance(reply, SubmitAccepted)
    assert reply.status_url == "/v1/tasks/a%2Fb%3Fc%3D1%23%C3%BC?tenant=acme"


async def test_an_envelope_that_its_new_id_makes_too_large_is_not_accepted() -> None:
    """What was answered "accepted" must not be a dead letter a moment later."""
    mill = await millrace()
    frame = encode({"task_type": "echo", "payload": ""})
    body = encode({"task_type": "echo", "payload": "x" * (MAX_ENVELOPE_BYTES - len(frame))})
    assert len(body) == MAX_ENVELOPE_BYTES
    reply = decode_submit_reply(await SubmitService(mill.dispatcher).answer(body))
    assert isinstance(reply, SubmitRejected)
    assert reply.code == "payload_too_large"


# --- the whole actor ------------------------------------------------------------------------------------


@asynccontextmanager
async def running(mill: Mill, configuration: Configuration | None = None) -> AsyncGenerator[None]:
    """A dispatcher with all its parts, until the end of the block."""
    stop = asyncio.Event()
    clock, ids = SystemClock(), SystemIds()
    dispatcher = Dispatcher(mill.broker, mill.settings, clock, ids, mill.telemetry, configuration=configuration)
    async with asyncio.TaskGroup() as group:
        group.create_task(dispatcher.run(stop))
        try:
            yield
        finally:
            stop.set()


async def becomes(mill: Mill, key: str, *kinds: str) -> None:
    """Wait until the life of a task is just that."""

    async def reached() -> bool:
        return await mill.kinds(key) == list(kinds)

    await wait_until(reached, f"{key} is {kinds}")


async def test_what_workers_announced_is_known_before_the_first_task_is_admitted() -> None:
    """A task that waited in INBOX for the dispatcher must not slip past a limit that is known."""
    mill = await millrace()
    worker = WorkerInfo(worker_id="w", queues=["default"], slots=1, handlers=[limited("echo", "model")])
    await mill.broker.kv_put(mill.names.workers_bucket, "w", encode(worker))
    handle = await mill.client.send("echo", None)
    other = await mill.client.send("other", None)
    async with running(mill):
        await becomes(mill, handle.key, "held")
        await becomes(mill, other.key, "queued")


def limited(task_type: str, limit: str) -> HandlerInfo:
    """A handler that names a limit."""
    return HandlerInfo(task_type=task_type, queue="default", limits=[limit])


async def test_a_new_configuration_document_meters_what_is_submitted_from_then_on() -> None:
    """Without a restart; and one that stands already is known before the first task is admitted."""
    mill = await millrace()
    waiting = await mill.client.send("echo", None, queue="first")
    bucket, key = mill.names.config_bucket, mill.names.config_key
    await mill.broker.kv_put(bucket, key, encode({"queues": {"first": {"limits": ["model"]}}}))
    configuration = Configuration(mill.broker, mill.settings, mill.telemetry)
    async with running(mill, configuration):
        await becomes(mill, waiting.key, "held")
        before = await mill.client.send("echo", None, queue="second")
        await becomes(mill, before.key, "queued")
        revision = await mill.broker.kv_put(bucket, key, encode({"queues": {"second": {"limits": ["model"]}}}))
        await wait_until(lambda: configuration.revision == revision, "the document is in effect")
        after = await mill.client.send("echo", None, queue="second")
        await becomes(mill, after.key, "held")


async def test_timers_are_served_and_a_dispatcher_that_cannot_look_yet_stops_all_the_same() -> None:
    """A delayed metered task is held when it is due; without its bucket the actor waits, and ends when told."""
    mill = await millrace(queues={"metered": {"limits": ["model"]}})
    handle = await mill.client.send("echo", None, queue="metered", delay=0.3)
    async with running(mill):
        await becomes(mill, handle.key, "scheduled", "held")
    broker: Any = Blind(mill.broker)
    blind = replace(mill, broker=broker)
    async with running(blind):
        await wait_until(lambda: mill.telemetry.counts["broker.trouble"] > 1, "it has looked twice")
        late = await mill.client.send("echo", None)
    assert await mill.kinds(late.key) == []


class Blind:
    """A broker whose buckets do not answer."""

    def __init__(self, target: Broker) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    async def kv_all(self, bucket: str) -> dict[str, bytes]:
        """Say so."""
        raise BrokerError(f"{bucket} does not answer")
