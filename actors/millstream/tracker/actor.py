"""The tracker actor: follows EVENTS from its own position, folds in batches, tells those who follow live, serves HTTP."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from millstream.errors import BrokerError
from millstream.ports import Broker, Clock, Feed, Record
from millstream.settings import Settings
from millstream.tracker import schema
from millstream.tracker.folding import Folder
from millstream.tracker.hub import Hub
from millstream.tracker.queries import Reader
from millstream.tracker.store import Position, Store
from millstream.tracker.view import View

T = TypeVar("T")

BATCH: Final = 2000
BUSY: Final = 50
GATHER_S: Final = 0.1
"""A take of at least BUSY records is joined by what comes within this time: transactions are dear, and nobody watches
thousands of tasks a second one by one."""
TAKE_WAIT_S: Final = 0.25
LOOK_EVERY_S: Final = 5.0
"""How often the stream's end is looked up and old tasks are swept, while little happens."""


@dataclass(frozen=True, slots=True)
class _Model:
    """The read model's parts. `folder` is used on the writer's thread alone, `view` and `hub` on the loop alone."""

    folder: Folder
    view: View
    reader: Reader
    hub: Hub
    writer: ThreadPoolExecutor

    async def on_writer(self, work: Callable[[], T]) -> T:
        """Run `work` on the writer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.writer, work)


class Tracker:
    """Owns nothing: its database can be deleted and is rebuilt from the stream."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        clock: Clock,
        *,
        control: Broker | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        self._broker = broker
        self._control = control or broker
        self._settings = settings
        self._clock = clock
        self._on_ready = on_ready
        self._url: str | None = None

    @property
    def url(self) -> str | None:
        """Where HTTP is served, once it is."""
        return self._url

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return Path(self._settings.tracker.database or Path(self._settings.data_dir) / "tracker.sqlite3")

    async def run(self, stop: asyncio.Event) -> None:
        """Fold and serve until `stop`.

        Raises SettingsError where the address is taken, AlreadyRunning where another tracker has the database,
        BrokerError where the broker is closed for good.
        """
        from millstream.http.serving import bind, url_of  # the surface reads this package: imported once that is whole

        if stop.is_set():
            return
        bound = bind(self._settings.tracker.host, self._settings.tracker.port)
        with contextlib.closing(bound):
            async with self._model() as model:
                self._url = url_of(bound)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._serve(model, bound, stop))
                    group.create_task(self._follow(model, stop))
                    if self._on_ready is not None:
                        self._on_ready(self._url)

    async def _follow(self, model: _Model, stop: asyncio.Event) -> None:
        # no filters: the stream holds nothing else, and the server spends a third less on each record
        feed = await self._broker.feed(self._settings.names.events_stream, [], model.view.position.seq)
        look_at = 0.0
        try:
            while not stop.is_set():
                records = await _gathered(feed)
                if records:
                    await self._handle(model, records)
                if self._clock.monotonic() >= look_at:
                    await self._look_around(model)
                    look_at = self._clock.monotonic() + LOOK_EVERY_S
        finally:
            await feed.close()

    async def _handle(self, model: _Model, records: Sequence[Record]) -> None:
        folded = await model.on_writer(lambda: model.folder.fold(records))
        model.view.take(folded)
        model.hub.publish(folded.changes, folded.position.seq)

    async def _look_around(self, model: _Model) -> None:
        ended_before = self._clock.now() - self._settings.history_s
        queues = list(model.view.queues())
        model.view.move(await model.on_writer(lambda: model.folder.sweep(queues, ended_before)))
        if self._broker.connected:
            with contextlib.suppress(TimeoutError, BrokerError):
                info = await self._broker.stream_info(self._settings.names.events_stream)
                model.view.stream_end = max(info.last_seq if info else 0, model.view.position.seq)

    @contextlib.asynccontextmanager
    async def _model(self) -> AsyncGenerator[_Model]:
        """The read model, opened; begun anew where the stream is another one than it was made from."""
        from millstream.http.views import event_frame

        writer = ThreadPoolExecutor(1, thread_name_prefix="tracker-write")
        loop = asyncio.get_running_loop()
        prefix = self._settings.nats.prefix
        try:
            store = await loop.run_in_executor(writer, lambda: Store(self.database, prefix))
            if not await self._is_of_stream(store.position()):
                store.close()
                schema.remove(self.database)
                store = await loop.run_in_executor(writer, lambda: Store(self.database, prefix))
            reader = Reader(self.database)
            try:
                folder = Folder(store, self._settings.names, self._settings.tracker.batch_ends_after_s)
                view = View(store.position(), await loop.run_in_executor(writer, store.tally), store.batches())
                yield _Model(folder, view, reader, Hub(view.position.seq, event_frame), writer)
            finally:
                reader.close()
                writer.shutdown(wait=True)
                store.close()
        finally:
            writer.shutdown(wait=True)

    async def _is_of_stream(self, position: Position) -> bool:
        if position.seq == 0:
            return True
        stream = self._settings.names.events_stream
        info = await self._broker.stream_info(stream)
        if info is not None and position.seq > info.last_seq:
            return False
        record = await self._broker.get(stream, position.seq)
        return record is None or abs(record.at - position.at) < 0.001

    async def _serve(self, model: _Model, bound: socket.socket, stop: asyncio.Event) -> None:
        from millstream.http.app import create_app
        from millstream.http.context import Context
        from millstream.http.serving import serve

        context = Context(
            reader=model.reader,
            view=model.view,
            hub=model.hub,
            broker=self._broker,
            control=self._control,
            settings=self._settings,
            clock=self._clock,
        )
        await serve(create_app(context), bound, model.hub, stop)


async def _gathered(feed: Feed) -> list[Record]:
    records = await feed.take(BATCH, TAKE_WAIT_S)
    if BUSY <= len(records) < BATCH:
        await asyncio.sleep(GATHER_S)
        records += await feed.take(BATCH - len(records), 0.0)
    return records
