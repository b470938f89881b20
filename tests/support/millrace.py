"""A mill in memory: the broker, the dispatcher's parts and a worker in one process, without a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millstream.client import Client
from millstream.clock import SystemClock, SystemIds
from millstream.dispatcher.admission import Admitter
from millstream.dispatcher.context import Bells, Context, Fixed, MeteringTable, Served
from millstream.dispatcher.decisions import Decider
from millstream.dispatcher.ticks import Ticker
from millstream.journal import Journal
from millstream.memory import MemoryServer
from millstream.settings import Settings, build
from millstream.telemetry.events import Recorder
from millstream.worker import Worker
from millstream_schemas.codec import decode_work_item
from millstream_schemas.topology import topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.app import App
    from millstream.ports import Broker, Delivery
    from millstream_schemas.events import Event, WorkItem
    from millstream_schemas.names import Names


@dataclass
class Mill:
    """One environment. `broker` may be a decorated one; `acked` holds what its user acked."""

    broker: Broker
    settings: Settings
    names: Names
    journal: Journal
    dispatcher: Context
    client: Client
    telemetry: Recorder = field(default_factory=lambda: Recorder("test"))

    def worker(self, app: App, broker: Broker | None = None) -> Worker:
        """A worker that does not run yet."""
        return Worker(app, broker or self.broker, self.settings, SystemClock(), SystemIds(), self.telemetry)

    async def admit(self) -> None:
        """Let the dispatcher admit what lies in the inbox, without a bell for idle workers."""
        await Admitter(self.dispatcher).handle(await self._lent(self.names.inbox_stream, self.names.inbox_consumer))

    async def decide(self) -> None:
        """Let the dispatcher decide on what asks for a decision."""
        await Decider(self.dispatcher).handle(await self._lent(self.names.events_stream, self.names.decisions_consumer))

    async def tick(self) -> None:
        """Let the dispatcher act on the timers that fired."""
        await Ticker(self.dispatcher).handle(await self._lent(self.names.work_stream, self.names.ticks_consumer))

    async def held(self) -> list[tuple[str, WorkItem]]:
        """The entries of HELD with their lanes, oldest first."""
        records = await self.broker.history(self.names.held_stream, self.names.held_filter)
        return [(self.names.parse_held(record.subject).lane, decode_work_item(record.body)) for record in records]

    async def kinds(self, key: str, tenant: str = "default") -> list[str]:
        """The life of a task so far."""
        return [str(event.__struct_config__.tag) for event in await self.life(key, tenant)]

    async def life(self, key: str, tenant: str = "default") -> list[Event]:
        """The events of a task so far."""
        return [event for _, event in await self.journal.past(tenant, key)]

    async def _lent(self, stream: str, consumer: str) -> Sequence[Delivery]:
        return await self.broker.pull(stream, consumer, 1000)


class NoBells(Bells):
    """Every bell is lost."""

    def ring(self, items: Any) -> None:
        """Say nothing."""


async def millrace(**settings: Any) -> Mill:
    """A mill with its topology declared; `settings` as in millstream.toml."""
    chosen = build({"lease_s": 2, **settings})
    names, clock = chosen.names, SystemClock()
    broker = MemoryServer(clock).connect()
    await broker.declare(topology(names, chosen.lifetimes))
    journal = Journal(broker, names, chosen.lifetimes.event_ttl_s)
    served = Served()
    context = Context(
        broker=broker,
        control=broker,
        journal=journal,
        names=names,
        configured=Fixed(chosen),
        clock=clock,
        ids=SystemIds(),
        telemetry=Recorder("dispatcher"),
        bells=NoBells(broker, names, clock),
        served=served,
        metering_table=MeteringTable(served),
    )
    return Mill(broker, chosen, names, journal, context, Client(broker, names))
