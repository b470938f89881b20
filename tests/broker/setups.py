"""What a conformance test stands on: a broker of either kind, and time that passes in the way of its kind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from millstream.memory import MemoryServer
from millstream.ports import Broker, Delivery, Outgoing, Stored
from millstream.server import LocalServer
from millstream_schemas.names import Names
from millstream_schemas.topology import BucketSpec, ConsumerSpec, Lifetimes, Topology, topology, work_consumer
from tests.support.clock import VirtualClock
from tests.support.waiting import wait_until

LEASE_S = 0.6
HEART_LEASE_S = 1.0
DEDUPE_S = 1.0
BUCKET_TTL_S = 1.0
LIMIT_S = 15.0
ALL = 10**9
"""A sequence that no test reaches: a purge up to it spares nothing."""

_STEP_S = 0.05
_INBOX_SHARE = 0.00005  # so that a test can fill it


@dataclass
class Setup:
    """One broker with the whole topology declared, in an environment of its own."""

    kind: str
    broker: Broker
    names: Names
    connect: Callable[[], Awaitable[Broker]]
    """Another connection to the same server; closed with the test."""
    now: Callable[[], float]
    """The server's time, Unix seconds."""
    step: Callable[[], Awaitable[None]]
    """Let a little time pass."""
    topology: Topology
    bucket: str

    async def elapse(self, seconds: float) -> None:
        """Let `seconds` of the server's time pass, and not much more."""
        end = self.now() + seconds
        while self.now() < end:
            await self.step()

    async def until(self, predicate: Callable[[], Awaitable[object]], what: str) -> None:
        """Let time pass until `predicate` gives something true."""
        end = self.now() + LIMIT_S
        while not await predicate():
            assert self.now() < end, f"waited {LIMIT_S:g} s for: {what}"
            await self.step()

    async def work(self, queue: str = "q", **changes: object) -> str:
        """Declare the consumer of a queue's normal work; returns its name."""
        spec = work_consumer(self.names, Lifetimes(lease_s=LEASE_S), queue, "normal", max_ack_pending=1000)
        spec = msgspec.structs.replace(spec, **changes)
        await self.broker.declare_consumer(spec)
        return spec.durable

    async def put(self, *keys: str, queue: str = "q", body: bytes = b"body") -> list[int]:
        """Store one work message for each key; returns their sequences."""
        outgoing = [Outgoing(self.names.work(queue, "normal", key), body) for key in keys]
        return [sequence(each) for each in await self.broker.publish_all(outgoing)]

    async def pull(self, consumer: str, limit: int = 10, broker: Broker | None = None) -> list[Delivery]:
        """What the work stream has for `consumer` now."""
        return await (broker or self.broker).pull(self.names.work_stream, consumer, limit)

    async def pull_some(self, consumer: str, count: int = 1, broker: Broker | None = None) -> list[Delivery]:
        """Let time pass until `count` deliveries have come."""
        found: list[Delivery] = []

        async def enough() -> bool:
            found.extend(await self.pull(consumer, count - len(found), broker))
            return len(found) >= count

        await self.until(enough, f"{count} deliveries of {consumer}")
        return found

    async def gone(self, seq: int) -> None:
        """Let time pass until the work stream no longer holds `seq`."""

        async def missing() -> bool:
            return await self.broker.get(self.names.work_stream, seq) is None

        await self.until(missing, f"message {seq} to be removed")


def sequence(published: object) -> int:
    """The sequence of a message that must have been stored."""
    assert isinstance(published, Stored), published
    return published.seq


def small_topology(names: Names, bucket: str) -> Topology:
    """The real topology with short times, a small inbox, and a bucket whose values soon expire."""
    declared = topology(names, Lifetimes(lease_s=LEASE_S, dedupe_s=DEDUPE_S))
    share = {names.inbox_stream: _INBOX_SHARE}
    streams = tuple(msgspec.structs.replace(each, store_share=share.get(each.name, 0.0)) for each in declared.streams)
    buckets = (*declared.buckets, BucketSpec(name=bucket, ttl_s=BUCKET_TTL_S))
    return msgspec.structs.replace(declared, streams=streams, buckets=buckets)


def consumer_spec(setup: Setup, durable: str) -> ConsumerSpec:
    """The consumer of this name that the topology declares."""
    return next(each for each in setup.topology.consumers if each.durable == durable)


@asynccontextmanager
async def memory_setup(names: Names) -> AsyncGenerator[Setup]:
    """A broker in memory, whose time is moved by the test."""
    clock = VirtualClock()
    server = MemoryServer(clock)

    async def connect() -> Broker:
        return server.connect()

    async def step() -> None:
        clock.advance(_STEP_S)
        await asyncio.sleep(0)

    async with _declared("memory", names, connect, clock.now, step) as setup:
        yield setup


@asynccontextmanager
async def nats_setup(names: Names, server: LocalServer) -> AsyncGenerator[Setup]:
    """A broker on a real server, in real time."""
    from millstream.jetstream.connection import connect as connect_nats  # the memory half runs without NATS

    async def connect() -> Broker:
        return await connect_nats(server.url, names, client_name="conformance", publish_timeout_s=2.0)

    async def step() -> None:
        start = time.monotonic()
        await wait_until(lambda: time.monotonic() - start >= _STEP_S, "a moment to pass")

    async with _declared("nats", names, connect, time.time, step) as setup:
        yield setup


@asynccontextmanager
async def _declared(
    kind: str,
    names: Names,
    connect: Callable[[], Awaitable[Broker]],
    now: Callable[[], float],
    step: Callable[[], Awaitable[None]],
) -> AsyncGenerator[Setup]:
    opened: list[Broker] = []

    async def connect_another() -> Broker:
        opened.append(await connect())
        return opened[-1]

    broker = await connect_another()
    bucket = f"{names.prefix}_short"
    declared = small_topology(names, bucket)
    await broker.declare(declared)
    try:
        yield Setup(kind, broker, names, connect_another, now, step, declared, bucket)
    finally:
        for each in reversed(opened):
            await each.close()
