"""What the endpoints share: the read model, the hub, the broker and the settings."""

import asyncio
import uuid
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect, Request

from millstream.http.problems import Problem
from millstream.ports import Broker, Clock
from millstream.settings import Settings
from millstream.tracker.hub import Hub
from millstream.tracker.model import TaskRow
from millstream.tracker.queries import Reader
from millstream.tracker.view import View
from millstream_schemas.lifecycle import TERMINAL
from millstream_schemas.names import Names

FIRST_EVENT_WAIT_S: Final = 1.0
MAX_PREFER_WAIT_S: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One tracker's parts, as HTTP uses them. `control` is the connection that may publish commands."""

    reader: Reader
    view: View
    hub: Hub
    broker: Broker
    control: Broker
    settings: Settings
    clock: Clock

    @property
    def names(self) -> Names:
        return self.settings.names

    @property
    def batch_ends_after_s(self) -> float:
        return self.settings.tracker.batch_ends_after_s

    async def find(self, ident: str, tenant: str | None, wait_s: float = FIRST_EVENT_WAIT_S) -> TaskRow | None:
        """The task of this id or key; waits up to `wait_s` for its first event."""
        if not 0 < len(ident) <= 128:
            return None
        deadline = self.clock.monotonic() + wait_s
        with self.hub.watch(ident) as watch:
            while True:
                row = await self.reader.find(ident, tenant)
                left = deadline - self.clock.monotonic()
                if row is not None or left <= 0 or not await watch.changed(left):
                    return row

    async def outcome(self, ident: str, tenant: str, wait_s: float, generation: int = 1) -> TaskRow | None:
        """The task once that generation of it, or a later one, has an outcome; after `wait_s` as it is then, if it is."""
        deadline = self.clock.monotonic() + wait_s
        with self.hub.watch(ident) as watch:
            while True:
                row = await self.reader.find(ident, tenant)
                left = deadline - self.clock.monotonic()
                begun = row is not None and row.generation >= generation
                over = begun and row is not None and row.state in TERMINAL
                if over or left <= 0 or not await watch.changed(left):
                    return row if begun else None

    def new_id(self) -> str:
        return uuid.uuid4().hex


async def body_of(request: Request, limit_bytes: int) -> bytes | Problem:
    """The body, never more of it than `limit_bytes`."""
    too_large = Problem(413, "payload_too_large", f"Expected at most {limit_bytes} bytes of body")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 18 or int(length) > limit_bytes):
        return too_large
    body = bytearray()
    try:
        async with asyncio.timeout(30):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    return too_large
    except TimeoutError:
        raise ClientDisconnect from None
    return bytes(body)
