"""Reading a stream as a table: pages of one subject or of many, and how much each subject holds."""

from __future__ import annotations

import pytest

from millstream.errors import BrokerError
from millstream.ports import Outgoing, Record
from tests.broker.setups import ALL, Setup, sequence


async def hold(setup: Setup, lane: str, count: int, body: bytes = b"item") -> list[int]:
    """Put entries into one lane; returns their sequences."""
    subject = setup.names.held("q", "normal", lane)
    outgoing = [Outgoing(subject, body, msg_id=f"{lane}-{number}") for number in range(count)]
    return [sequence(one) for one in await setup.broker.publish_all(outgoing)]


async def test_page_holds_the_next_messages_of_one_subject_oldest_first(setup: Setup) -> None:
    """Beyond the position that was given, and no more than asked for."""
    names, broker = setup.names, setup.broker
    first, _, second = await hold(setup, "a", 5), await hold(setup, "b", 3), await hold(setup, "a2", 1)
    subject = names.held("q", "normal", "a")
    page = await broker.page(names.held_stream, subject, 0, 3)
    assert [record.seq for record in page] == first[:3]
    assert {record.subject for record in page} == {subject}
    assert page[0].body == b"item"
    assert page[0].at > 0
    assert [record.seq for record in await broker.page(names.held_stream, subject, first[2], 10)] == first[3:]
    assert await broker.page(names.held_stream, subject, first[-1], 10) == []
    assert [record.seq for record in await broker.page(names.held_stream, names.held_filter, first[-1], 100)][
        -1:
    ] == second


async def test_page_leaves_out_what_was_deleted(setup: Setup) -> None:
    """A lane shrinks from wherever its entries are removed."""
    names, broker = setup.names, setup.broker
    seqs = await hold(setup, "a", 4)
    assert await broker.delete(names.held_stream, seqs[0])
    assert await broker.delete(names.held_stream, seqs[2])
    page = await broker.page(names.held_stream, names.held("q", "normal", "a"), 0, 10)
    assert [record.seq for record in page] == [seqs[1], seqs[3]]


async def test_page_of_large_messages_is_cut_and_never_empty(setup: Setup) -> None:
    """One message at least comes; the others with later calls."""
    names, broker = setup.names, setup.broker
    seqs = await hold(setup, "a", 12, b"x" * 600_000)
    subject = names.held("q", "normal", "a")
    found: list[int] = []
    while page := await broker.page(names.held_stream, subject, found[-1] if found else 0, 100):
        found += [record.seq for record in page]
    assert found == seqs


async def test_page_of_nothing_is_empty(setup: Setup) -> None:
    """No subject, no limit: no records."""
    names, broker = setup.names, setup.broker
    assert await broker.page(names.held_stream, names.held("q", "normal", "none"), 0, 10) == []
    await hold(setup, "a", 1)
    assert await broker.page(names.held_stream, names.held("q", "normal", "a"), 0, 0) == []
    with pytest.raises(BrokerError):
        await broker.page("NO_SUCH_STREAM", "a.b", 0, 10)


async def test_subjects_are_counted_while_they_hold_anything(setup: Setup) -> None:
    """Each with its own number, and gone with its last message."""
    names, broker = setup.names, setup.broker
    await hold(setup, "a", 3)
    seqs = await hold(setup, "b", 2)
    lane = {name: names.held("q", "normal", name) for name in ("a", "b")}
    assert await broker.subjects(names.held_stream, names.held_filter) == {lane["a"]: 3, lane["b"]: 2}
    assert await broker.subjects(names.held_stream, lane["b"]) == {lane["b"]: 2}
    for seq in seqs:
        await broker.delete(names.held_stream, seq)
    assert await broker.subjects(names.held_stream, names.held_filter) == {lane["a"]: 3}
    await broker.purge(names.held_stream, lane["a"], ALL)
    assert await broker.subjects(names.held_stream, names.held_filter) == {}
    with pytest.raises(BrokerError):
        await broker.subjects("NO_SUCH_STREAM", "a.>")


async def test_feed_without_bodies_has_everything_else(setup: Setup) -> None:
    """Who only needs to know that something happened does not carry envelopes."""
    names, broker = setup.names, setup.broker
    subject = names.event("acme", "k", "q", "started")
    seq = sequence(await broker.publish(Outgoing(subject, b"x" * 1000, headers={"traceparent": "00-ab"})))
    feed = await broker.feed(names.events_stream, [names.events_of_kind("started")], 0, bodies=False)
    found: list[Record] = []
    while not found:
        await setup.step()
        found = await feed.take(10, 0.0 if setup.kind == "memory" else 1.0)
    assert [(one.subject, one.body, one.seq) for one in found] == [(subject, b"", seq)]
    assert found[0].headers["traceparent"] == "00-ab"
    await feed.close()
