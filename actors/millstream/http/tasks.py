"""Tasks over HTTP: list, look at, explain, cancel. Reading changes nothing."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from millstream.http import explain, params, views
from millstream.http.context import Context, body_of
from millstream.http.problems import Fault, Problem, json_response, not_found
from millstream.ports import Outgoing, Stored
from millstream.tracker.model import TaskRow
from millstream_schemas.codec import encode
from millstream_schemas.commands import Cancel
from millstream_schemas.lifecycle import TERMINAL
from millstream_schemas.names import is_token

T = TypeVar("T")
D = TypeVar("D")

COMMAND_BODY_BYTES: Final = 64 * 1024
CANCEL_CHUNK: Final = 500


class CancelBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a cancel may say of itself."""

    by: str = "http"
    note: str = ""


class Tasks:
    """`/v1/tasks` and what lies below it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def listed(self, request: Request) -> Response | Problem:
        asked = params.listing(request)
        if isinstance(asked, Problem):
            return asked
        return json_response(await listing(self._context, asked, views.summary), headers={"Cache-Control": "no-store"})

    async def get(self, request: Request) -> Response | Problem:
        row = await self._row(request)
        if isinstance(row, Problem):
            return row
        lines = await self._context.reader.timeline(row)
        result = await self._context.reader.result(row)
        headers = {"Cache-Control": "no-store", "ETag": f'"{row.seq}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        if row.state not in TERMINAL:
            headers["Retry-After"] = "1"
        return json_response(views.task(row, lines, result), headers=headers)

    async def result(self, request: Request) -> Response | Problem:
        row = await self._row(request)
        if isinstance(row, Problem):
            return row
        result = await self._context.reader.result(row)
        if result is not None:
            return Response(result, 200, {"Cache-Control": "no-store"}, "application/json")
        if row.state in TERMINAL:
            return Problem(409, "no_result", f"The task is {row.state}", more={"state": row.state})
        return json_response({"task_id": row.task_id, "state": row.state}, 202, {"Retry-After": "1"})

    async def why(self, request: Request) -> Response | Problem:
        row = await self._row(request)
        if isinstance(row, Problem):
            return row
        return json_response(await explain.why(self._context, row), headers={"Cache-Control": "no-store"})

    async def cancel(self, request: Request) -> Response | Problem:
        body = await command_body(request, CancelBody, CancelBody())
        if isinstance(body, Problem):
            return body
        row = await self._row(request)
        if isinstance(row, Problem):
            return row
        if row.state in TERMINAL:
            return Problem(409, "already_final", f"The task is {row.state}", more={"state": row.state})
        context = self._context
        command = _cancel(row, body)
        subject = context.names.control(_CANCEL, row.tenant_id)
        if not isinstance(await context.control.publish(Outgoing(subject, encode(command))), Stored):
            return Problem(503, "broker_unavailable", "The command was not confirmed; ask again", retry_after_s=2)
        return json_response(views.summary(row), 202, {"Location": views.task_url(row)})

    async def cancel_queue(self, request: Request) -> Response | Problem:
        """Cancel what waits in a queue now; what runs ends by itself."""
        name, tenant = request.path_params["queue"], params.tenant(request)
        if isinstance(tenant, Problem):
            return tenant
        if not is_token(name):
            return not_found("queue")
        body = await command_body(request, CancelBody, CancelBody())
        if isinstance(body, Problem):
            return body
        body = CancelBody(by=body.by, note=body.note or "the queue was cancelled")
        context, cancelled, after, upto = self._context, 0, 0, self._context.view.position.seq
        while True:
            rows = await context.reader.waiting(name, tenant, after, CANCEL_CHUNK)
            commands = [
                Outgoing(context.names.control(_CANCEL, row.tenant_id), encode(_cancel(row, body)))
                for row in rows
                if row.n <= upto
            ]
            published = await context.control.publish_all(commands) if commands else []
            confirmed = sum(isinstance(each, Stored) for each in published)
            cancelled += confirmed
            if confirmed < len(commands):
                detail = f"{cancelled} commands were confirmed, then no more; ask again for the others"
                return Problem(503, "broker_unavailable", detail, retry_after_s=2, more={"cancelled": cancelled})
            if len(commands) < CANCEL_CHUNK:
                break
            after = rows[-1].n
        return json_response({"cancelled": cancelled, "queue": name, "seq": upto}, 202)

    async def _row(self, request: Request) -> TaskRow | Problem:
        tenant = params.tenant(request)
        if isinstance(tenant, Problem):
            return tenant
        row = await self._context.find(request.path_params["ident"], tenant)
        return not_found("task") if row is None else row


_CANCEL: Final = "cancel"


def _cancel(row: TaskRow, body: CancelBody) -> Cancel:
    return Cancel(tenant_id=row.tenant_id, task_id=row.task_id, key=row.key, by=body.by[:128], note=body.note[:512])


async def command_body(request: Request, kind: type[T], default: D) -> T | D | Problem:
    """The body of a command; none at all is the default."""
    body = await body_of(request, COMMAND_BODY_BYTES)
    if isinstance(body, Problem) or not body.strip():
        return body if isinstance(body, Problem) else default
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return Problem(400, "invalid_request", "The request body does not fit", (Fault(str(error)[:512]),))


async def listing(context: Context, asked: params.Listing, shown: Callable[[TaskRow], views.Json]) -> dict[str, Any]:
    """A page of tasks, each as `shown` has it; `total` counts exactly by tenant, queue and state, else up to a cap."""
    seq = context.view.position.seq
    page = await context.reader.page(asked.wanted, asked.limit, asked.before)
    total = context.view.total(asked.wanted)
    if total is None:
        total = await context.reader.count(asked.wanted)
    items = [shown(row) for row in page.items]
    return {"items": items, "next": params.as_cursor(page.next), "total": total, "seq": seq}
