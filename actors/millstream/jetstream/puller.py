"""Keeps pulls of one consumer outstanding, so that what was asked for and what is buffered stay within a credit.

Survives everything that ends a pull without a word: a restart, a new leader, a consumer made anew, a pull that the
server dropped. A delivery does not say which pull it belongs to, so the open pulls are counted together.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from millstream.jetstream.protocol import (
    API,
    HEARTBEAT,
    TIMED_OUT,
    as_json,
    nanos,
    parse_headers,
    status_of,
    status_text,
)
from millstream.jetstream.wire import Heard, Wire

EXPIRES_S = 30.0
HEARTBEAT_S = 1.0
_TICK_S = 0.5
_SILENT_TICKS = 6  # ticks, not seconds: a loop that was blocked for long counts one
_BACKOFF_S = (0.05, 0.1, 0.2, 0.4, 0.8)
_ORDINARY = ("Batch Completed", "Exceeds MaxBytes")  # told with 409 of every pull that has a limit of bytes
_MAX_BYTES = 8 * 1024 * 1024


class Puller:
    """Raw pulls with credit.

    `heard(subject, reply, header, body)` gets each message, `buffered()` says how many of them are not yet taken.
    `trouble(status)` hears of every end of a pull that is not ordinary (503, 409, 400), `beat(header)` each idle heartbeat.
    """

    def __init__(
        self,
        wire: Wire,
        inbox_prefix: str,
        target: tuple[str, str],
        credit: int,
        heard: Heard,
        buffered: Callable[[], int],
        trouble: Callable[[bytes], None] | None = None,
        beat: Callable[[dict[str, str]], None] | None = None,
    ) -> None:
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._next = f"{API}CONSUMER.MSG.NEXT.{target[0]}.{target[1]}"
        self._inbox = f"{inbox_prefix}.{secrets.token_hex(8)}."
        self._credit = credit
        self._heard = heard
        self._buffered = buffered
        self._trouble = trouble
        self._beat = beat
        self._asked = 0
        self._count = 0
        self._given_up = 0  # pulls up to this number count no more
        self._until = 0.0
        self._failures = 0
        self._paused = False
        self._silent_ticks = 0
        self._stopped = False
        self._sid = wire.subscribe(f"{self._inbox}*", self._incoming)
        self._undo = wire.on_reconnect(self._reconnected)
        self._loop.call_later(_TICK_S, self._tick)
        self.refill()

    def refill(self) -> None:
        """Ask for more once half of the credit is free."""
        room = self._credit - self._asked - self._buffered()
        if room * 2 < self._credit or room <= 0 or self._paused or self._stopped or not self._wire.connected:
            return
        self._count += 1
        token = str(self._count)
        largest = int(self._wire.info.get("max_payload", 0))
        request = as_json(
            {
                "batch": room,
                "max_bytes": max(_MAX_BYTES, 2 * largest),
                "expires": nanos(EXPIRES_S),
                "idle_heartbeat": nanos(HEARTBEAT_S),
            }
        )
        self._wire.send(f"PUB {self._next} {self._inbox}{token} {len(request)}\r\n".encode() + request + b"\r\n")
        self._asked += room
        self._until = self._loop.time() + EXPIRES_S
        self._silent_ticks = 0

    def _incoming(self, subject: bytes, reply: bytes, header: bytes | None, body: bytes) -> None:
        self._silent_ticks = 0
        if reply and (header is None or status_of(header) is None):
            self._failures = 0
            self._asked = max(0, self._asked - 1)
            self._heard(subject, reply, header, body)
            return
        status = status_of(header)
        if status is None or header is None:
            return
        if status == HEARTBEAT:
            if self._beat is not None:
                self._beat(parse_headers(header))
            return
        self._ended(subject[len(self._inbox) :], status, header)

    def _ended(self, token: bytes, status: bytes, header: bytes) -> None:
        if int(token) <= self._given_up:
            return
        left = parse_headers(header).get("Nats-Pending-Messages", "")
        if left.isdigit():
            self._asked = max(0, self._asked - int(left))
        else:
            self._forget()  # nobody knows how much of it was open; asking for too much is bounded by the credit
        if status != TIMED_OUT and not status_text(header).endswith(_ORDINARY):
            self._pause()
            if self._trouble is not None:
                self._trouble(status)
        self.refill()

    def _pause(self) -> None:
        if self._paused:
            return
        self._paused = True
        self._loop.call_later(_BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)], self._resume)
        self._failures += 1

    def _resume(self) -> None:
        self._paused = False
        self.refill()

    def _tick(self) -> None:
        if self._stopped:
            return
        self._loop.call_later(_TICK_S, self._tick)
        if not self._wire.connected:
            return
        self._silent_ticks += 1
        overdue = self._loop.time() > self._until + 2 * HEARTBEAT_S
        if self._asked and (overdue or self._silent_ticks > _SILENT_TICKS):
            self._forget()
        self.refill()

    def _reconnected(self) -> None:
        self._forget()
        self._paused = False
        self.refill()

    def _forget(self) -> None:
        self._asked = 0
        self._given_up = self._count

    async def stop(self, late: Heard | None = None) -> None:
        """Pull no more. With `late`, wait until what is under way has come in, and give it to that."""
        if self._stopped:
            return
        self._stopped = True
        self._undo()
        self._wire.unsubscribe(self._sid, late=late)
        if late is None:
            return
        try:
            if self._wire.connected:
                async with asyncio.timeout(1.0):
                    await self._wire.ping()
        except TimeoutError:
            pass
        finally:
            self._wire.forget(self._sid)
