"""What only a real server can show: outages, and hearts that beat while the loop of the handlers is blocked."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator

import msgspec
import pytest

from millstream.errors import BrokerError, TopologyConflict
from millstream.ports import Outgoing, Stored, Unanswered
from millstream.server import LocalServer
from millstream_schemas.names import Names
from tests.broker.setups import HEART_LEASE_S, Setup, nats_setup, sequence, small_topology


@pytest.fixture
async def real(nats_server: LocalServer) -> AsyncGenerator[Setup]:
    """A broker on a server of its own, that may be killed."""
    async with nats_setup(Names(f"t{uuid.uuid4().hex[:10]}"), nats_server) as setup:
        yield setup


async def test_an_outage_is_a_value_and_ends_by_itself(real: Setup, nats_server: LocalServer) -> None:
    """Publishing without a server is unanswered, in every place; nothing is raised, and the broker comes back."""
    names = real.names
    outgoing = [Outgoing(names.event("acme", f"k{i}", "q", "queued"), b"", msg_id=f"k{i}") for i in range(3)]
    first = sequence(await real.broker.publish(outgoing[0]))
    nats_server.kill()
    assert await real.broker.publish_all(outgoing) == [Unanswered()] * 3
    real.broker.tell(names.bell("q"))
    real.broker.inform(outgoing[1])
    nats_server.start()

    async def back() -> bool:
        return isinstance(await real.broker.publish(outgoing[2]), Stored)

    await real.until(back, "the broker to be back")
    assert await real.broker.get(names.events_stream, first) is not None


async def test_a_feed_goes_on_after_a_restart(real: Setup, nats_server: LocalServer) -> None:
    """Without gap or repetition."""
    names = real.names

    async def append(count: int) -> list[int]:
        outgoing = [Outgoing(names.event("acme", f"k{i}", "q", "queued"), b"") for i in range(count)]
        return [sequence(each) for each in await real.broker.publish_all(outgoing)]

    async def publishes() -> bool:
        return isinstance(await real.broker.publish(Outgoing(names.info("acme", "k", "q", "ping"), b"")), Stored)

    feed = await real.broker.feed(names.events_stream, [names.event_filter], 0)
    expected, got = await append(20), list[int]()

    async def read() -> bool:
        got.extend(each.seq for each in await feed.take(7, 0.2))
        return len(got) >= len(expected)

    await real.until(read, "the first records")
    nats_server.restart()
    await real.until(publishes, "the broker to be back")
    expected += await append(20)
    await real.until(read, "the records after the restart")
    assert got == expected
    await feed.close()


async def test_a_mailbox_goes_on_after_a_restart(real: Setup, nats_server: LocalServer) -> None:
    """A take that began before it ends with the first message after it."""
    names = real.names
    consumer = await real.work()
    mailbox = await real.broker.mailbox(names.work_stream, consumer, 8)
    await real.put("a")
    real.broker.ack(await mailbox.take(1))
    await real.broker.flush()
    nats_server.restart()

    async def stored() -> bool:
        work = Outgoing(names.work("q", "normal", "b"), b"", msg_id="b")
        return isinstance(await real.broker.publish(work), Stored)

    await real.until(stored, "the broker to be back")
    taken = {names.parse_work(each.subject)[2] for each in await mailbox.take(1)}
    assert taken <= {"a", "b"}  # an ack just before the end may be lost
    await mailbox.close()


async def test_a_stream_without_room_is_no_conflict_of_names(real: Setup) -> None:
    """The error says what the server lacks; another prefix, as after a conflict, would not help."""
    names = Names(f"t{uuid.uuid4().hex[:10]}")
    wanted = small_topology(names, f"{names.prefix}_short")
    wide = tuple(msgspec.structs.replace(each, store_share=1.5 * bool(each.store_share)) for each in wanted.streams)
    with pytest.raises(BrokerError, match=r"cannot be created: .*max_file_store") as caught:
        await real.broker.declare(msgspec.structs.replace(wanted, streams=wide))
    assert not isinstance(caught.value, TopologyConflict)


async def test_a_heart_beats_while_the_loop_is_blocked(real: Setup) -> None:
    """A handler that never yields keeps its lease."""
    consumer = await real.work(ack_wait_s=HEART_LEASE_S)
    other = await real.connect()
    await real.put("a")
    (delivery,) = await real.pull_some(consumer)
    heart = real.broker.heart()
    heart.start(delivery, HEART_LEASE_S)
    time.sleep(2 * HEART_LEASE_S)  # the blocked loop is what is tested
    assert heart.alive(delivery)
    assert await real.pull(consumer, 1, other) == []
    real.broker.ack([delivery])
    heart.stop(delivery)
    await real.gone(delivery.seq)
