"""The dispatcher's loop: five mailboxes and a service, each taken in batches and handed to its part."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from millstream.configuration import Configuration
from millstream.dispatcher.admission import Admitter
from millstream.dispatcher.advisories import Sweeper
from millstream.dispatcher.commands import Commander
from millstream.dispatcher.context import Bells, Context, Fixed, MeteringTable, Served, together
from millstream.dispatcher.decisions import Decider
from millstream.dispatcher.intake import Intake
from millstream.dispatcher.releaser import Releaser
from millstream.dispatcher.submit import SubmitService
from millstream.dispatcher.ticks import Ticker
from millstream.errors import BrokerClosed, BrokerError, MessageTooLarge
from millstream.journal import Journal
from millstream.ports import Broker, Clock, Delivery, Ids, Mailbox
from millstream.settings import Settings
from millstream.telemetry.events import Telemetry
from millstream_schemas.commands import WorkerInfo

BATCH = 256
BATCHES_AT_ONCE = 3
REGISTRY_EVERY_S = 1.0
LOOK_AGAIN_S = 0.25
BELLS_EVERY_S = 0.1

Handle = Callable[[Sequence[Delivery]], Awaitable[None]]


class Dispatcher:
    """Admits, decides and carries out commands. Any number of replicas may run; none of them holds state.

    With a `configuration`, which it keeps up to date, queues, tenants and limits are those of the newest document;
    without one they stay as they are given.
    """

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        clock: Clock,
        ids: Ids,
        telemetry: Telemetry,
        control: Broker | None = None,
        configuration: Configuration | None = None,
    ) -> None:
        names = settings.names
        self._served = Served()
        self._configuration = configuration
        self._context = Context(
            broker=broker,
            control=control or broker,
            journal=Journal(broker, names, settings.lifetimes.event_ttl_s),
            names=names,
            configured=configuration or Fixed(settings),
            clock=clock,
            ids=ids,
            telemetry=telemetry,
            bells=Bells(broker, names, clock),
            served=self._served,
            metering_table=MeteringTable(self._served),
        )
        self._admitter = Admitter(self._context)
        self._decider = Decider(self._context)
        self._commander = Commander(self._context)
        self._ticker = Ticker(self._context)
        self._sweeper = Sweeper(self._context, self._admitter, self._decider, self._ticker)
        self._releaser = Releaser(self._context)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; what was taken is finished, what was only pulled is handed back."""
        broker, control, names = self._context.broker, self._context.control, self._context.names
        if not await self._first_look(stop):
            return
        submits = SubmitService(self._context)
        service = await broker.serve(names.request_submit, submits.answer, group=names.inbox_consumer)
        boxes: list[tuple[Mailbox, Handle]] = [
            (await broker.mailbox(names.events_stream, names.decisions_consumer, BATCH), self._decider.handle),
            (await broker.mailbox(names.work_stream, names.ticks_consumer, BATCH), self._ticker.handle),
            (await control.mailbox(names.control_stream, names.control_consumer, BATCH), each(self._commander.handle)),
            (
                await broker.mailbox(names.advisory_stream, names.advisory_consumer, BATCH),
                each(self._sweeper.handle),
            ),
        ]
        intake = Intake(self._context, BATCH * 4, lambda mailbox: self._serve(mailbox, self._admitter.handle))
        async with asyncio.TaskGroup() as group:
            group.create_task(intake.run(stop))
            group.create_task(self._releaser.run(stop))
            if self._configuration is not None:
                group.create_task(self._configuration.run(stop))
            for mailbox, handle in boxes:
                group.create_task(self._serve(mailbox, handle))
            chores = [group.create_task(self._watch_registry()), group.create_task(self._ring_bells())]
            self._context.telemetry.emit("actor.started")
            await stop.wait()
            await service.close()
            for mailbox, _ in boxes:
                await mailbox.close()
            for chore in chores:
                chore.cancel()
        self._context.telemetry.emit("actor.stopped")

    async def _serve(self, mailbox: Mailbox, handle: Handle) -> None:
        """Take batches until the mailbox closes, a few of them in work at once."""
        room = asyncio.Semaphore(BATCHES_AT_ONCE)
        async with asyncio.TaskGroup() as batches:
            while True:
                await room.acquire()
                deliveries = await mailbox.take(BATCH)
                if not deliveries:
                    return
                task = batches.create_task(self._handle(handle, deliveries))
                task.add_done_callback(lambda _: room.release())

    async def _handle(self, handle: Handle, deliveries: Sequence[Delivery]) -> None:
        """The one place that catches what goes wrong with a batch.

        A fault of the broker leaves the whole batch for redelivery. After any other fault its messages are tried one by
        one, so that only the faulty one is left behind.
        """
        try:
            await handle(deliveries)
        except BrokerClosed:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it was, the others go on
            if isinstance(error, BrokerError) and not isinstance(error, MessageTooLarge):
                self._context.telemetry.emit("broker.trouble", error=str(error))
                return
            self._context.telemetry.emit("message.faulty", error=repr(error), messages=len(deliveries))
            if len(deliveries) > 1:
                for delivery in deliveries:
                    await self._handle(handle, [delivery])

    async def _first_look(self, stop: asyncio.Event) -> bool:
        """Read the limits before any task is admitted, so that no metered task is taken for a plain one.

        False when stopped before they could be read.
        """
        while not stop.is_set():
            try:
                await self._look_at_registry()
                known = self._configuration is None or await self._configuration.look()
            except BrokerClosed:
                raise
            except BrokerError as error:
                self._context.telemetry.emit("broker.trouble", error=str(error))
            else:
                if known:
                    return True
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await stop.wait()
        return False

    async def _watch_registry(self) -> None:
        """Keep up to date what live workers announce."""
        while True:
            await asyncio.sleep(REGISTRY_EVERY_S)
            with suppress(BrokerError):
                await self._look_at_registry()

    async def _look_at_registry(self) -> None:
        entries = await self._context.broker.kv_all(self._context.names.workers_bucket)
        workers: list[WorkerInfo] = []
        for entry in entries.values():
            with suppress(msgspec.MsgspecError):
                workers.append(msgspec.json.decode(entry, type=WorkerInfo))
        self._served.refresh(workers)

    async def _ring_bells(self) -> None:
        while True:
            await asyncio.sleep(BELLS_EVERY_S)
            self._context.bells.ring_due()


def each(handle: Callable[[Delivery], Awaitable[None]]) -> Handle:
    """Make a handler of batches from a handler of single messages."""

    async def handle_all(deliveries: Sequence[Delivery]) -> None:
        await together(handle, deliveries)

    return handle_all
