"""The two ends that tests use of the stub provider: start it and read its log, and call it cheaply."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import msgspec

from tests.support.provider import Call, Config, KeyConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.processes import ActorProcess, Processes


class Provider:
    """A running stub provider."""

    def __init__(self, process: ActorProcess, port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    @classmethod
    def start(
        cls, processes: Processes, keys: Mapping[str, KeyConfig] | None = None, life_s: float = 900.0
    ) -> Provider:
        """Start one as a process of its own; it ends with the others of `processes`."""
        config = msgspec.json.encode(Config(keys=dict(keys or {}), life_s=life_s)).decode()
        process = processes.start_command([sys.executable, "-m", "tests.support.provider", config], "provider")
        process.wait_for_log('"port"')
        return cls(process, int(json.loads(process.log().splitlines()[0])["port"]))

    async def log(self, key: str | None = None) -> list[Call]:
        """Every arrival so far, of all keys or of one, in order of time."""
        calls = msgspec.json.decode(await self._ask("/log"), type=list[Call])
        return sorted((call for call in calls if key is None or call.key == key), key=lambda call: call.at)

    async def refuse(self, key: str, seconds: float, retry_after: str = "seconds") -> float:
        """Answer 429 to all calls of a key from now on; returns when that ends, by the monotonic clock."""
        found = await self._ask("/refuse", key=key, seconds=seconds, retry_after=retry_after)
        return float(msgspec.json.decode(found, type=float))

    async def _ask(self, path: str, **params: Any) -> bytes:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            answer = await client.get(path, params=params)
            answer.raise_for_status()
            return answer.content


@dataclass(frozen=True, slots=True)
class Answer:
    """What the provider answered to one call."""

    status: int
    retry_after: str


class Caller:
    """Calls the provider over connections that it keeps; a call costs some 50 µs."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def call(self, key: str, *, tag: str = "", tokens: int = 0, cost: float = 0.0) -> Answer:
        """One call, logged by the provider as it arrives; raises ConnectionError where it is gone."""
        if not self._idle:
            self._idle.append(await asyncio.open_connection("127.0.0.1", self._port))
        reader, writer = self._idle.pop()
        target = f"/call?key={quote(key)}&tokens={tokens}&cost={cost:.6f}&tag={quote(tag)}"
        writer.write(f"GET {target} HTTP/1.1\r\nhost: stub\r\n\r\n".encode())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = dict(line.split(": ", 1) for line in head[1:] if line)
            await reader.readexactly(int(fields["content-length"]))
        except asyncio.IncompleteReadError as error:
            writer.close()
            raise ConnectionError("the provider closed the connection") from error
        except asyncio.CancelledError:
            writer.close()
            raise
        self._idle.append((reader, writer))
        return Answer(int(head[0].split(" ")[1]), fields.get("retry-after", ""))

    def close(self) -> None:
        """Close all kept connections."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()
