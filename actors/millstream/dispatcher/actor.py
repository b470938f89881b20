"""The dispatcher's loop: four mailboxes and a service, each taken in batches and handed to its part."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from millstream.dispatcher.admission import Admitter
from millstream.dispatcher.advisories import Sweeper
from millstream.dispatcher.commands import Commander
from millstream.dispatcher.context import Bells, Context, Served
from millstream.dispatcher.decisions import Decider
from millstream.dispatcher.intake import Intake
from millstream.dispatcher.submit import SubmitService
from millstream.errors import BrokerClosed, BrokerError, MessageTooLarge
from millstream.journal import Journal
from millstream.ports import Broker, Clock, Delivery, Ids, Mailbox
from millstream.settings import Settings
from millstream.telemetry.events import Telemetry
from millstream_schemas.commands import WorkerInfo

BATCH = 256
BATCHES_AT_ONCE = 3
REGISTRY_EVERY_S = 5.0
BELLS_EVERY_S = 0.1
MESSAGES_AT_ONCE = 32

Handle = Callable[[Sequence[Delivery]], Awaitable[None]]


class Dispatcher:
    """Admits, decides and carries out commands. Any number of replicas may run; none of them holds state."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        clock: Clock,
        ids: Ids,
        telemetry: Telemetry,
        control: Broker | None = None,
    ) -> None:
        names = settings.names
        self._served = Served()
        self._context = Context(
            broker=broker,
            control=control or broker,
            journal=Journal(broker, names, settings.lifetimes.event_ttl_s),
            names=names,
            settings=settings,
            clock=clock,
            ids=ids,
            telemetry=telemetry,
            bells=Bells(broker, names, clock),
            served=self._served,
        )
        self._admitter = Admitter(self._context)
        self._decider = Decider(self._context)
        self._commander = Commander(self._context)
        self._sweeper = Sweeper(self._context, self._admitter, self._decider)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; what was taken is finished, what was only pulled is handed back."""
        broker, control, names = self._context.broker, self._context.control, self._context.names
        submits = SubmitService(self._context)
        service = await broker.serve(names.request_submit, submits.answer, group=names.inbox_consumer)
        boxes: list[tuple[Mailbox, Handle]] = [
            (await broker.mailbox(names.events_stream, names.decisions_consumer, BATCH), self._decider.handle),
            (await control.mailbox(names.control_stream, names.control_consumer, BATCH), each(self._commander.handle)),
            (
                await broker.mailbox(names.advisory_stream, names.advisory_consumer, BATCH),
                each(self._sweeper.handle),
            ),
        ]
        intake = Intake(self._context, BATCH * 4, lambda mailbox: self._serve(mailbox, self._admitter.handle))
        async with asyncio.TaskGroup() as group:
            group.create_task(intake.run(stop))
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
        """The one boundary of a batch: a fault leaves it for redelivery, and one by one then, to spare the innocent."""
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

    async def _watch_registry(self) -> None:
        """Keep the task types that live workers serve."""
        while True:
            with suppress(BrokerError):
                entries = await self._context.broker.kv_all(self._context.names.workers_bucket)
                self._served.task_types = _task_types(entries.values())
            await asyncio.sleep(REGISTRY_EVERY_S)

    async def _ring_bells(self) -> None:
        while True:
            await asyncio.sleep(BELLS_EVERY_S)
            self._context.bells.ring_due()


def _task_types(entries: Iterable[bytes]) -> frozenset[str]:
    found: set[str] = set()
    for entry in entries:
        with suppress(msgspec.MsgspecError):
            found.update(handler.task_type for handler in msgspec.json.decode(entry, type=WorkerInfo).handlers)
    return frozenset(found)


def each(handle: Callable[[Delivery], Awaitable[None]]) -> Handle:
    """A handler of single messages as one of batches."""

    async def handle_all(deliveries: Sequence[Delivery]) -> None:
        for start in range(0, len(deliveries), MESSAGES_AT_ONCE):
            some = deliveries[start : start + MESSAGES_AT_ONCE]
            ends = await asyncio.gather(*(handle(delivery) for delivery in some), return_exceptions=True)
            for end in ends:  # only now, so that none is still at work when the boundary tries them one by one
                if isinstance(end, BaseException):
                    raise end

    return handle_all
