"""Dead letters over HTTP: list them, read one whole, run them again."""

from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from millstream.http import params, views
from millstream.http.context import Context
from millstream.http.problems import Problem, bad_parameter, json_response, not_found
from millstream.http.tasks import command_body, listing
from millstream.ports import Outgoing, Record, Stored
from millstream.tracker.model import TaskRow
from millstream_schemas.codec import UnknownMessage, decode_dead_letter, encode
from millstream_schemas.commands import Replay
from millstream_schemas.keys import is_key
from millstream_schemas.names import is_token

MAX_REPLAYS: Final = 1_000
_REPLAY: Final = "replay"


class ReplayBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters: one by `task_id`, or several by `ids`."""

    task_id: str | None = None
    ids: list[str] | None = None
    tenant_id: str | None = None
    by: str = "http"
    note: str = ""


class DeadLetters:
    """`/v1/dlq` and what lies below it. The list shows tasks that are failed now; a replayed one leaves it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def listed(self, request: Request) -> Response | Problem:
        asked = params.listing(request)
        if isinstance(asked, Problem):
            return asked
        if asked.wanted.states not in ((), ("failed",)):
            return bad_parameter("state", "failed, or none")
        asked = replace(asked, wanted=replace(asked.wanted, states=("failed",)))
        return json_response(
            await listing(self._context, asked, _letter_summary), headers={"Cache-Control": "no-store"}
        )

    async def get(self, request: Request) -> Response | Problem:
        tenant = params.tenant(request)
        if isinstance(tenant, Problem):
            return tenant
        row = await self._context.find(request.path_params["ident"], tenant)
        if row is None or not is_key(row.key) or not is_token(row.tenant_id):
            return not_found("dead letter")
        names = self._context.names
        record = await self._context.broker.last(names.dlq_stream, names.dlq_of_key(row.tenant_id, row.key))
        if record is None:
            return not_found("dead letter")
        try:
            return json_response(_letter(row, record), headers={"Cache-Control": "no-store"})
        except UnknownMessage:
            return Problem(502, "internal", "The dead letter was written by a newer version")

    async def replay(self, request: Request) -> Response | Problem:
        wrong = params.known_only(request, frozenset())
        if wrong is not None:
            return wrong
        body = await command_body(request, ReplayBody, ReplayBody())
        if isinstance(body, Problem):
            return body
        wanted = body.ids if body.ids is not None else [body.task_id] if body.task_id else []
        if not 0 < len(wanted) <= MAX_REPLAYS or (body.ids is not None and body.task_id is not None):
            return Problem(422, "invalid_request", f"Expected `task_id`, or `ids` with 1 to {MAX_REPLAYS} of them")
        rows: list[TaskRow] = []
        skipped: list[dict[str, str]] = []
        for ident in dict.fromkeys(wanted):
            row = await self._context.find(ident, body.tenant_id, wait_s=0.0)
            if row is None or row.state != "failed":
                skipped.append({"task_id": ident[:128], "state": row.state if row else "unknown"})
            else:
                rows.append(row)
        if not rows and body.ids is None:
            if skipped[0]["state"] == "unknown":
                return not_found("dead letter")
            return Problem(
                409, "not_replayable", f"The task is {skipped[0]['state']}", more={"state": skipped[0]["state"]}
            )
        replayed = await self._publish(rows, body)
        if replayed < len(rows):
            return Problem(
                503, "broker_unavailable", f"{replayed} of {len(rows)} commands were confirmed", retry_after_s=2,
                more={"replayed": replayed},
            )  # fmt: skip
        return json_response({"replayed": replayed, "skipped": skipped}, 202)

    async def _publish(self, rows: list[TaskRow], body: ReplayBody) -> int:
        names = self._context.names
        commands = [
            Outgoing(
                names.control(_REPLAY, row.tenant_id),
                encode(
                    Replay(
                        tenant_id=row.tenant_id,
                        task_id=row.task_id,
                        key=row.key,
                        by=body.by[:128],
                        note=body.note[:512],
                    )
                ),
            )
            for row in rows
        ]
        published = await self._context.control.publish_all(commands) if commands else []
        return sum(isinstance(each, Stored) for each in published)


def _letter_summary(row: TaskRow) -> dict[str, Any]:
    fingerprint = row.error.fingerprint if row.error is not None else ""
    return views.summary(row) | {
        "reason": row.reason,
        "fingerprint": fingerprint,
        "failed_at": views.rfc3339(row.ended_at),
    }


def _letter(row: TaskRow, record: Record) -> dict[str, Any]:
    """The dead letter as the stream holds it, with the task it belongs to. Raises UnknownMessage."""
    letter = decode_dead_letter(record.body)
    return {
        "task_id": letter.card.task_id,
        "key": letter.card.key,
        "tenant_id": letter.card.tenant_id,
        "queue": letter.card.queue,
        "task_type": letter.card.task_type,
        "trace_id": letter.card.trace_id,
        "generation": letter.card.generation,
        "state": row.state,
        "reason": letter.reason,
        "failure": letter.failure,
        "fingerprint": letter.failure.fingerprint,
        "envelope": letter.envelope,
        "history": [
            msgspec.structs.asdict(each) | {"ended_at": views.rfc3339(each.ended_at or None)} for each in letter.history
        ],
        "usage": letter.usage,
        "failed_at": views.rfc3339(letter.failed_at or record.at),
        "raw_base64": letter.raw_base64,
        "raw_bytes": letter.raw_bytes,
        "seq": record.seq,
    }
