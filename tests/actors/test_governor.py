"""The governor as an actor and the worker's client, over the in-memory broker and over a real server."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from millstream.clock import SystemClock, SystemIds
from millstream.errors import BrokerError, NoAnswer
from millstream.governor import RateGovernor
from millstream.governor_state import Saved, StateKeeper
from millstream.jetstream.connection import connect as connect_nats
from millstream.memory import MemoryServer
from millstream.permits_client import DeniedPermit, Need, Permit, PermitClient, Settlement, WaitFor
from millstream.policy.limit_state import Rules
from millstream.policy.limits import Limit
from millstream.policy.snapshots import SavedKey, Snapshot
from millstream.ports import Broker, KeyValue, Outgoing
from millstream.server import LocalServer
from millstream.settings import Settings, build
from millstream.telemetry.events import Recorder
from millstream_schemas.keys import derive_key
from millstream_schemas.limit_states import DimensionState, LimitState
from millstream_schemas.names import Names
from millstream_schemas.permits import (
    Acquire,
    Denied,
    Granted,
    HeldPermit,
    Limits,
    LimitsListing,
    Operate,
    PermitReply,
    PermitRequest,
    Renew,
    Said,
    Settle,
    Settled,
    Wait,
)
from millstream_schemas.topology import LEADER_TTL_S, Lifetimes, topology
from tests.support.clock import VirtualClock
from tests.support.permit_desk import Desk as CoreDesk
from tests.support.permit_desk import rpm
from tests.support.waiting import wait_until

RULES = Rules(lease_s=1.5, relearn_s=1.0)
LIMITS: dict[str, dict[str, Any]] = {
    "llm": {"requests": "60/min"},
    "fast": {"requests": "6000/min", "tokens": "600000/min"},
    "tool": {"concurrency": 1},
    "paid": {"cost": "10 USD"},
}
ONE = Need()
OK = Settlement("ok")


@dataclass
class Site:
    """One environment on a broker, and the governors and clients that run in it."""

    names: Names
    connect: Callable[[], Broker]
    group: asyncio.TaskGroup
    stops: list[asyncio.Event] = field(default_factory=list[asyncio.Event])
    clients: list[asyncio.Task[None]] = field(default_factory=list["asyncio.Task[None]"])
    telemetry: Recorder = field(default_factory=lambda: Recorder("governor"))

    def settings(self, limits: dict[str, dict[str, Any]]) -> Settings:
        """Settings of this environment."""
        return build({"nats": {"prefix": self.names.prefix}, "limits": limits, "prices": {"m": {"tokens_out": 2.0}}})

    def governor(self, broker: Broker | None = None, limits: dict[str, dict[str, Any]] | None = None) -> RateGovernor:
        """A governor that does not run yet."""
        settings = self.settings(LIMITS if limits is None else limits)
        return RateGovernor(broker or self.connect(), settings, SystemClock(), SystemIds(), self.telemetry, rules=RULES)

    def start(self, governor: RateGovernor | None = None) -> tuple[asyncio.Task[None], asyncio.Event]:
        """A governor that leads or stands by; its task, and the event that stops it."""
        stop = asyncio.Event()
        self.stops.append(stop)
        return self.group.create_task((governor or self.governor()).run(stop)), stop

    async def lead(self, governor: RateGovernor | None = None) -> tuple[asyncio.Task[None], asyncio.Event]:
        """A governor that leads."""
        before = self.terms
        task, stop = self.start(governor)
        await self.led(before + 1)
        return task, stop

    @property
    def terms(self) -> int:
        """How many terms have begun."""
        return self.telemetry.counts["actor.started"]

    async def led(self, terms: int) -> None:
        """Wait until so many terms have begun."""
        await wait_until(lambda: self.terms >= terms, f"{terms} terms to have begun")

    def client(self, worker: str = "w") -> PermitClient:
        """A worker's client that runs until the test ends."""
        client = PermitClient(self.connect(), self.names, worker)
        self.clients.append(self.group.create_task(client.run(asyncio.Event())))
        return client

    async def ask(self, body: bytes | PermitRequest, verb: str = "acquire") -> PermitReply:
        """The governor's reply to any bytes."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        reply = await self.connect().request(self.names.governor(verb), raw, 5.0)
        return msgspec.json.decode(reply, type=PermitReply)

    async def listing(self) -> LimitsListing:
        """All limits as they are listed."""
        listing = await self.ask(Limits(), "limits")
        assert isinstance(listing, LimitsListing)
        return listing

    async def limit(self, key: str) -> LimitState:
        """A limit as it is listed."""
        return next(item for item in (await self.listing()).items if item.key == key)

    async def cost(self, key: str) -> DimensionState:
        """The budget of a limit."""
        return next(each for each in (await self.limit(key)).dimensions if each.dimension == "cost")

    async def until_free(self, key: str) -> None:
        """Wait until no permit of a limit is in use."""

        async def free() -> bool:
            return (await self.limit(key)).in_use == 0

        await until(free, f"the places of {key} to be free")

    async def until_waiting(self, key: str, count: int = 1) -> None:
        """Wait until so many acquires are held."""

        async def waiting() -> bool:
            return (await self.limit(key)).waiting == count

        await until(waiting, f"{count} acquires of {key} to be held")

    async def configure(self, body: bytes) -> int:
        """Write a configuration document; returns its revision."""
        return await self.connect().kv_put(self.names.config_bucket, self.names.config_key, body)


@asynccontextmanager
async def _site(kind: str, request: pytest.FixtureRequest | None) -> AsyncGenerator[Site]:
    names = Names(f"t{uuid.uuid4().hex[:10]}")
    async with AsyncExitStack() as stack:
        if kind == "memory":
            server = MemoryServer(SystemClock())
            brokers: list[Broker] = [server.connect() for _ in range(6)]
        else:
            assert request is not None
            local: LocalServer = request.getfixturevalue("shared_nats_server")
            brokers = [await connect_nats(local.url, names, client_name="governor test") for _ in range(6)]
        for broker in brokers:
            stack.push_async_callback(broker.close)
        declared = topology(names, Lifetimes())
        streams = tuple(each for each in declared.streams if each.name in (names.spent_stream, names.events_stream))
        await brokers[0].declare(msgspec.structs.replace(declared, streams=streams, consumers=()))
        turn = iter(range(1_000_000))
        async with asyncio.TaskGroup() as group:
            site = Site(names, lambda: brokers[next(turn) % len(brokers)], group)
            yield site
            for client in site.clients:
                client.cancel()
            for stop in site.stops:
                stop.set()


@asynccontextmanager
async def _site_in_memory() -> AsyncGenerator[Site]:
    async with _site("memory", None) as made:
        yield made


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
    got = permit(await client.acquire(["fast", "tool"], Need(tokens_in=100), 1.0))
    assert time.monotonic() <= got.use_by
    assert (await site.limit("tool")).in_use == 1
    client.settle(got, Settlement("ok", tokens_in=50))
    await site.until_free("tool")
    assert (await site.limit("fast")).granted_total == 1


async def test_a_waiting_acquire_is_answered_when_a_place_is_free(site: Site) -> None:
    """Held at the governor: one settles, the other has it without asking again."""
    await site.lead()
    one, two = site.client("one"), site.client("two")
    got = permit(await one.acquire(["tool"], ONE, 1.0))
    waiting = site.group.create_task(two.acquire(["tool"], ONE, 10.0))
    await site.until_waiting("tool")
    one.settle(got, OK)
    begun = time.monotonic()
    two.give_back(permit(await waiting))
    assert time.monotonic() - begun < 5


async def test_paced_starts_reach_the_worker_one_interval_apart(site: Site) -> None:
    """At 60 a minute, whoever asks, the second starts a second after the first."""
    await site.lead()
    one, two = site.client("one"), site.client("two")
    permit(await one.acquire(["llm"], ONE, 5.0))
    first = time.monotonic()
    permit(await two.acquire(["llm"], ONE, 5.0))
    assert time.monotonic() - first >= 0.95
    refused = await one.acquire(["llm"], ONE, 0.1)
    assert isinstance(refused, WaitFor)
    assert (refused.limiting_key, refused.reason) == ("llm", "requests")
    assert 0 < refused.seconds <= 1.1


async def test_a_throttled_call_pauses_the_limit_for_every_worker(site: Site) -> None:
    """What one worker was told holds for all: by the settlement, or told on the way."""
    await site.lead()
    one, two = site.client("one"), site.client("two")
    one.settle(
        permit(await one.acquire(["fast"], Need(tokens_in=10), 1.0)), Settlement("throttled", retry_after_s=30.0)
    )

    async def paused() -> bool:
        return (await site.limit("fast")).paused_for_s is not None

    await until(paused, "the pause")
    answer = await two.acquire(["fast"], Need(tokens_in=10), 1.0)
    assert isinstance(answer, WaitFor)
    assert answer.reason == "paused"
    assert 25 < answer.seconds <= 30
    one.report(["llm"], "throttled", 40.0)

    async def also_paused() -> bool:
        return (await site.limit("llm")).paused_for_s is not None

    await until(also_paused, "the other pause")


async def test_without_a_governor_nothing_is_granted(site: Site) -> None:
    """Closed, not open: the worker is told to wait, and not for long."""
    answer = await site.client().acquire(["fast"], ONE, 0.3)
    assert isinstance(answer, WaitFor)
    assert answer.reason == "governor_unreachable"
    assert answer.seconds <= 5


async def test_what_cannot_be_granted_is_denied(site: Site) -> None:
    """Unknown limits, estimates over a whole minute, and bytes that are no request."""
    await site.lead()
    client = site.client()
    denied = await client.acquire(["nope"], ONE, 1.0)
    assert isinstance(denied, DeniedPermit)
    assert (denied.reason, denied.key) == ("unknown_limit", "nope")
    denied = await client.acquire(["fast"], Need(tokens_in=600_001), 1.0)
    assert isinstance(denied, DeniedPermit)
    assert (denied.reason, denied.key) == ("too_large", "fast")
    other_version = msgspec.json.encode(Acquire(id="x", worker="w", keys=("fast",), v=1))
    for body in (b"", b"[]", b"{", b"\xff", b"[" * 5000, b'{"verb":"acquire"}', other_version):
        answer = await site.ask(body)
        assert isinstance(answer, Denied)
        assert answer.reason == "bad_request"


async def test_an_acquire_that_is_given_up_leaves_nothing_behind(site: Site) -> None:
    """A cancelled caller's place in the queue, or its permit, goes to the next one."""
    await site.lead()
    one, two = site.client("one"), site.client("two")
    got = permit(await one.acquire(["tool"], ONE, 1.0))
    waiting = site.group.create_task(two.acquire(["tool"], ONE, 20.0))
    await site.until_waiting("tool")
    await ended(waiting)  # type: ignore[arg-type]
    await site.until_waiting("tool", 0)
    one.give_back(got)
    permit(await one.acquire(["tool"], ONE, 5.0))


async def test_a_place_is_kept_as_long_as_its_worker_renews(site: Site) -> None:
    """For several leases; and one lease after the worker died it is free."""
    await site.lead()
    stop, client = asyncio.Event(), PermitClient(site.connect(), site.names, "w")
    renewing = site.group.create_task(client.run(stop))
    permit(await client.acquire(["tool"], ONE, 1.0))
    other = site.client("other")
    refused = await other.acquire(["tool"], ONE, RULES.lease_s * 2.5)
    assert isinstance(refused, WaitFor)
    assert refused.reason == "concurrency"
    await ended(renewing)
    permit(await other.acquire(["tool"], ONE, 10.0))


async def test_the_same_acquire_gets_the_same_permit_over_the_wire(site: Site) -> None:
    """A request that is repeated because its answer was lost is not charged twice."""
    await site.lead()
    body = Acquire(id="once", worker="w", keys=("tool",), wait_ms=1000)
    first, second = await asyncio.gather(site.ask(body), site.ask(body))
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert first.leases[0].permit == second.leases[0].permit


async def test_many_workers_never_start_more_than_the_limit(site: Site) -> None:
    """Eight at once on one paced limit: no window of their starts, however short, holds more than the pace lets in."""
    await site.lead(site.governor(limits={"llm": {"requests": "600/min"}}))
    starts: list[float] = []

    async def work(client: PermitClient) -> None:
        for _ in range(4):
            client.settle(permit(await client.acquire(["llm"], ONE, 10.0)), OK)
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


# --- who leads ----------------------------------------------------------------------------------------


async def test_a_second_governor_stands_by_and_follows_at_once_when_the_first_one_stops(site: Site) -> None:
    """It answers nothing until then; it knows the debts and the places, and its epoch is higher."""
    task, stop = await site.lead()
    site.start()
    await wait_until(lambda: site.telemetry.counts["leader.waiting"] == 1, "the second to stand by")
    client = site.client()
    first = permit(await client.acquire(["llm", "tool"], ONE, 1.0))
    assert site.terms == 1
    began = time.monotonic()
    stop.set()
    await task
    await site.led(2)
    assert time.monotonic() - began < LEADER_TTL_S
    assert (await site.limit("tool")).in_use == 1
    client.settle(first, OK)
    second = permit(await client.acquire(["llm", "tool"], ONE, 10.0))
    assert time.monotonic() - began >= 0.9
    assert second.epoch > first.epoch


async def test_a_governor_that_was_killed_is_followed_and_no_place_is_given_twice(site: Site) -> None:
    """The standby waits for the lock to expire, learns the places from the workers, and paces from the start."""
    task, _ = await site.lead()
    site.start()
    client = site.client()
    got = permit(await client.acquire(["tool"], ONE, 1.0))
    permit(await client.acquire(["llm"], ONE, 1.0))
    killed = time.monotonic()
    await ended(task)
    await site.led(2)
    assert time.monotonic() - killed < LEADER_TTL_S + 4  # generous; it is at most one second in a quiet system
    refused = await site.client("other").acquire(["tool"], ONE, RULES.lease_s * 2)
    assert isinstance(refused, WaitFor)
    client.settle(got, OK)
    assert permit(await site.client("other").acquire(["tool"], ONE, 10.0)).epoch > got.epoch


async def test_whoever_begins_to_lead_says_so(site: Site) -> None:
    """Workers say then what they hold."""
    heard: list[Said] = []
    listening = await site.connect().listen(
        site.names.governor_said, lambda _, body: heard.append(msgspec.json.decode(body, type=Said))
    )
    task, stop = await site.lead()
    await wait_until(lambda: heard, "the word of the first")
    stop.set()
    await task
    await site.lead()
    await wait_until(lambda: len(heard) == 2, "the word of the second")
    assert [said.began for said in heard] == [True, True]
    assert heard[0].epoch < heard[1].epoch
    await listening.close()


async def test_what_comes_late_for_a_predecessor_grants_and_takes_nothing(site: Site) -> None:
    """Copies of old messages: nobody would use the permit, and the places named have been free for long."""
    task, stop = await site.lead()
    first = permit(await site.client().acquire(["fast"], ONE, 1.0))
    stop.set()
    await task
    await site.lead()
    late = await site.ask(Acquire(id="late", worker="w", keys=("tool",), epoch=first.epoch))
    assert isinstance(late, Wait)
    assert late.epoch > first.epoch
    held = HeldPermit(permit=f"{first.epoch}-999", keys=("tool",))
    await site.ask(Renew(worker="w", permits=(held,), epoch=first.epoch), "renew")
    assert (await site.limit("tool")).in_use == 0
    await site.ask(Renew(worker="w", permits=(held,), epoch=late.epoch), "renew")
    assert (await site.limit("tool")).in_use == 1


async def test_a_request_that_was_told_to_wait_is_not_granted_when_it_comes_again(site: Site) -> None:
    """Who was told to wait asks with another id; a copy of the old request has nobody behind it."""
    await site.lead()
    got = permit(await site.client().acquire(["tool"], ONE, 1.0))
    again = Acquire(id="again", worker="w", keys=("tool",))
    assert isinstance(await site.ask(again), Wait)
    site.client().give_back(got)
    denied = await site.ask(again)
    assert isinstance(denied, Denied)
    assert denied.reason == "spent"


async def test_a_settlement_outlives_the_absence_of_the_governor(site: Site) -> None:
    """It is sent again until a governor has taken it."""
    task, stop = await site.lead()
    client = site.client()
    got = permit(await client.acquire(["tool"], ONE, 1.0))
    stop.set()
    await task
    client.settle(got, OK)
    await site.lead()
    permit(await client.acquire(["tool"], ONE, 10.0))


async def test_a_governor_whose_lock_was_taken_answers_nothing_more(site: Site) -> None:
    """Another holder's value in the bucket ends its term: it stands by, and leads again when it can."""
    await site.lead()
    broker = site.connect()
    stolen = asyncio.Event()

    async def steal() -> None:
        while not stolen.is_set():
            await broker.kv_put(site.names.leaders_bucket, site.names.governor_lock, b"somebody/1 else")
            await asyncio.sleep(0.3)

    stealing = site.group.create_task(steal())
    await wait_until(lambda: site.telemetry.counts["actor.stopped"] == 1, "the end of the term")
    answer = await site.client().acquire(["fast"], ONE, 0.5)
    assert isinstance(answer, WaitFor)
    assert answer.reason == "governor_unreachable"
    stolen.set()
    await stealing
    await site.led(2)


class Cut:
    """A broker whose writes and reads of buckets fail while `broken`."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = False
        update, get, create = broker.kv_update, broker.kv_get, broker.kv_create

        async def kv_update(bucket: str, key: str, value: bytes, revision: int) -> int | None:
            self._check()
            return await update(bucket, key, value, revision)

        async def kv_get(bucket: str, key: str) -> KeyValue | None:
            self._check()
            return await get(bucket, key)

        async def kv_create(bucket: str, key: str, value: bytes) -> int | None:
            self._check()
            return await create(bucket, key, value)

        monkeypatch.setattr(broker, "kv_update", kv_update)
        monkeypatch.setattr(broker, "kv_get", kv_get)
        monkeypatch.setattr(broker, "kv_create", kv_create)

    def _check(self) -> None:
        if self.broken:
            raise NoAnswer("cut off")


async def test_a_governor_that_cannot_renew_falls_silent_before_its_lock_expires(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own clock: nothing tells it, and still it grants nothing when another may lead."""
    broker = site.connect()
    cut = Cut(broker, monkeypatch)
    task, _ = await site.lead(site.governor(broker))
    cut_off = time.monotonic()
    cut.broken = True
    client = site.client()
    last_grant = cut_off
    while time.monotonic() - cut_off < 3.5:
        answer = await client.acquire(["fast"], ONE, 0.0)
        if isinstance(answer, Permit):
            last_grant = time.monotonic()
            client.settle(answer, OK)
        await asyncio.sleep(0.02)
    assert last_grant - cut_off < LEADER_TTL_S
    assert not task.done()  # it stands by, to lead again
    cut.broken = False
    permit(await client.acquire(["fast"], ONE, 20.0))


async def test_what_a_former_leader_writes_late_does_not_replace_its_successors_state(site: Site) -> None:
    """Each write replaces what its writer has read or written; one whose answer was lost is known again as its own."""
    former, successor = (StateKeeper(site.connect(), site.names, site.telemetry) for _ in range(2))
    assert await former.read() is None
    assert await former.write(saved(1))
    assert await former.write(saved(1))
    assert (await successor.read()) == saved(1)
    assert await successor.write(saved(2))
    assert not await former.write(saved(1))
    assert not await former.write(saved(1))
    assert await successor.write(saved(2))
    assert (await former.read()) == saved(2)
    await successor.write(saved(2))  # as if the answer to a write of `former` had been lost
    assert not await former.write(saved(3))
    assert await former.write(saved(3))


async def test_the_state_of_many_keys_fits_into_one_message(site: Site) -> None:
    """It is squeezed where it is large, and read as it was."""
    keys = tuple(SavedKey(key=f"tenant/{number}", pause_s=1.5) for number in range(50_000))
    large = msgspec.structs.replace(saved(1), snapshot=msgspec.structs.replace(saved(1).snapshot, keys=keys))
    keeper = StateKeeper(site.connect(), site.names, site.telemetry)
    await keeper.read()
    assert await keeper.write(large)
    assert await keeper.read() == large


async def test_a_state_that_cannot_be_read_is_not_trusted(site: Site) -> None:
    """A governor leads all the same, and lets a start pass before its first one."""
    await site.connect().kv_put(site.names.governor_bucket, site.names.governor_lock, b"x\x9c?")
    await site.lead()
    assert site.telemetry.counts["message.unknown"] == 1
    refused = await site.client().acquire(["llm"], ONE, 0.0)
    assert isinstance(refused, WaitFor)
    assert refused.reason == "requests"


def saved(epoch: int) -> Saved:
    """What a governor without limits would leave."""
    return Saved(at=1.0, snapshot=Snapshot(keys=(), permits=(), clean=False, epoch=epoch))


# --- configuration and operators --------------------------------------------------------------------


async def test_a_new_configuration_takes_effect_at_once_and_keeps_what_is_in_use(site: Site) -> None:
    """One revision as a whole; a held acquire is granted by it."""
    await site.lead()
    client, other = site.client(), site.client("other")
    permit(await client.acquire(["tool"], ONE, 1.0))
    waiting = site.group.create_task(other.acquire(["tool"], ONE, 20.0))
    await site.until_waiting("tool")
    revision = await site.configure(b'{"limits":{"tool":{"concurrency":2},"new":{"concurrency":1}}}')
    permit(await waiting)
    permit(await client.acquire(["new"], ONE, 1.0))
    listing = await site.listing()
    assert (listing.revision, listing.fault) == (revision, "")
    tool = next(item for item in listing.items if item.key == "tool")
    assert tool.in_use == 2


async def test_a_faulty_configuration_changes_nothing_and_shows_in_the_listing(site: Site) -> None:
    """Also to a governor that begins with it."""
    await site.configure(b'{"limits":{"tool":{"concurrency":0},"new":{"concurrency":1}}}')
    await site.lead()
    assert "concurrency" in (await site.listing()).fault
    assert {item.key for item in (await site.listing()).items} == set(LIMITS)
    revision = await site.configure(b'{"limits":{"new":{"concurrency":1}}}')

    async def taken() -> bool:
        return (await site.listing()).revision == revision

    await until(taken, "the right one to be taken")
    assert (await site.listing()).fault == ""


async def test_what_an_operator_did_outlives_the_governor(site: Site) -> None:
    """A breaker that was forced open stays so over a kill, however soon that comes."""
    task, _ = await site.lead()
    answer = await site.ask(Operate(key="fast", operation="open", by="test"), "operate")
    assert not isinstance(answer, Denied)
    await ended(task)
    await site.lead()
    assert (await site.limit("fast")).breaker == "forced_open"
    answer = await site.ask(Acquire(id="x", worker="w", keys=("fast",)))
    assert not isinstance(answer, Granted)


# --- money --------------------------------------------------------------------------------------------


async def test_spending_is_stored_before_the_settlement_is_answered(site: Site) -> None:
    """In a sum that any governor can read: the cost that was said, else the price of the tokens."""
    await site.lead()
    first = await granted(site, "a", cost_usd=5.0)
    answer = await site.ask(Settle(permit=first, outcome="ok", cost_usd=1.5), "settle")
    assert isinstance(answer, Settled)
    assert await spent(site) == 1_500_000
    second = await granted(site, "b", tokens_out=2_000_000, model="m")
    assert (await site.cost("paid")).reserved == pytest.approx(4.0)
    await site.ask(Settle(permit=second, outcome="ok", tokens_out=1_000_000, model="m"), "settle")
    assert await spent(site) == 3_500_000
    assert (await site.cost("paid")).used == pytest.approx(3.5)


async def test_a_budget_outlives_the_governor(site: Site) -> None:
    """What was spent stays spent, over a kill, and what is reserved stays reserved; the last cent is denied."""
    task, _ = await site.lead()
    first = await granted(site, "a", cost_usd=6.0)
    await site.ask(Settle(permit=first, outcome="ok", cost_usd=6.0), "settle")
    held = await granted(site, "b", cost_usd=3.0)
    await ended(task)
    await site.lead()
    await site.ask(Renew(worker="w", permits=(HeldPermit(permit=held, keys=("paid",), cost_usd=3.0),)), "renew")
    answer = await site.ask(Acquire(id="c", worker="w", keys=("paid",), cost_usd=1.5))
    assert isinstance(answer, Wait)  # what is set aside may come back
    assert answer.reason == "cost"
    answer = await site.ask(Acquire(id="d", worker="w", keys=("paid",), cost_usd=4.5))
    assert isinstance(answer, Denied)
    assert answer.reason == "budget_exhausted"
    state = await site.cost("paid")
    assert state.used == pytest.approx(6.0)
    assert state.reserved == pytest.approx(3.0)


async def test_spending_that_cannot_be_stored_is_not_confirmed_and_not_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settlement stays without an answer; the successor of a governor that dies then stores it, once."""
    broker = site.connect()
    publish_all = broker.publish_all

    async def failing(outgoing: list[Outgoing]) -> Any:
        if any(each.increment for each in outgoing):
            raise BrokerError("no leader")
        return await publish_all(outgoing)

    task, _ = await site.lead(site.governor(broker))
    first = await granted(site, "a", cost_usd=6.0)
    monkeypatch.setattr(broker, "publish_all", failing)
    settle = Settle(permit=first, outcome="ok", cost_usd=6.0)
    with pytest.raises(NoAnswer):
        await site.connect().request(site.names.governor("settle"), msgspec.json.encode(settle), 1.5)
    assert await spent(site) == 0
    monkeypatch.undo()
    await ended(task)
    await site.lead()
    assert await spent(site) == 6_000_000
    answer = await site.ask(settle, "settle")
    assert isinstance(answer, Settled)
    assert await spent(site) == 6_000_000
    assert (await site.cost("paid")).used == pytest.approx(6.0)


async def test_a_settlement_that_is_repeated_is_paid_once(site: Site) -> None:
    """To the same governor, and to its successor."""
    task, _ = await site.lead()
    first = await granted(site, "a", cost_usd=2.0)
    settle = Settle(permit=first, outcome="ok", cost_usd=2.0)
    for _ in range(3):
        await site.ask(settle, "settle")
    await ended(task)
    await site.lead()
    await site.ask(settle, "settle")
    assert await spent(site) == 2_000_000


async def test_a_call_that_ended_unseen_is_paid_by_the_successor(site: Site) -> None:
    """Granted after the last snapshot of a governor that was killed, and settled with another; once."""
    await site.lead()
    settle = Settle(permit="999-1", outcome="ok", cost_usd=2.0, keys=("paid",))
    for _ in range(2):
        await site.ask(settle, "settle")
    assert await spent(site) == 2_000_000
    assert (await site.cost("paid")).used == pytest.approx(2.0)


async def test_what_two_governors_settled_counts_once(site: Site) -> None:
    """The second one does not know that the first one did; the durable sum says so with the next call."""
    await site.lead()
    subject = site.names.spent(derive_key("limit", "", "paid"), "total")
    first = await granted(site, "a", cost_usd=2.0)
    before = Outgoing(subject, b"", msg_id=f"{first}/{derive_key('limit', '', 'paid')}", increment=2_000_000)
    await site.connect().publish(before)
    await site.ask(Settle(permit=first, outcome="ok", cost_usd=2.0), "settle")
    second = await granted(site, "b", cost_usd=1.0)
    await site.ask(Settle(permit=second, outcome="ok", cost_usd=1.0), "settle")
    assert await spent(site) == 3_000_000
    assert (await site.cost("paid")).used == pytest.approx(3.0)


async def test_passing_the_soft_threshold_is_recorded_once(site: Site) -> None:
    """In the life of the task that was being paid for, and as an event of the governor."""
    await site.lead()
    key = derive_key("id", "acme", "task-1")
    await site.connect().publish(Outgoing(site.names.event("acme", key, "agent-run", "queued"), b"{}"))
    for number in range(2):
        name = await granted(site, f"a{number}", cost_usd=0.5, task=key)
        cost_usd = 8.5 if number == 0 else 0.5
        await site.ask(Settle(permit=name, outcome="ok", cost_usd=cost_usd), "settle")
    broker, names = site.connect(), site.names
    subject = names.info("acme", key, "agent-run", "budget_warning")

    async def recorded() -> bool:
        return await broker.last(names.events_stream, subject) is not None

    await until(recorded, "the warning")
    assert len(await broker.history(names.events_stream, subject)) == 1
    assert site.telemetry.counts["budget.warning"] == 1


async def granted(site: Site, acquire: str, **need: Any) -> str:
    """The name of a permit on the budget."""
    answer = await site.ask(Acquire(id=acquire, worker="w", keys=("paid",), **need))
    assert isinstance(answer, Granted), answer
    return answer.leases[0].permit


async def spent(site: Site) -> int:
    """The durable sum of the budget in micro-dollars."""
    subject = site.names.spent(derive_key("limit", "", "paid"), "total")
    record = await site.connect().last(site.names.spent_stream, subject)
    return 0 if record is None else int(msgspec.json.decode(record.body, type=dict[str, str])["val"])


async def test_what_a_governor_knows_outlasts_any_standstill() -> None:
    """A month later what an operator forced, a long quota and what was learned still hold: nothing of it expires."""
    clock, names = VirtualClock(), Names("t")
    broker = MemoryServer(clock).connect()
    declared = topology(names, Lifetimes())
    await broker.declare(msgspec.structs.replace(declared, streams=(), consumers=()))
    limits = (rpm("forced", 600), rpm("lower", 600), Limit(key="weekly", requests="1000/7d"), rpm("empty", 600))
    desk = CoreDesk(*limits)
    desk.operate("forced", "open")
    desk.settle(desk.acquire("lower"), "ramp", retry_after_s=0.0)
    desk.settle(desk.acquire("empty"), "quota", retry_after_s=86_400.0)
    for _ in range(3):
        desk.acquire("weekly", wait_s=0.1)
    keeper = StateKeeper(broker, names, Recorder("t"))
    assert await keeper.write(Saved(at=clock.now(), snapshot=desk.governor.snapshot(desk.now, clean=True)))
    for days, used in ((6.0, 1.0), (24.0, 0.0)):
        clock.advance(days * 86_400.0)
        saved = await StateKeeper(broker, names, Recorder("t")).read()
        assert saved is not None
        heir = CoreDesk(*limits, epoch=2, now=5.0)
        heir.governor.restore(saved.snapshot, clock.now() - saved.at, heir.now)
        assert heir.limit("forced").breaker == "forced_open"
        assert heir.effective("lower") < 600
        assert heir.limit("empty").paused_reason == ""
        (window,) = heir.limit("weekly").dimensions
        assert window.used == used


async def test_an_idle_governor_goes_on_storing_its_state() -> None:
    """A successor takes the age of the state for the gap of which nothing is known."""
    async with _site_in_memory() as site:
        await site.lead()
        broker, names = site.connect(), site.names
        first = await broker.kv_get(names.governor_bucket, names.governor_lock)
        assert first is not None

        async def newer() -> bool:
            found = await broker.kv_get(names.governor_bucket, names.governor_lock)
            return found is not None and found.revision > first.revision + 2

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("millstream.governor.SAVE_IDLE_EVERY_S", 0.1)
            await until(newer, "the state to be stored again and again")
