"""The lock of whoever leads: stood by for, taken over, fenced by the holder's own clock."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from millstream.clock import SystemClock
from millstream.errors import BrokerClosed, BrokerError
from millstream.leadership import SAFETY_S, Leadership
from millstream.memory import MemoryServer
from millstream.ports import Broker, KeyValue
from millstream_schemas.topology import BucketSpec, Topology
from tests.support.clock import VirtualClock
from tests.support.waiting import wait_until

TTL_S = 1.5


class Full:
    """Holds the lock of whoever asks first; its store is full for two writes."""

    refusals = 2
    value = b""

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int | None:
        self.value = self.value or value
        return None

    async def kv_get(self, bucket: str, key: str) -> KeyValue | None:
        return KeyValue(self.value, 3)

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int | None:
        if self.refusals:
            self.refusals -= 1
            raise BrokerError("insufficient resources (10023)")
        return 7


async def test_refused_renewal_of_our_own_lock_is_tried_again() -> None:
    """After a lapse the lock may still be ours: a refused write is no reason to give up the process."""
    broker = cast(Broker, cast(Any, Full()))
    lock = Leadership(broker, "leaders", "governor", VirtualClock(), 3.0, "token")
    async with asyncio.timeout(20):
        assert await lock.win(asyncio.Event()) == 7
    assert lock.held()


@dataclass
class Site:
    """A bucket in memory, and those who want its one lock."""

    server: MemoryServer
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0

    def lock(
        self, name: str, broker: Broker | None = None, clock: SystemClock | VirtualClock | None = None
    ) -> Leadership:
        """The lock as one process sees it."""
        return Leadership(
            broker or self.server.connect(), "leaders", "governor", clock or SystemClock(), TTL_S, f"{name}-1"
        )

    def count(self) -> None:
        """Somebody stands by."""
        self.waiting += 1


@pytest.fixture
async def site() -> Site:
    """An environment of its own."""
    server = MemoryServer(SystemClock())
    buckets = (BucketSpec(name="leaders", ttl_s=TTL_S),)
    await server.connect().declare(Topology(revision=1, streams=(), consumers=(), buckets=buckets))
    return Site(server)


async def epoch_of(lock: Leadership, stop: asyncio.Event) -> int:
    """The epoch of a lock that must be won."""
    epoch = await lock.win(stop)
    assert epoch is not None
    return epoch


async def test_one_of_many_wins_and_the_others_stand_by_for_as_long_as_it_renews(site: Site) -> None:
    """They raise nothing and say once that they wait."""
    first = site.lock("a")
    await epoch_of(first, site.stop)
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(first.hold())
        others = [group.create_task(site.lock(name).win(site.stop, site.count)) for name in "bcd"]
        await asyncio.sleep(TTL_S * 2)
        assert first.held()
        assert not any(task.done() for task in others)
        site.stop.set()
        assert await asyncio.gather(*others) == [None] * 3
        holding.cancel()
    assert site.waiting == 3


async def test_a_released_lock_is_taken_over_at_once(site: Site) -> None:
    """Well before it would have expired, with a higher epoch."""
    first, second = site.lock("a"), site.lock("b")
    epoch = await epoch_of(first, site.stop)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(second.win(site.stop, site.count))
        await wait_until(lambda: site.waiting, "the second to stand by")
        began = time.monotonic()
        await first.release()
        assert not first.held()
        later = await waiting
    assert later is not None
    assert later > epoch
    assert time.monotonic() - began < TTL_S * 0.8
    assert second.held()


async def test_a_dead_holders_lock_is_taken_over_once_it_expires(site: Site) -> None:
    """Not before, and soon after."""
    await epoch_of(site.lock("a"), site.stop)
    began = time.monotonic()
    await epoch_of(site.lock("b"), site.stop)
    assert TTL_S * 0.8 <= time.monotonic() - began < TTL_S + 4


async def test_a_holder_whose_lock_is_gone_notices_and_another_has_it(site: Site) -> None:
    """Taken by hand, as an operator may."""
    first, second = site.lock("a"), site.lock("b")
    await epoch_of(first, site.stop)
    await site.server.connect().kv_delete("leaders", "governor")
    await epoch_of(second, site.stop)
    async with asyncio.timeout(20):
        await first.hold()
    assert not first.held()
    assert second.held()
    await first.release()
    assert await second.renew()


async def test_a_holder_trusts_its_lock_only_for_as_long_as_nobody_else_can_have_it(site: Site) -> None:
    """By its own monotonic clock, counted from before it asked; a step of the wall clock changes nothing."""
    clock = VirtualClock()
    lock = site.lock("a", clock=clock)
    await epoch_of(lock, site.stop)
    clock.step(-3600.0)
    clock.advance(TTL_S - SAFETY_S - 0.01)
    assert lock.held()
    clock.step(7200.0)
    clock.advance(0.02)
    assert not lock.held()


class Deaf:
    """Passes all on; while `lost`, what was done is not answered."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.lost = False
        self.closed = False

    def _check(self) -> None:
        if self.closed:
            raise BrokerClosed("closed")
        if self.lost:
            raise BrokerError("no answer")

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int | None:
        done = await self._broker.kv_create(bucket, key, value)
        self._check()
        return done

    async def kv_get(self, bucket: str, key: str) -> KeyValue | None:
        self._check()
        return await self._broker.kv_get(bucket, key)

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int | None:
        done = await self._broker.kv_update(bucket, key, value, revision)
        self._check()
        return done


async def test_a_renewal_whose_answer_was_lost_is_known_as_our_own(site: Site) -> None:
    """The value tells; and a lock that was won without an answer is ours as well."""
    deaf = Deaf(site.server.connect())
    lock = site.lock("a", cast(Broker, cast(Any, deaf)))
    deaf.lost = True
    async with asyncio.TaskGroup() as group:
        winning = group.create_task(lock.win(site.stop))
        await asyncio.sleep(0.05)
        deaf.lost = False
        assert await winning is not None
    deaf.lost = True
    assert await lock.renew()  # it may still be ours
    deaf.lost = False
    assert await lock.renew()
    assert lock.held()


async def test_a_closed_connection_ends_the_waiting(site: Site) -> None:
    """Another process has to go on."""
    deaf = Deaf(site.server.connect())
    deaf.closed = True
    with pytest.raises(BrokerClosed):
        await site.lock("a", cast(Broker, cast(Any, deaf))).win(site.stop)
