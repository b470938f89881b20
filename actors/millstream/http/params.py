"""Query parameters: each is checked against what it may be, before anything is asked of the database."""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, get_args

from starlette.requests import Request

from millstream.http.problems import Problem, bad_parameter
from millstream.tracker.hub import Interest
from millstream.tracker.queries import Filter
from millstream_schemas.lifecycle import State
from millstream_schemas.names import is_token

MAX_LIMIT: Final = 200
DEFAULT_LIMIT: Final = 50
MAX_SEQ: Final = 2**63 - 1
STATES: Final = frozenset(get_args(State))

_DIGITS: Final = re.compile(r"[0-9]{1,19}\Z")
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,128}\Z")
_KIND: Final = re.compile(r"[a-z_]{1,32}\Z")
_LATEST: Final = 253_402_300_799.0

FILTERS: Final = frozenset(
    {"state", "queue", "tenant", "task_type", "run_id", "tag", "since", "until", "q", "inbox_seq"}
)
PAGING: Final = frozenset({"limit", "cursor"})

Values = dict[str, Any]


def known_only(request: Request, allowed: frozenset[str]) -> Problem | None:
    """A parameter that is not known would be a filter that silently does nothing."""
    for name in request.query_params:
        if name not in allowed:
            shown = name if _KIND.match(name) else "?"
            return bad_parameter(shown, f"one of {', '.join(sorted(allowed))}" if allowed else "no parameters")
        if len(request.query_params.getlist(name)) > 1 and name != "state":
            return bad_parameter(name, "one value")
    return None


def task_filter(request: Request) -> Filter | Problem:
    """What `GET /v1/tasks` filters by."""
    wrong = known_only(request, FILTERS | PAGING)
    if wrong is not None:
        return wrong
    values: Values = {}
    for name, check in _CHECKS.items():
        given = request.query_params.get(name)
        if given is None or given == "":
            continue
        value = check(name, ",".join(request.query_params.getlist(name)) if name == "state" else given)
        if isinstance(value, Problem):
            return value
        values[_FIELDS.get(name, name)] = value
    return Filter(**values)


@dataclass(frozen=True, slots=True)
class Listing:
    """Which tasks a caller asked for, how many of them at once, and where the page begins (None: at the newest)."""

    wanted: Filter
    limit: int
    before: int | None


def listing(request: Request) -> Listing | Problem:
    """The parameters of a list of tasks, all of them checked."""
    wanted, size, before = task_filter(request), limit(request), cursor(request)
    if isinstance(wanted, Problem):
        return wanted
    if isinstance(size, Problem):
        return size
    return before if isinstance(before, Problem) else Listing(wanted, size, before)


def interest(request: Request) -> Interest | Problem:
    """What `GET /v1/stream` filters by."""
    wrong = known_only(request, frozenset(_STREAM) | {"last_event_id"})
    if wrong is not None:
        return wrong
    values: Values = {}
    for name, check in _STREAM.items():
        given = request.query_params.get(name)
        if not given:
            continue
        value = check(name, ",".join(request.query_params.getlist(name)) if name == "state" else given)
        if isinstance(value, Problem):
            return value
        values[{"state": "states", "kind": "kinds", "task_id": "task"}.get(name, name)] = value
    return Interest(**values)


def limit(request: Request) -> int | Problem:
    """How many items a page holds: 1 to 200."""
    given = request.query_params.get("limit")
    if given is None or given == "":
        return DEFAULT_LIMIT
    return integer("limit", given, 1, MAX_LIMIT)


def cursor(request: Request) -> int | Problem | None:
    """Where a page begins; None for the first."""
    given = request.query_params.get("cursor")
    if given is None or given == "":
        return None
    try:
        text = base64.urlsafe_b64decode(given.encode() + b"=" * (-len(given) % 4)).decode()
    except (binascii.Error, ValueError):
        return bad_parameter("cursor", "the `next` of an earlier page")
    name, _, number = text.partition(":")
    if name != "n" or not _DIGITS.match(number) or int(number) > MAX_SEQ:
        return bad_parameter("cursor", "the `next` of an earlier page")
    return int(number)


def as_cursor(number: int | None) -> str | None:
    """The opaque `next` of a page."""
    return None if number is None else base64.urlsafe_b64encode(f"n:{number}".encode()).decode().rstrip("=")


def tenant(request: Request) -> str | Problem | None:
    """The `tenant` parameter alone; no other is known."""
    wrong = known_only(request, frozenset({"tenant"}))
    if wrong is not None:
        return wrong
    given = request.query_params.get("tenant")
    return None if not given else _token("tenant", given)


def last_event_id(request: Request) -> int | Problem | None:
    """Where a stream resumes: the header, which a browser sets when it reconnects, before the parameter."""
    given = request.headers.get("last-event-id", "").strip() or request.query_params.get("last_event_id", "")
    return None if given == "" else integer("last_event_id", given, 0, MAX_SEQ)


def integer(name: str, given: str, low: int, high: int) -> int | Problem:
    """A decimal integer within bounds; nothing else is one."""
    if not _DIGITS.match(given) or not low <= int(given) <= high:
        return bad_parameter(name, f"an integer from {low} to {high}")
    return int(given)


def instant(name: str, given: str) -> float | Problem:
    """RFC 3339 with a zone, as Unix seconds."""
    expected = "an RFC 3339 time with a zone"
    if len(given) > 64:
        return bad_parameter(name, expected)
    try:
        moment = datetime.fromisoformat(given.replace(" ", "+"))  # a plus sign that was not escaped arrives as a space
        seconds = moment.timestamp() if moment.tzinfo is not None else -1.0
    except (ValueError, OverflowError):
        return bad_parameter(name, expected)
    return seconds if 0 <= seconds <= _LATEST else bad_parameter(name, expected)


def _states(name: str, given: str) -> tuple[str, ...] | Problem:
    states = tuple(dict.fromkeys(given.split(",")))
    return states if STATES.issuperset(states) else bad_parameter(name, f"one or more of {', '.join(sorted(STATES))}")


def _kinds(name: str, given: str) -> tuple[str, ...] | Problem:
    kinds = tuple(given.split(","))
    good = len(kinds) <= 32 and all(_KIND.match(kind) for kind in kinds)
    return kinds if good else bad_parameter(name, "kinds of events")


def _token(name: str, given: str) -> str | Problem:
    return given if is_token(given) else bad_parameter(name, "a name that matches [A-Za-z0-9_-]{1,64}")


def _text(name: str, given: str) -> str | Problem:
    return given if _NAME.match(given) else bad_parameter(name, "1 to 128 characters without control characters")


def _sequence(name: str, given: str) -> int | Problem:
    return integer(name, given, 1, MAX_SEQ)


_CHECKS: Final[Mapping[str, Any]] = {
    "state": _states,
    "queue": _token,
    "tenant": _token,
    "task_type": _text,
    "run_id": _text,
    "tag": _text,
    "since": instant,
    "until": instant,
    "q": _text,
    "inbox_seq": _sequence,
}
_STREAM: Final[Mapping[str, Any]] = {
    "state": _states,
    "kind": _kinds,
    "queue": _token,
    "tenant": _token,
    "task_type": _text,
    "run_id": _text,
    "task_id": _text,
}
_FIELDS: Final[Mapping[str, str]] = {"state": "states", "q": "text"}
