"""Core messages: listening and serving, with nothing durable behind them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from millstream.errors import MillstreamError
from millstream.jetstream.frames import check_subject, reply_frame
from millstream.jetstream.wire import Wire
from millstream.ports import Answering

_log = logging.getLogger("millstream.jetstream")


class CoreSubscription:
    """One subject that is listened to or served, until it is closed."""

    def __init__(self, wire: Wire, subject: str) -> None:
        check_subject(subject)
        self._wire = wire
        self._sid = 0
        self._subject = subject
        self._answering: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    def listen(self, heard: Callable[[str, bytes], None]) -> None:
        """Call `heard` for each message."""

        def call(subject: bytes, _reply: bytes, _header: bytes | None, body: bytes) -> None:
            heard(subject.decode("utf-8", "replace"), body)

        self._sid = self._wire.subscribe(self._subject, call)

    async def serve(self, answer: Answering, group: str | None) -> None:
        """Answer each request, in a task of its own where it has to be awaited; `close` ends those and waits for them."""
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())

        def call(_subject: bytes, reply: bytes, _header: bytes | None, body: bytes) -> None:
            try:
                result = answer(body)
                if result is None or isinstance(result, bytes):
                    self._send(reply, result)
                    return
            except Exception as error:  # noqa: BLE001 - the border of one request: its fault is its own
                self._failed(error)
                return
            task = tasks.create_task(self._answer(result, reply))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

        self._sid = self._wire.subscribe(self._subject, call, group or "")

    async def _answer(self, pending: Awaitable[bytes | None], reply: bytes) -> None:
        try:
            self._send(reply, await pending)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)

    def _send(self, reply: bytes, result: bytes | None) -> None:
        if result is not None and reply:
            self._wire.send(reply_frame(reply, result, int(self._wire.info.get("max_payload", 1024 * 1024))))

    def _failed(self, error: Exception) -> None:
        if isinstance(error, MillstreamError):
            _log.warning("no answer on %s: %s", self._subject, error)
        else:
            _log.error("answering on %s failed", self._subject, exc_info=error)

    async def close(self) -> None:
        """Take no more; cancel what is still being answered."""
        if self._sid:
            self._wire.unsubscribe(self._sid)
            self._sid = 0
        for task in self._answering:
            task.cancel()
        await self._stack.aclose()

    def end(self) -> None:
        """The connection is closed for good: what is still being answered runs to its end, unheard."""
