"""The ASGI application: its routes, and what holds for every request."""

import ipaddress
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.http.context import Context
from millstream.http.deadletters import DeadLetters
from millstream.http.fleet import Fleet, Snapshots
from millstream.http.health import Health
from millstream.http.limits import Limits
from millstream.http.metrics import Metrics
from millstream.http.page import Page
from millstream.http.problems import Endpoint, Problem, guarded, not_found, of_exception, problem_response
from millstream.http.streams import EventStream, QueueStream
from millstream.http.submit import Submits
from millstream.http.tasks import Tasks

SECURITY: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITE: Final = frozenset({"same-origin", "none"})


def create_app(context: Context) -> ASGIApp:
    """The whole surface over one tracker's read model."""
    app = Starlette(
        routes=_routes(context),
        exception_handlers={HTTPException: _http_exception, Exception: _exception},
    )
    app.router.redirect_slashes = False
    return Guard(app, context.settings.tracker.host)


def _routes(context: Context) -> list[BaseRoute]:
    tasks, submits, letters = Tasks(context), Submits(context), DeadLetters(context)
    fleet, health, page, limits = Fleet(context), Health(context), Page(), Limits(context)
    queue_stream = QueueStream(context, Snapshots(context))
    return [
        _get("/", page.index),
        _get("/static/{name}", page.static),
        _get("/healthz", health.alive),
        _get("/readyz", health.ready),
        _get("/metrics", Metrics(context).get),
        _get("/v1/tasks", tasks.listed),
        _post("/v1/tasks", submits.post),
        # an id may hold slashes: what is asked of it stands last
        _get("/v1/tasks/{ident:path}/result", tasks.result),
        _get("/v1/tasks/{ident:path}/why", tasks.why),
        _post("/v1/tasks/{ident:path}/cancel", tasks.cancel),
        _get("/v1/tasks/{ident:path}", tasks.get),
        _get("/v1/queues", fleet.queues),
        _post("/v1/queues/{queue}/cancel", tasks.cancel_queue),
        Route("/v1/queues/{queue}/stream", queue_stream, methods=["GET"]),
        Route("/v1/stream", EventStream(context), methods=["GET"]),
        _get("/v1/dlq", letters.listed),
        _post("/v1/dlq/replay", letters.replay),
        _get("/v1/dlq/{ident:path}", letters.get),
        _get("/v1/limits", limits.listed),
        _post("/v1/limits/{key:path}/operate", limits.operate),
        _get("/v1/limits/{key:path}", limits.get),
        _get("/v1/workers", fleet.workers),
    ]


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, guarded(endpoint), methods=["GET"])


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, guarded(endpoint), methods=["POST"])


async def _http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 405:
        response = problem_response(Problem(405, "method_not_allowed", "This method is not possible here"), request)
        allow = (error.headers or {}).get("Allow") if isinstance(error, HTTPException) else None
        if allow:
            response.headers["Allow"] = allow
        return response
    return problem_response(
        not_found("resource") if status == 404 else Problem(status, "invalid_request", "Bad request"), request
    )


async def _exception(request: Request, error: Exception) -> Response:
    return problem_response(of_exception(error), request)


class Guard:
    """Refuses what a page of another site could make a browser send, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._local_only = _is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refused(str(scope["method"]), Headers(scope=scope))

        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    headers[name] = value
            await send(message)

        app: ASGIApp = self._app if refused is None else problem_response(refused, Request(scope))
        await app(scope, receive, guarded_send)

    def _refused(self, method: str, headers: Headers) -> Problem | None:
        host = headers.get("host", "")
        if self._local_only and not _is_loopback(_hostname(host)):  # a name of another site that leads here
            return Problem(421, "misdirected", "This server answers for loopback names only")
        if method in _SAFE:
            return None
        site = headers.get("sec-fetch-site")
        origin = headers.get("origin")
        foreign = site not in _OWN_SITE if site is not None else origin is not None and urlsplit(origin).netloc != host
        return Problem(403, "cross_site", "Requests from other sites are refused") if foreign else None


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host in ("localhost", "ip6-localhost") or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
