"""The handlers that tests run in real workers. Each execution appends a line to the file that MILLSTREAM_EFFECTS names."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from millstream import App, Cancel, Context, Fatal, Retry, Snooze, Throttled

app = App("tests")


class Note(msgspec.Struct):
    """A typed payload."""

    title: str
    words: int = 0


def effect(ctx: Context, what: str, **more: Any) -> None:
    """Append one line about this execution; a line under 4 kB is appended whole or not at all."""
    path = os.environ.get("MILLSTREAM_EFFECTS")
    if path is None:
        return
    line = {"task_id": ctx.task_id, "attempt": ctx.attempt, "execution": ctx.execution_id, "pid": os.getpid()}
    line |= {"what": what, "at": time.time(), **more}
    with Path(path).open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


@app.task("echo", queue="agent-run")
async def echo(ctx: Context, payload: Any) -> Any:
    effect(ctx, "start")
    return payload


@app.task("quiet", queue="agent-run")
async def quiet() -> None:
    """Leave no trace: for floods that are judged by the stream alone."""


@app.task("agent.run", queue="agent-run")
async def agent_run(ctx: Context, payload: Any) -> dict[str, Any]:
    effect(ctx, "start")
    ctx.progress(0.5, "half way")
    ctx.usage(tokens_in=10, tokens_out=5, cost_usd=0.01)
    return {"agent": payload["agent_id"]}


@app.task("typed", queue="agent-run")
async def typed(ctx: Context, note: Note) -> int:
    effect(ctx, "start")
    return note.words + len(note.title)


@app.task("sleep", queue="agent-run")
async def sleep(ctx: Context, payload: dict[str, float]) -> str:
    effect(ctx, "start")
    await asyncio.sleep(payload["seconds"])
    effect(ctx, "end")
    return "slept"


@app.task("sleep.sync", queue="agent-run")
def sleep_sync(ctx: Context, payload: dict[str, float]) -> str:
    effect(ctx, "start")
    time.sleep(payload["seconds"])
    effect(ctx, "end")
    return "slept"


@app.task("limited", queue="agent-run", limits=["llm"])
async def limited(ctx: Context, payload: Any) -> Any:
    effect(ctx, "start")
    return payload


@app.task("limited.throttled", queue="agent-run", limits=["llm"])
async def limited_throttled(ctx: Context, payload: dict[str, float]) -> None:
    effect(ctx, "start")
    raise Throttled(payload["after"])


@app.task("limited.once", queue="agent-run", limits=["llm"])
async def limited_once(ctx: Context, payload: dict[str, float]) -> int:
    """Refused in its first execution, by an exception as client libraries raise it."""
    effect(ctx, "start")
    if ctx.item.card.throttles == 0:
        raise Refused(payload["after"])
    return ctx.attempt


@app.task("limited.sleep", queue="agent-run", limits=["llm"])
async def limited_sleep(ctx: Context, payload: dict[str, float]) -> str:
    effect(ctx, "start")
    await asyncio.sleep(payload["seconds"])
    effect(ctx, "end")
    return "slept"


@app.task("limited.calls", queue="agent-run")
async def limited_calls(ctx: Context, payload: dict[str, int]) -> int:
    """Calls under a limit, one after the other, each reporting a token."""
    effect(ctx, "start")
    for _ in range(payload["calls"]):
        async with ctx.limit("llm", tokens_in=1) as grant:
            grant.usage(tokens_in=1)
    return payload["calls"]


@app.task("limited.calls.sync", queue="agent-run")
def limited_calls_sync(ctx: Context, payload: dict[str, int]) -> int:
    """The same from a thread."""
    effect(ctx, "start")
    for _ in range(payload["calls"]):
        with ctx.limit("llm", tokens_in=1) as grant:
            grant.usage(tokens_in=1)
    return payload["calls"]


@app.task("timed", queue="agent-run", timeout="300ms")
async def timed(ctx: Context) -> None:
    effect(ctx, "start")
    await asyncio.sleep(30)


@app.task("flaky", queue="agent-run")
async def flaky(ctx: Context, payload: dict[str, Any]) -> int:
    effect(ctx, "start")
    if ctx.attempt <= payload["failures"]:
        raise ConnectionError(f"attempt {ctx.attempt} did not get through")
    return ctx.attempt


class TooManyRequests(Exception):
    """An error that carries an HTTP status, as client libraries raise it."""

    status_code = 429


class ServerFault(Exception):
    """As above, for a fault of the service."""

    status_code = 500


class Refused(Exception):
    """A 429 whose answer says how long to wait."""

    def __init__(self, after_s: float) -> None:
        super().__init__("too many requests")
        self.response = Answer(429, {"retry-after": str(after_s)})


class Answer(msgspec.Struct, frozen=True):
    """What an HTTP library hands on of an answer."""

    status_code: int
    headers: dict[str, str]


@app.task("http", queue="agent-run")
async def http(ctx: Context, payload: dict[str, int]) -> int:
    effect(ctx, "start")
    if ctx.attempt <= payload.get("throttled", 0):
        raise TooManyRequests("slow down")
    if payload.get("broken"):
        raise ServerFault("broken")
    return ctx.attempt


@app.task("signal", queue="agent-run")
async def signal(ctx: Context, payload: dict[str, Any]) -> str:
    effect(ctx, "start")
    first = ctx.item.card.throttles == 0 and ctx.attempt == 1 and not ctx.task.tags
    match payload["raise"]:
        case "throttled":
            if ctx.item.card.throttles < payload.get("times", 1):
                raise Throttled(payload.get("after", 0.3))
        case "snooze":
            if not Path(payload["flag"]).exists():
                Path(payload["flag"]).touch()
                raise Snooze(time.time() + payload.get("after", 0.3))
        case "retry":
            if first:
                raise Retry(payload.get("after", 0.3), "once more")
        case "fatal":
            raise Fatal("never again")
        case "cancel":
            raise Cancel("not wanted any more")
        case other:
            raise ValueError(other)
    return "done"


@app.task("block", queue="agent-run")
async def block(ctx: Context, payload: dict[str, float]) -> str:
    """An async handler that should have been a sync one: it blocks the loop of its worker."""
    effect(ctx, "start")
    time.sleep(payload["seconds"])
    effect(ctx, "end")
    return "blocked"


@app.task("interruptible", queue="agent-run")
async def interruptible(ctx: Context) -> str:
    """Endless until it was interrupted once."""
    effect(ctx, "start")
    if ctx.item.card.interruptions == 0:
        await asyncio.sleep(3600)
    effect(ctx, "end")
    return "resumed"


@app.task("until.flag", queue="agent-run")
async def until_flag(ctx: Context, payload: dict[str, str]) -> int:
    """Fails until a file exists: a fault that somebody repairs."""
    effect(ctx, "start")
    if not Path(payload["flag"]).exists():
        raise ConnectionError("the service is down")
    return ctx.item.card.generation


@app.task("parent", queue="agent-run")
async def parent(ctx: Context, payload: dict[str, int]) -> list[str]:
    effect(ctx, "start")
    children = [await ctx.spawn(echo, {"child": number}) for number in range(payload["children"])]
    if ctx.attempt <= payload.get("failures", 0):
        raise ConnectionError("after the children were sent")
    return [child.task_id for child in children]


def _current_span() -> dict[str, str]:
    from opentelemetry import trace as api

    current = api.get_current_span().get_span_context()
    return {"trace_id": f"{current.trace_id:032x}", "span_id": f"{current.span_id:016x}"}


@app.task("trace", queue="agent-run")
async def trace(ctx: Context) -> dict[str, str]:
    return _current_span()


@app.task("trace.sync", queue="agent-run")
def trace_sync(ctx: Context) -> dict[str, str]:
    return _current_span()


@app.task("trace.flaky", queue="agent-run")
async def trace_flaky(ctx: Context, payload: dict[str, int]) -> dict[str, str]:
    """Parked once, then fails a number of times; every execution tells its span."""
    effect(ctx, "start", traceparent=ctx.traceparent, **_current_span())
    if ctx.item.card.throttles == 0:
        raise Throttled(0.1)
    if ctx.attempt <= payload["failures"] and ctx.item.card.generation == 1:
        raise ConnectionError("once more")
    return _current_span()


# --- results and errors that have no exact JSON form -------------------------------------------


def _cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


def nested(levels: int) -> list[Any]:
    """A list in a list in a list…"""
    deep: list[Any] = []
    for _ in range(levels):
        deep = [deep]
    return deep


ODD_RESULTS: dict[str, Any] = {
    "nan": math.nan,
    "inside": {"deep": [1, {"x": math.inf}]},
    "set": {1, 2},
    "bytes": b"\x00\x01",
    "cycle": _cycle(),
    "bigint": 2**70,
    "surrogate": "\ud800",
    "surrogate key": {"\ud800": 1},
    "int keys": {1: "one"},
    "deep": nested(100),
    "complex": 1j,
    "generator": (number for number in range(3)),
    "class": dict,
    "object": object(),
}

ODD_ERRORS: dict[str, str] = {
    "nul": "a\x00b",
    "surrogate": "lone \ud800 surrogate",
    "huge": "x" * 10_000_000,
    "wide": "\U0001f600" * 1_000_000,
    "escape": "\x1b[2J\x1b]0;title\x07 red",
}


class SilentError(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class NotAnOrdinaryError(BaseException):
    """What `except Exception` does not catch."""


ODD_RAISES: dict[str, BaseException] = {
    "silent": SilentError(),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "base": NotAnOrdinaryError("beyond"),
    "cancelled": asyncio.CancelledError("of its own"),
    "timeout": TimeoutError("of its own"),
    "stop": StopAsyncIteration("early"),
    "group": ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    "recursion": RecursionError("too deep"),
    "os": OSError(2, "none", "\udcff.txt"),
}


@app.task("odd.result", queue="agent-run")
async def odd_result(ctx: Context, payload: str) -> Any:
    return ODD_RESULTS[payload]


@app.task("odd.error", queue="agent-run")
async def odd_error(ctx: Context, payload: str) -> None:
    raise RuntimeError(ODD_ERRORS[payload])


@app.task("odd.result.sync", queue="agent-run")
def odd_result_sync(ctx: Context, payload: str) -> Any:
    return ODD_RESULTS[payload]


@app.task("odd.error.sync", queue="agent-run")
def odd_error_sync(ctx: Context, payload: str) -> None:
    raise RuntimeError(ODD_ERRORS[payload])


@app.task("odd.raise", queue="agent-run")
async def odd_raise(ctx: Context, payload: str) -> None:
    raise ODD_RAISES[payload]


@app.task("odd.raise.sync", queue="agent-run")
def odd_raise_sync(ctx: Context, payload: str) -> None:
    raise ODD_RAISES[payload]


@app.task("odd.reports", queue="agent-run")
async def odd_reports(ctx: Context, payload: Any) -> str:
    effect(ctx, "start")
    ctx.usage(tokens_in=2**70, tokens_out=-5, cost_usd=math.inf)
    ctx.usage(tokens_in=1.5, cost_usd=math.nan)  # type: ignore[arg-type]
    ctx.progress(math.nan, "no number")
    ctx.progress(1.0, "lone \ud800 and nul \x00 " + "x" * 100_000)
    return "reported"


_NOT_A_TEXT: Any = 42
_NOT_A_TIME: Any = "some day"
ODD_SIGNALS: dict[str, Exception] = {
    "retry nan": Retry(math.nan),
    "retry inf": Retry(math.inf),
    "retry below zero": Retry(-5),
    "retry text": Retry("soon"),
    "retry duration": Retry("10ms"),
    "throttled nan": Throttled(math.nan),
    "throttled text": Throttled("soon"),
    "throttled duration": Throttled("10ms"),
    "throttled reason": Throttled(0.01, _NOT_A_TEXT),
    "snooze nan": Snooze(math.nan),
    "snooze text": Snooze(_NOT_A_TIME),
    "snooze past": Snooze(-1e300),
    "snooze datetime": Snooze(datetime.now(UTC)),
    "snooze reason": Snooze(0, _NOT_A_TEXT),
}
_raised: set[str] = set()


@app.task("odd.signal", queue="agent-run")
async def odd_signal(ctx: Context, payload: str) -> str:
    effect(ctx, "start")
    if payload not in _raised:
        _raised.add(payload)
        raise ODD_SIGNALS[payload]
    return "done"


@app.task("large", queue="agent-run")
async def large(ctx: Context, payload: int) -> str:
    return "x" * payload
