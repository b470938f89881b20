"""Runs user code: decodes its payload, bounds its time, and turns however it ends into one of a few endings."""

import asyncio
import contextvars
import math
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from millstream.answers import ERROR, OK, UNKNOWN, Said, said_of, status_in, wait_s
from millstream.app import AnyTask
from millstream.context import Context
from millstream.errors import BudgetExhausted, Cancel, Fatal, Retry, Snooze, Throttled
from millstream.policy.results import NotEncodable, encode_strictly
from millstream.policy.retry import ASKED, names_refusal
from millstream.policy.start import time_limit_s
from millstream.policy.texts import MESSAGE_BYTES, TRACEBACK_BYTES, clean, fingerprint
from millstream_schemas.envelope import RetryPolicy
from millstream_schemas.events import Failure

STUBBORN_S = 5.0
"""How long a handler may take to end once it is cancelled."""


@dataclass(frozen=True, slots=True)
class Good:
    """The handler returned; `result` is JSON."""

    result: bytes
    said: Said = OK


@dataclass(frozen=True, slots=True)
class Bad:
    """The attempt failed; `said` is what its end says of the called service."""

    failure: Failure
    said: Said = ERROR


@dataclass(frozen=True, slots=True)
class Later:
    """The handler asks to run again later, at no cost in attempts; at most one of `after_s` and `until` is set."""

    throttled: bool
    detail: str
    after_s: float | None = None
    until: float | None = None
    said: Said = ERROR


@dataclass(frozen=True, slots=True)
class CancelledByHandler:
    """The handler ended the task."""

    note: str
    said: Said = ERROR


@dataclass(frozen=True, slots=True)
class Stopped:
    """The worker ended the execution because it is stopping."""

    said: Said = UNKNOWN


Ending = Good | Bad | Later | CancelledByHandler | Stopped


async def execute(task: AnyTask, context: Context, max_result_bytes: int) -> Ending:
    """One execution. Never raises for what the handler does; a cancellation from outside is `Stopped`."""
    try:
        arguments = _arguments(task, context)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        return Bad(_mismatch(error))
    limit_s = time_limit_s(context.item, task.timeout_s)
    timer = asyncio.timeout(limit_s)
    try:
        if limit_s is None:
            value = await _call(task, arguments)
        else:
            async with timer:
                value = await _call(task, arguments)
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is None or not current.cancelling():
            return _ending(task, error, context)  # raised by the handler itself
        current.uncancel()
        return Stopped()
    except TimeoutError as error:
        if timer.expired():
            return Bad(_timed_out(task, limit_s or 0.0), UNKNOWN)
        return _ending(task, error, context)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; a real Ctrl-C is a signal of the loop
        return _ending(task, error, context)
    return _result(value, max_result_bytes)


def _arguments(task: AnyTask, context: Context) -> list[Any]:
    signature = task.signature
    arguments: list[Any] = [context] if signature.takes_context else []
    if signature.takes_payload:
        raw = bytes(context.item.envelope.payload) or b"null"
        arguments.append(msgspec.json.decode(raw, type=signature.payload_type))
    return arguments


async def _call(task: AnyTask, arguments: list[Any]) -> Any:
    if task.is_async:
        return await _in_task(task.function, arguments)
    return await _in_thread(task.function, arguments)


async def _in_task(function: Callable[..., Any], arguments: list[Any]) -> Any:
    """Await an async function in a task of its own: if it cancels its task, that is its own affair.

    When cancelled it is waited for, but not for ever: one that does not end is left behind, as a stuck thread is.
    """

    async def run() -> tuple[Any, BaseException | None]:
        try:
            return await function(*arguments), None
        except BaseException as caught:  # noqa: BLE001 - raised again below; SystemExit would end the loop here
            return None, caught

    name = f"handler-{function.__name__}"
    handler = asyncio.create_task(run(), name=name)  # noqa: TID251 - a group could not leave a stuck one behind
    try:
        await asyncio.shield(handler)
    except asyncio.CancelledError:
        handler.cancel()
        await asyncio.wait([handler], timeout=STUBBORN_S)
        if not handler.done() or handler.cancelled() or isinstance(handler.result()[1], asyncio.CancelledError):
            raise
    if handler.cancelled():  # before its first step
        raise asyncio.CancelledError
    value, error = handler.result()
    if error is not None:
        raise error
    return value


async def _in_thread(function: Callable[..., Any], arguments: list[Any]) -> Any:
    """Call a sync function in a thread of its own, which a stuck call cannot keep from others nor from the exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def run() -> None:
        value, error = None, None
        try:
            value = function(*arguments)
        except BaseException as caught:  # noqa: BLE001 - raised again in the loop
            error = caught
        with suppress(RuntimeError):  # the loop has ended; the execution was handed back
            loop.call_soon_threadsafe(settle, value, error)

    carried = contextvars.copy_context()  # the span of the execution is current in the thread, too
    threading.Thread(target=lambda: carried.run(run), name=f"handler-{function.__name__}", daemon=True).start()
    value, error = await done
    if error is not None:
        raise error
    return value


def _result(value: Any, max_result_bytes: int) -> Ending:
    encoded = encode_strictly(value)
    if isinstance(encoded, NotEncodable):
        return Bad(_failure("result_not_encodable", "ResultNotEncodable", str(encoded), path=encoded.path))
    if len(encoded) > max_result_bytes:
        message = f"the result has {len(encoded)} bytes, the limit is {max_result_bytes}; store it elsewhere and return a reference"
        return Bad(_failure("result_too_large", "ResultTooLarge", message))
    return Good(encoded)


def _timed_out(task: AnyTask, limit_s: float) -> Failure:
    return Failure(
        reason="timeout",
        error_type="TimeoutError",
        message=f"over its time limit of {limit_s:g} s",
        classes=["timeout", "TimeoutError"],
        fingerprint=fingerprint("TimeoutError", "", task.task_type),
    )


def _mismatch(error: Exception) -> Failure:
    text = str(error) or type(error).__name__
    path = text.rpartition(" - at `")[2].rstrip("`") if " - at `" in text else "$"
    return _failure("payload_mismatch", "PayloadMismatch", text, path=path)


def _failure(reason: Any, error_type: str, message: str, path: str | None = None) -> Failure:
    return Failure(
        reason=reason,
        error_type=error_type,
        message=clean(message),
        classes=[reason, error_type],
        fingerprint=fingerprint(error_type, message, path or ""),
        path=path,
    )


def _ending(task: AnyTask, error: BaseException, context: Context) -> Ending:
    """What an exception of the handler means."""
    said = said_of(error) if context.calls is None else context.calls.end(error)
    match error:
        case Throttled():
            return Later(True, _reason(error.reason), after_s=wait_s(error.after), said=said)
        case Snooze():
            return Later(False, _reason(error.reason), until=_instant(error.until), said=said)
        case Cancel():
            return CancelledByHandler(_reason(error.reason), said)
        case BudgetExhausted():
            return Bad(_raised(task, error, "budget_exhausted"), said)
        case Fatal():
            return Bad(_raised(task, error, "fatal"), said)
        case Retry():
            return Bad(_raised(task, error, "error", wait_s(error.after)), said)
        case _:
            return _answered(task, error, said, context.item.envelope.retry_policy)


def _answered(task: AnyTask, error: BaseException, said: Said, policy: RetryPolicy | None) -> Ending:
    """What an exception means that is none of Millstream's own.

    Where it carries the answer of a service that refuses for now, the task waits and no attempt is used up; where the
    service says that the request itself is wrong, another attempt would be, too. Both unless the task's retry policy
    names that answer. All else is a failed attempt.
    """
    named = names_refusal(policy, f"http_{status_in(error)}", _classes(error))
    hopeless = said.outcome == "too_large" or (said.outcome == "client" and not named)
    failure = _raised(task, error, "fatal" if hopeless else "error", said.retry_after_s)
    if said.asks_to_wait and not named:
        return Later(True, _refused(error, said), after_s=said.retry_after_s, said=said)
    return Bad(failure, said)


def _refused(error: BaseException, said: Said) -> str:
    text = said.detail or _text(error)
    return clean(f"the called service answered {said.outcome}: {text}", 512)


def _reason(given: object) -> str:
    return clean(str(given), 512)


def _instant(given: object) -> float | None:
    """An instant that a handler asked for, as Unix seconds; None for what is none."""
    try:
        at = given.timestamp() if isinstance(given, datetime) else float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return at if math.isfinite(at) else None


def _raised(task: AnyTask, error: BaseException, reason: Any, retry_after_s: float | None = None) -> Failure:
    name = type(error).__name__
    message = clean(_text(error), MESSAGE_BYTES)
    return Failure(
        reason=reason,
        error_type=clean(name, 128),
        message=message,
        classes=_classes(error),
        traceback=clean(_trace(error), TRACEBACK_BYTES),
        fingerprint=fingerprint(name, message, task.task_type),
        retry_after_s=retry_after_s,
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a __str__ of user code may fail too
        return f"<{type(error).__name__} without a text>"


def _trace(error: BaseException) -> str:
    try:
        frames = traceback.format_tb(error.__traceback__)
    except Exception:  # noqa: BLE001 - so may a __repr__ on the way
        return ""
    return "".join(frames[-20:])


_COMMON = frozenset({"object", "BaseException", "Exception", "MillstreamError", "HandlerSignal"})


def _classes(error: BaseException) -> list[str]:
    """The names that `retry_on` and `fatal_on` may use for an error."""
    names = [clean(kind.__name__, 128) for kind in type(error).__mro__ if kind.__name__ not in _COMMON]
    qualified = f"{type(error).__module__}.{type(error).__qualname__}"
    names.append(clean(qualified, 256))
    if isinstance(error, Retry):
        names.insert(0, ASKED)
    status = status_in(error)
    if status is not None:
        names += [f"http_{status}", f"http_{status // 100}xx"]
    return list(dict.fromkeys(names))[:32]
