"""A stream read in order from a position."""

from __future__ import annotations

import asyncio
import time

from millstream.ports import Broker, Feed, Outgoing, Record
from tests.broker.setups import Setup, sequence

WAIT_S = 5.0


async def append(setup: Setup, count: int, kind: str = "queued") -> list[int]:
    """Store `count` events; returns their sequences."""
    outgoing = [Outgoing(setup.names.event("acme", f"k{i}", "q", kind), b"%d" % i) for i in range(count)]
    return [sequence(each) for each in await setup.broker.publish_all(outgoing)]


async def events(setup: Setup, after_seq: int = 0, broker: Broker | None = None) -> Feed:
    """A feed of all life cycle events."""
    return await (broker or setup.broker).feed(setup.names.events_stream, [setup.names.event_filter], after_seq)


async def read(feed: Feed, count: int) -> list[Record]:
    """Take until `count` records have come."""
    found: list[Record] = []
    while len(found) < count:
        taken = await feed.take(min(64, count - len(found)), WAIT_S)
        assert taken, f"only {len(found)} of {count} records came"
        found.extend(taken)
    return found


async def test_a_feed_gives_all_in_order(setup: Setup) -> None:
    """What was there and what comes, without gap or repetition."""
    before = await append(setup, 150)
    feed = await events(setup)
    records = await read(feed, 150)
    assert [each.seq for each in records] == before
    assert (records[7].subject, records[7].body) == (setup.names.event("acme", "k7", "q", "queued"), b"7")
    after = await append(setup, 50)
    assert [each.seq for each in await read(feed, 50)] == after
    await feed.close()


async def test_a_feed_begins_after_a_position(setup: Setup) -> None:
    """As a reader does that was stopped and started."""
    sequences = await append(setup, 10)
    feed = await events(setup, sequences[3])
    assert [each.seq for each in await read(feed, 6)] == sequences[4:]
    await feed.close()
    again = await events(setup, sequences[-1])
    assert await again.take(10, 0.1) == []
    (new,) = await append(setup, 1)
    assert [each.seq for each in await read(again, 1)] == [new]
    await again.close()


async def test_every_feed_gets_everything(setup: Setup) -> None:
    """Feeds do not share; nobody acks."""
    feeds = [await events(setup), await events(setup, broker=await setup.connect())]
    sequences = await append(setup, 20)
    for feed in feeds:
        assert [each.seq for each in await read(feed, 20)] == sequences
        await feed.close()


async def test_a_feed_gives_only_what_its_filters_name(setup: Setup) -> None:
    """Several filters, in stream order."""
    names = setup.names
    await append(setup, 2, "queued")
    started = await append(setup, 2, "started")
    info = sequence(await setup.broker.publish(Outgoing(names.info("acme", "k", "q", "usage"), b"")))
    feed = await setup.broker.feed(names.events_stream, [names.events_of_kind("started"), names.info_filter], 0)
    assert [each.seq for each in await read(feed, 3)] == [*started, info]
    assert await feed.take(10, 0.1) == []
    await feed.close()


async def test_an_idle_feed_answers_after_its_wait(setup: Setup) -> None:
    """Empty, soon after the time that was given."""
    feed = await events(setup)
    start = time.monotonic()
    assert await feed.take(10, 0.2) == []
    assert 0.15 <= time.monotonic() - start < 2.0
    await feed.close()


async def test_a_waiting_take_ends_with_the_next_event(setup: Setup) -> None:
    """Long before its wait is over."""
    feed = await events(setup)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(feed.take(10, 30.0))
        await setup.step()
        (seq,) = await append(setup, 1)
    assert [each.seq for each in waiting.result()] == [seq]
    await feed.close()


async def test_a_feed_steps_over_what_was_removed(setup: Setup) -> None:
    """Removed messages are no gap that it waits for."""
    names = setup.names
    sequences = await append(setup, 6)
    for seq in (sequences[0], sequences[3]):
        await setup.broker.delete(names.events_stream, seq)
    feed = await events(setup)
    assert [each.seq for each in await read(feed, 4)] == [sequences[i] for i in (1, 2, 4, 5)]
    await feed.close()
