"""Streams of counters: increments that add up on the server, once each."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from millstream.errors import TopologyConflict
from millstream.ports import Expect, Outgoing, Refused, Stored
from millstream_schemas.keys import derive_key
from millstream_schemas.topology import Topology
from tests.broker.setups import ALL, Setup, sequence

KEY = derive_key("limit", "", "llm")
OTHER = derive_key("limit", "", "tenant/acme")


def increment(setup: Setup, by: int, msg_id: str | None = None, key: str = KEY, period: str = "2026-11-30") -> Outgoing:
    """A message that adds to a sum."""
    return Outgoing(setup.names.spent(key, period), b"", msg_id=msg_id, increment=by)


async def total(setup: Setup, key: str = KEY, period: str = "2026-11-30") -> int | None:
    """The sum on a subject, None where there is none."""
    record = await setup.broker.last(setup.names.spent_stream, setup.names.spent(key, period))
    return None if record is None else int(json.loads(record.body)["val"])


async def test_increments_add_up_for_each_subject(setup: Setup) -> None:
    """From any connection; the body of the last message holds the sum as a text."""
    other = await setup.connect()
    results = await asyncio.gather(
        *((setup.broker, other)[n % 2].publish(increment(setup, n)) for n in range(1, 11)),
        setup.broker.publish(increment(setup, 7, key=OTHER)),
        setup.broker.publish(increment(setup, 10**15, period="total")),
    )
    assert all(isinstance(result, Stored) for result in results)
    assert (await total(setup), await total(setup, OTHER), await total(setup, period="total")) == (55, 7, 10**15)


async def test_an_increment_may_be_negative_or_nothing(setup: Setup) -> None:
    """A correction downwards is an increment too."""
    for by in (5, -3, 0):
        sequence(await setup.broker.publish(increment(setup, by)))
    assert await total(setup) == 2


async def test_an_equal_message_id_counts_once(setup: Setup) -> None:
    """Also when the message that it repeats has given way to a newer sum."""
    broker = setup.broker
    first = await broker.publish(increment(setup, 5, "permit-1"))
    assert isinstance(first, Stored)
    assert first.total == 5
    assert await broker.publish(increment(setup, 5, "permit-1")) == Stored(sequence(first), duplicate=True)
    sequence(await broker.publish(increment(setup, 2, "permit-2")))
    assert await broker.publish(increment(setup, 5, "permit-1")) == Stored(sequence(first), duplicate=True)
    assert await total(setup) == 7


async def test_only_the_sums_are_kept(setup: Setup) -> None:
    """One message a subject, however many increments; read by period."""
    for _ in range(20):
        sequence(await setup.broker.publish(increment(setup, 1)))
        sequence(await setup.broker.publish(increment(setup, 2, key=OTHER)))
    sequence(await setup.broker.publish(increment(setup, 9, period="2026-12-01")))
    names = setup.names
    held = await setup.broker.history(names.spent_stream, names.spent_in("2026-11-30"))
    assert {names.parse_spent(each.subject)[0]: json.loads(each.body)["val"] for each in held} == {
        KEY: "20",
        OTHER: "40",
    }
    info = await setup.broker.stream_info(names.spent_stream)
    assert info is not None
    assert info.messages == 3


async def test_what_is_no_increment_is_refused(setup: Setup) -> None:
    """A body, a missing increment, a compare-and-set: the sum stays."""
    sequence(await setup.broker.publish(increment(setup, 5)))
    whole = increment(setup, 1)
    wrong = (
        msgspec.structs.replace(whole, body=b"6"),
        msgspec.structs.replace(whole, increment=None),
        msgspec.structs.replace(whole, expect=Expect(whole.subject, 0)),
        msgspec.structs.replace(whole, ttl_s=60.0),
    )
    for result in await setup.broker.publish_all(wrong):
        assert isinstance(result, Refused), result
    assert await total(setup) == 5


async def test_an_increment_to_a_plain_stream_is_refused(setup: Setup) -> None:
    """A counter that does not count would lose what it was told."""
    outgoing = Outgoing(setup.names.control("cancel", "acme"), b"", increment=1)
    assert isinstance(await setup.broker.publish(outgoing), Refused)


async def test_a_removed_sum_begins_at_nothing(setup: Setup) -> None:
    """By a purge; equal message ids are still known."""
    sequence(await setup.broker.publish(increment(setup, 5, "permit-1")))
    await setup.broker.purge(setup.names.spent_stream, setup.names.spent(KEY, "2026-11-30"), ALL)
    assert await total(setup) is None
    again = await setup.broker.publish(increment(setup, 5, "permit-1"))
    assert isinstance(again, Stored)
    assert again.duplicate
    sequence(await setup.broker.publish(increment(setup, 3)))
    assert await total(setup) == 3


async def test_a_stream_does_not_change_between_counting_and_not(setup: Setup) -> None:
    """No server can do that: it is said so, in both directions."""
    for spec in setup.topology.streams:
        if spec.name in (setup.names.spent_stream, setup.names.dlq_stream):
            changed = msgspec.structs.replace(spec, allow_msg_counter=not spec.allow_msg_counter)
            with pytest.raises(TopologyConflict):
                await setup.broker.declare(Topology(revision=9, streams=(changed,), consumers=(), buckets=()))


async def test_a_bucket_without_expiry_keeps_what_is_written(setup: Setup) -> None:
    """As the configuration is kept: revision and value, over much more than the other buckets' time."""
    broker, bucket = setup.broker, setup.names.config_bucket
    revision = await broker.kv_put(bucket, setup.names.config_key, b"{}")
    await setup.elapse(2.5)
    found = await broker.kv_get(bucket, setup.names.config_key)
    assert found is not None
    assert (found.value, found.revision) == (b"{}", revision)
    later = await broker.kv_update(bucket, setup.names.config_key, b"[]", revision)
    assert later is not None
    assert later > revision
