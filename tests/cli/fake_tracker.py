"""A tracker that answers what a test tells it to, on a real port, and a runner of our commands against it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from click.testing import CliRunner, Result
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from millstream.cli import main
from tests.support.waiting import wait_until_sync

Json = dict[str, Any]
HOSTILE = "\x1b[31mred\x07\r\n[bold]mark\u202eup\u2028\x9b2J\ud7ff"


class FakeTracker:
    """`answers` maps `GET /v1/tasks` to a status and a body, or to several for calls in a row (the last one stays)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, list[tuple[int, Any]]] = {}
        self.streams: list[bytes] = []
        """What each call of the event stream gets; then it ends. Without any left, it is refused."""
        self.asked: list[tuple[str, dict[str, list[str]], Any, str | None]] = []

    def on(self, call: str, *answers: Any, status: int = 200) -> None:
        """Answer a call."""
        self.answers[call] = [(status, body) for body in answers]

    def queries(self, call: str) -> list[dict[str, list[str]]]:
        """The query parameters of every such call."""
        return [query for name, query, _, _ in self.asked if name == call]

    def bodies(self, call: str) -> list[Any]:
        """The JSON bodies of every such call."""
        return [body for name, _, body, _ in self.asked if name == call]

    def resumed_after(self) -> list[str | None]:
        """Where each call of the event stream began."""
        return [after for name, _, _, after in self.asked if name == "GET /v1/stream"]

    async def endpoint(self, request: Request) -> Response:
        """Answer any request."""
        call = f"{request.method} {request.scope['raw_path'].decode()}"
        query = {name: request.query_params.getlist(name) for name in request.query_params}
        body = await request.body()
        self.asked.append((call, query, json.loads(body) if body else None, request.headers.get("last-event-id")))
        if call == "GET /v1/stream" and self.streams:
            return StreamingResponse(iter([self.streams.pop(0)]), media_type="text/event-stream")
        found = self.answers.get(call)
        if found is None:
            return problem(404, "not_found", "There is no task of this name here")
        status, answer = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(answer, Response):
            return answer
        media = "application/json" if status < 400 else "application/problem+json"
        return JSONResponse(answer, status, media_type=media)

    def run(self, *args: str, stdin: str | None = None) -> Result:
        """Run a command of ours against this tracker, in this process."""
        return run(*args, stdin=stdin, env={"MILLSTREAM_HTTP_URL": self.url})


def run(*args: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
    """Run a command of ours in this process; what it raises beside its exit is raised."""
    result = CliRunner().invoke(main, list(args), input=stdin, env=env, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def problem(status: int, code: str, detail: str, **more: Any) -> Response:
    """A problem as the tracker tells it."""
    body = {"type": "about:blank", "title": "t", "status": status, "detail": detail, "code": code, **more}
    return JSONResponse(body, status, media_type="application/problem+json")


def task(ident: str, state: str, seq: int = 1, **more: Any) -> Json:
    """A task as the tracker shows it."""
    return {
        "task_id": ident,
        "key": f"key-{ident}",
        "state": state,
        "task_type": "notes.summarize",
        "queue": "agent-run",
        "tenant_id": "acme",
        "priority": "normal",
        "attempt": 1,
        "max_attempts": 3,
        "created_at": "2026-01-02T03:04:05.678Z",
        "seq": seq,
        **more,
    }


def event(seq: int, ident: str, kind: str, state: str, *, info: bool = False, **more: Any) -> bytes:
    """One frame of the event stream."""
    data = {"seq": seq, "at": "2026-01-02T03:04:05.678Z", "kind": kind, "state": state, "attempt": 1, "detail": ""}
    data |= {"task_id": ident, "key": f"key-{ident}", "tenant_id": "acme", "queue": "q", "task_type": "t", **more}
    name = "info" if info else "task"
    return f"id: {seq}\nevent: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def page(items: Sequence[Json], following: str | None = None, **more: Any) -> Json:
    """One page of a listing."""
    return {"items": list(items), "next": following, "total": len(items), "seq": 100, **more}


@contextmanager
def fake_tracker() -> Generator[FakeTracker, None, None]:
    """Serve a tracker without any answers, on a free port, until the end of the block."""
    bound = socket.create_server(("127.0.0.1", 0))
    tracker = FakeTracker(f"http://127.0.0.1:{bound.getsockname()[1]}")
    app = Starlette(routes=[Route("/{path:path}", tracker.endpoint, methods=["GET", "POST"])])
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", loop="asyncio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        wait_until_sync(lambda: server.started, "the fake tracker listens")
        yield tracker
    finally:
        server.should_exit = True
        thread.join()
