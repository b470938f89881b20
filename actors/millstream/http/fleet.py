"""Queues and workers over HTTP, and what one queue's active batch looks like."""

import asyncio
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from millstream.http import params, views
from millstream.http.asking import decoded_workers
from millstream.http.context import Context
from millstream.http.problems import Problem, json_response
from millstream.tracker.snapshot import shown
from millstream.tracker.view import active
from millstream_schemas.names import is_token

TASKS_SHOWN: Final = 200
_NO_STORE: Final = {"Cache-Control": "no-store"}


class Fleet:
    """What is not one task: `/v1/queues`, `/v1/workers`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def queues(self, request: Request) -> Response | Problem:
        tenant = params.tenant(request)
        if isinstance(tenant, Problem):
            return tenant
        context, now = self._context, self._context.clock.now()
        counted = context.view.queues(tenant)
        for name in context.settings.queues:
            counted.setdefault(name, {})
        items: list[dict[str, Any]] = []
        for name, states in sorted(counted.items()):
            ready_since = await context.reader.ready_since(name) if states.get("queued") else None
            items.append(
                {
                    "queue": name,
                    "states": states,
                    "active": active(states),
                    "total": sum(states.values()),
                    "oldest_ready_age_s": None if ready_since is None else round(max(now - ready_since, 0.0), 3),
                    "batch": _sums(context, name, now),
                }
            )
        seq = context.view.position.seq
        return json_response({"items": items, "next": None, "total": len(items), "seq": seq}, headers=_NO_STORE)

    async def workers(self, request: Request) -> Response | Problem:
        wrong = params.known_only(request, frozenset())
        if wrong is not None:
            return wrong
        entries = await self._context.broker.kv_all(self._context.names.workers_bucket)
        workers = decoded_workers(entries)
        items = [
            msgspec.structs.asdict(worker)
            | {"started_at": views.rfc3339(worker.started_at or None), "seen_at": views.rfc3339(worker.seen_at or None)}
            for worker in workers
        ]
        body = {"items": items, "next": None, "total": len(items), "unreadable": len(entries) - len(workers)}
        return json_response(body, headers=_NO_STORE)


def _sums(context: Context, queue: str, now: float) -> dict[str, Any]:
    batch = shown(context.view.batches.get(queue), now, context.batch_ends_after_s)
    return {name: getattr(batch, name) for name in ("total", "queued", "processing", "completed", "failed")}


class Snapshots:
    """The snapshot of each queue, made at most once a second however many look at it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._made: dict[str, tuple[float, bytes]] = {}
        self._lock = asyncio.Lock()

    async def of(self, queue: str) -> bytes:
        """The JSON of the queue's active batch, at most a second old."""
        async with self._lock:
            clock = self._context.clock
            at, body = self._made.get(queue, (0.0, b""))
            if body and 0 <= clock.monotonic() - at < 0.9:
                return body
            body = await self._make(queue)
            if len(self._made) > 1000:
                self._made.clear()
            self._made[queue] = (clock.monotonic(), body)
            return body

    async def _make(self, queue: str) -> bytes:
        context = self._context
        if not is_token(queue):
            return b"{}"
        batch = shown(context.view.batches.get(queue), context.clock.now(), context.batch_ends_after_s)
        rows = await context.reader.watched(queue, batch.began_at, TASKS_SHOWN) if batch.total else []
        return msgspec.json.encode(views.snapshot(queue, batch, rows))
