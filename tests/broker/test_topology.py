"""Declaring what must exist on the server."""

from __future__ import annotations

import msgspec
import pytest

from millstream.errors import BrokerError, TopologyConflict
from millstream_schemas.topology import Lifetimes, StreamSpec, Topology, work_consumer
from tests.broker.setups import LEASE_S, Setup


def changed(setup: Setup, stream: str, **changes: object) -> Topology:
    """The topology with one stream declared otherwise."""

    def change(spec: StreamSpec) -> StreamSpec:
        return msgspec.structs.replace(spec, **changes) if spec.name == stream else spec

    return msgspec.structs.replace(setup.topology, streams=tuple(change(each) for each in setup.topology.streams))


async def test_declaring_twice_changes_nothing(setup: Setup) -> None:
    """Messages and leases stay, also when another actor declares."""
    consumer = await setup.work(ack_wait_s=60.0)
    await setup.put("a", "b")
    assert len(await setup.pull_some(consumer)) == 1
    other = await setup.connect()
    await other.declare(setup.topology)
    await setup.broker.declare(setup.topology)
    await setup.work(ack_wait_s=60.0)
    assert len(await setup.pull(consumer)) == 1
    assert await setup.pull(consumer) == []


async def test_limits_are_adapted(setup: Setup) -> None:
    """What the server lets us change is changed."""
    names = setup.names
    before = await setup.broker.stream_info(names.inbox_stream)
    await setup.broker.declare(changed(setup, names.inbox_stream, store_share=0.0001))
    after = await setup.broker.stream_info(names.inbox_stream)
    assert before is not None
    assert after is not None
    assert after.max_bytes > before.max_bytes


async def test_what_a_newer_peer_declared_is_left_as_it_is(setup: Setup) -> None:
    """An older revision changes no stream; it may run beside it."""
    names = setup.names
    before = await setup.broker.stream_info(names.inbox_stream)
    assert before is not None
    older = msgspec.structs.replace(changed(setup, names.inbox_stream, store_share=0.0001), revision=0)
    await setup.broker.declare(older)
    after = await setup.broker.stream_info(names.inbox_stream)
    assert after is not None
    assert msgspec.structs.replace(after, told_at=before.told_at) == before


async def test_another_retention_is_a_conflict(setup: Setup) -> None:
    """A stream of another kind cannot become a work queue."""
    names = setup.names
    with pytest.raises(TopologyConflict) as caught:
        await setup.broker.declare(changed(setup, names.dlq_stream, retention="workqueue"))
    assert names.dlq_stream in caught.value.name
    await setup.broker.declare(setup.topology)


async def test_schedules_cannot_be_switched_off(setup: Setup) -> None:
    """They stay on once they are on."""
    names = setup.names
    with pytest.raises(TopologyConflict) as caught:
        await setup.broker.declare(changed(setup, names.work_stream, allow_msg_schedules=False))
    assert names.work_stream in caught.value.name


async def test_two_consumers_of_a_work_queue_may_not_share_a_subject(setup: Setup) -> None:
    """Each message of a work queue has one consumer."""
    await setup.work("q")
    spec = work_consumer(setup.names, Lifetimes(lease_s=LEASE_S), "q", "normal", max_ack_pending=10)
    every = msgspec.structs.replace(spec, durable="another", filters=setup.names.work_filters[:1])
    with pytest.raises(TopologyConflict):
        await setup.broker.declare_consumer(every)


async def test_a_consumer_needs_its_stream(setup: Setup) -> None:
    """Otherwise it is an error of the broker's kind."""
    spec = work_consumer(setup.names, Lifetimes(), "q", "normal", max_ack_pending=10)
    with pytest.raises(BrokerError):
        await setup.broker.declare_consumer(msgspec.structs.replace(spec, stream="NONE"))


async def test_the_server_tells_what_it_is(setup: Setup) -> None:
    """Its limits are numbers that can be reckoned with."""
    info = await setup.broker.server_info()
    assert info.version
    assert info.max_payload_bytes >= 1024
    assert info.store_bytes > 0
    assert 0 <= info.store_used_bytes <= info.store_bytes
