"""A releaser in memory: a clock that a test moves, workers that only have slots, a governor that is told what to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from millstream.client import Client
from millstream.dispatcher.admission import Admitter
from millstream.dispatcher.context import Bells, Context, Fixed, MeteringTable, Served
from millstream.dispatcher.releaser import Releaser
from millstream.journal import Journal
from millstream.memory import MemoryServer
from millstream.policy.supply import Pool
from millstream.ports import Broker, Subscription
from millstream.settings import build
from millstream.telemetry.events import Recorder
from millstream_schemas.codec import decode_event, decode_work_item
from millstream_schemas.commands import WorkerInfo
from millstream_schemas.events import Event, Parked, Started, WorkItem
from millstream_schemas.names import Names
from millstream_schemas.permits import Gate, Gates, GatesListing
from millstream_schemas.topology import topology
from tests.support.clock import CountingIds, VirtualClock
from tests.support.waiting import wait_until

QUEUE = "q"


@dataclass
class ReleaseHouse:
    """One environment in memory. `gates` is what the governor answers, by pool; an open one without bounds otherwise."""

    server: MemoryServer
    clock: VirtualClock
    context: Context
    gates: dict[Pool, Gate] = field(default_factory=dict[Pool, Gate])
    asked: list[Gates] = field(default_factory=list[Gates])
    serving: Subscription | None = None

    @property
    def names(self) -> Names:
        return self.context.names

    @property
    def broker(self) -> Broker:
        return self.context.broker

    @property
    def telemetry(self) -> Recorder:
        recorder = self.context.telemetry
        assert isinstance(recorder, Recorder)
        return recorder

    # --- what is held ----------------------------------------------------------------------------

    async def hold(self, count: int, tenant: str = "acme", queue: str = QUEUE, **fields: Any) -> list[str]:
        """Send tasks and have them admitted; returns their keys."""
        client = Client(self.broker, self.names)
        handles = await client.send_many("work", range(count), tenant=tenant, queue=queue, **fields)
        await self.admit()
        return [handle.key for handle in handles]

    async def admit(self) -> None:
        """Let the dispatcher admit what lies in the inbox."""
        lent = await self.broker.pull(self.names.inbox_stream, self.names.inbox_consumer, 10_000)
        await Admitter(self.context).handle(lent)

    async def held(self) -> list[str]:
        """The keys of what lies in HELD, oldest first."""
        records = await self.broker.history(self.names.held_stream, self.names.held_filter, 100_000)
        return [decode_work_item(record.body).card.key for record in records]

    # --- who works -------------------------------------------------------------------------------

    async def worker(self, slots: int, queue: str = QUEUE, name: str = "w", *, draining: bool = False) -> None:
        """Announce slots; nobody pulls."""
        info = WorkerInfo(worker_id=name, queues=[queue], slots=slots, draining=draining)
        await self.broker.kv_put(self.names.workers_bucket, name, msgspec.json.encode(info))

    async def work(self, queue: str = QUEUE) -> list[WorkItem]:
        """What was released to WORK, oldest first."""
        found: list[WorkItem] = []
        for priority in ("high", "normal", "low"):
            records = await self.broker.history(self.names.work_stream, self.names.work_class(queue, priority), 100_000)
            found += [decode_work_item(record.body) for record in records]
        return sorted(found, key=lambda item: item.fence)

    async def released(self, count: int, queue: str = QUEUE) -> list[WorkItem]:
        """Wait until WORK holds exactly so many tasks, and no more come at once."""

        async def enough() -> list[WorkItem] | None:
            found = await self.work(queue)
            return found if len(found) == count else None

        if count:
            await wait_until(enough, f"{count} tasks in WORK")
        await self.settled()
        found = await self.work(queue)
        assert len(found) == count
        return found

    async def settled(self) -> None:
        """Give the releaser a few turns more."""
        seen = -1
        for _ in range(3):
            info = await self.broker.stream_info(self.names.events_stream)
            seen = info.last_seq if info else 0
            await asyncio.sleep(0.06)
        assert seen >= 0

    async def passed(self, seconds: float) -> None:
        """Let time pass in steps within which a releaser keeps its lock and gates stay fresh, with turns after each."""
        for _ in range(round(seconds * 2)):
            self.clock.advance(0.5)
            asked = len(self.asked)
            await wait_until(lambda count=asked: len(self.asked) > count + 2, "turns that know the gates")  # type: ignore[misc]

    async def begin(self, items: list[WorkItem]) -> None:
        """Claim tasks as a worker does, and take them out of WORK."""
        for item in items:
            card = msgspec.structs.replace(item.card, release=item.fence, execution_id=f"e{item.fence}")
            await self._answer(item, Started(card=card, worker_id="w"))

    async def park(self, items: list[WorkItem]) -> None:
        """Give tasks back for want of a permit, as a worker does."""
        for item in items:
            card = msgspec.structs.replace(item.card, release=item.fence, execution_id=f"e{item.fence}")
            await self._answer(item, Parked(card=card, until=self.clock.now() + 3600, reason="throttled", item=item))

    async def _answer(self, item: WorkItem, event: Event) -> None:
        answer = await self.context.journal.append(event, item.fence)
        assert getattr(answer, "seq", 0), answer
        subject = self.names.work(item.card.queue, item.card.priority, item.card.key)
        record = await self.broker.last(self.names.work_stream, subject)
        assert record is not None
        await self.broker.delete(self.names.work_stream, record.seq)

    async def life(self, key: str, tenant: str = "acme") -> list[str]:
        """The kinds of a task's events."""
        return [str(event.__struct_config__.tag) for event in await self.events(key, tenant)]

    async def events(self, key: str, tenant: str = "acme") -> list[Event]:
        """A task's events."""
        records = await self.broker.history(self.names.events_stream, self.names.life(tenant, key))
        return [decode_event(record.body) for record in records]

    # --- who governs -----------------------------------------------------------------------------

    async def govern(self) -> None:
        """Answer for the governor from here on."""

        async def answer(body: bytes) -> bytes:
            asked = msgspec.json.decode(body, type=Gates)
            self.asked.append(asked)
            items = tuple(self.gates.get(pool.keys, Gate(keys=pool.keys, open=True)) for pool in asked.pools)
            return msgspec.json.encode(GatesListing(items=items, epoch=1))

        self.serving = await self.broker.serve(self.names.governor("gates"), answer)

    def said(self) -> None:
        """Tell everybody that gates have changed."""
        self.broker.tell(self.names.governor_said, b"{}")


@asynccontextmanager
async def release_house(**settings: Any) -> AsyncGenerator[ReleaseHouse]:
    """A house without a running releaser; `settings` as in millstream.toml."""
    chosen = build({"queues": {QUEUE: {"fair": True}}, **settings})
    clock = VirtualClock()
    server = MemoryServer(clock)
    broker = server.connect()
    names = chosen.names
    await broker.declare(topology(names, chosen.lifetimes))
    served = Served()
    context = Context(
        broker=broker,
        control=broker,
        journal=Journal(broker, names, chosen.lifetimes.event_ttl_s),
        names=names,
        configured=Fixed(chosen),
        clock=clock,
        ids=CountingIds(),
        telemetry=Recorder("dispatcher"),
        bells=Bells(broker, names, clock),
        served=served,
        metering_table=MeteringTable(served),
    )
    try:
        yield ReleaseHouse(server, clock, context)
    finally:
        await broker.close()


@asynccontextmanager
async def releasing(house: ReleaseHouse, context: Context | None = None) -> AsyncGenerator[Callable[[], bool]]:
    """A running releaser; what is given says whether it still runs."""
    stop = asyncio.Event()
    before = house.telemetry.counts["releaser.elected"]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(Releaser(context or house.context).run(stop))
        await wait_until(lambda: house.telemetry.counts["releaser.elected"] > before, "an election")
        try:
            yield lambda: not task.done()
        finally:
            stop.set()
