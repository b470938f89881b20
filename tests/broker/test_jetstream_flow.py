"""Pulls with credit under load: no pause, no new consumer, no leak, whatever the size of the messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from millstream.jetstream.broker import JetStreamBroker
from millstream.jetstream.connection import connect
from millstream.jetstream.protocol import nak_payload, parse_ack_subject, schedule_text
from millstream.ports import Outgoing
from millstream.server import LocalServer
from millstream_schemas.names import Names
from millstream_schemas.topology import Lifetimes, topology

_NAMES = Names("mill")


@pytest.fixture
async def broker(nats_server: LocalServer) -> AsyncGenerator[JetStreamBroker]:
    """A broker with everything declared."""
    made = await connect(nats_server.url, _NAMES, client_name="flow")
    await made.declare(topology(_NAMES, Lifetimes()))
    yield made
    await made.close()


@pytest.mark.parametrize(("count", "size", "credit"), [(3000, 10, 16), (60, 600_000, 50)])
async def test_a_mailbox_flows_without_a_pause(broker: JetStreamBroker, count: int, size: int, credit: int) -> None:
    """The ordinary ends of pulls, by number and by bytes, are no reason to back off."""
    await broker.publish_all([Outgoing(_NAMES.submit("acme", "q"), b"x" * size) for _ in range(count)])
    mailbox = await broker.mailbox(_NAMES.inbox_stream, _NAMES.inbox_consumer, credit)
    got: list[int] = []
    while len(got) < count:
        deliveries = await mailbox.take(5)
        assert len(deliveries) <= 5
        got += [one.seq for one in deliveries]
        broker.ack(deliveries)
    assert got == sorted(set(got))
    assert mailbox._puller._failures == 0
    await mailbox.close()


async def test_a_feed_flows_with_one_consumer(broker: JetStreamBroker) -> None:
    """Only a doubt starts a new one."""
    await broker.publish_all([Outgoing(_NAMES.info("acme", "k", "q", "progress"), b"x") for _ in range(5000)])
    feed = await broker.feed(_NAMES.events_stream, [_NAMES.info_filter], 1000)
    first = await feed.take(1, 5.0)
    consumer, got = feed._consumer, [one.seq for one in first]
    while len(got) < 4000:
        got += [one.seq for one in await feed.take(300, 5.0)]
    assert got == list(range(1001, 5001))
    assert feed._consumer == consumer
    assert await feed.take(1, 0.05) == []
    await feed.close()


async def test_nothing_is_left_behind(broker: JetStreamBroker) -> None:
    """Mailboxes, feeds, pulls and requests give back every subscription."""
    wire = broker._wire
    before, hooks = len(wire._reader.heard), len(wire._reconnected)
    for _ in range(5):
        mailbox = await broker.mailbox(_NAMES.inbox_stream, _NAMES.inbox_consumer, 5)
        feed = await broker.feed(_NAMES.events_stream, [], 0)
        assert await feed.take(1, 0.05) == []
        assert await broker.pull(_NAMES.inbox_stream, _NAMES.inbox_consumer, 3) == []
        assert await broker.last(_NAMES.events_stream, _NAMES.event_filter) is None
        await mailbox.close()
        await feed.close()
    assert len(wire._reader.heard) == len(wire.client._subs) == before
    assert len(wire._reconnected) == hooks
    assert broker._requests._waiting == {}
    assert broker._publisher._pending == {}


def test_ack_subjects_are_read_in_both_forms() -> None:
    """With and without domain and account hash."""
    short = parse_ack_subject("$JS.ACK.MILL_WORK.work-q-normal.2.17.5.1700000000500000000.9")
    assert short == parse_ack_subject("$JS.ACK.hub.HASH.MILL_WORK.work-q-normal.2.17.5.1700000000500000000.9.token")
    assert (short.stream, short.consumer, short.delivery, short.seq) == ("MILL_WORK", "work-q-normal", 2, 17)
    assert (short.consumer_seq, short.at, short.pending) == (5, 1700000000.5, 9)


@pytest.mark.parametrize(
    ("delay_s", "payload"),
    [(0, b"-NAK"), (-1, b"-NAK"), (float("nan"), b"-NAK"), (0.5, b'-NAK {"delay": 500000000}'),
     (float("inf"), b'-NAK {"delay": 31536000000000000}')],
)  # fmt: skip
def test_a_delay_is_one_that_the_server_can_read(delay_s: float, payload: bytes) -> None:
    """What it cannot read it takes for none: a hot loop."""
    assert nak_payload(delay_s) == payload


@pytest.mark.parametrize(
    ("at", "text"),
    [(1700000000.0, "@at 2023-11-14T22:13:20.000Z"), (1700000000.0004, "@at 2023-11-14T22:13:20.001Z"),
     (1700000000.9995, "@at 2023-11-14T22:13:21.000Z")],
)  # fmt: skip
def test_a_schedule_is_never_early(at: float, text: str) -> None:
    """Rounded up to a millisecond."""
    assert schedule_text(at) == text
