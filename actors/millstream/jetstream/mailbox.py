"""The mailbox: deliveries of one durable consumer, pulled ahead up to a credit."""

from __future__ import annotations

import asyncio
from collections import deque

from millstream.errors import BrokerClosed
from millstream.jetstream.deliveries import Raw, delivery_of, nak_frames
from millstream.jetstream.puller import Puller
from millstream.jetstream.wire import Wire
from millstream.ports import Delivery


class JetStreamMailbox:
    """Buffers what the puller brings; `take` is safe to cancel, nothing is lost by it."""

    def __init__(self, wire: Wire, inbox_prefix: str, stream: str, consumer: str, credit: int) -> None:
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Raw] = deque()
        self._takers: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._lost = False
        self._puller = Puller(
            wire, inbox_prefix, (stream, consumer), max(1, credit), self._heard, lambda: len(self._buffer)
        )

    async def take(self, limit: int) -> list[Delivery]:
        """Up to `limit` deliveries, at least one; waits for it. Empty once closed. Raises BrokerClosed."""
        while not self._buffer:
            if self._closed:
                return []
            if self._lost:
                raise BrokerClosed("the connection to the NATS server is closed")
            waiting: asyncio.Future[None] = self._loop.create_future()
            self._takers.append(waiting)
            await waiting
        buffer = self._buffer
        taken = [delivery_of(buffer.popleft()) for _ in range(min(limit, len(buffer)))]
        self._puller.refill()
        return taken

    def _heard(self, subject: bytes, reply: bytes, header: bytes | None, body: bytes) -> None:
        self._buffer.append((subject, reply, header, body))
        if self._takers:
            self._wake()

    def _wake(self) -> None:
        while self._takers:
            waiting = self._takers.popleft()
            if not waiting.done():
                waiting.set_result(None)

    async def close(self) -> None:
        """Stop pulling; what was pulled and not taken, or is still under way, is handed back."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        if self._buffer:
            self._wire.send(nak_frames(raw[1] for raw in self._buffer), keep=True)
            self._buffer.clear()
        await self._puller.stop(late=self._hand_back)

    def _hand_back(self, _subject: bytes, reply: bytes, _header: bytes | None, _body: bytes) -> None:
        if reply:
            self._wire.send(nak_frames((reply,)), keep=True)

    def end(self) -> None:
        """The connection is closed for good."""
        self._lost = True
        self._wake()
