"""Answers: JSON, and problems as RFC 9457 has them. An endpoint returns a Problem; it never raises for a caller's fault."""

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from millstream.errors import BrokerError, MessageTooLarge
from millstream.policy.trace import parse_traceparent
from millstream_schemas.codec import InvalidEnvelope

_log: Final = logging.getLogger("millstream.http")
_encode: Final = msgspec.json.Encoder().encode
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")

_TITLES: Final[Mapping[str, str]] = {
    "bad_parameter": "A query parameter is not valid",
    "invalid_envelope": "The task does not fit the contract",
    "invalid_request": "The request body does not fit",
    "payload_too_large": "The task is too large",
    "conflict": "The same key names another task",
    "already_final": "The task has its outcome already",
    "not_replayable": "Only a failed task can be replayed",
    "not_found": "There is nothing of this name",
    "no_result": "The task has no result",
    "method_not_allowed": "This method is not possible here",
    "cross_site": "Requests from other sites are refused",
    "misdirected": "The host name is not this server's",
    "broker_unavailable": "The broker did not answer",
    "store_full": "The broker has no room for new tasks",
    "not_possible": "This cannot be done now",
    "governor_unavailable": "No governor answered",
    "query_too_slow": "The query took too long",
    "too_many_streams": "Too many streams are open",
    "not_ready": "Not ready",
    "internal": "Something went wrong here",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in what the caller sent; `pointer` is a JSON Pointer as a URI fragment."""

    detail: str
    pointer: str = "#"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request was not done. `more` holds further members."""

    status: int
    code: str
    detail: str
    errors: tuple[Fault, ...] = ()
    retry_after_s: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])


Endpoint = Callable[[Request], Awaitable[Response | Problem]]


def pointer(path: str) -> str:
    """`$.budget.max_attempts` as `#/budget/max_attempts`."""
    steps = [name or index for name, index in _STEP.findall(path.removeprefix("$"))]
    return "#" + "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)


def bad_parameter(name: str, expected: str) -> Problem:
    """A query parameter that does not fit; what was sent is not repeated."""
    return Problem(
        400,
        "bad_parameter",
        f"Expected {expected} - at query parameter `{name}`",
        (Fault(f"Expected {expected}", f"#/{name}"),),
    )


def not_found(what: str) -> Problem:
    """404: nothing of this name, or nothing that the caller may see."""
    return Problem(404, "not_found", f"There is no {what} of this name here")


def invalid_envelope(error: InvalidEnvelope, *, malformed: bool) -> Problem:
    """400 where the body is no JSON at all, 422 where the JSON does not fit."""
    more = {} if error.byte_offset is None else {"byte_offset": error.byte_offset}
    fault = Fault(error.message, pointer(error.path))
    status = 400 if malformed else 422
    return Problem(
        status, "invalid_envelope", f"{error.message} - at `{error.path}`", (fault,), more={"path": error.path, **more}
    )


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`body` as JSON."""
    return Response(_encode(body), status, dict(headers or {}), "application/json")


def problem_response(problem: Problem, request: Request) -> Response:
    """The problem as `application/problem+json`, with the caller's trace id where it sent one."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": _TITLES.get(problem.code, "Problem"),
        "status": problem.status,
        "detail": problem.detail,
        "code": problem.code,
    }
    trace = parse_traceparent(request.headers.get("traceparent", ""))
    if trace is not None:
        body["trace_id"] = trace.trace_id
    if problem.errors:
        body["errors"] = [{"pointer": fault.pointer, "detail": fault.detail} for fault in problem.errors]
    headers = {"Cache-Control": "no-store"}
    if problem.retry_after_s is not None:
        body["retry_after"] = problem.retry_after_s
        headers["Retry-After"] = str(problem.retry_after_s)
    return Response(_encode(body | dict(problem.more)), problem.status, headers, "application/problem+json")


def of_exception(error: Exception) -> Problem:
    """The one boundary of a request: what went wrong on our side, without telling how; the log tells what nobody expects."""
    match error:
        case MessageTooLarge():
            return Problem(413, "payload_too_large", str(error))
        case BrokerError():
            return Problem(
                503, "broker_unavailable", "The broker did not do what was asked; ask again", retry_after_s=2
            )
        case TimeoutError():
            return Problem(503, "query_too_slow", "The query took too long; narrow it down", retry_after_s=2)
        case _:
            _log.error("a request failed", exc_info=error)
            return Problem(500, "internal", f"Unexpected {type(error).__name__}; the tracker's log has the traceback")


def guarded(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint as Starlette calls it."""

    async def answer(request: Request) -> Response:
        try:
            found = await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:  # noqa: BLE001 - the one boundary of a request
            found = of_exception(error)
        return problem_response(found, request) if isinstance(found, Problem) else found

    return answer
