"""Our own publisher: pipelined, one inbox, a token and a time limit for each publish, one sweeper for all of them.

nats-py's own asynchronous publish never resolves a future whose answer was an error or was lost.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from millstream.errors import BrokerClosed
from millstream.jetstream.frames import publish_frame
from millstream.jetstream.protocol import NOT_AVAILABLE, WRONG_LAST_SEQUENCE, decode_pub_ack, status_of
from millstream.jetstream.wire import Wire
from millstream.ports import Conflict, Outgoing, Published, Refused, Stored, Unanswered

WINDOW = 4096  # the server refuses what comes while 10,000 publishes wait in one of its streams
_WINDOW_BYTES = 16 * 1024 * 1024
_CHUNK = 512
_SWEEP_S = 0.1
_AFTER_RECONNECT_S = 1.0
_BACKOFF_S = (0.05, 0.1, 0.2, 0.4)

_CONFLICT: Final = Conflict()
_UNANSWERED: Final = Unanswered()


class _Batch:
    """The results of one call, in its order, and who waits for them."""

    __slots__ = ("done", "left", "results")

    def __init__(self, size: int, done: asyncio.Future[None]) -> None:
        self.results: list[Published] = [_UNANSWERED] * size
        self.left = size
        self.done = done


class _Entry:
    """One publish under way."""

    __slots__ = ("batch", "deadline", "frame", "index", "sent", "token")

    def __init__(self, batch: _Batch, index: int, token: bytes, frame: bytes) -> None:
        self.batch = batch
        self.index = index
        self.token = token
        self.frame = frame
        self.deadline = 0.0
        self.sent = False


class Publisher:
    """Stores messages and reports each one's fate. `timeout_s` is the limit for one answer, retries included."""

    def __init__(self, wire: Wire, inbox_prefix: str, timeout_s: float) -> None:
        self._wire = wire
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._inbox = f"{inbox_prefix}.{secrets.token_hex(8)}."
        self._token_at = len(self._inbox)
        self._count = 0
        self._pending: dict[bytes, _Entry] = {}  # in order of their deadlines
        self._pending_bytes = 0
        self._room: deque[asyncio.Future[None]] = deque()
        self._again: list[_Entry] = []
        self._failures = 0
        self._sweeping = False
        self._closed = False
        wire.subscribe(f"{self._inbox}*", self._answered)
        wire.on_reconnect(self._reconnected)

    async def publish_all(self, outgoing: Sequence[Outgoing]) -> list[Published]:
        """One result each, in their order. Raises MessageTooLarge before anything is sent, and BrokerClosed."""
        if self._closed:
            raise BrokerClosed("the connection to the NATS server is closed")
        batch = _Batch(len(outgoing), self._loop.create_future())
        limit = int(self._wire.info.get("max_payload", 1024 * 1024))
        entries: list[_Entry] = []
        for index, message in enumerate(outgoing):
            self._count += 1
            token = str(self._count)
            frame = publish_frame(message, self._inbox + token, limit)
            entries.append(_Entry(batch, index, token.encode(), frame))
        for start in range(0, len(entries), _CHUNK):
            if len(self._pending) >= WINDOW or self._pending_bytes >= _WINDOW_BYTES:
                await self._wait_for_room()
            self._start(entries[start : start + _CHUNK])
        if batch.left:
            await batch.done
        return batch.results

    def _start(self, entries: list[_Entry]) -> None:
        deadline = self._loop.time() + self._timeout_s
        for entry in entries:
            entry.deadline = deadline
            self._pending[entry.token] = entry
            self._pending_bytes += len(entry.frame)
        self._send(entries)
        if not self._sweeping:
            self._sweeping = True
            self._loop.call_later(_SWEEP_S, self._sweep, self._loop.time() + _SWEEP_S)

    def _send(self, entries: list[_Entry]) -> None:
        if not self._wire.connected:
            return  # `_reconnected` sends what is still in time
        for entry in entries:
            entry.sent = True
        self._wire.send(b"".join([entry.frame for entry in entries]))

    def _answered(self, subject: bytes, _reply: bytes, header: bytes | None, body: bytes) -> None:
        entry = self._pending.get(subject[self._token_at :])
        if entry is None:
            return  # came after its time limit
        if not body and status_of(header) is not None:
            self._retry(entry)  # nobody listens: no stream, or it has no leader for now
            return
        try:
            ack = decode_pub_ack(body)
        except msgspec.DecodeError:
            return  # not from JetStream; the time limit decides
        error = ack.error
        if error is None:
            self._failures = 0
            self._resolve(entry, Stored(ack.seq, ack.duplicate, int(ack.val) if ack.val else None))
        elif error.err_code in WRONG_LAST_SEQUENCE:
            self._failures = 0
            self._resolve(entry, _CONFLICT)
        elif error.err_code in NOT_AVAILABLE:
            self._retry(entry)
        else:
            self._resolve(entry, Refused(error.err_code or error.code, error.description))

    def _resolve(self, entry: _Entry, result: Published) -> None:
        del self._pending[entry.token]
        self._pending_bytes -= len(entry.frame)
        batch = entry.batch
        batch.results[entry.index] = result
        batch.left -= 1
        if not batch.left and not batch.done.done():
            batch.done.set_result(None)
        if self._room and len(self._pending) < WINDOW // 2 and self._pending_bytes < _WINDOW_BYTES // 2:
            self._wake_all()

    def _wake_all(self) -> None:
        # All of them: each looks again for itself, and a waiter that is cancelled just now takes nobody's turn along.
        while self._room:
            waiting = self._room.popleft()
            if not waiting.done():
                waiting.set_result(None)

    async def _wait_for_room(self) -> None:
        while len(self._pending) >= WINDOW or self._pending_bytes >= _WINDOW_BYTES:
            waiting: asyncio.Future[None] = self._loop.create_future()
            self._room.append(waiting)
            await waiting
        if self._closed:
            raise BrokerClosed("the connection to the NATS server is closed")

    def _retry(self, entry: _Entry) -> None:
        if not self._again:
            delay = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
            self._failures += 1
            self._loop.call_later(delay, self._send_again)
        self._again.append(entry)
        entry.sent = False

    def _send_again(self) -> None:
        again, self._again = self._again, []
        self._send([entry for entry in again if entry.token in self._pending and not entry.sent])

    def _sweep(self, due: float) -> None:
        now = self._loop.time()
        if now - due < 5 * _SWEEP_S:  # else the loop was blocked and answers may lie unread: look again afterwards
            late: list[_Entry] = []
            for entry in self._pending.values():
                if entry.deadline > now:
                    break
                late.append(entry)
            for entry in late:
                self._resolve(entry, _UNANSWERED)
        self._sweeping = bool(self._pending)
        if self._sweeping:
            self._loop.call_later(_SWEEP_S, self._sweep, now + _SWEEP_S)

    def _reconnected(self) -> None:
        """Answers to what was sent before are most likely lost: wait for them no longer than a moment."""
        limit = self._loop.time() + _AFTER_RECONNECT_S
        unsent: list[_Entry] = []
        for entry in self._pending.values():
            if entry.sent:
                entry.deadline = min(entry.deadline, limit)
            else:
                unsent.append(entry)
        if unsent:
            self._send(unsent)

    def close(self) -> None:
        """Fail all that waits with BrokerClosed."""
        self._closed = True
        pending, self._pending = list(self._pending.values()), {}
        self._pending_bytes = 0
        for entry in pending:
            if not entry.batch.done.done():
                entry.batch.done.set_exception(BrokerClosed("the connection to the NATS server is closed"))
        self._wake_all()
