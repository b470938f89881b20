"""Limits over HTTP: what each allows, what is in effect and in use; and what an operator can tell one of them to do."""

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from millstream.http import asking, params, views
from millstream.http.context import Context
from millstream.http.problems import Problem, json_response, not_found
from millstream.http.tasks import command_body
from millstream_schemas.limit_states import LimitState
from millstream_schemas.permits import Denied, LimitsListing, Operate, Operation

_NO_STORE: Final = {"Cache-Control": "no-store"}
_MAX_KEY: Final = 128


class OperateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do: force the breaker `open`, leave it to itself (`auto`), `disable` it, or `resume` a paused limit."""

    operation: Operation
    by: str = "http"


class Limits:
    """`/v1/limits` and what lies below it. Reading changes nothing."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def listed(self, request: Request) -> Response | Problem:
        wrong = params.known_only(request, frozenset())
        if wrong is not None:
            return wrong
        listing = await asking.limits(self._context)
        if listing is None:
            return _silent()
        now = self._context.clock.now()
        items = [limit(state, now) for state in listing.items]
        page: dict[str, Any] = {"items": items, "next": None, "total": len(items)}
        page |= {"prices": [msgspec.structs.asdict(price) for price in listing.prices], "unknown": listing.unknown}
        return json_response(page | _head(listing), headers=_NO_STORE)

    async def get(self, request: Request) -> Response | Problem:
        wrong = params.known_only(request, frozenset())
        if wrong is not None:
            return wrong
        return await self._one(request.path_params["key"])

    async def operate(self, request: Request) -> Response | Problem:
        """Have the governor do what was asked, and show the limit as it is afterwards."""
        key = request.path_params["key"]
        body = await command_body(request, OperateBody, None)
        if body is None:
            return Problem(400, "invalid_request", 'Expected a body such as {"operation": "open"}')
        if isinstance(body, Problem):
            return body
        if not 0 < len(key) <= _MAX_KEY:
            return not_found("limit")
        asked = Operate(key=key, operation=body.operation, by=body.by[:128])
        reply = await asking.governor(self._context, asked)
        if reply is None:
            return _silent()
        if isinstance(reply, Denied):
            if reply.reason == "unknown_limit":
                return not_found("limit")
            detail = reply.detail or reply.reason.replace("_", " ")
            return Problem(409, "not_possible", f"The governor refused: {detail}")
        return await self._one(key)

    async def _one(self, key: str) -> Response | Problem:
        if not 0 < len(key) <= _MAX_KEY:
            return not_found("limit")
        listing = await asking.limits(self._context, key)
        if listing is None:
            return _silent()
        found = next((state for state in listing.items if state.key == key), None)
        if found is None:
            return not_found("limit")
        return json_response(limit(found, self._context.clock.now()) | _head(listing), headers=_NO_STORE)


def limit(state: LimitState, now: float) -> dict[str, Any]:
    """One limit as JSON; the end of a pause stands in it both as seconds that are left and as an instant."""
    paused = state.paused_for_s
    whole: dict[str, Any] = msgspec.structs.asdict(state)
    whole["dimensions"] = [msgspec.structs.asdict(each) for each in state.dimensions]
    return whole | {"paused_until": None if paused is None else views.rfc3339(now + paused)}


def _head(listing: LimitsListing) -> dict[str, Any]:
    """The term of the governor that answered, the configuration that it works by, and what is wrong with a newer one."""
    return {"epoch": listing.epoch, "revision": listing.revision, "fault": listing.fault}


def _silent() -> Problem:
    detail = "No rate-governor answered; is one running? Start one with `millstream governor`"
    return Problem(503, "governor_unavailable", detail, retry_after_s=2)
