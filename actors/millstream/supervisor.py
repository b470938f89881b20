"""Runs actors to their end: signals, soft and hard stop, and an exit status that says how it went."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.app import App
from millstream.clock import SystemClock, SystemIds
from millstream.configuration import Configuration
from millstream.connecting import open_broker, open_control
from millstream.dispatcher import Dispatcher
from millstream.errors import BrokerClosed, MillstreamError, ServerLimitTooSmall, StreamLost
from millstream.faults import faulty
from millstream.governor import RateGovernor
from millstream.loop import loop_factory
from millstream.ports import Broker
from millstream.settings import Settings
from millstream.telemetry.events import Recorder
from millstream.topology_watch import TopologyWatch
from millstream.tracker import Tracker
from millstream.worker import Worker
from millstream_schemas.envelope import MAX_ENVELOPE_BYTES
from millstream_schemas.topology import Topology, split_control, topology

GC_YOUNG = 20_000
STRAYS_S = 1.0
"""How long what handlers left running may take to end with the process."""

MIN_PAYLOAD_BYTES = MAX_ENVELOPE_BYTES + 192 * 1024

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_STOPPED_AT_ONCE = 130

Run = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
Ready = Callable[[str], None]


@dataclass(frozen=True)
class Starter:
    """Connects and makes one actor; `name` is its role."""

    name: str
    start: Callable[["Supervisor"], Awaitable[Run]]


class Supervisor:
    """Runs some actors in one process until a signal or a fault ends them all."""

    def __init__(self, settings: Settings, *, on_ready: Ready | None = None) -> None:
        self.settings = settings
        self.on_ready = on_ready or _nobody_waits
        self.stop = asyncio.Event()
        self._brokers: list[Broker] = []
        self._closed = asyncio.Event()
        self._lost: StreamLost | None = None

    async def run(self, starters: Sequence[Starter], *, signals: bool = True) -> None:
        """Start all actors and wait for them; the first fault stops the others and is raised.

        The first SIGTERM or SIGINT stops softly, a second one ends the process at once; SIGHUP stops softly.
        """
        if signals:
            self._catch_signals()
        try:
            async with asyncio.TaskGroup() as group:
                guards = [group.create_task(self._guard())]
                async with asyncio.TaskGroup() as actors:
                    for starter in starters:
                        run = await starter.start(self)
                        actors.create_task(run(self.stop), name=starter.name)
                    guards.append(group.create_task(self._watch()))
                for guard in guards:
                    guard.cancel()
        except* MillstreamError as errors:
            raise self._lost or _first(errors) from None
        finally:
            for broker in self._brokers:
                await broker.close()

    async def broker(self, role: str) -> Broker:
        """A connection for one actor, its topology declared; the end of it ends the process."""
        broker = await open_broker(self.settings, role, on_closed=self._closed.set)
        self._brokers.append(broker)
        await broker.declare(self._topology)
        await _check_payload_limit(broker)
        return faulty(broker)

    async def control(self) -> Broker | None:
        """The connection of its own that CONTROL has, if any."""
        broker = await open_control(self.settings, on_closed=self._closed.set)
        if broker is not None:
            self._brokers.append(broker)
            await broker.declare(split_control(self._declared, self.settings.names)[1])
        return broker

    def telemetry(self, actor: str) -> Recorder:
        """Where an actor's events go."""
        return Recorder(actor)

    async def _guard(self) -> None:
        """A connection that is closed for good ends everything: a new process can connect again."""
        await self._closed.wait()
        raise BrokerClosed("the connection to the server was closed for good")

    async def _watch(self) -> None:
        """A lost stream ends everything at once: no work in hand could be committed any more."""
        if not self._brokers:
            return
        try:
            await TopologyWatch(self._brokers[0], self._topology, self.telemetry("supervisor")).run()
        except StreamLost as lost:
            self._lost = lost
            for broker in self._brokers:
                await broker.close()
            raise

    @property
    def _declared(self) -> Topology:
        return topology(self.settings.names, self.settings.lifetimes)

    @property
    def _topology(self) -> Topology:
        """What the main connection declares: all of it, but CONTROL where that has a connection of its own."""
        if self.settings.nats.control_url is None:
            return self._declared
        return split_control(self._declared, self.settings.names)[0]

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` has it ignored
            loop.add_signal_handler(signal.SIGHUP, self.stop.set)  # a terminal that closes sends it more than once

    def _on_signal(self) -> None:
        if self.stop.is_set():
            os._exit(EXIT_STOPPED_AT_ONCE)
        self.stop.set()


def _nobody_waits(_: str) -> None:
    return


async def _check_payload_limit(broker: Broker) -> None:
    """An envelope that INBOX takes must fit into WORK with its card and history, else its task could never be released."""
    limit = (await broker.server_info()).max_payload_bytes
    if limit < MIN_PAYLOAD_BYTES:
        raise ServerLimitTooSmall("max_payload", limit, MIN_PAYLOAD_BYTES)


def _first(errors: BaseExceptionGroup[MillstreamError]) -> MillstreamError:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, MillstreamError)
    return found


# --- the actors -----------------------------------------------------------------------------------


def dispatcher() -> Starter:
    """The dispatcher on connections of its own."""

    async def start(supervisor: Supervisor) -> Run:
        broker = await supervisor.broker("dispatcher")
        telemetry = supervisor.telemetry("dispatcher")
        actor = Dispatcher(
            broker,
            supervisor.settings,
            SystemClock(),
            SystemIds(),
            telemetry,
            await supervisor.control(),
            Configuration(broker, supervisor.settings, telemetry),
        )
        return actor.run

    return Starter("dispatcher", start)


def governor() -> Starter:
    """The rate-governor on a connection of its own: it leads, or stands by for the one that does."""

    async def start(supervisor: Supervisor) -> Run:
        broker = await supervisor.broker("governor")
        telemetry = supervisor.telemetry("governor")
        return RateGovernor(broker, supervisor.settings, SystemClock(), SystemIds(), telemetry).run

    return Starter("governor", start)


def worker(app: App, queues: Sequence[str] = ()) -> Starter:
    """A worker for the handlers of `app`, on a connection of its own."""

    async def start(supervisor: Supervisor) -> Run:
        broker = await supervisor.broker("worker")
        telemetry = supervisor.telemetry("worker")
        return Worker(app, broker, supervisor.settings, SystemClock(), SystemIds(), telemetry, queues).run

    return Starter("worker", start)


def tracker() -> Starter:
    """The tracker and its HTTP surface, on a connection of its own."""

    async def start(supervisor: Supervisor) -> Run:
        broker = await supervisor.broker("tracker")
        control = await supervisor.control()
        return Tracker(broker, supervisor.settings, SystemClock(), control=control, on_ready=supervisor.on_ready).run

    return Starter("tracker", start)


def run_process(settings: Settings, starters: Sequence[Starter], *, on_ready: Ready | None = None) -> int:
    """Run actors as this process; returns its exit status, having said on standard error what went wrong."""

    over = False

    async def main() -> None:
        nonlocal over
        try:
            await Supervisor(settings, on_ready=on_ready).run(starters)
        finally:
            over = True

    _spare_the_collector()
    runner = asyncio.Runner(loop_factory=loop_factory())
    status = EXIT_OK
    try:
        runner.run(main())
    except MillstreamError as error:
        sys.stderr.write(f"millstream: {error}\n")
        status = EXIT_FAILED
    except BaseException as error:
        if over:
            raise
        # A stray task of a handler ended the loop: nothing in it can come to its end any more, leases see to the rest.
        sys.stderr.write(f"millstream: something in this process ended its event loop: {error!r}\n")
        return EXIT_FAILED
    if runner.run(_end_strays()):
        runner.close()
    return status


async def _end_strays() -> bool:
    """Cancel what handlers left running; False where some of it will not end, and must not keep the process."""
    strays = asyncio.all_tasks() - {asyncio.current_task()}
    for stray in strays:
        stray.cancel()
    if strays:
        await asyncio.wait(strays, timeout=STRAYS_S)
    return all(stray.done() for stray in strays)


def _spare_the_collector() -> None:
    """Look for cycles less often: a message leaves none behind, and each look costs the more the more is in flight."""
    gc.freeze()
    gc.set_threshold(GC_YOUNG, 20, 50)
