"""Pulls that take what is there now and leave nothing behind.

Each has a subscription of its own: a delivery does not name its pull, and only a lost interest ends a pull that the
server keeps waiting because the consumer has as many unacked deliveries as it may have.
"""

from __future__ import annotations

import asyncio
import secrets

from millstream.errors import ConsumerMissing
from millstream.jetstream.deliveries import Raw, delivery_of, nak_frames
from millstream.jetstream.protocol import API, HEARTBEAT, NO_RESPONDERS, as_json, status_of
from millstream.jetstream.wire import Wire
from millstream.ports import Delivery

_TICK_S = 0.02
_SILENT_TICKS = 25  # nothing at all came
_PARTIAL_TICKS = 3  # some came and no more: the consumer may not lend more, and what came must not wait for it
_LIMIT_S = 2.0
_LATE_S = 5.0


class _Pull:
    """One pull under way."""

    __slots__ = ("done", "got", "limit", "loop", "missing", "quiet", "until")

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        self.limit = limit
        self.loop = loop
        self.got: list[Raw] = []
        self.done: asyncio.Future[bool] = loop.create_future()
        self.missing = False
        self.quiet = 0
        self.until = loop.time() + _LIMIT_S

    def heard(self, subject: bytes, reply: bytes, header: bytes | None, body: bytes) -> None:
        self.quiet = 0
        if reply and status_of(header) is None:
            self.got.append((subject, reply, header, body))
            if len(self.got) >= self.limit:
                self.finish(True)
        elif status_of(header) != HEARTBEAT:
            self.missing = status_of(header) == NO_RESPONDERS
            self.finish(True)  # 404, 408, 409, 503: no more for this pull

    def finish(self, clean: bool) -> None:
        if not self.done.done():
            self.done.set_result(clean)

    def tick(self) -> None:
        if self.done.done():
            return
        self.quiet += 1
        patience = _PARTIAL_TICKS if self.got else _SILENT_TICKS
        if self.quiet > patience or self.loop.time() > self.until:
            self.finish(False)
        else:
            self.loop.call_later(_TICK_S, self.tick)


class Pulls:
    """Makes `no_wait` pulls."""

    def __init__(self, wire: Wire, inbox_prefix: str) -> None:
        self._wire = wire
        self._inbox_prefix = inbox_prefix
        self._loop = asyncio.get_running_loop()
        self._base = f"{inbox_prefix}.{secrets.token_hex(8)}."
        self._count = 0

    async def pull(self, stream: str, consumer: str, limit: int) -> list[Delivery]:
        """What is there now, up to `limit`; empty without a connection. Cancelled, it hands back what it got.

        Raises ConsumerMissing.
        """
        if limit < 1 or not self._wire.connected:
            return []
        self._count += 1
        inbox = f"{self._base}{self._count}"
        pull = _Pull(limit, self._loop)
        sid = self._wire.subscribe(inbox, pull.heard)
        request = as_json({"batch": limit, "no_wait": True})
        self._wire.send(
            f"PUB {API}CONSUMER.MSG.NEXT.{stream}.{consumer} {inbox} {len(request)}\r\n".encode() + request + b"\r\n"
        )
        self._loop.call_later(_TICK_S, pull.tick)
        try:
            clean = await pull.done
        except BaseException:
            self._abandon(sid)
            self._hand_back([raw[1] for raw in pull.got])
            raise
        if clean:
            self._wire.unsubscribe(sid)
        else:
            self._abandon(sid)
        if pull.missing and not pull.got:
            raise ConsumerMissing(f"{consumer}: there is no such consumer of {stream}, or it has no leader now")
        return [delivery_of(raw) for raw in pull.got]

    def _abandon(self, sid: int) -> None:
        """End a pull that may still bring something; what comes late is handed back."""
        self._wire.unsubscribe(sid, late=self._late)
        self._loop.call_later(_LATE_S, self._wire.forget, sid)

    def _late(self, _subject: bytes, reply: bytes, _header: bytes | None, _body: bytes) -> None:
        if reply:
            self._hand_back([reply])

    def _hand_back(self, tokens: list[bytes]) -> None:
        if tokens:
            self._wire.send(nak_frames(tokens), keep=True)
