"""What the end of a call says of the called service, read from the exception that ended it."""

import asyncio
from dataclasses import dataclass

from millstream.errors import HandlerSignal, LimitReached, Throttled
from millstream.policy.durations import seconds
from millstream.providers import classify
from millstream_schemas.envelope import MAX_WAIT_S
from millstream_schemas.permits import Observed, OutcomeClass

THROTTLING: frozenset[OutcomeClass] = frozenset({"throttled", "ramp", "quota"})
"""Refusals after which waiting helps, and for which the task is not to blame."""

# Known by name, because the libraries that define them need not be installed.
_LOST = frozenset({"ReadTimeout", "WriteTimeout", "ReadError", "WriteError", "RemoteProtocolError", "APITimeoutError"})
_UNREACHED = frozenset({"ConnectError", "ConnectTimeout", "APIConnectionError"})


@dataclass(frozen=True, slots=True)
class Said:
    """How a call ended, in the governor's words. `reported`: the governor was told of it before."""

    outcome: OutcomeClass
    retry_after_s: float | None = None
    observed: tuple[Observed, ...] = ()
    reported: bool = False
    detail: str = ""

    @property
    def asks_to_wait(self) -> bool:
        """Whether the task is put off at no cost in attempts: the service refuses for now, or is overloaded and says for
        how long."""
        return self.outcome in THROTTLING or (self.outcome == "overloaded" and self.retry_after_s is not None)


OK = Said("ok")
ERROR = Said("error")
UNKNOWN = Said("unknown")
"""The service may have done the work, and billed it."""


def said_of(error: BaseException | None) -> Said:
    """What the end of a call says of the called service; `error` is None where the call ended well."""
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
    """What the answer says that an exception carries; None where it carries none."""
    if status_in(error) is None:
        return None
    found = classify(error)
    # An exception with a 200 in it: the service answered, and the handler failed at what came.
    outcome: OutcomeClass = "error" if found.outcome == "ok" else found.outcome
    return Said(outcome, found.retry_after_s, found.observed, detail=found.detail)


def _of_kind(error: BaseException) -> Said:
    """What an exception without an answer says: was the service reached, and may it have done the work?"""
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
    """A wait that a handler asked for, in seconds; None where it gave none, or something that is no duration."""
    try:
        return None if given is None else min(seconds(given), MAX_WAIT_S)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def attribute(holder: object, name: str) -> object:
    """An attribute of an object from user code; None where it has none, or where reading it fails."""
    try:
        return getattr(holder, name, None)
    except Exception:  # noqa: BLE001 - a property of user code may raise anything
        return None
