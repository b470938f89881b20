"""The worker's loop: pull for free slots, start, refill; drain on stop."""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from millstream._version import __version__
from millstream.app import App
from millstream.calls import Permits
from millstream.client import Client
from millstream.configuration import Configuration
from millstream.errors import BrokerClosed, BrokerError, ConsumerMissing
from millstream.journal import Journal
from millstream.permits_client import PermitClient
from millstream.policy.rotation import ClassOfWork, Rotation
from millstream.ports import Broker, Clock, Delivery, Ids
from millstream.settings import Settings
from millstream.telemetry.events import Telemetry
from millstream.telemetry.otel import Spans
from millstream.worker.context import Bench
from millstream.worker.hands import Hands
from millstream.worker.running import Running
from millstream.worker.server_clock import ServerClock
from millstream.worker.slots import Place, Slots
from millstream_schemas.codec import encode
from millstream_schemas.commands import HandlerInfo, WorkerInfo
from millstream_schemas.names import PRIORITIES
from millstream_schemas.topology import WORKER_ENTRY_TTL_S, work_consumer

POLL_S = 0.25
POLL_MAX_S = 5.0
TROUBLE_S = 0.5
REGISTER_EVERY_S = WORKER_ENTRY_TTL_S / 3


class Worker:
    """Runs an app's handlers, at most `concurrency` at once over all its queues and priorities."""

    def __init__(
        self,
        app: App,
        broker: Broker,
        settings: Settings,
        clock: Clock,
        ids: Ids,
        telemetry: Telemetry,
        queues: Sequence[str] = (),
        permits: Permits | None = None,
    ) -> None:
        """`permits` stands in for those of the governor."""
        self._app = app
        self._broker = broker
        self._settings = settings
        self._wall = clock
        self._clock = ServerClock(clock, broker, settings.names.work_stream)
        self._telemetry = telemetry
        self._queues = list(queues) or app.queues
        self._rotation = Rotation(tuple((queue, priority) for queue in self._queues for priority in PRIORITIES))
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._running = Running()
        self._slots = Slots(settings.worker.concurrency, self._wake.set)
        self._held: Counter[ClassOfWork] = Counter()
        self._started_at = clock.now()
        self.worker_id = f"{socket.gethostname()[:40]}-{os.getpid()}-{ids.new()[-6:]}"
        names = settings.names
        self._names = names
        self._configuration = Configuration(broker, settings, telemetry)
        self._governor = PermitClient(broker, names, self.worker_id, clock, self._configured)
        self._permits: Permits = permits or self._governor
        self._bench = self._make_bench(ids)
        self._hands = Hands(self._bench, self._running, self._stopping)

    def _make_bench(self, ids: Ids) -> Bench:
        broker, names = self._broker, self._names
        return Bench(
            app=self._app,
            broker=broker,
            journal=Journal(broker, names, self._settings.lifetimes.event_ttl_s),
            names=names,
            settings=self._settings,
            configured=self._configured,
            clock=self._clock,
            ids=ids,
            telemetry=self._telemetry,
            permits=self._permits,
            heart=broker.heart(),
            send=Client(broker, names, ids).send,
            worker_id=self.worker_id,
            spans=Spans(),
        )

    def _configured(self) -> Settings:
        return self._configuration.settings

    def __repr__(self) -> str:
        return f"Worker({self.worker_id}, {self._slots!r}, queues={self._queues})"

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain: take no more, let running work end within the grace, hand back the rest."""
        await self._declare()
        await self._clock.measure()
        bells = [await self._broker.listen(self._names.bell(queue), self._heard) for queue in self._queues]
        async with asyncio.TaskGroup() as group:
            chores = [
                group.create_task(self._register()),
                group.create_task(self._governor.run(asyncio.Event())),
                group.create_task(self._configuration.run(asyncio.Event())),
                group.create_task(self._watch_connection()),
            ]
            watcher = group.create_task(self._watch(stop))
            self._telemetry.emit("actor.started", worker_id=self.worker_id)
            async with asyncio.TaskGroup() as in_flight:
                await self._pull_until_stopped(in_flight)
                self._telemetry.emit("actor.draining", running=len(self._running.executions))
                await self._announce()
                hard = group.create_task(self._hard_stop())
            hard.cancel()
            for chore in (*chores, watcher):
                chore.cancel()
            for bell in bells:
                await bell.close()
            with suppress(BrokerError):
                await self._broker.kv_delete(self._names.workers_bucket, self.worker_id)
                await self._broker.flush()
        self._telemetry.emit("actor.stopped", worker_id=self.worker_id)

    async def _declare(self) -> None:
        """The consumers of this worker's queues; declaring them again changes nothing."""
        for one in self._rotation.classes:
            await self._declare_class(one)

    async def _declare_class(self, one: ClassOfWork) -> None:
        limit = self._settings.queue(one[0]).max_running
        spec = work_consumer(self._names, self._settings.lifetimes, *one, max_ack_pending=limit)
        await self._broker.declare_consumer(spec)

    # --- pull ------------------------------------------------------------------------------------

    async def _pull_until_stopped(self, in_flight: asyncio.TaskGroup) -> None:
        poll_s, ask_all_at = POLL_S, 0.0
        while not self._stopping.is_set():
            self._wake.clear()
            if self._clock.monotonic() >= ask_all_at:  # a redelivery rings no bell, and a busy worker never idles
                self._rotation.wake_all()
                ask_all_at = self._clock.monotonic() + POLL_MAX_S
            try:
                taken = await self._pull_round(in_flight)
            except BrokerClosed:
                raise
            except BrokerError as error:
                self._telemetry.emit("broker.trouble", error=str(error))
                await asyncio.sleep(TROUBLE_S)
                continue
            if taken:
                poll_s = POLL_S
                continue
            try:
                async with asyncio.timeout(poll_s):
                    await self._wake.wait()
            except TimeoutError:
                self._rotation.wake_all()
                poll_s = min(poll_s * 2, POLL_MAX_S)

    async def _pull_round(self, in_flight: asyncio.TaskGroup) -> int:
        """Ask the classes in weighted order for as much as there is room; returns what came."""
        taken = 0
        if not self._slots.room:  # without this, each class would be charged for a turn that it cannot use
            return taken
        for one in self._rotation.order():
            room = self._slots.room
            if not room or self._stopping.is_set():
                break
            room = min(room, self._settings.queue(one[0]).max_running - self._held[one])
            if room <= 0:  # the server would let such a pull wait, and all other classes with it
                continue
            bells = self._rotation.bells(one)
            deliveries = await self._pull_reserved(one, room)
            if len(deliveries) < room:
                self._rotation.rest(one, bells)
            for delivery in deliveries:
                place = self._slots.place()
                self._held[one] += 1
                task = in_flight.create_task(self._hands.handle(delivery, place))
                task.add_done_callback(partial(self._freed, one, place))
            taken += len(deliveries)
        return taken

    async def _pull_reserved(self, one: ClassOfWork, room: int) -> list[Delivery]:
        """What a class has now, pulled into reserved slots: deliveries that wait for a slot cannot take these meanwhile."""
        self._slots.reserve(room)
        came = 0
        try:
            deliveries = await self._pull(one, room)
            came = len(deliveries)
        finally:
            self._slots.release(room - came)
        return deliveries

    async def _pull(self, one: ClassOfWork, limit: int) -> list[Delivery]:
        """What a class has now; its consumer is declared anew where somebody deleted it."""
        consumer = self._names.work_consumer(*one)
        try:
            return await self._broker.pull(self._names.work_stream, consumer, limit)
        except ConsumerMissing:
            await self._declare_class(one)
            self._telemetry.emit("consumer.redeclared", consumer=consumer, stream=self._names.work_stream)
            return await self._broker.pull(self._names.work_stream, consumer, limit)

    def _freed(self, one: ClassOfWork, place: Place, _: object) -> None:
        self._held[one] -= 1
        place.leave()
        self._wake.set()

    def _heard(self, subject: str, body: bytes) -> None:
        queue = subject.rpartition(".")[2]
        for priority in body.decode("ascii", "replace").split(","):
            one: ClassOfWork = (queue, priority)
            if one in self._rotation.classes:
                self._rotation.bell(one)
        self._wake.set()

    async def _watch_connection(self) -> None:
        """Ask at once after an outage, however long the worker was idle: bells rung meanwhile were lost."""
        connected = True
        while True:
            await asyncio.sleep(POLL_S)
            was, connected = connected, self._broker.connected
            if connected and not was:
                self._rotation.wake_all()
                self._wake.set()

    # --- stop ------------------------------------------------------------------------------------

    async def _watch(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._stopping.set()
        self._slots.drain()
        self._wake.set()

    async def _hard_stop(self) -> None:
        """End what still runs once the grace is over."""
        await asyncio.sleep(self._settings.worker.grace_s)
        self._running.stop_all()

    # --- registry --------------------------------------------------------------------------------

    async def _register(self) -> None:
        while True:
            await self._clock.measure()
            await self._announce()
            await asyncio.sleep(REGISTER_EVERY_S)

    async def _announce(self) -> None:
        self._bench.spans.look()
        info = WorkerInfo(
            worker_id=self.worker_id,
            queues=self._queues,
            slots=self._slots.total,
            handlers=[
                HandlerInfo(
                    task_type=task.task_type, queue=task.queue, limits=list(task.limits), timeout_s=task.timeout_s
                )
                for task in self._app.tasks.values()
            ],
            running=self._running.task_ids(),
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            started_at=self._started_at,
            seen_at=self._wall.now(),  # not set right: `doctor` compares it
            draining=self._stopping.is_set(),
        )
        with suppress(BrokerError):
            await self._broker.kv_put(self._names.workers_bucket, self.worker_id, encode(info))
