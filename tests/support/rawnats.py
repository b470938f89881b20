"""A producer that speaks the NATS protocol by hand: it sends bytes that no client library would."""

from __future__ import annotations

import json
import socket
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

_ANSWER_S = 10.0
_AFTER_ERROR_S = 0.5


class RawProducer:
    """Publishes any bytes as subject, headers and body, and returns what JetStream answers. Blocks."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname or "127.0.0.1", address.port or 4222), timeout=10)
        self._read = b""
        self._count = 0
        self._socket.sendall(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB _RAW.* 1\r\n')
        self._sync()

    def publish(self, subject: bytes, body: bytes, header: bytes | None = None) -> dict[str, Any] | None:
        """The PubAck or error object; None where no stream took the message, or the server refused the frame."""
        self._count += 1
        reply = b"_RAW.%d" % self._count
        if header is None:
            frame = b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body)
        else:
            frame = b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
                subject, reply, len(header), len(header) + len(body), header, body,
            )  # fmt: skip
        self._socket.sendall(frame)
        return self._answer(reply)

    def _answer(self, reply: bytes) -> dict[str, Any] | None:
        ends = time.monotonic() + _ANSWER_S
        while time.monotonic() < ends:
            try:
                line = self._line()
            except TimeoutError:
                return None
            if line.startswith((b"MSG ", b"HMSG ")):
                parts = line.split(b" ")
                body = self._bytes(int(parts[-1]) + 2)[:-2]
                if parts[1] == reply:
                    return None if line.startswith(b"HMSG ") else json.loads(body)
            elif line.startswith(b"-ERR"):  # told about a wildcard, which is stored all the same
                self._socket.settimeout(_AFTER_ERROR_S)
            elif line == b"PING":
                self._socket.sendall(b"PONG\r\n")
        return None

    def _sync(self) -> None:
        self._socket.sendall(b"PING\r\n")
        while self._line() != b"PONG":
            pass

    def _line(self) -> bytes:
        while b"\r\n" not in self._read:
            self._more()
        line, self._read = self._read.split(b"\r\n", 1)
        return line

    def _bytes(self, count: int) -> bytes:
        while len(self._read) < count:
            self._more()
        found, self._read = self._read[:count], self._read[count:]
        return found

    def _more(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._read += data

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
