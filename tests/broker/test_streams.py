"""Storing and reading: what comes back from a publish, compare-and-set, duplicates, limits, purge."""

from __future__ import annotations

import asyncio

import pytest

from millstream.errors import BrokerClosed, BrokerError, MessageTooLarge
from millstream.ports import Conflict, Expect, Outgoing, Refused, Stored, Unanswered
from tests.broker.setups import ALL, DEDUPE_S, Setup, sequence


def event(setup: Setup, key: str, kind: str = "queued", seq: int | None = None, body: bytes = b"{}") -> Outgoing:
    """An event, appended on `seq` where one is given."""
    expect = Expect(setup.names.life("acme", key), seq) if seq is not None else None
    return Outgoing(setup.names.event("acme", key, "q", kind), body, expect=expect)


async def test_a_stored_message_can_be_read_with_all_its_parts(setup: Setup) -> None:
    """By filter, by sequence and as history: the same record."""
    names, broker = setup.names, setup.broker
    subject = names.event("acme", "k1", "q", "queued")
    before = setup.now()
    stored = await broker.publish(Outgoing(subject, b"\x00\xff{}", headers={"traceparent": "00-ab-cd-01"}))
    assert isinstance(stored, Stored)
    assert not stored.duplicate
    record = await broker.last(names.events_stream, names.life("acme", "k1"))
    assert record is not None
    assert (record.subject, record.body, record.seq) == (subject, b"\x00\xff{}", stored.seq)
    assert record.headers["traceparent"] == "00-ab-cd-01"
    assert before - 0.01 <= record.at <= setup.now() + 0.01
    assert await broker.get(names.events_stream, stored.seq) == record
    assert await broker.history(names.events_stream, names.life("acme", "k1")) == [record]


async def test_reading_what_is_not_there_gives_nothing(setup: Setup) -> None:
    """No record, no history, no exception."""
    names, broker = setup.names, setup.broker
    assert await broker.last(names.events_stream, names.life("acme", "none")) is None
    assert await broker.get(names.events_stream, 4711) is None
    assert await broker.history(names.events_stream, names.life("acme", "none")) == []


async def test_many_messages_come_back_in_the_order_they_were_given(setup: Setup) -> None:
    """One result each, in order, and stored in that order."""
    results = await setup.broker.publish_all([event(setup, f"k{i}", body=b"%d" % i) for i in range(300)])
    sequences = [sequence(each) for each in results]
    assert sequences == sorted(set(sequences))
    history = await setup.broker.history(setup.names.events_stream, setup.names.event_filter)
    assert [record.body for record in history] == [b"%d" % i for i in range(300)]
    assert await setup.broker.publish_all([]) == []


async def test_each_result_belongs_to_its_message(setup: Setup) -> None:
    """Stored, conflict, duplicate and refused, mixed in one call."""
    names = setup.names
    first = sequence(await setup.broker.publish(event(setup, "a")))
    results = await setup.broker.publish_all(
        [
            event(setup, "a", "started", seq=first),
            event(setup, "a", "completed", seq=first),
            Outgoing(names.event("acme", "b", "q", "queued"), b"1", msg_id="once"),
            Outgoing(names.event("acme", "b", "q", "queued"), b"2", msg_id="once"),
            Outgoing(names.dlq("acme", "q", "a", 1), b"", ttl_s=5.0),
            event(setup, "c", seq=0),
        ]
    )
    kinds = [type(each) for each in results]
    assert kinds == [Stored, Conflict, Stored, Stored, Refused, Stored]
    assert results[3] == Stored(sequence(results[2]), duplicate=True)


async def test_history_is_oldest_first_and_limited(setup: Setup) -> None:
    """The limit cuts the newest off."""
    sequences = [
        sequence(each) for each in await setup.broker.publish_all([event(setup, "k", str(i)) for i in range(5)])
    ]
    life = setup.names.life("acme", "k")
    assert [each.seq for each in await setup.broker.history(setup.names.events_stream, life, 3)] == sequences[:3]


async def test_one_of_many_writers_wins(setup: Setup) -> None:
    """Compare-and-set excludes all others, over several connections at once."""
    other = await setup.connect()
    writers = [(setup.broker, other)[i % 2] for i in range(20)]
    results = await asyncio.gather(
        *(writer.publish(event(setup, "k", f"kind{i}", seq=0)) for i, writer in enumerate(writers))
    )
    assert sorted(type(each).__name__ for each in results) == ["Conflict"] * 19 + ["Stored"]
    assert len(await setup.broker.history(setup.names.events_stream, setup.names.life("acme", "k"))) == 1


async def test_compare_and_set_counts_every_subject_under_the_filter(setup: Setup) -> None:
    """An event of another kind moves the expected sequence; another task's does not."""
    first = sequence(await setup.broker.publish(event(setup, "k", "queued", seq=0)))
    sequence(await setup.broker.publish(event(setup, "other", "queued", seq=0)))
    second = sequence(await setup.broker.publish(event(setup, "k", "started", seq=first)))
    assert await setup.broker.publish(event(setup, "k", "completed", seq=first)) == Conflict()
    last = await setup.broker.last(setup.names.events_stream, setup.names.life("acme", "k"))
    assert last is not None
    assert last.seq == second


async def test_an_equal_message_id_stores_nothing_within_the_window(setup: Setup) -> None:
    """Whatever the subject and the body; the answer names the first message."""
    names = setup.names
    first = await setup.broker.publish(Outgoing(names.work("q", "normal", "a"), b"1", msg_id="7"))
    again = await setup.broker.publish(Outgoing(names.work("q", "high", "b"), b"2", msg_id="7"))
    assert again == Stored(sequence(first), duplicate=True)
    assert len(await setup.broker.history(names.work_stream, names.work_filters[0])) == 1


async def test_a_message_id_is_remembered_after_its_message_was_acked(setup: Setup) -> None:
    """A work queue that is empty again still knows the id."""
    consumer = await setup.work()
    outgoing = Outgoing(setup.names.work("q", "normal", "a"), b"1", msg_id="7")
    seq = sequence(await setup.broker.publish(outgoing))
    setup.broker.ack(await setup.pull_some(consumer))
    await setup.gone(seq)
    assert await setup.broker.publish(outgoing) == Stored(seq, duplicate=True)


async def test_a_message_id_is_forgotten_after_the_window(setup: Setup) -> None:
    """The window is the stream's own."""
    outgoing = Outgoing(setup.names.work("q", "normal", "a"), b"1", msg_id="7")
    seq = sequence(await setup.broker.publish(outgoing))

    async def stored_again() -> bool:
        await setup.elapse(DEDUPE_S)
        return sequence(await setup.broker.publish(outgoing)) > seq

    await setup.until(stored_again, "the id to be forgotten")


async def test_repeating_an_append_with_an_expectation_stores_nothing_again(setup: Setup) -> None:
    """A conflict is what the repetition gets, not `duplicate`: who sees one reads the last event."""
    names = setup.names
    outgoing = Outgoing(names.work("q", "normal", "a"), b"", expect=Expect(names.work_of_key("a"), 0), msg_id="x")
    seq = sequence(await setup.broker.publish(outgoing))
    assert await setup.broker.publish(outgoing) == Conflict()
    other = Outgoing(names.work("q", "normal", "b"), b"", expect=Expect(names.work_of_key("b"), 0), msg_id="x")
    assert await setup.broker.publish(other) == Stored(seq, duplicate=True)


@pytest.mark.parametrize("part", ["body", "headers"])
async def test_too_large_is_said_before_anything_is_sent(setup: Setup, part: str) -> None:
    """Body and headers count together, and the connection lives."""
    limit = (await setup.broker.server_info()).max_payload_bytes
    subject = setup.names.work("q", "normal", "a")
    body, headers = (
        (b"x" * (limit + 1), dict[str, str]()) if part == "body" else (b"x" * (limit - 10), {"traceparent": "y" * 20})
    )
    with pytest.raises(MessageTooLarge) as caught:
        await setup.broker.publish(Outgoing(subject, body, headers=headers))
    assert caught.value.limit_bytes == limit
    assert caught.value.size_bytes > limit
    with pytest.raises(MessageTooLarge):
        await setup.broker.publish_all([Outgoing(subject, b"small"), Outgoing(subject, body, headers=headers)])
    assert await setup.broker.history(setup.names.work_stream, subject) == []
    assert isinstance(await setup.broker.publish(Outgoing(subject, b"small")), Stored)
    assert setup.broker.connected


async def test_a_subject_that_is_too_long_is_refused_locally(setup: Setup) -> None:
    """It would close the connection for good."""
    with pytest.raises(MessageTooLarge):
        await setup.broker.publish(Outgoing(setup.names.work("q", "normal", "a") * 300, b""))
    assert isinstance(await setup.broker.publish(Outgoing(setup.names.work("q", "normal", "a"), b"")), Stored)


async def test_a_subject_that_no_stream_holds_is_a_value(setup: Setup) -> None:
    """Nobody answers, as when a stream has no leader: not raised, and the others' results stand."""
    nowhere = Outgoing(setup.names.bell("q"), b"")
    results = await setup.broker.publish_all([event(setup, "a"), nowhere, event(setup, "b")])
    assert [type(each) for each in results] == [Stored, Unanswered, Stored]


async def test_a_message_with_a_ttl_is_there_and_then_gone(setup: Setup) -> None:
    """Part of a second is rounded up to a whole one."""
    names = setup.names
    subject = names.event("acme", "k", "q", "queued")
    seq = sequence(await setup.broker.publish(Outgoing(subject, b"", ttl_s=0.3)))
    assert await setup.broker.get(names.events_stream, seq) is not None
    start = setup.now()

    async def gone() -> bool:
        return await setup.broker.get(names.events_stream, seq) is None

    await setup.until(gone, "the message to expire")
    assert setup.now() - start >= 0.9
    assert await setup.broker.last(names.events_stream, names.life("acme", "k")) is None


async def test_what_a_stream_does_not_allow_is_refused(setup: Setup) -> None:
    """A time to live on a stream without it."""
    result = await setup.broker.publish(Outgoing(setup.names.dlq("acme", "q", "k", 1), b"", ttl_s=5.0))
    assert isinstance(result, Refused)
    assert result.code == 10166


async def test_a_full_stream_refuses_and_takes_again_once_there_is_room(setup: Setup) -> None:
    """Nothing that was stored is lost to make room."""
    names = setup.names
    info = await setup.broker.stream_info(names.inbox_stream)
    assert info is not None
    assert info.max_bytes > 0
    outgoing = Outgoing(names.submit("acme", "q"), b"x" * (info.max_bytes // 4))
    results = await setup.broker.publish_all([outgoing] * 6)
    stored = [each for each in results if isinstance(each, Stored)]
    refused = [each for each in results if isinstance(each, Refused)]
    assert len(stored) == 3
    assert [each.code for each in refused] == [10077] * 3
    assert results == [*stored, *refused]
    setup.broker.ack(await setup.broker.pull(names.inbox_stream, names.inbox_consumer, 1))

    async def room() -> bool:
        return isinstance(await setup.broker.publish(outgoing), Stored)

    await setup.until(room, "room for one more")


async def test_purge_removes_what_the_filter_names_and_nothing_else(setup: Setup) -> None:
    """One key in all queues and priorities."""
    names = setup.names
    await setup.put("a", "b", "a")
    await setup.put("a", "ab", queue="other")
    assert await setup.broker.purge(names.work_stream, names.work_of_key("a"), ALL) == 3
    assert await setup.broker.purge(names.work_stream, names.work_of_key("a"), ALL) == 0
    left = await setup.broker.history(names.work_stream, names.work_filters[0])
    assert [names.parse_work(each.subject)[2] for each in left] == ["b", "ab"]


async def test_purge_spares_what_came_after_its_bound(setup: Setup) -> None:
    """A purge that is late removes nothing that was published meanwhile."""
    names = setup.names
    await setup.put("a")
    info = await setup.broker.stream_info(names.work_stream)
    assert info is not None
    await setup.put("a")
    assert await setup.broker.purge(names.work_stream, names.work_of_key("a"), info.last_seq) == 1
    left = await setup.broker.history(names.work_stream, names.work_of_key("a"))
    assert [each.seq for each in left] == [info.last_seq + 1]


async def test_one_message_can_be_deleted_once(setup: Setup) -> None:
    """The second time says that there was nothing."""
    names = setup.names
    first, second = await setup.put("a", "b")
    assert await setup.broker.delete(names.work_stream, first)
    assert not await setup.broker.delete(names.work_stream, first)
    assert await setup.broker.get(names.work_stream, first) is None
    assert await setup.broker.get(names.work_stream, second) is not None


async def test_the_inbox_cannot_be_purged(setup: Setup) -> None:
    """The stream denies it, and that is an error of the caller's program."""
    names = setup.names
    seq = sequence(await setup.broker.publish(Outgoing(names.submit("acme", "q"), b"")))
    with pytest.raises(BrokerError):
        await setup.broker.purge(names.inbox_stream, names.submit_filter, ALL)
    assert await setup.broker.get(names.inbox_stream, seq) is not None


async def test_the_counts_of_a_stream(setup: Setup) -> None:
    """Messages, first and last sequence, and no answer for a stream that does not exist."""
    names = setup.names
    first, second, third = await setup.put("a", "b", "c")
    await setup.broker.delete(names.work_stream, first)
    info = await setup.broker.stream_info(names.work_stream)
    assert info is not None
    assert (info.name, info.messages, info.first_seq, info.last_seq) == (names.work_stream, 2, second, third)
    assert info.bytes > 0
    assert abs(info.first_at - setup.now()) < 5
    assert await setup.broker.stream_info("NONE") is None


async def test_informing_stores_without_an_answer(setup: Setup) -> None:
    """It arrives soon; nobody waits for it."""
    names = setup.names
    setup.broker.inform(Outgoing(names.info("acme", "k", "q", "progress"), b"0.4", ttl_s=60.0))

    async def arrived() -> bool:
        return await setup.broker.last(names.events_stream, names.info_filter) is not None

    await setup.until(arrived, "the note to be stored")


async def test_a_closed_broker_says_so(setup: Setup) -> None:
    """Closing twice is fine; publishing afterwards is not."""
    other = await setup.connect()
    before = other.connected
    await other.close()
    await other.close()
    assert (before, other.connected) == (True, False)
    with pytest.raises(BrokerClosed):
        await other.publish(Outgoing(setup.names.work("q", "normal", "a"), b""))
    assert setup.broker.connected
