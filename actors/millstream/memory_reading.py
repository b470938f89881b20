"""What the in-memory broker hands out: mailboxes, feeds, hearts and subscriptions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from millstream.ports import Answering, Delivery, Record

if TYPE_CHECKING:
    from millstream.memory import MemoryServer

Heard = Callable[[str, bytes], None]


class MemoryMailbox:
    """Lends messages when they are taken, never ahead: so there is nothing to hand back on close."""

    def __init__(self, server: MemoryServer, stream: str, consumer: str, credit: int) -> None:
        self._server = server
        self._stream = stream
        self._consumer = consumer
        self._credit = credit
        self._closed = False

    async def take(self, limit: int) -> list[Delivery]:
        await asyncio.sleep(0)  # a reader that never waits must not keep the loop to itself
        while not self._closed:
            found = self._server.deliver(self._stream, self._consumer, min(limit, self._credit))
            if found:
                return found
            await self._server.change()
        return []

    async def close(self) -> None:
        self._closed = True
        self._server.wake()


class MemoryFeed:
    """Reads a stream from a position; the position moves with what was taken."""

    def __init__(
        self, server: MemoryServer, stream: str, filters: Sequence[str], after_seq: int, *, bodies: bool = True
    ) -> None:
        self._server = server
        self._bodies = bodies
        self._stream = stream
        self._filters = tuple(filters)
        self._position = after_seq
        self._closed = False

    async def take(self, limit: int, wait_s: float) -> list[Record]:
        await asyncio.sleep(0)  # as above
        try:
            async with asyncio.timeout(wait_s):
                while not self._closed:
                    found = self._server.read(self._stream, self._filters, self._position, limit)
                    if found:
                        self._position = found[-1].seq
                        return found if self._bodies else [msgspec.structs.replace(one, body=b"") for one in found]
                    await self._server.change()
        except TimeoutError:
            pass
        return []

    async def close(self) -> None:
        self._closed = True
        self._server.wake()


class MemoryHeart:
    """Renews leases inside the server itself: no time passes between two beats, and none is ever missed."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._beating: dict[str, Delivery] = {}

    def start(self, delivery: Delivery, lease_s: float) -> None:  # noqa: ARG002  (the consumer's own lease is renewed)
        if delivery.token not in self._beating:
            self._beating[delivery.token] = delivery
            self._server.beat(delivery)

    def stop(self, delivery: Delivery) -> None:
        if self._beating.pop(delivery.token, None) is not None:
            self._server.rest(delivery)

    def alive(self, delivery: Delivery) -> bool:
        return delivery.token in self._beating

    def stop_all(self) -> None:
        """Let every lease run out, as the end of the process would."""
        for delivery in list(self._beating.values()):
            self.stop(delivery)


class Answers:
    """Runs the answers of one served subject beside each other, and ends those still running when it closes."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self._running: set[asyncio.Task[None]] = set()
        self._tasks = asyncio.TaskGroup()

    async def open(self) -> None:
        """Take requests from here on."""
        await self._tasks.__aenter__()

    def begin(self, body: bytes, reply: Callable[[bytes], None]) -> None:
        """Answer one request; `reply` is called with the answer, or not at all."""
        try:
            answer = self._answer(body)
        except Exception as error:  # noqa: BLE001  (the boundary of one request: the others go on)
            _raised(error)
            return
        if answer is None or isinstance(answer, bytes):
            if answer is not None:
                reply(answer)
            return
        task = self._tasks.create_task(self._run(answer, reply))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        for task in self._running:
            if task is not asyncio.current_task():
                task.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def _run(self, pending: Awaitable[bytes | None], reply: Callable[[bytes], None]) -> None:
        try:
            answer = await pending
        except Exception as error:  # noqa: BLE001  (as above)
            _raised(error)
            return
        if answer is not None:
            reply(answer)


def _raised(error: Exception) -> None:
    context = {"message": "no answer was given: the server of a request raised", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


class MemorySubscription:
    """Ends what it stands for, once."""

    def __init__(self, end: Callable[[], Awaitable[None]]) -> None:
        self._end = end
        self._open = True

    async def close(self) -> None:
        if self._open:
            self._open = False
            await self._end()


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """A subject that somebody listens on (`heard`) or serves (`answers`, one of a `group`)."""

    subject: str
    heard: Heard | None = None
    answers: Answers | None = None
    group: str | None = None
