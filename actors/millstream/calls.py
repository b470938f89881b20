"""Calls inside a handler: `ctx.limit` puts each under a permit of its own; `ctx.http` reports what services answer."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from millstream.answers import UNKNOWN, Said, attribute, said_of
from millstream.context import Used
from millstream.errors import BudgetExhausted, CallerError, Fatal, LimitReached
from millstream.permits_client import DeniedPermit, Need, Permit, Settlement, WaitFor
from millstream.policy import waiting as policy
from millstream.policy.limits import Price
from millstream.policy.start import beyond_budget, cost_of
from millstream.providers import Classified
from millstream_schemas.events import Usage, WorkItem
from millstream_schemas.permits import MAX_AMOUNT, MAX_CALLS, Observed, OutcomeClass

if TYPE_CHECKING:
    import httpx

CLOSE_S = 2.0
"""How long the client may take to close its connections at the end of an execution."""
_TOLD = 32
"""Answers and exceptions of an execution that are remembered as reported, the newest."""


class Permits(Protocol):
    """Where permits come from, and where they go."""

    async def acquire(
        self, keys: Sequence[str], need: Need, wait_s: float, task: str = "", retry: bool = False
    ) -> Permit | WaitFor | DeniedPermit: ...

    def settle(self, permit: Permit, settlement: Settlement) -> None: ...

    def report(
        self,
        keys: Sequence[str],
        outcome: OutcomeClass,
        retry_after_s: float | None = None,
        observed: Sequence[Observed] = (),
        started_ago_s: float = 0.0,
    ) -> None: ...

    def give_back(self, permit: Permit) -> None: ...

    def may_begin(self, permit: Permit) -> bool: ...


class Grant:
    """The permit that a call is using: what `async with ctx.limit(...) as grant` gives."""

    def __init__(self, permit: Permit, used: Used, outer: "Grant | None" = None) -> None:
        self.permit = permit
        self.outer = outer
        """The grant of the block around this one."""
        self._used = used
        self._own: Used | None = None
        self.reported = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The limits that the call counts against."""
        return self.permit.keys

    def usage(self, *, tokens_in: int = 0, tokens_out: int = 0, cost_usd: float = 0.0) -> None:
        """Add to what the call has used. It replaces the estimate when the permit is settled, and counts for the task."""
        self._own = self._own or Used()
        self._own.add(tokens_in, tokens_out, cost_usd)
        self._used.add(tokens_in, tokens_out, cost_usd)

    def settlement(self, said: Said) -> Settlement:
        """What to tell the governor when the call has ended."""
        own = self._own
        return Settlement(
            outcome=said.outcome,
            tokens_in=None if own is None else own.tokens_in,
            tokens_out=None if own is None else own.tokens_out,
            cost_usd=None if own is None else own.cost_usd or None,
            retry_after_s=said.retry_after_s,
            observed=said.observed,
            reported=said.reported,
        )


_innermost: ContextVar[Grant | None] = ContextVar("millstream_grant", default=None)
"""The grant of the innermost `ctx.limit` block that this code runs in: `ctx.http` reports for its keys."""


@dataclass
class Calls:
    """The calls of one execution: their permits, the HTTP client, and which answers were reported already.

    `over` is set once the execution has ended; `used` is what it has reported as used.
    """

    item: WorkItem
    permits: Permits
    monotonic: Callable[[], float]
    prices: Mapping[str, Price]
    keys: tuple[str, ...] = ()
    """The limits of the task's own permit."""
    used: Used = field(default_factory=Used)
    over: bool = False
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _reserved: Used = field(default_factory=Used)
    _open: dict[Grant, Need] = field(default_factory=dict[Grant, Need])
    """The grants that have neither been settled nor given back; changed in the loop alone."""
    _told: deque[object] = field(default_factory=lambda: deque[object](maxlen=_TOLD))
    _http: "httpx.AsyncClient | None" = None

    @property
    def http(self) -> "httpx.AsyncClient":
        """A client that reports every answer; made when first used, closed with the execution."""
        if self._http is None:
            from millstream.providers.http import reporting_client  # a handler that calls nothing loads no HTTP

            self._http = reporting_client(self.heard)
        return self._http

    async def close(self) -> None:
        """End with the execution: from now on no permit is given, not even to a thread that still runs.

        A call that was never left is settled as unknown: nobody will say how it ended.
        """
        self.over = True
        for grant in tuple(self._open):
            self._settle(grant, UNKNOWN)
        if self._http is not None:
            with suppress(Exception):  # whatever is wrong with its connections, the execution has its ending
                async with asyncio.timeout(CLOSE_S):
                    await self._http.aclose()

    # --- what was told ---------------------------------------------------------------------------

    def heard(self, answer: object, said: Classified, started_ago_s: float) -> None:
        """Report an answer for the limits of the innermost open `ctx.limit`, else for those of the task's permit."""
        grant = _innermost.get()
        keys = self.keys if grant is None else grant.keys
        if not keys:
            return
        self.permits.report(keys, said.outcome, said.retry_after_s, said.observed, started_ago_s)
        if said.outcome != "ok":  # an exception that carries this answer may come; it must not count twice
            self._told.append(answer)
        if grant is not None:
            grant.reported = True

    def end(self, error: BaseException | None, grant: Grant | None = None) -> Said:
        """How a call, or the whole execution, ended; marked as reported where the limits were told of it before."""
        said = said_of(error)
        if error is None:
            before = grant is not None and grant.reported
        else:
            before = self._was_told(error) or self._was_told(attribute(error, "response"))
            self._told.append(error)
        return said if not before else Said(said.outcome, said.retry_after_s, said.observed, True, said.detail)

    def _was_told(self, one: object) -> bool:
        return one is not None and any(one is told for told in self._told)

    # --- permits for calls -----------------------------------------------------------------------

    def limited(
        self,
        keys: tuple[str, ...],
        wait_s: float,
        *,
        requests: int,
        tokens_in: int,
        tokens_out: int,
        cost_usd: float,
        model: str,
    ) -> "LimitedCall":
        """A call that is to begin under `keys`. Amounts that a permit cannot state are clamped to what it can."""
        need = Need(
            requests=min(max(1, int(requests)), MAX_CALLS),
            tokens_in=min(max(0, int(tokens_in)), MAX_AMOUNT),
            tokens_out=min(max(0, int(tokens_out)), MAX_AMOUNT),
            cost_usd=max(0.0, float(cost_usd)),
            model=model[:128],
        )
        return LimitedCall(self, keys, need, wait_s)

    async def begin(self, keys: tuple[str, ...], need: Need, wait_s: float, outer: Grant | None) -> Grant:
        """Wait for a permit under which a call may begin at once; raises LimitReached, BudgetExhausted, Fatal, CallerError."""
        self.check_open()
        self._reserve(need, 1)
        permit: Permit | None = None
        try:
            permit = await self._acquire(keys, need, wait_s, outer)
            self.check_open()
        except BaseException:
            self._reserve(need, -1)
            if permit is not None:
                self.permits.give_back(permit)
            raise
        grant = Grant(permit, self.used, outer)
        self._open[grant] = need
        return grant

    def check_open(self) -> None:
        """Raises CallerError once the execution is over."""
        if self.over:
            raise CallerError("the execution of this task has ended: `ctx.limit` gives no permit for it any more")

    def abandon(self, grant: Grant) -> None:
        """Give back a permit under which no call began."""
        need = self._open.pop(grant, None)
        if need is not None:
            self._reserve(need, -1)
            self.permits.give_back(grant.permit)

    def finish(self, grant: Grant, error: BaseException | None) -> None:
        """Settle a permit by how its call ended; of several ends the first counts."""
        if grant in self._open:
            self._settle(grant, self.end(error, grant))

    def _settle(self, grant: Grant, said: Said) -> None:
        self._reserve(self._open.pop(grant), -1)
        self.permits.settle(grant.permit, grant.settlement(said))

    def _reserve(self, need: Need, times: int) -> None:
        """Add (`times` 1) or take away (-1) the estimate of a call that runs, so that several at once keep the task's budget.

        Raises BudgetExhausted where the estimate does not fit into what is left of it.
        """
        cost_usd = need.cost_usd or cost_of(self.prices.get(need.model), need.tokens_in, need.tokens_out)
        ahead, used = self._reserved, self.item.usage
        if times > 0:
            so_far = Usage(
                tokens_in=used.tokens_in + self.used.tokens_in + ahead.tokens_in,
                tokens_out=used.tokens_out + self.used.tokens_out + ahead.tokens_out,
                cost_usd=used.cost_usd + self.used.cost_usd + ahead.cost_usd,
            )
            estimate = Usage(tokens_in=need.tokens_in, tokens_out=need.tokens_out, cost_usd=cost_usd)
            spent = beyond_budget(self.item, so_far, estimate)
            if spent is not None:
                raise BudgetExhausted(spent)
        ahead.tokens_in += times * need.tokens_in
        ahead.tokens_out += times * need.tokens_out
        ahead.cost_usd += times * cost_usd

    def _holds(self, key: str, inner: Grant | None) -> bool:
        """Whether this call would wait for itself: its task's permit, or a block around it, has a place of `key`."""
        while inner is not None and not (inner in self._open and key in inner.keys):
            inner = inner.outer
        return inner is not None or key in self.keys

    async def _acquire(self, keys: tuple[str, ...], need: Need, wait_s: float, outer: Grant | None) -> Permit:
        ends = self.monotonic() + wait_s
        card = self.item.card
        while True:
            asked_at = self.monotonic()
            hold_s = policy.even_hold_s(ends - asked_at)
            answer = await self.permits.acquire(keys, need, hold_s, card.key, card.attempt > 1)
            if isinstance(answer, Permit):
                return answer
            if isinstance(answer, DeniedPermit):
                raise _refusal(answer)
            if answer.reason == "concurrency" and self._holds(answer.limiting_key, outer):
                place = f"`ctx.limit` waits for a place of `{answer.limiting_key}`"
                raise CallerError(f"{place} that is already held by this task: take the key only once")
            now = self.monotonic()
            if answer.seconds >= ends - now:
                raise LimitReached(answer.seconds, policy.waits_for(answer.limiting_key, answer.reason))
            await asyncio.sleep(max(policy.LEAST_PAUSE_S, answer.seconds - (now - asked_at)))


def _refusal(answer: DeniedPermit) -> LimitReached | BudgetExhausted | Fatal:
    """The exception that tells a handler why it gets no permit."""
    match policy.after_denial(answer.reason, answer.key, answer.detail):
        case policy.Park(after_s, detail):
            return LimitReached(after_s, detail)
        case policy.Fail(failure):
            if failure.reason == "budget_exhausted":
                return BudgetExhausted(failure.message)
            return Fatal(failure.message)


class LimitedCall:
    """One call under limits: `async with` in an async handler, `with` in a sync one. Yields its `Grant`."""

    __slots__ = ("_before", "_calls", "_grant", "_keys", "_need", "_wait_s")

    def __init__(self, calls: Calls, keys: tuple[str, ...], need: Need, wait_s: float) -> None:
        self._calls = calls
        self._keys = keys
        self._need = need
        self._wait_s = wait_s
        self._grant: Grant | None = None
        self._before: Grant | None = None

    async def __aenter__(self) -> Grant:
        return self._entered(await self._calls.begin(self._keys, self._need, self._wait_s, _innermost.get()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.finish(self._left(), error)

    def __enter__(self) -> Grant:
        calls = self._calls
        if _runs_a_loop():
            raise CallerError("an async handler takes its limits by `async with ctx.limit(...)`")
        while True:
            asked = calls.begin(self._keys, self._need, self._wait_s, _innermost.get())
            grant = asyncio.run_coroutine_threadsafe(asked, calls.loop).result()
            calls.check_open()
            if calls.permits.may_begin(grant.permit):  # a busy process may take its time to come back to this thread
                return self._entered(grant)
            calls.loop.call_soon_threadsafe(calls.abandon, grant)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        grant = self._left()
        with suppress(RuntimeError):  # the worker's loop has ended, and the execution long before it
            self._calls.loop.call_soon_threadsafe(self._calls.finish, grant, error)

    def _entered(self, grant: Grant) -> Grant:
        self._grant, self._before = grant, grant.outer
        _innermost.set(grant)
        return grant

    def _left(self) -> Grant:
        grant = self._grant
        if grant is None:
            raise CallerError("`ctx.limit(...)` was left without having been entered")
        self._grant = None
        _innermost.set(self._before)
        return grant


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
