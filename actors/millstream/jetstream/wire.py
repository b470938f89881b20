"""The one file that reaches into nats-py: raw writes, a fast reader, and subscriptions without a task or queue each.

nats-py keeps what it is good at (connect, TLS, credentials, pings, reconnect). Its reader is replaced: it parses with
regular expressions, makes an object, a queue entry and a task switch of every message, and one unexpected exception
leaves a connection that looks alive and reads nothing. tests/broker/test_jetstream_wire.py holds the private names down.
"""
# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client
from nats.errors import ProtocolError

Heard = Callable[[bytes, bytes, "bytes | None", bytes], None]
"""Called with subject, reply subject, raw header block (None without one) and body; must be quick."""

_log = logging.getLogger("millstream.jetstream")
_MAX_LINE = 1024 * 1024
_KEPT_BYTES = 8 * 1024 * 1024
_M, _H = b"MH"


@dataclass(slots=True)
class _Replay:
    """What nats-py needs of a subscription to renew it after a reconnect and to drop it at the end."""

    _id: int
    _subject: str
    _queue: str = ""
    _max_msgs: int = 0
    _received: int = 0
    _wait_for_msgs_task: None = None
    _message_iterator: None = None
    _pending_next_msgs_calls: None = None


class WireReader:
    """Stands in for nats-py's parser: `reset()` and `await parse(data)`; messages go straight to their `Heard`."""

    def __init__(self, client: Client) -> None:
        self.heard: dict[bytes, Heard] = {}
        self._client = client
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._needed = 0

    def reset(self) -> None:
        """Forget half a message: the connection that it came by is gone."""
        self._held.clear()
        self._held_bytes = 0

    async def parse(self, data: bytes = b"") -> None:
        """Take the next bytes; raises ProtocolError, on which nats-py reconnects, and nothing else."""
        if self._held:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._needed:
                return
            data = b"".join(self._held)
            self.reset()
        at, end = 0, len(data)
        while at < end:
            eol = data.find(b"\r\n", at)
            if eol < 0:
                if end - at > _MAX_LINE:
                    raise ProtocolError
                self._needed = end - at + 1
                break
            if data[at] == _M or (data[at] == _H):
                after = self._message(data, at, eol, end)
                if not after:
                    break
                at = after
            else:
                line = data[at:eol]
                at = eol + 2
                await self._control(line)
        if at < end:
            self._held.append(data[at:])
            self._held_bytes = end - at

    def _message(self, data: bytes, at: int, eol: int, end: int) -> int:
        """Hand over one message and return where the next line starts, 0 while part of it is missing."""
        parts = data[at:eol].split(b" ")
        with_header = data[at] == _H
        try:
            total = int(parts[-1])
            header_bytes = int(parts[-2]) if with_header else 0
            sid = parts[2]
        except (ValueError, IndexError):
            raise ProtocolError from None
        start = eol + 2
        stop = start + total
        if stop + 2 > end:
            self._needed = stop + 2 - at
            return 0
        heard = self.heard.get(sid)
        if heard is not None:
            reply = parts[3] if len(parts) == (6 if with_header else 5) else b""
            body = start + header_bytes
            try:
                heard(parts[1], reply, data[start:body] if header_bytes else None, data[body:stop])
            except Exception:  # noqa: BLE001 - a fault in one receiver must not end the reading for all
                _log.exception("a receiver failed on %r", parts[1])
        return stop + 2

    async def _control(self, line: bytes) -> None:
        verb = line[:4].upper()
        client = self._client
        if verb == b"PING":
            _write(client, b"PONG\r\n")
        elif verb == b"PONG":
            client._pings_outstanding = 0
            if client._pongs:
                waiting = client._pongs.pop(0)
                if not waiting.done():  # nats-py would die of a flush that was cancelled
                    waiting.set_result(True)
        elif verb == b"-ERR":
            await client._process_err(line[4:].strip().decode("utf-8", "replace").lower())
        elif verb == b"INFO":
            try:
                info = json.loads(line[4:])
            except ValueError:
                raise ProtocolError from None
            await client._process_info(info)
        elif not line.startswith(b"+OK"):
            raise ProtocolError


def _write(client: Client, data: bytes) -> None:
    transport = client._transport
    if transport is None:
        return
    try:
        transport.write(data)
    except (OSError, RuntimeError, AttributeError):
        _log.debug("written to a connection that is gone", exc_info=True)  # the reader notices and reconnects


class Wire:
    """A NATS connection as a pipe of bytes with numbered subscriptions. Belongs to the loop that made it."""

    def __init__(self) -> None:
        self.client = Client()
        self._reader = WireReader(self.client)
        self.client._ps = self._reader  # type: ignore[assignment]
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._sid = 0
        self._reconnected: list[Callable[[], None]] = []

    @property
    def connected(self) -> bool:
        """Whether bytes can go out now."""
        return self.client.is_connected

    @property
    def closed(self) -> bool:
        """Whether the connection is closed for good."""
        return self.client.is_closed

    @property
    def info(self) -> dict[str, Any]:
        """The server's INFO of the current connection."""
        return self.client._server_info

    def abandon(self) -> None:
        """Give up an attempt to connect without a trace."""
        transport = self.client._transport
        if transport is not None:
            transport.close()  # type: ignore[no-untyped-call]

    def send(self, data: bytes, *, keep: bool = False) -> None:
        """Write protocol bytes with all else that is sent in this turn of the loop, in order.

        Without a connection they are dropped, or kept for the next one where `keep` (up to 8 MiB).
        """
        if not self.client.is_connected:
            if keep and self._kept_bytes < _KEPT_BYTES:
                self._kept.append(data)
                self._kept_bytes += len(data)
            return
        if not self._out:
            self._loop.call_soon(self._write_out)
        self._out.append(data)

    def _write_out(self) -> None:
        if not self._out:
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        _write(self.client, data)

    def subscribe(self, subject: str, heard: Heard, group: str = "") -> int:
        """Have `heard` called for each message on `subject`, through all reconnects; returns the number to end it by.

        Of the subscribers in one `group` one gets each message.
        """
        self._sid += 1
        sid = self._sid
        self._reader.heard[b"%d" % sid] = heard
        self.client._subs[sid] = _Replay(sid, subject, group)  # type: ignore[assignment]
        self.send(f"SUB {subject} {group} {sid}\r\n".encode())
        return sid

    def unsubscribe(self, sid: int, *, late: Heard | None = None) -> None:
        """End a subscription. What is under way goes to `late` until `forget(sid)`, if one is given."""
        self.client._subs.pop(sid, None)
        self.send(b"UNSUB %d\r\n" % sid)
        if late is None:
            self.forget(sid)
        else:
            self._reader.heard[b"%d" % sid] = late

    def forget(self, sid: int) -> None:
        """Drop what still comes for an ended subscription."""
        self._reader.heard.pop(b"%d" % sid, None)

    async def ping(self) -> None:
        """Write out all that was sent and wait until the server has read it; hangs if the connection breaks."""
        self._write_out()
        pong: asyncio.Future[bool] = self._loop.create_future()
        self.client._pongs.append(pong)
        _write(self.client, b"PING\r\n")
        await pong

    async def wait_connected(self) -> None:
        """Return at once, or after the next reconnect; for ever if there is none: callers bring a time limit."""
        while not self.client.is_connected:
            back = asyncio.Event()
            undo = self.on_reconnect(back.set)
            try:
                await back.wait()
            finally:
                undo()

    def on_reconnect(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have `call` called after each reconnect; returns what undoes it."""
        self._reconnected.append(call)

        def undo() -> None:
            if call in self._reconnected:
                self._reconnected.remove(call)

        return undo

    def after_reconnect(self) -> None:
        """Send what was kept and tell all who asked; subscriptions have been renewed before."""
        kept, self._kept, self._kept_bytes = self._kept, [], 0
        if kept:
            self.send(b"".join(kept))
        for call in tuple(self._reconnected):
            call()
