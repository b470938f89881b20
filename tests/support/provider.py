"""A stub provider, a process of its own: HTTP by hand over bare sockets, so that a call costs it little.

`python -m tests.support.provider CONFIG` prints `{"port": …}` and serves until SIGTERM, at the longest `life_s`.
`GET /call?key=K&tokens=N&cost=C&tag=T` is one call; its arrival is logged whatever the answer. The log is the judge of
every limit: times are of the monotonic clock, which all processes of a machine share on Linux.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import msgspec

from millstream.loop import loop_factory
from tests.support.enforcing import Enforcer, Rule

LIMITED = json.dumps(
    {"error": {"message": "Rate limit reached", "type": "requests", "code": "rate_limit_exceeded"}}
).encode()
DONE = b'{"ok":true}'


class KeyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How calls with one key are treated.

    `retry_after` is the header's form: `seconds`, `date`, `none`, or any text that is sent as it is.
    """

    rules: tuple[Rule, ...] = ()
    charge_refused: bool = False
    retry_after: str = "seconds"
    latency_s: float = 0.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of keys; one that is not named has no limit."""

    keys: dict[str, KeyConfig] = {}
    life_s: float = 900.0


class Call(msgspec.Struct, array_like=True):
    """One arrival as logged. `ended` is when it was answered, 0 while it runs."""

    at: float
    key: str
    tag: str
    tokens: int
    cost: float
    status: int
    ended: float = 0.0


@dataclass
class _Key:
    config: KeyConfig
    enforcer: Enforcer
    refuse_until: float = 0.0
    hint: str = ""


@dataclass
class Stub:
    """The provider's state: its keys and its log."""

    config: Config
    keys: dict[str, _Key] = field(default_factory=dict[str, _Key])
    log: list[Call] = field(default_factory=list[Call])

    def key(self, name: str) -> _Key:
        found = self.keys.get(name)
        if found is None:
            config = self.config.keys.get(name, KeyConfig())
            enforcer = Enforcer(config.rules, charge_refused=config.charge_refused)
            found = self.keys[name] = _Key(config, enforcer)
        return found

    def arrive(self, now: float, asked: dict[str, str]) -> tuple[Call, float, str]:
        """Log one call; returns it with the answer's delay and its Retry-After header."""
        tokens = int(asked.get("tokens", "0"))
        name = asked.get("key", "")
        key = self.key(name)
        if now < key.refuse_until:
            wait_s = key.refuse_until - now
            header = retry_after(key.hint or key.config.retry_after, wait_s)
        else:
            wait_s = key.enforcer.arrive(now, tokens)
            header = retry_after(key.config.retry_after, wait_s)
        call = Call(now, name, asked.get("tag", ""), tokens, float(asked.get("cost", "0")), 429 if wait_s > 0 else 200)
        self.log.append(call)
        return call, 0.0 if wait_s > 0 else key.config.latency_s, header if wait_s > 0 else ""

    def control(self, path: str, asked: dict[str, str]) -> bytes:
        """The answers that are no calls: the log, and refusing everything for a while."""
        if path == "/log":
            return msgspec.json.encode(self.log[int(asked.get("from", "0")) :])
        if path == "/refuse":
            key = self.key(asked["key"])
            key.refuse_until = time.monotonic() + float(asked["seconds"])
            key.hint = asked.get("retry_after", "")
            return msgspec.json.encode(key.refuse_until)
        return b"null"


def retry_after(form: str, wait_s: float) -> str:
    """The header's value in one of its forms; what is no form is sent as it is."""
    if form == "none":
        return ""
    if form not in ("seconds", "date"):
        return form
    whole = min(10**6, math.ceil(wait_s)) if math.isfinite(wait_s) else 10**6
    # A date has no fractions: the next whole second, so that who keeps to it is never early.
    return str(whole) if form == "seconds" else formatdate(math.ceil(time.time() + whole), usegmt=True)


class Connection(asyncio.Protocol):
    """One client; requests have no body and are answered one after the other."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its ancestry

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
            self._request(now, head.split(b" ", 2)[1].decode())

    def _request(self, now: float, target: str) -> None:
        parts = urlsplit(target)
        asked = dict(parse_qsl(parts.query))
        if parts.path != "/call":
            self._answer(200, self._stub.control(parts.path, asked))
            return
        call, delay_s, header = self._stub.arrive(now, asked)
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self._finish, call, header)
        else:
            self._finish(call, header)

    def _finish(self, call: Call, header: str) -> None:
        call.ended = time.monotonic()
        self._answer(call.status, DONE if call.status == 200 else LIMITED, header)

    def _answer(self, status: int, body: bytes, header: str = "") -> None:
        if self._transport is None or self._transport.is_closing():
            return
        more = f"retry-after: {header}\r\n" if header else ""
        reason = "OK" if status == 200 else "Too Many Requests"
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n{more}content-length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)


async def serve(config: Config) -> None:
    """Serve until SIGTERM or the end of `life_s`."""
    loop = asyncio.get_running_loop()
    stub = Stub(config)
    server: Any = await loop.create_server(lambda: Connection(stub), "127.0.0.1", 0)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    sys.stdout.write(json.dumps({"port": server.sockets[0].getsockname()[1]}) + "\n")
    sys.stdout.flush()
    try:
        async with asyncio.timeout(config.life_s):
            await ended.wait()
    except TimeoutError:
        sys.stderr.write("provider: served for as long as it may\n")
    server.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(msgspec.json.decode(sys.argv[1], type=Config)))
