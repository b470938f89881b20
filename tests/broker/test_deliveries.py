"""Deliveries of work-queue consumers: pull, mailbox, leases, acks and what happens without them."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec
import pytest

from millstream.errors import ConsumerMissing
from millstream.ports import Delivery, Outgoing
from tests.broker.setups import ALL, HEART_LEASE_S, LEASE_S, Setup, consumer_spec


async def test_pull_gives_what_is_there_up_to_the_limit(setup: Setup) -> None:
    """Oldest first, with all that a handler needs to know."""
    names = setup.names
    consumer = await setup.work()
    sequences = await setup.put("a", "b", "c")
    first, second = await setup.pull(consumer, 2)
    assert (first.subject, first.body) == (names.work("q", "normal", "a"), b"body")
    assert (first.stream, first.consumer, first.seq) == (names.work_stream, consumer, sequences[0])
    assert (first.delivery, second.delivery, second.seq) == (1, 1, sequences[1])
    assert second.pending == 1
    assert abs(first.at - setup.now()) < 5
    assert [each.seq for each in await setup.pull(consumer)] == sequences[2:]


async def test_headers_are_delivered(setup: Setup) -> None:
    """Our own headers come along."""
    consumer = await setup.work()
    await setup.broker.publish(Outgoing(setup.names.work("q", "normal", "a"), b"", headers={"traceparent": "00-1"}))
    (delivery,) = await setup.pull_some(consumer)
    assert delivery.headers["traceparent"] == "00-1"


async def test_pull_never_waits(setup: Setup) -> None:
    """An empty queue answers at once."""
    consumer = await setup.work()
    start = time.monotonic()
    assert await setup.pull(consumer) == []
    assert time.monotonic() - start < 1.0


async def test_pull_leaves_nothing_behind(setup: Setup) -> None:
    """What arrives later is there for the next one who asks, as a first delivery."""
    consumer = await setup.work()
    other = await setup.connect()
    await setup.put("a")
    assert len(await setup.pull(consumer, 10, other)) == 1
    assert await setup.pull(consumer, 10, other) == []
    await setup.put("b", "c")
    found = await setup.pull_some(consumer, 2)
    assert [each.delivery for each in found] == [1, 1]


async def test_an_ack_removes_the_message_from_a_work_queue(setup: Setup) -> None:
    """It is gone, and does not come back after the lease."""
    consumer = await setup.work()
    sequences = await setup.put("a", "b")
    setup.broker.ack(await setup.pull_some(consumer, 2))
    for seq in sequences:
        await setup.gone(seq)
    await setup.elapse(1.5 * LEASE_S)
    assert await setup.pull(consumer) == []


async def test_without_an_ack_the_message_comes_again_after_the_lease(setup: Setup) -> None:
    """With a growing delivery count, and not before."""
    consumer = await setup.work()
    (seq,) = await setup.put("a")
    lent = setup.now()
    await setup.pull_some(consumer)
    for count in (2, 3):
        (again,) = await setup.pull_some(consumer)
        assert (again.seq, again.delivery) == (seq, count)
        assert setup.now() - lent >= 0.9 * LEASE_S
        lent = setup.now()


async def test_a_late_ack_is_accepted(setup: Setup) -> None:
    """There is no fence: the first holder's ack removes what the second one holds."""
    consumer = await setup.work()
    (seq,) = await setup.put("a")
    first = await setup.pull_some(consumer)
    second = await setup.pull_some(consumer)
    setup.broker.ack(first)
    await setup.gone(seq)
    setup.broker.ack(second)
    await setup.broker.flush()
    assert await setup.pull(consumer) == []


async def test_a_heart_keeps_the_lease(setup: Setup) -> None:
    """Beyond its end, twice over; once it stops, the message comes again."""
    consumer = await setup.work(ack_wait_s=HEART_LEASE_S)
    await setup.put("a")
    (delivery,) = await setup.pull_some(consumer)
    heart = setup.broker.heart()
    assert not heart.alive(delivery)
    heart.start(delivery, HEART_LEASE_S)
    end = setup.now() + 2 * HEART_LEASE_S
    while setup.now() < end:
        assert heart.alive(delivery)
        assert await setup.pull(consumer) == []
        await setup.step()
    heart.stop(delivery)
    heart.stop(delivery)
    (again,) = await setup.pull_some(consumer)
    assert again.delivery == 2


async def test_a_nak_brings_the_message_back_at_once(setup: Setup) -> None:
    """Long before the lease ends."""
    consumer = await setup.work(ack_wait_s=60.0)
    await setup.put("a")
    (delivery,) = await setup.pull_some(consumer)
    setup.broker.nak(delivery)
    (again,) = await setup.pull_some(consumer)
    assert again.delivery == 2


async def test_a_delayed_nak_brings_it_back_later(setup: Setup) -> None:
    """Not before the delay has passed."""
    consumer = await setup.work(ack_wait_s=60.0)
    await setup.put("a")
    (delivery,) = await setup.pull_some(consumer)
    start = setup.now()
    setup.broker.nak(delivery, 0.5)
    await setup.pull_some(consumer)
    assert setup.now() - start >= 0.49


async def test_deliveries_end_and_an_advisory_is_stored(setup: Setup) -> None:
    """After max_deliver the message stays in its stream, unseen, and the advisory stream says so."""
    names = setup.names
    consumer = await setup.work(max_deliver=2)
    (seq,) = await setup.put("a")
    await setup.pull_some(consumer, 2)
    mailbox = await setup.broker.mailbox(
        names.work_stream, consumer, 1
    )  # the server counts when it is asked to deliver
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(mailbox.take(1))
        advisories: list[Delivery] = []

        async def advised() -> bool:
            advisories.extend(await setup.broker.pull(names.advisory_stream, names.advisory_consumer, 1))
            return bool(advisories)

        await setup.until(advised, "the advisory")
        await mailbox.close()
    assert waiting.result() == []
    body = json.loads(advisories[0].body)
    assert advisories[0].subject == names.advisories(names.work_stream)[0].removesuffix("*") + consumer
    assert (body["stream"], body["consumer"]) == (names.work_stream, consumer)
    assert (body["stream_seq"], body["deliveries"]) == (seq, 2)
    assert await setup.broker.get(names.work_stream, seq) is not None


async def test_unacked_messages_are_capped_and_the_cap_can_be_raised(setup: Setup) -> None:
    """Live, over all who pull."""
    other = await setup.connect()
    consumer = await setup.work(max_ack_pending=2, ack_wait_s=60.0)
    await setup.put("a", "b", "c", "d")
    held = await setup.pull_some(consumer, 2)
    assert await setup.pull(consumer, 10, other) == []
    await setup.work(max_ack_pending=3, ack_wait_s=60.0)
    assert len(await setup.pull_some(consumer, 1, other)) == 1
    assert await setup.pull(consumer) == []
    setup.broker.ack(held[:1])
    assert len(await setup.pull_some(consumer, 1, other)) == 1


async def test_each_consumer_gets_its_own_subjects(setup: Setup) -> None:
    """Two queues of one stream."""
    one, two = await setup.work("q1"), await setup.work("q2")
    await setup.put("a", queue="q1")
    await setup.put("b", queue="q2")
    assert [each.subject for each in await setup.pull_some(one)] == [setup.names.work("q1", "normal", "a")]
    assert [each.subject for each in await setup.pull_some(two)] == [setup.names.work("q2", "normal", "b")]
    assert await setup.pull(one) == []


async def test_an_ack_on_a_kept_stream_moves_the_consumer_only(setup: Setup) -> None:
    """Events are read and stay."""
    names = setup.names
    await setup.broker.publish(Outgoing(names.event("acme", "k", "q", "queued"), b""))
    await setup.broker.publish(Outgoing(names.event("acme", "k", "q", "attempt_failed"), b""))
    found = await setup.broker.pull(names.events_stream, names.decisions_consumer, 10)
    assert [names.parse_event(each.subject).kind for each in found] == ["attempt_failed"]
    setup.broker.ack(found)
    await setup.elapse(1.5 * LEASE_S)
    assert await setup.broker.pull(names.events_stream, names.decisions_consumer, 10) == []
    assert await setup.broker.get(names.events_stream, found[0].seq) is not None


async def test_purged_work_is_not_delivered(setup: Setup) -> None:
    """Neither what waits nor what is lent; its ack does no harm."""
    names = setup.names
    consumer = await setup.work()
    await setup.put("a", "b", "a")
    lent = await setup.pull_some(consumer)
    assert await setup.broker.purge(names.work_stream, names.work_of_key("a"), ALL) == 2
    (other,) = await setup.pull_some(consumer)
    assert names.parse_work(other.subject)[2] == "b"
    setup.broker.ack([*lent, other])
    await setup.elapse(1.5 * LEASE_S)
    assert await setup.pull(consumer) == []


async def test_the_counts_of_a_consumer(setup: Setup) -> None:
    """What waits, what is lent, what is lent again."""
    consumer = await setup.work(max_ack_pending=7, ack_wait_s=60.0)
    await setup.put("a")
    (delivery,) = await setup.pull_some(consumer)
    setup.broker.nak(delivery)
    await setup.pull_some(consumer)
    await setup.put("b", "c")
    (info,) = [each for each in await setup.broker.consumers(setup.names.work_stream) if each.name == consumer]
    assert (info.name, info.pending, info.ack_pending, info.max_ack_pending) == (consumer, 2, 1, 7)
    assert info.redelivered == 1
    assert await setup.broker.consumers("NONE") == []


async def test_readers_may_come_before_what_they_read(setup: Setup) -> None:
    """Actors start in any order: a mailbox waits for its consumer, a pull says that there is none."""
    names = setup.names
    durable = names.work_consumer("q", "normal")
    mailbox = await setup.broker.mailbox(names.work_stream, durable, 1)
    with pytest.raises(ConsumerMissing):
        await setup.pull(durable)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(mailbox.take(1))
        await setup.step()
        assert await setup.work() == durable
        (seq,) = await setup.put("a")
    assert [each.seq for each in waiting.result()] == [seq]
    await mailbox.close()


async def test_a_closed_broker_ends_what_waits_and_answers(setup: Setup) -> None:
    """Takes return empty, answers are cancelled: nothing hangs and nothing is left running."""
    names = setup.names
    other = await setup.connect()
    mailbox = await other.mailbox(names.work_stream, await setup.work(), 1)
    feed = await other.feed(names.events_stream, [names.event_filter], 0)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def for_ever(body: bytes) -> bytes | None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return None

    await other.serve(names.governor("acquire"), for_ever)
    await other.flush()
    setup.broker.tell(names.governor("acquire"))
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        takes = (tasks.create_task(mailbox.take(1)), tasks.create_task(feed.take(1, 60.0)))
        await begun.wait()
        await other.close()
        await ended.wait()
    assert [take.result() for take in takes] == [[], []]


async def test_a_mailbox_waits_for_work(setup: Setup) -> None:
    """A take that began before the publish ends with it."""
    names = setup.names
    consumer = await setup.work()
    mailbox = await setup.broker.mailbox(names.work_stream, consumer, 10)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(mailbox.take(5))
        await setup.step()
        assert not waiting.done()
        (seq,) = await setup.put("a")
    assert [each.seq for each in waiting.result()] == [seq]
    await mailbox.close()


async def test_mailboxes_share_the_work(setup: Setup) -> None:
    """Every message goes to one of them, once; credit is no limit to how many go through."""
    names = setup.names
    consumer = await setup.work(ack_wait_s=60.0)
    brokers = (setup.broker, await setup.connect())
    mailboxes = [await each.mailbox(names.work_stream, consumer, 16) for each in brokers]
    got: list[int] = []

    async def drain(index: int) -> None:
        while taken := await mailboxes[index].take(10):
            assert len(taken) <= 10
            got.extend(each.seq for each in taken)
            brokers[index].ack(taken)
            if len(got) == 200:
                for each in mailboxes:
                    await each.close()

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for index in range(2):
            tasks.create_task(drain(index))
        sequences = await setup.put(*(f"k{i}" for i in range(200)))
    assert sorted(got) == sequences


async def test_a_closed_mailbox_hands_back_what_was_not_taken(setup: Setup) -> None:
    """Long before the lease ends, another one has it."""
    names = setup.names
    consumer = await setup.work(ack_wait_s=60.0)
    await setup.put(*"abcdef")
    mailbox = await setup.broker.mailbox(names.work_stream, consumer, 6)
    async with asyncio.timeout(10):
        taken = await mailbox.take(1)
    assert len(taken) == 1
    await mailbox.close()
    assert await mailbox.take(1) == []
    other = await setup.connect()
    rest = await setup.pull_some(consumer, 5, other)
    assert len({each.seq for each in [*taken, *rest]}) == 6


async def test_a_declared_consumer_can_be_changed(setup: Setup) -> None:
    """A longer lease holds for what is lent from then on."""
    names = setup.names
    spec = consumer_spec(setup, names.inbox_consumer)
    await setup.broker.declare_consumer(msgspec.structs.replace(spec, ack_wait_s=60.0))
    await setup.broker.publish(Outgoing(names.submit("acme", "q"), b""))

    async def lent() -> list[Delivery]:
        return await setup.broker.pull(names.inbox_stream, names.inbox_consumer, 1)

    await setup.until(lent, "the submit")
    await setup.elapse(1.5 * LEASE_S)
    assert await lent() == []
