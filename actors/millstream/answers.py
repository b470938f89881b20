"""What the end of a call says of the called service, read from the exception that ended it."""

import asyncio
from dataclasses import dataclass

from millstream.errors import HandlerSignal, LimitReached, Throttled
from millstream.policy.durations import seconds
from millstream.providers import classify
from millstream_schemas.envelope import MAX_WAIT_S
from millstream_schemas.permits import Observed, OutcomeClass

THROTTLING: frozenset[OutcomeClass] = frozenset({"throttled", "ramp", "quota"})
"""Waiting helps, and is no fault of the task."""

# Known by name: the libraries that define them need not be there.
_LOST = frozenset({"ReadTimeout", "WriteTimeout", "ReadError", "WriteError", "RemoteProtocolError", "APITimeoutError"})
_UNREACHED = frozenset({"ConnectError", "ConnectTimeout", "APIConnectionError"})


@dataclass(frozen=True, slots=True)
class Said:
    """How a call ended, as the governor is told it. `reported`: it was told before."""

    outcome: OutcomeClass
    retry_after_s: float | None = None
    observed: tuple[Observed, ...] = ()
    reported: bool = False
    detail: str = ""

    @property
    def asks_to_wait(self) -> bool:
        """Another go later costs no attempt: the service refused for now, or is overloaded and says until when."""
        return self.outcome in THROTTLING or (self.outcome == "overloaded" and self.retry_after_s is not None)


OK = Said("ok")
ERROR = Said("error")
UNKNOWN = Said("unknown")
"""The service may have done the work, and billed it."""


def said_of(error: BaseException | None) -> Said:
    """What the end of a call says of the called service; None is a good end."""
    match error:
        case None:
            return OK
        case LimitReached():
            return ERROR
        case Throttled():
            return Said("throttled", wait_s(error.after), detail=str(error.reason))
        case HandlerSignal():
            return ERROR
        case asyncio.CancelledError():
            return UNKNOWN
        case _:
            return _of_answer(error) or _of_kind(error)


def _of_answer(error: BaseException) -> Said | None:
    if status_in(error) is None:
        return None
    found = classify(error)
    outcome: OutcomeClass = "error" if found.outcome == "ok" else found.outcome  # it failed at what came with a 200
    return Said(outcome, found.retry_after_s, found.observed, detail=found.detail)


def _of_kind(error: BaseException) -> Said:
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _LOST:
        return UNKNOWN
    if names & _UNREACHED or isinstance(error, ConnectionRefusedError):
        return Said("fault")
    return UNKNOWN if isinstance(error, TimeoutError | ConnectionError) else ERROR


def status_in(error: BaseException) -> int | None:
    """The HTTP status that an exception carries, as `.response` or by itself; None where it carries none."""
    of_answer = _status(attribute(error, "response"))
    return _status(error) if of_answer is None else of_answer


def _status(holder: object) -> int | None:
    for name in ("status_code", "status"):
        status = attribute(holder, name)
        if isinstance(status, int) and not isinstance(status, bool) and 100 <= status <= 999:
            return int(status)
    return None


def wait_s(given: object) -> float | None:
    """A wait that a handler asked for, in seconds; None, the default, for what is no duration."""
    try:
        return None if given is None else min(seconds(given), MAX_WAIT_S)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def attribute(holder: object, name: str) -> object:
    """An attribute of what user code made; None where there is none, or where it cannot be read."""
    try:
        return getattr(holder, name, None)
    except Exception:  # noqa: BLE001 - a property of user code may raise anything
        return None
