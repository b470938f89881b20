"""The governor as an actor and the worker's client, over the in-memory broker and over a real server."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import pytest

from millstream.clock import SystemClock, SystemIds
from millstream.errors import GovernorAlreadyRunning, NoAnswer
from millstream.governor import GovernorSettings, RateGovernor
from millstream.jetstream.connection import connect as connect_nats
from millstream.memory import MemoryServer
from millstream.permits_client import DeniedPermit, Permit, PermitClient, WaitFor
from millstream.policy.limit_state import Limit, Rules
from millstream.ports import Broker
from millstream.server import LocalServer
from millstream.telemetry.events import Recorder
from millstream_schemas.names import Names
from millstream_schemas.permits import Acquire, Denied, Granted, Limits, LimitsListing, LimitState, PermitReply
from millstream_schemas.topology import BucketSpec, Lifetimes, Topology, topology
from tests.support.waiting import wait_until

RULES = Rules(lease_s=1.5, relearn_s=1.0)
LIMITS = (
    Limit(key="llm", requests_per_minute=60),
    Limit(key="fast", requests_per_minute=6000, tokens_per_minute=600_000),
    Limit(key="tool", concurrency=1),
)


@dataclass
class Site:
    """One environment on a broker, and the governors and clients that run in it."""

    names: Names
    connect: Callable[[], Broker]
    group: asyncio.TaskGroup
    stack: AsyncExitStack
    stops: list[asyncio.Event] = field(default_factory=list[asyncio.Event])
    refused: list[GovernorAlreadyRunning] = field(default_factory=list[GovernorAlreadyRunning])
    clients: list[asyncio.Task[None]] = field(default_factory=list["asyncio.Task[None]"])
    telemetry: Recorder = field(default_factory=lambda: Recorder("governor"))

    @property
    def bucket(self) -> str:
        """Where governors keep what their successors must know."""
        return f"{self.names.prefix}_test"

    def governor(self, broker: Broker | None = None, limits: tuple[Limit, ...] = LIMITS) -> RateGovernor:
        """A governor that does not run yet."""
        settings = GovernorSettings(self.names, limits, RULES, state_bucket=self.bucket)
        return RateGovernor(broker or self.connect(), settings, SystemClock(), SystemIds(), self.telemetry)

    async def lead(self, governor: RateGovernor | None = None) -> tuple[asyncio.Task[None], asyncio.Event]:
        """A governor that leads; its task, and the event that stops it."""
        stop = asyncio.Event()
        self.stops.append(stop)
        before = self.telemetry.counts["actor.started"]
        task = self.group.create_task(self._run(governor or self.governor(), stop))
        await wait_until(
            lambda: task.done() or self.telemetry.counts["actor.started"] > before, "a governor that leads"
        )
        assert not task.done(), self.refused
        return task, stop

    async def _run(self, governor: RateGovernor, stop: asyncio.Event) -> None:
        try:
            await governor.run(stop)
        except GovernorAlreadyRunning as error:
            self.refused.append(error)

    def client(self, worker: str = "w") -> PermitClient:
        """A worker's client that runs until the test ends."""
        client = PermitClient(self.connect(), self.names, worker)
        self.clients.append(self.group.create_task(client.run(asyncio.Event())))
        return client

    async def ask(self, body: bytes, verb: str = "acquire") -> PermitReply:
        """The governor's reply to any bytes."""
        reply = await self.connect().request(self.names.governor(verb), body, 5.0)
        return msgspec.json.decode(reply, type=PermitReply)

    async def limit(self, key: str) -> LimitState:
        """A limit as it is listed."""
        listing = await self.ask(msgspec.json.encode(Limits()), "limits")
        assert isinstance(listing, LimitsListing)
        return next(item for item in listing.items if item.key == key)


@asynccontextmanager
async def _site(kind: str, request: pytest.FixtureRequest) -> AsyncGenerator[Site]:
    names = Names(f"t{uuid.uuid4().hex[:10]}")
    async with AsyncExitStack() as stack:
        if kind == "memory":
            server = MemoryServer(SystemClock())
            brokers: list[Broker] = [server.connect() for _ in range(6)]
        else:
            local: LocalServer = request.getfixturevalue("shared_nats_server")
            brokers = [await connect_nats(local.url, names, client_name="governor test") for _ in range(6)]
        for broker in brokers:
            stack.push_async_callback(broker.close)
        buckets = (*topology(names, Lifetimes()).buckets, BucketSpec(name=f"{names.prefix}_test", ttl_s=600.0))
        await brokers[0].declare(Topology(revision=1, streams=(), consumers=(), buckets=buckets))
        turn = iter(range(1_000_000))
        async with asyncio.TaskGroup() as group:
            site = Site(names, lambda: brokers[next(turn) % len(brokers)], group, stack)
            yield site
            for client in site.clients:
                client.cancel()
            for stop in site.stops:
                stop.set()


@pytest.fixture(params=["memory", "nats"])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """An environment that no other test uses."""
    async with _site(request.param, request) as made:
        yield made


def permit(answer: Permit | WaitFor | DeniedPermit) -> Permit:
    """The permit that must have been granted."""
    assert isinstance(answer, Permit), answer
    return answer


async def until(predicate: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for an answer of the governor that is as it should be."""
    check: Callable[[], bool | Awaitable[bool]] = predicate
    await wait_until(check, what)


async def ended(task: asyncio.Task[None]) -> None:
    """Kill an actor's task in the way a killed process ends: without a word."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_permit_is_granted_and_settled(site: Site) -> None:
    """Over request/reply, all keys of it at once, and shown in the listing."""
    await site.lead()
    client = site.client()
    got = permit(await client.acquire(["fast", "tool"], 100, 1.0))
    assert time.monotonic() <= got.use_by
    assert (await site.limit("tool")).in_use == 1
    client.settle(got, "ok", tokens=50)

    async def free() -> bool:
        return (await site.limit("tool")).in_use == 0

    await until(free, "the place to be free again")
    assert (await site.limit("fast")).granted_total == 1


async def test_a_second_governor_refuses_to_start(site: Site) -> None:
    """It names the one that runs, and the first one goes on."""
    await site.lead()
    with pytest.raises(GovernorAlreadyRunning) as raised:
        await site.governor().run(asyncio.Event())
    assert "/" in raised.value.holder
    permit(await site.client().acquire(["fast"], 0, 1.0))


async def test_a_waiting_acquire_is_answered_when_a_place_is_free(site: Site) -> None:
    """Held at the governor: one settles, the other has it without asking again."""
    await site.lead()
    one, two = site.client("one"), site.client("two")
    got = permit(await one.acquire(["tool"], 0, 1.0))
    waiting = site.group.create_task(two.acquire(["tool"], 0, 10.0))

    async def queued() -> bool:
        return (await site.limit("tool")).waiting == 1

    await until(queued, "the second to wait")
    one.settle(got, "ok")
    begun = time.monotonic()
    two.give_back(permit(await waiting))
    assert time.monotonic() - begun < 5


async def test_paced_starts_reach_the_worker_one_interval_apart(site: Site) -> None:
    """At 60 a minute, whoever asks, the second starts a second after the first."""
    await site.lead()
    one, two = site.client("one"), site.client("two")
    permit(await one.acquire(["llm"], 0, 5.0))
    first = time.monotonic()
    permit(await two.acquire(["llm"], 0, 5.0))
    assert time.monotonic() - first >= 0.95
    refused = await one.acquire(["llm"], 0, 0.1)
    assert isinstance(refused, WaitFor)
    assert (refused.limiting_key, refused.reason) == ("llm", "requests")
    assert 0 < refused.seconds <= 1.1


async def test_a_throttled_call_pauses_the_limit_for_every_worker(site: Site) -> None:
    """What one worker was told holds for all."""
    await site.lead()
    one, two = site.client("one"), site.client("two")
    one.settle(permit(await one.acquire(["fast"], 10, 1.0)), "throttled", retry_after_s=30.0)

    async def paused() -> bool:
        return (await site.limit("fast")).paused_until_s is not None

    await until(paused, "the pause")
    answer = await two.acquire(["fast"], 10, 1.0)
    assert isinstance(answer, WaitFor)
    assert answer.reason == "paused"
    assert 25 < answer.seconds <= 30


async def test_without_a_governor_nothing_is_granted(site: Site) -> None:
    """Closed, not open: the worker is told to wait, and not for long."""
    answer = await site.client().acquire(["fast"], 0, 0.3)
    assert isinstance(answer, WaitFor)
    assert answer.reason == "governor_unreachable"
    assert answer.seconds <= 5


async def test_what_cannot_be_granted_is_denied(site: Site) -> None:
    """Unknown limits, estimates over a whole minute, and bytes that are no request."""
    await site.lead()
    client = site.client()
    assert await client.acquire(["nope"], 0, 1.0) == DeniedPermit("unknown_limit", "nope")
    assert await client.acquire(["fast"], 600_001, 1.0) == DeniedPermit("too_large", "fast")
    for body in (b"", b"[]", b"{", b"\xff", b"[" * 5000, b'{"verb":"acquire"}'):
        assert await site.ask(body) == Denied(reason="bad_request")
    newer = msgspec.json.encode(Acquire(id="x", worker="w", keys=("fast",), v=2))
    assert await site.ask(newer) == Denied(reason="bad_request")


async def test_an_acquire_that_is_given_up_leaves_nothing_behind(site: Site) -> None:
    """A cancelled caller's place in the queue, or its permit, goes to the next one."""
    await site.lead()
    one, two = site.client("one"), site.client("two")
    got = permit(await one.acquire(["tool"], 0, 1.0))
    waiting = site.group.create_task(two.acquire(["tool"], 0, 20.0))

    async def queued() -> bool:
        return (await site.limit("tool")).waiting == 1

    await until(queued, "the second to wait")
    await ended(waiting)  # type: ignore[arg-type]

    async def left() -> bool:
        return (await site.limit("tool")).waiting == 0

    await until(left, "the second to have left")
    one.give_back(got)
    permit(await one.acquire(["tool"], 0, 5.0))


async def test_a_place_is_kept_as_long_as_its_worker_renews(site: Site) -> None:
    """For several leases; and one lease after the worker died it is free."""
    await site.lead()
    stop, client = asyncio.Event(), PermitClient(site.connect(), site.names, "w")
    renewing = site.group.create_task(client.run(stop))
    permit(await client.acquire(["tool"], 0, 1.0))
    other = site.client("other")
    refused = await other.acquire(["tool"], 0, RULES.lease_s * 2.5)
    assert isinstance(refused, WaitFor)
    assert refused.reason == "concurrency"
    await ended(renewing)
    permit(await other.acquire(["tool"], 0, 10.0))


async def test_a_governor_that_stopped_hands_over_at_once(site: Site) -> None:
    """The next one knows the debts and the places, and its epoch is higher."""
    task, stop = await site.lead()
    client = site.client()
    first = permit(await client.acquire(["llm", "tool"], 0, 1.0))
    began = time.monotonic()
    stop.set()
    await task
    await site.lead()
    assert time.monotonic() - began < 3
    assert (await site.limit("tool")).in_use == 1
    client.settle(first, "ok")
    second = permit(await client.acquire(["llm", "tool"], 0, 10.0))
    assert time.monotonic() - began >= 0.9
    assert second.epoch > first.epoch


async def test_a_governor_that_was_killed_is_followed_and_no_place_is_given_twice(site: Site) -> None:
    """The successor waits for the lock to expire, learns the places from the workers, and paces from the start."""
    task, _ = await site.lead()
    client = site.client()
    got = permit(await client.acquire(["tool"], 0, 1.0))
    permit(await client.acquire(["llm"], 0, 1.0))
    await ended(task)
    await site.lead()
    refused = await site.client("other").acquire(["tool"], 0, RULES.lease_s * 2)
    assert isinstance(refused, WaitFor)
    client.settle(got, "ok")
    assert permit(await site.client("other").acquire(["tool"], 0, 10.0)).epoch > got.epoch


async def test_a_settlement_outlives_the_absence_of_the_governor(site: Site) -> None:
    """It is sent again until a governor has taken it."""
    task, stop = await site.lead()
    client = site.client()
    got = permit(await client.acquire(["tool"], 0, 1.0))
    stop.set()
    await task
    client.settle(got, "ok")
    await site.lead()
    permit(await client.acquire(["tool"], 0, 10.0))


async def test_a_governor_whose_lock_was_taken_answers_nothing_more(site: Site) -> None:
    """Another holder's value in the bucket ends its term, and it does not try to share."""
    task, _ = await site.lead(site.governor())
    broker = site.connect()
    stolen = asyncio.Event()

    async def steal() -> None:
        while not stolen.is_set():
            await broker.kv_put(site.names.leaders_bucket, site.names.governor_lock, b"somebody/1 else")
            await asyncio.sleep(0.3)

    stealing = site.group.create_task(steal())
    done, _pending = await asyncio.wait([task], timeout=20)
    stolen.set()
    await stealing
    assert done
    assert [error.holder for error in site.refused] == ["somebody/1"]


async def test_a_governor_that_cannot_renew_falls_silent_before_its_lock_expires(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own clock: nothing tells it, and still it grants nothing when another may lead."""
    broker = site.connect()
    lease = {"broken": False}
    update, get = broker.kv_update, broker.kv_get

    async def kv_update(bucket: str, key: str, value: bytes, revision: int) -> int | None:
        if lease["broken"]:
            raise NoAnswer("cut off")
        return await update(bucket, key, value, revision)

    async def kv_get(bucket: str, key: str) -> object:
        if lease["broken"]:
            raise NoAnswer("cut off")
        return await get(bucket, key)

    monkeypatch.setattr(broker, "kv_update", kv_update)
    monkeypatch.setattr(broker, "kv_get", kv_get)
    task, _ = await site.lead(site.governor(broker))
    cut_off = time.monotonic()
    lease["broken"] = True
    client = site.client()
    last_grant = cut_off
    while time.monotonic() - cut_off < 3.5:
        answer = await client.acquire(["fast"], 0, 0.0)
        if isinstance(answer, Permit):
            last_grant = time.monotonic()
            client.settle(answer, "ok")
        await asyncio.sleep(0.02)
    assert last_grant - cut_off < 3.0
    assert not task.done()  # it waits for the lock, to lead again
    lease["broken"] = False
    permit(await client.acquire(["fast"], 0, 20.0))


async def test_the_same_acquire_gets_the_same_permit_over_the_wire(site: Site) -> None:
    """A request that is repeated because its answer was lost is not charged twice."""
    await site.lead()
    body = msgspec.json.encode(Acquire(id="once", worker="w", keys=("tool",), wait_ms=1000))
    first, second = await asyncio.gather(site.ask(body), site.ask(body))
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert first.permit == second.permit


async def test_many_workers_never_start_more_than_the_limit(site: Site) -> None:
    """Eight at once on one paced limit: no window of their starts, however short, holds more than the pace lets in."""
    limits = (Limit(key="llm", requests_per_minute=600),)
    await site.lead(site.governor(limits=limits))
    starts: list[float] = []

    async def work(client: PermitClient) -> None:
        for _ in range(4):
            client.settle(permit(await client.acquire(["llm"], 0, 10.0)), "ok")
            starts.append(time.monotonic())

    await asyncio.gather(*(work(site.client(f"w{n}")) for n in range(8)))
    assert len(starts) == 32
    starts.sort()
    # A start is seen a little after it came; a burst of a few beyond that lag would break the bound of some window.
    lag_s, interval_s = 0.4, 60 / 600
    crowded = [
        (first, last)
        for first in range(len(starts))
        for last in range(first + 1, len(starts))
        if starts[last] - starts[first] < (last - first) * interval_s - lag_s
    ]
    assert crowded == []


async def test_an_absurd_number_of_tokens_is_asked_for_and_settled_as_a_large_one(site: Site) -> None:
    """A request that states more than the contract allows would be refused as a whole, and its place stay taken."""
    await site.lead()
    client = site.client()
    assert await client.acquire(["fast"], 10**12, 1.0) == DeniedPermit("too_large", "fast")
    client.settle(permit(await client.acquire(["tool"], 0, 1.0)), "ok", tokens=10**12)

    async def free() -> bool:
        return (await site.limit("tool")).in_use == 0

    await until(free, "the place to be free")
