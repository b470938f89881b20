"""The feed: a stream read in order from a position, by an ephemeral consumer without acks that is made anew when in doubt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Sequence

from millstream.errors import BrokerClosed, NoAnswer
from millstream.jetstream.protocol import API, NANOS, ApiError, headers_of, nanos
from millstream.jetstream.puller import Puller
from millstream.jetstream.requests import Requests
from millstream.jetstream.wire import Wire
from millstream.ports import Record

CREDIT = 4000
_INACTIVE_S = 60.0
_SHORT_REPLY = 9  # parts of `$JS.ACK.<stream>.<consumer>.<delivery>.<seq>.<consumer seq>.<time>.<pending>`
_BACKOFF_S = 0.25
_log = logging.getLogger("millstream.jetstream")


class JetStreamFeed:
    """Each consumer numbers what it delivers: a number left out, or a doubt about the tail, starts a new one behind the
    last record received. Nothing runs in the background; `take` does the mending.
    """

    def __init__(
        self,
        wire: Wire,
        requests: Requests,
        inbox_prefix: str,
        stream: str,
        filters: Sequence[str],
        after_seq: int,
        *,
        bodies: bool = True,
    ) -> None:
        self._wire = wire
        self._requests = requests
        self._inbox_prefix = inbox_prefix
        self._stream = stream
        self._filters = tuple(filters)
        self._bodies = bodies
        self._last = after_seq
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Record] = deque()
        self._takers: deque[asyncio.Future[None]] = deque()
        self._puller: Puller | None = None
        self._consumer = ""
        self._expected = 1
        self._broken = True
        self._closed = False
        self._lost = False
        self._undo = wire.on_reconnect(self._doubt)

    async def take(self, limit: int, wait_s: float) -> list[Record]:
        """Up to `limit` records in order, without gap or repetition; empty when none came within `wait_s`."""
        ends = self._loop.time() + wait_s
        while not self._buffer:
            if self._closed:
                return []
            if self._lost:
                raise BrokerClosed("the connection to the NATS server is closed")
            left = ends - self._loop.time()
            if self._broken:
                try:
                    await self._mend(left)
                except BrokerClosed:
                    if not self._closed:  # else it is our own end that met a consumer in the making
                        raise
            elif left <= 0:
                return []
            else:
                await self._wait(left)
            if not self._buffer and self._loop.time() >= ends:
                return []
        buffer = self._buffer
        taken = [buffer.popleft() for _ in range(min(limit, len(buffer)))]
        if self._puller is not None and not self._broken:
            self._puller.refill()
        return taken

    async def _wait(self, seconds: float) -> None:
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._takers.append(waiting)
        timer = self._loop.call_later(seconds, _release, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            with contextlib.suppress(ValueError):
                self._takers.remove(waiting)

    async def _mend(self, left: float) -> None:
        """Make a new consumer behind the last record; not within `left` seconds is for the next call to try."""
        if self._puller is not None:
            await self._puller.stop()
            self._puller = None
        name = f"feed-{secrets.token_hex(8)}"
        answer: bytes | ApiError | None = None
        with contextlib.suppress(TimeoutError, NoAnswer):
            async with asyncio.timeout(max(0.05, left)):
                answer = await self._requests.api(f"CONSUMER.CREATE.{self._stream}.{name}", self._config(name))
        if isinstance(answer, bytes):
            self._forget_consumer()
            self._consumer = name
            if self._closed:
                self._forget_consumer()
                return
            self._expected = 1
            self._broken = False
            self._puller = Puller(
                self._wire,
                self._inbox_prefix,
                (self._stream, name),
                CREDIT,
                self._heard,
                lambda: len(self._buffer),
                self._troubled,
                self._beat,
            )
            return
        if answer is not None:
            _log.warning("cannot read %s: %s", self._stream, answer.description)
        await asyncio.sleep(max(0.0, min(left, _BACKOFF_S)))

    def _config(self, name: str) -> dict[str, object]:
        config: dict[str, object] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._last + 1,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "inactive_threshold": nanos(_INACTIVE_S),
            "num_replicas": 1,
            "mem_storage": True,
            "headers_only": not self._bodies,
        }
        if self._filters:
            config["filter_subjects"] = list(self._filters)
        return {"stream_name": self._stream, "config": config, "action": "create"}

    def _heard(self, subject: bytes, reply: bytes, header: bytes | None, body: bytes) -> None:
        if self._broken:
            return
        parts = reply.split(b".")
        first = 5 if len(parts) == _SHORT_REPLY else 7  # the newer form names domain and account before the stream
        if int(parts[first + 1]) != self._expected:
            self._doubt()
            return
        self._expected += 1
        seq = int(parts[first])
        if seq <= self._last:
            return  # the stream is shorter than our position: a restored server
        self._last = seq
        at = int(parts[first + 2]) / NANOS
        self._buffer.append(Record(subject.decode("utf-8", "replace"), body, seq, at, headers_of(header)))
        if self._takers:
            self._wake()

    def _beat(self, header: dict[str, str]) -> None:
        delivered = header.get("Nats-Last-Consumer", "")
        if delivered.isdigit() and int(delivered) != self._expected - 1:
            self._doubt()

    def _troubled(self, _status: bytes) -> None:
        self._doubt()

    def _doubt(self) -> None:
        self._broken = True
        self._wake()

    def _wake(self) -> None:
        while self._takers:
            _release(self._takers.popleft())

    def _forget_consumer(self) -> None:
        if self._consumer:  # without an answer: an inactive one ends by itself
            subject = f"{API}CONSUMER.DELETE.{self._stream}.{self._consumer}"
            self._wire.send(f"PUB {subject} 0\r\n\r\n".encode())
            self._consumer = ""

    async def close(self) -> None:
        """Stop reading and drop the consumer."""
        if self._closed:
            return
        self._closed = True
        self._undo()
        self._wake()
        if self._puller is not None:
            await self._puller.stop()
        self._forget_consumer()

    def end(self) -> None:
        """The connection is closed for good."""
        self._lost = True
        self._wake()


def _release(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
