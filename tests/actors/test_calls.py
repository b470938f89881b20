"""Calls inside a handler: a permit each, settled by how they end; what a provider answers is told once, where it belongs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx
import pytest

from millstream import Context, Fatal, Retry, Throttled
from millstream.errors import BudgetExhausted, CallerError, LimitReached
from millstream.permits_client import DeniedPermit, Settlement, WaitFor
from millstream_schemas.events import AttemptFailed, Completed, Event, Parked, Queued, Started
from tests.actors.test_worker_slots import Race, race
from tests.support.waiting import wait_until

Handler = Callable[..., Any]


@dataclass
class Tried:
    """How one execution of a handler ended."""

    event: Event
    here: Race

    @property
    def settlements(self) -> list[tuple[tuple[str, ...], Settlement]]:
        """With their keys, in the order of their ends."""
        return [(permit.keys, settlement) for permit, settlement in self.here.desk.settled]

    @property
    def outcomes(self) -> list[tuple[str, str, bool]]:
        """First key, outcome and whether that was told before."""
        return [(keys[0], settlement.outcome, settlement.reported) for keys, settlement in self.settlements]


async def tried(handler: Handler, limits: tuple[str, ...] = (), here: Race | None = None, **task: Any) -> Tried:
    """Run a handler once."""
    here = here or await race()
    here.app.task("t", limits=limits)(handler)
    (key,) = await here.send("t", "one", **task)
    async with here.at_work():

        async def ended() -> Event | None:
            last = await here.last(key)
            return None if isinstance(last, Queued | Started) else last

        event: Event = await wait_until(ended, "the end of the execution")
    assert here.desk.outstanding == 0, "every permit was settled or returned"
    return Tried(event, here)


async def test_a_call_takes_a_permit_and_settles_what_it_used() -> None:
    """Keys may be templates; the estimate is reserved, the truth settles, and both the call and the task count it."""

    async def handler(ctx: Context) -> None:
        async with ctx.limit(
            "llm/{pins.model}", "tenant/{tenant_id}", requests=2, tokens_in=900, tokens_out=100
        ) as grant:
            assert grant.keys == ("llm/opus", "tenant/default")
            grant.usage(tokens_in=800)
            grant.usage(tokens_out=70, cost_usd=0.5)

    end = await tried(handler, pins={"model": "opus"})
    assert isinstance(end.event, Completed)
    usage = end.event.usage
    assert (usage.tokens_in, usage.tokens_out, usage.cost_usd) == (800, 70, 0.5)
    (asked,) = end.here.desk.asked
    need = asked.need
    assert (need.requests, need.tokens_in, need.tokens_out, need.model) == (2, 900, 100, "opus")
    ((_, settled),) = end.settlements
    assert (settled.outcome, settled.tokens_in, settled.tokens_out, settled.cost_usd) == ("ok", 800, 70, 0.5)


async def test_tokens_of_both_kinds_together_are_reserved_as_tokens_in() -> None:
    """For limits that count them together, as most do."""

    async def handler(ctx: Context) -> None:
        async with ctx.limit("llm", tokens=900):
            pass

    end = await tried(handler)
    assert isinstance(end.event, Completed)
    (asked,) = end.here.desk.asked
    assert (asked.need.tokens_in, asked.need.tokens_out) == (900, 0)


async def test_a_sync_handler_takes_its_permits_by_with() -> None:
    """From its thread, over the loop of the worker."""

    def handler(ctx: Context) -> str:
        for _ in range(3):
            with ctx.limit("llm", tokens_in=5) as grant:
                grant.usage(tokens_in=4)
        return threading.current_thread().name

    end = await tried(handler)
    assert isinstance(end.event, Completed)
    assert b"handler-" in bytes(end.event.result)
    assert end.event.usage.tokens_in == 12
    assert [(settled.outcome, settled.tokens_in) for _, settled in end.settlements] == [("ok", 4)] * 3


async def test_an_async_handler_cannot_block_its_loop_by_with() -> None:
    """It is told which form to take."""

    async def handler(ctx: Context) -> None:
        with ctx.limit("llm"):
            pass

    end = await tried(handler, retry_policy={"strategy": "none"})
    assert isinstance(end.event, AttemptFailed)
    assert "async with" in end.event.failure.message
    assert end.here.desk.asked == []


class Answered(Exception):
    """As client libraries raise it."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"status {status}")
        self.response = httpx.Response(status, headers=headers or {})


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Throttled(3), "throttled"),
        (Answered(429, {"retry-after": "3"}), "throttled"),
        (Answered(503), "overloaded"),
        (Answered(500), "fault"),
        (Answered(401), "client"),
        (httpx.ConnectError("refused"), "fault"),
        (httpx.ReadTimeout("late"), "unknown"),
        (TimeoutError(), "unknown"),
        (asyncio.CancelledError(), "unknown"),
        (ValueError("mine"), "error"),
        (Fatal("mine"), "error"),
        (Retry(1), "error"),
    ],
)
async def test_a_call_is_settled_by_how_its_block_ends(error: BaseException, outcome: str) -> None:
    """And what was told for the call's limits is not told again for the task's own."""

    async def handler(ctx: Context) -> None:
        async with ctx.limit("inner"):
            raise error

    end = await tried(handler, limits=("outer",))
    assert end.outcomes == [("inner", outcome, False), ("outer", outcome, True)]
    (_, inner), _ = end.settlements
    assert inner.retry_after_s == (3.0 if outcome == "throttled" else None)
    assert (inner.tokens_in, inner.tokens_out, inner.cost_usd) == (None, None, None)


def _refuse() -> NoReturn:
    raise Answered(429)


async def test_a_refusal_that_the_handler_copes_with_counts_for_the_call_alone() -> None:
    """The task completes, and its own limit hears of a good end."""

    async def handler(ctx: Context) -> str:
        try:
            async with ctx.limit("first"):
                _refuse()
        except Answered:
            async with ctx.limit("second"):
                return "from the second"

    end = await tried(handler, limits=("outer",))
    assert isinstance(end.event, Completed)
    assert end.outcomes == [("first", "throttled", False), ("second", "ok", False), ("outer", "ok", False)]


async def test_a_wait_beyond_its_time_parks_the_task_and_slows_nobody_else() -> None:
    """The limit is ours: the limits of the task's own permit were not refused by anybody."""
    here = await race()
    here.desk.answers["inner"] = WaitFor(90.0, "inner", "tokens_in")
    caught: list[Throttled] = []

    async def handler(ctx: Context) -> None:
        try:
            async with ctx.limit("inner", wait="30s"):
                raise AssertionError("no permit, no call")
        except LimitReached as error:
            caught.append(error)
            raise

    end = await tried(handler, ("outer",), here)
    assert [error.after for error in caught] == [90.0]
    assert isinstance(end.event, Parked)
    assert (end.event.reason, end.event.detail) == ("throttled", "limit inner: tokens in")
    assert end.event.until - time.time() > 80
    assert end.outcomes == [("outer", "error", False)]


async def test_a_call_waits_for_its_turn() -> None:
    """As often as it takes, within its time."""
    here = await race()
    gate = here.desk.hold("inner")

    async def handler(ctx: Context) -> None:
        async with ctx.limit("inner"):
            return

    async def open_later() -> None:
        await wait_until(lambda: here.desk.asked, "the call has asked")
        gate.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(open_later())
        end = await tried(handler, (), here)
    assert isinstance(end.event, Completed)


@pytest.mark.parametrize(
    ("denied", "reason", "said"),
    [
        (DeniedPermit("budget_exhausted", "inner", None, "5 of 5 USD"), "budget_exhausted", "budget inner: 5 of 5 USD"),
        (DeniedPermit("too_large", "inner"), "fatal", "limit inner: "),
    ],
)
async def test_a_call_that_can_never_be_made_ends_the_task(denied: DeniedPermit, reason: str, said: str) -> None:
    """A budget that is used up, an estimate over the limit."""
    here = await race()
    here.desk.answers["inner"] = denied

    async def handler(ctx: Context) -> None:
        async with ctx.limit("inner"):
            raise AssertionError("no permit, no call")

    end = await tried(handler, (), here)
    assert isinstance(end.event, AttemptFailed)
    assert end.event.failure.reason == reason
    assert end.event.failure.message.startswith(said)


async def test_calls_that_run_at_one_time_stay_within_the_tasks_budget_together() -> None:
    """Each reserves its estimate; what a call used takes the estimate's place."""
    refused: list[str] = []

    async def handler(ctx: Context) -> None:
        over = asyncio.Event()

        async def call() -> None:
            async with ctx.limit("llm", cost_usd=0.4) as grant:
                await over.wait()
                grant.usage(cost_usd=0.3)

        async with asyncio.TaskGroup() as group:
            group.create_task(call())
            group.create_task(call())
            await wait_until(lambda: len(here.desk.asked) == 2, "two calls run")
            with pytest.raises(BudgetExhausted) as caught:
                async with ctx.limit("llm", cost_usd=0.4):
                    raise AssertionError("over the budget")
            refused.append(str(caught.value))
            over.set()
        async with ctx.limit("llm", cost_usd=0.4):
            pass

    here = await race()
    end = await tried(handler, here=here, budget={"max_cost_usd": 1.0})
    assert isinstance(end.event, Completed), end.event
    assert len(refused) == 1
    assert "max_cost_usd: 1.2 of 1 used" in refused[0]


async def test_a_call_that_is_never_left_ends_with_its_execution() -> None:
    """As unknown; whoever leaves it later says nothing more."""
    left_open: list[Any] = []

    async def handler(ctx: Context) -> None:
        call = ctx.limit("inner")
        grant = await call.__aenter__()
        grant.usage(tokens_in=3)
        left_open.append(call)

    end = await tried(handler, limits=("outer",))
    assert isinstance(end.event, Completed)
    assert end.outcomes == [("inner", "unknown", False), ("outer", "ok", False)]
    assert end.settlements[0][1].tokens_in == 3
    await left_open[0].__aexit__(None, None, None)
    assert len(end.settlements) == 2


@pytest.mark.parametrize("limits", [("one",), ()])
async def test_a_call_that_would_wait_for_its_own_task_is_told_so(limits: tuple[str, ...]) -> None:
    """The place it wants is held by the task's permit, or by the block around it."""
    here = await race()

    async def handler(ctx: Context) -> None:
        async with ctx.limit("outer" if limits else "one"):
            here.desk.answers["one"] = WaitFor(0.01, "one", "concurrency")
            async with ctx.limit("one"):
                raise AssertionError("no permit, no call")

    end = await tried(handler, limits, here)
    assert isinstance(end.event, AttemptFailed)
    assert end.event.failure.error_type == "CallerError"
    assert "`one` that is already held by this task" in end.event.failure.message


async def test_a_call_waits_for_one_beside_it() -> None:
    """It is not inside of the other's block, which ends by itself and gives its place away."""
    here = await race()

    async def handler(ctx: Context) -> None:
        asked = asyncio.Event()

        async def first() -> None:
            async with ctx.limit("one"):
                here.desk.answers["one"] = WaitFor(0.01, "one", "concurrency")
                asked.set()
                await wait_until(lambda: len(here.desk.asked) >= 3, "the other to have asked twice")
            del here.desk.answers["one"]

        async def second() -> None:
            await asked.wait()
            async with ctx.limit("one"):
                pass

        await asyncio.gather(first(), second())

    end = await tried(handler, (), here)
    assert isinstance(end.event, Completed), end.event


async def test_no_call_begins_once_the_execution_is_over() -> None:
    """A thread that outlives its execution gets no permit any more."""
    ended = threading.Event()
    found: list[BaseException] = []

    def handler(ctx: Context) -> None:
        ended.wait(20)
        try:
            with ctx.limit("llm"):
                raise AssertionError("no permit, no call")
        except CallerError as error:
            found.append(error)

    here = await race()
    here.app.task("slow", timeout="100ms")(handler)
    (key,) = await here.send("slow", "one")
    async with here.at_work():
        event = await here.until(key, "attempt_failed")
        ended.set()
        await wait_until(lambda: found, "the thread asked for a permit")
    assert isinstance(event, AttemptFailed)
    assert event.failure.reason == "timeout"
    assert here.desk.asked == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"wait": "soon"},
        {"key": ""},
        {"key": "t/\ud800"},
        {"key": "a\nb"},
        {"key": "k" * 129},
        {"key": 7},
        {"key": "{bogus}"},
        {"more": ["t/{pins.model}", "open{"]},
        {"model": "\ud800"},
        {"model": 7},
        {"more": [f"key-{n}" for n in range(40)]},
        {"tokens": 1, "tokens_in": 1},
        {"tokens": 1, "tokens_out": 1},
    ],
)
async def test_arguments_that_make_no_permit_are_the_callers_fault(arguments: dict[str, Any]) -> None:
    """And told as such."""

    async def handler(ctx: Context) -> None:
        more = arguments.pop("more", [])
        ctx.limit(arguments.pop("key", "llm"), *more, **arguments)

    end = await tried(handler)
    assert isinstance(end.event, AttemptFailed)
    assert end.event.failure.error_type == "CallerError"


# --- what an exception's answer means for the task ------------------------------------------------


@pytest.mark.parametrize(
    ("status", "headers", "after_s"),
    [
        (429, {"retry-after": "40"}, 40.0),
        (429, {}, 1.0),
        (503, {"retry-after": "40"}, 40.0),
        (402, {}, 60.0),
    ],
)
async def test_a_refusal_for_now_costs_no_attempt(status: int, headers: dict[str, str], after_s: float) -> None:
    """The task comes again when the service says so."""

    async def handler() -> None:
        raise Answered(status, headers)

    before = time.time()
    end = await tried(handler, limits=("llm",))
    assert isinstance(end.event, Parked)
    assert end.event.reason == "throttled"
    assert end.event.detail.startswith("the called service answered ")
    assert after_s - 0.1 <= end.event.until - before <= after_s + 10
    ((_, settled),) = end.settlements
    assert settled.outcome in ("throttled", "overloaded", "quota")
    assert settled.retry_after_s == (float(headers["retry-after"]) if headers else None)


@pytest.mark.parametrize(
    ("status", "headers", "outcome", "reason"),
    [
        (503, {}, "overloaded", "error"),
        (500, {"retry-after": "2"}, "fault", "error"),
        (404, {}, "client", "fatal"),
        (429, {"x-should-retry": "false"}, "too_large", "fatal"),
    ],
)
async def test_any_other_error_of_the_service_is_an_attempt(
    status: int, headers: dict[str, str], outcome: str, reason: str
) -> None:
    """Named by its status, so that `retry_on` and `fatal_on` can tell it; a wrong request stays wrong, so it is fatal."""

    async def handler() -> None:
        raise Answered(status, headers)

    end = await tried(handler, limits=("llm",))
    assert isinstance(end.event, AttemptFailed)
    failure = end.event.failure
    assert failure.reason == reason
    assert {"Answered", f"http_{status}", f"http_{status // 100}xx"} <= set(failure.classes)
    assert failure.retry_after_s == (2.0 if status == 500 else None)
    assert end.outcomes == [("llm", outcome, False)]


async def test_a_wrong_request_is_tried_again_where_the_tasks_policy_names_it() -> None:
    """What is not found yet may be found later: its producer knows."""

    async def handler() -> None:
        raise Answered(404, {})

    end = await tried(handler, limits=("llm",), retry_policy={"retry_on": ["http_404"]})
    assert isinstance(end.event, AttemptFailed)
    assert end.event.failure.reason == "error"


@pytest.mark.parametrize(
    ("policy", "counts"),
    [
        ({"retry_on": ["http_429"]}, True),
        ({"fatal_on": ["Answered"]}, True),
        ({"retry_on": ["Answered", "http_4xx"]}, False),
        ({"fatal_on": ["http_403"]}, False),
    ],
)
async def test_a_refusal_that_the_tasks_policy_names_is_an_attempt(policy: dict[str, Any], counts: bool) -> None:
    """Its producer has said what it is, by its status; the limit hears the same either way."""

    async def handler() -> None:
        raise Answered(429, {"retry-after": "3"})

    end = await tried(handler, limits=("llm",), retry_policy=policy)
    assert isinstance(end.event, AttemptFailed if counts else Parked)
    assert end.outcomes == [("llm", "throttled", False)]
    if isinstance(end.event, AttemptFailed):
        assert end.event.failure.retry_after_s == 3.0


# --- ctx.http -------------------------------------------------------------------------------------


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the status that the path names."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ")[1].strip(b"/").decode()
    writer.write(f"HTTP/1.1 {status} x\r\nretry-after: 7\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok".encode())
    await writer.drain()
    writer.close()


def _url(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_client_of_the_context_reports_each_answer_where_it_belongs() -> None:
    """For the innermost open limit, else for the task's own; what was told so is not told again by the settlement."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    url = _url(server)
    clients: list[httpx.AsyncClient] = []

    async def handler(ctx: Context) -> None:
        clients.append(ctx.http)
        await ctx.http.get(f"{url}/200")
        async with ctx.limit("inner"):
            await ctx.http.get(f"{url}/200")
        answer = await ctx.http.get(f"{url}/429")
        answer.raise_for_status()

    async with server:
        end = await tried(handler, limits=("outer",))
    reports = [(report.keys, report.outcome, report.retry_after_s) for report in end.here.desk.reports]
    assert [(keys, outcome) for keys, outcome, _ in reports] == [
        (("outer",), "ok"),
        (("inner",), "ok"),
        (("outer",), "throttled"),
    ]
    assert reports[2][2] == 7.0
    assert end.outcomes == [("inner", "ok", True), ("outer", "throttled", True)]
    assert isinstance(end.event, Parked)
    assert clients[0].is_closed


async def test_the_client_of_the_context_tells_nobody_where_there_is_no_limit() -> None:
    """There is nothing to slow down; the ending of the task is the same."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    url = _url(server)

    async def handler(ctx: Context) -> None:
        (await ctx.http.get(f"{url}/429")).raise_for_status()

    async with server:
        end = await tried(handler)
    assert isinstance(end.event, Parked)
    assert end.here.desk.reports == []
