"""The adapter while its server is killed, restarted, and loses its consumers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator

import pytest

from millstream.jetstream.broker import JetStreamBroker
from millstream.jetstream.connection import connect
from millstream.ports import Outgoing, Stored, Unanswered
from millstream.server import LocalServer
from millstream_schemas.names import Names
from millstream_schemas.topology import Lifetimes, topology, work_consumer
from tests.support.waiting import wait_until

_NAMES = Names("mill")


@pytest.fixture
async def broker(nats_server: LocalServer) -> AsyncGenerator[JetStreamBroker]:
    """A broker with everything declared, on a server that may be killed."""
    made = await connect(nats_server.url, _NAMES, client_name="outages", publish_timeout_s=2.0)
    await made.declare(topology(_NAMES, Lifetimes(lease_s=2.0)))
    yield made
    await made.close()


def _submits(count: int) -> list[Outgoing]:
    run = uuid.uuid4().hex[:6]
    return [Outgoing(_NAMES.submit("acme", f"q{run}{index}"), b"x" * 100) for index in range(count)]


async def _stored(broker: JetStreamBroker, outgoing: list[Outgoing]) -> set[int]:
    """Publish until all are stored, as a producer would; returns the sequences."""
    seqs: set[int] = set()
    while outgoing:
        results = await broker.publish_all(outgoing)
        seqs |= {one.seq for one in results if isinstance(one, Stored)}
        outgoing = [one for one, result in zip(outgoing, results, strict=True) if not isinstance(result, Stored)]
    return seqs


async def test_nothing_that_was_stored_is_lost_to_kills(broker: JetStreamBroker, nats_server: LocalServer) -> None:
    """Publisher, mailbox and feed go on through three kills; every stored sequence is delivered, the feed has no gap."""
    stored: set[int] = set()
    delivered: set[int] = set()
    fed: list[int] = []
    mailbox = await broker.mailbox(_NAMES.inbox_stream, _NAMES.inbox_consumer, 64)
    feed = await broker.feed(_NAMES.events_stream, [_NAMES.info_filter], 0)

    async def publish() -> None:
        for _ in range(60):
            stored.update(await _stored(broker, _submits(20)))
            await _stored(broker, [Outgoing(_NAMES.info("acme", "k", "q", "progress"), b"1")] * 5)
            await asyncio.sleep(0.05)

    async def consume() -> None:
        while deliveries := await mailbox.take(50):
            delivered.update(one.seq for one in deliveries)
            broker.ack(deliveries)

    async def read() -> None:
        while True:
            fed.extend(record.seq for record in await feed.take(50, 0.2))

    async with asyncio.TaskGroup() as group:
        consuming, reading = group.create_task(consume()), group.create_task(read())
        publishing = group.create_task(publish())
        for _ in range(3):
            await asyncio.sleep(0.7)
            await asyncio.to_thread(nats_server.kill)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(nats_server.start)
        await publishing
        await wait_until(lambda: stored <= delivered, "all that was stored to be delivered")
        info = await broker.stream_info(_NAMES.events_stream)
        assert info is not None
        await wait_until(lambda: bool(fed) and fed[-1] == info.last_seq, "the feed to reach the end")
        consuming.cancel()
        reading.cancel()
    assert fed == sorted(set(fed))
    assert len(fed) == info.messages
    await mailbox.close()
    await feed.close()


async def test_a_mailbox_finds_a_consumer_that_was_made_anew(broker: JetStreamBroker) -> None:
    """Deleted under its pulls, declared again: deliveries go on."""
    spec = work_consumer(_NAMES, Lifetimes(), "q", "normal", max_ack_pending=100)
    mailbox = await broker.mailbox(_NAMES.work_stream, spec.durable, 10)  # before there is one
    await broker.declare_consumer(spec)
    await broker.publish(Outgoing(_NAMES.work("q", "normal", "a"), b""))
    broker.ack(await mailbox.take(10))
    await broker.flush()
    await broker._requests.command(f"CONSUMER.DELETE.{_NAMES.work_stream}.{spec.durable}")
    await broker.declare_consumer(spec)
    await broker.publish(Outgoing(_NAMES.work("q", "normal", "b"), b""))
    async with asyncio.timeout(15):
        subjects = {one.subject for one in await mailbox.take(10)}
        assert _NAMES.work("q", "normal", "b") in subjects
    await mailbox.close()


async def test_a_closed_mailbox_leaves_nothing_lent(broker: JetStreamBroker) -> None:
    """What it had pulled ahead is delivered to another at once, not after the ack deadline."""
    stored = await _stored(broker, _submits(200))
    mailbox = await broker.mailbox(_NAMES.inbox_stream, _NAMES.inbox_consumer, 100)
    first = {one.seq for one in await mailbox.take(10)}
    await mailbox.close()
    assert await mailbox.take(1) == []
    other = await broker.mailbox(_NAMES.inbox_stream, _NAMES.inbox_consumer, 100)
    got: set[int] = set()
    async with asyncio.timeout(1.5):  # the lease is two seconds
        while got < stored - first:
            got |= {one.seq for one in await other.take(100)}
    await other.close()


async def test_a_cancelled_pull_leaves_nothing_lent(broker: JetStreamBroker) -> None:
    """Cancelled at any moment, its deliveries are with the next pull at once."""
    spec = work_consumer(_NAMES, Lifetimes(lease_s=60.0), "q", "normal", max_ack_pending=1000)
    await broker.declare_consumer(spec)
    await broker.publish_all([Outgoing(_NAMES.work("q", "normal", f"k{index}"), b"") for index in range(50)])
    for turns in range(12):
        async with asyncio.TaskGroup() as group:
            pulling = group.create_task(broker.pull(_NAMES.work_stream, spec.durable, 50))
            for _ in range(turns):
                await asyncio.sleep(0)
            pulling.cancel()
        for delivery in [] if pulling.cancelled() else pulling.result():
            broker.nak(delivery)
    got: set[int] = set()

    async def all_there() -> bool:
        got.update(one.seq for one in await broker.pull(_NAMES.work_stream, spec.durable, 50))
        return len(got) == 50

    await wait_until(all_there, "all fifty to be lent again", timeout=10)


async def test_a_full_consumer_is_not_left_with_pulls(broker: JetStreamBroker) -> None:
    """A pull that the server would keep waiting ends empty, and what becomes free later goes to the next one."""
    spec = work_consumer(_NAMES, Lifetimes(lease_s=60.0), "q", "normal", max_ack_pending=1)
    await broker.declare_consumer(spec)
    await broker.publish_all([Outgoing(_NAMES.work("q", "normal", f"k{index}"), b"") for index in range(2)])
    (first,) = await broker.pull(_NAMES.work_stream, spec.durable, 5)
    for _ in range(3):
        assert await broker.pull(_NAMES.work_stream, spec.durable, 5) == []
    broker.ack([first])
    await broker.flush()
    second: list[object] = []

    async def lent() -> bool:
        second.extend(await broker.pull(_NAMES.work_stream, spec.durable, 5))
        return bool(second)

    await wait_until(lent, "the second message")
    (info,) = [each for each in await broker.consumers(_NAMES.work_stream) if each.name == spec.durable]
    assert (info.pending, info.ack_pending, info.redelivered) == (0, 1, 0)


async def test_a_publish_waits_for_its_stream(nats_server: LocalServer) -> None:
    """Within its time limit, nobody listening is a reason to try again; after it, the answer is Unanswered."""
    broker = await connect(nats_server.url, _NAMES, client_name="early", publish_timeout_s=3.0)
    outgoing = Outgoing(_NAMES.submit("acme", "q"), b"1")
    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(broker.publish(outgoing))
        await asyncio.sleep(0.3)
        await broker.declare(topology(_NAMES, Lifetimes()))
    assert publishing.result() == Stored(1)
    started = asyncio.get_running_loop().time()
    assert await broker.publish(Outgoing("nobody.listens", b"")) == Unanswered()
    assert 2.5 < asyncio.get_running_loop().time() - started < 4.5
    await broker.close()
