"""A tracker over the in-memory broker, with its HTTP surface on a free port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from millstream.clock import SystemClock
from millstream.memory import MemoryServer
from millstream.memory_broker import MemoryBroker
from millstream.ports import Outgoing
from millstream.settings import QueueSettings, Settings, TrackerSettings
from millstream.tracker import Tracker
from millstream_schemas.names import Names
from millstream_schemas.topology import topology
from tests.support.waiting import wait_until
from tests.tracker.histories import Stream


@dataclass
class Running:
    """A running tracker: its broker, a client, and a stream to write histories into."""

    broker: MemoryBroker
    tracker: Tracker
    client: httpx.AsyncClient
    stream: Stream = field(default_factory=Stream)
    told: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def names(self) -> Names:
        return Names("mill")

    async def tell(self, stream: Stream | None = None) -> None:
        """Publish what was added to the stream since the last time, and wait until it is folded."""
        records = (stream or self.stream).records[self.told :]
        await self.broker.publish_all([Outgoing(record.subject, record.body) for record in records])
        self.told += len(records)
        await self.folded(self.told)

    async def folded(self, seq: int) -> None:
        """Wait until the tracker has folded that sequence."""

        async def there() -> bool:
            return int((await self.client.get("/v1/queues")).json()["seq"]) >= seq

        await wait_until(there, f"the tracker has folded {seq}")

    async def stop(self) -> None:
        """End the tracker before the block does."""
        self.stopping.set()
        await self.stopped.wait()

    async def get(self, path: str, status: int = 200) -> Any:
        """The JSON at `path`."""
        answer = await self.client.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()


def settings_for(folder: Path, port: int, batch_ends_after_s: float) -> Settings:
    """Settings with one queue, everything in `folder`."""
    return Settings(
        data_dir=str(folder),
        tracker=TrackerSettings(port=port, batch_ends_after_s=batch_ends_after_s),
        queues={"notes": QueueSettings(max_attempts=5)},
    )


@asynccontextmanager
async def running(
    folder: Path, server: MemoryServer | None = None, *, port: int = 0, batch_ends_after_s: float = 5.0
) -> AsyncGenerator[Running]:
    """A tracker that is stopped, and has ended, when the block ends."""
    settings = settings_for(folder, port, batch_ends_after_s)
    server = server or MemoryServer(SystemClock())
    broker = server.connect()
    await broker.declare(topology(settings.names, settings.lifetimes))
    ready = asyncio.Event()
    actor = Tracker(broker, settings, SystemClock(), on_ready=lambda _url: ready.set())
    stop, stopped = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        try:
            await actor.run(stop)
        finally:
            stopped.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(run())
        await asyncio.wait_for(ready.wait(), 10)
        assert actor.url is not None
        async with httpx.AsyncClient(base_url=actor.url, timeout=20) as client:
            try:
                yield Running(broker, actor, client, stopping=stop, stopped=stopped)
            finally:
                stop.set()


@dataclass
class Frame:
    """One server-sent event."""

    event: str
    data: Any
    id: str


async def frames(response: httpx.Response) -> AsyncIterator[Frame]:
    """The events of a stream, read as a browser reads them."""
    event, data, last = "message", list[str](), ""
    async for line in response.aiter_lines():
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if line == "":
            if data:
                yield Frame(event, json.loads("\n".join(data)), last)
            event, data = "message", []
        elif name == "data":
            data.append(value)
        elif name == "event":
            event = value
        elif name == "id":
            last = value


async def take(response: httpx.Response, count: int) -> list[Frame]:
    """The first so many events."""
    found: list[Frame] = []
    async with asyncio.timeout(20):
        async for frame in frames(response):
            found.append(frame)
            if len(found) == count:
                break
    return found
