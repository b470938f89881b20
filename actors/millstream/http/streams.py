"""Server-sent events: every folded event with resume from any sequence, and one queue's snapshot a second."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from millstream.http import params, views
from millstream.http.context import Context
from millstream.http.fleet import Snapshots
from millstream.http.problems import Problem, not_found, of_exception, problem_response
from millstream.tracker.hub import Client, Interest
from millstream.tracker.model import Change
from millstream_schemas.names import is_token

HEARTBEAT_S: Final = 15.0
SEND_LIMIT_S: Final = 15.0
"""A client that takes nothing for so long is closed."""
PAGE: Final = 500
SNAPSHOT_EVERY_S: Final = 1.0
RETRY: Final = b"retry: 2000\n"
BEAT: Final = b": beat\n\n"
BYE: Final = b"event: bye\ndata: {}\n\n"

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """`GET /v1/stream`: an ASGI application. Without a last event id it begins with what comes next."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        interest, last = params.interest(request), params.last_event_id(request)
        for each in (interest, last):
            if isinstance(each, Problem):
                await problem_response(each, request)(scope, receive, send)
                return
        assert isinstance(interest, Interest)
        assert not isinstance(last, Problem)
        await serve(self._context, request, send, self._frames(interest, last))

    async def _frames(self, interest: Interest, last: int | None) -> AsyncGenerator[bytes, None]:
        hub = self._context.hub
        position = hub.position if last is None else last
        yield RETRY + (b"id: %d\n\n" % position)
        if last is not None:
            notice, position = await self._gap(position)
            if notice:
                yield notice
            async for lines in self._pages(position, None):
                yield _joined(lines, interest)
                position = lines[-1].entry.seq
        client = hub.subscribe(interest)
        try:
            async for lines in self._pages(position, client.position):
                yield _joined(lines, interest)
                position = lines[-1].entry.seq
            async for chunk in self._live(client, position):
                yield chunk
        finally:
            hub.unsubscribe(client)

    async def _pages(self, after: int, upto: int | None) -> AsyncIterator[list[Change]]:
        """What the store holds after a sequence; without `upto`, until a page is not full."""
        while True:
            lines = await self._context.reader.lines_after(after, PAGE, upto)
            if lines:
                yield lines
                after = lines[-1].entry.seq
            if len(lines) < PAGE:
                return

    async def _live(self, client: Client, position: int) -> AsyncIterator[bytes]:
        while not self._context.hub.closing.is_set():
            frames = await client.take(HEARTBEAT_S)
            if client.overflowed:
                yield b'event: reset\ndata: {"reason":"too_slow"}\n\n'
                return
            yield b"".join(encoded for seq, encoded in frames if seq > position) or BEAT
        yield BYE

    async def _gap(self, last: int) -> tuple[bytes, int]:
        """A `reset` where what follows `last` is gone, or where the stream never came so far; and where to go on."""
        context = self._context
        if last > context.view.stream_end:
            info = await context.broker.stream_info(context.names.events_stream)
            if info is None or last > info.last_seq:
                return b'event: reset\ndata: {"reason":"unknown_id"}\n\n', context.hub.position
        if last < await context.reader.swept_seq():
            return b'event: reset\ndata: {"reason":"history_gone"}\n\n', last
        return b"", last


def _joined(lines: list[Change], interest: Interest) -> bytes:
    return b"".join(views.event_frame(line) for line in lines if interest.covers(line.row, line.entry))


class QueueStream:
    """`GET /v1/queues/{queue}/stream`: an ASGI application that sends `event: status` each second."""

    def __init__(self, context: Context, snapshots: Snapshots) -> None:
        self._context = context
        self._snapshots = snapshots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        queue = request.path_params["queue"]
        wrong = params.known_only(request, frozenset()) or (None if is_token(queue) else not_found("queue"))
        if wrong is not None:
            await problem_response(wrong, request)(scope, receive, send)
            return
        await serve(self._context, request, send, self._frames(queue))

    async def _frames(self, queue: str) -> AsyncGenerator[bytes, None]:
        closing = self._context.hub.closing
        yield RETRY
        while not closing.is_set():
            position = self._context.hub.position
            yield b"id: %d\nevent: status\ndata: %s\n\n" % (position, await self._snapshots.of(queue))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SNAPSHOT_EVERY_S):
                    await closing.wait()
        yield BYE


async def serve(context: Context, request: Request, send: Send, frames: AsyncGenerator[bytes, None]) -> None:
    """Send frames until they end, the client leaves, or it takes nothing for too long."""
    scope, receive = request.scope, request.receive
    if request.method == "HEAD":
        await frames.aclose()
        await Response(headers=_HEADERS)(scope, receive, send)
        return
    if not context.hub.admit():
        await frames.aclose()
        problem = Problem(503, "too_many_streams", "Too many streams are open", retry_after_s=10)
        await problem_response(problem, request)(scope, receive, send)
        return
    try:
        await _until_either(_left(receive), _send_all(send, frames))
    finally:
        context.hub.leave()


async def _until_either(left: Coroutine[None, None, None], sent: Coroutine[None, None, None]) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(left), group.create_task(sent)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_all(send: Send, frames: AsyncGenerator[bytes, None]) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
    start: Message = {"type": "http.response.start", "status": 200, "headers": headers}
    async with contextlib.aclosing(frames):
        with contextlib.suppress(OSError, TimeoutError):
            await send(start)
            async for chunk in _told(frames):
                async with asyncio.timeout(SEND_LIMIT_S):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _told(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The frames that are not empty; a fault on our side ends them with a `reset`, so that the client asks again."""
    try:
        async for chunk in frames:
            if chunk:
                yield chunk
    except Exception as error:  # noqa: BLE001 - the one boundary of a stream
        yield b'event: reset\ndata: {"reason":"%s"}\n\n' % of_exception(error).code.encode()
