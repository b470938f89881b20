"""Sends like acquires as one request: the first at once, those that come while it is under way together after it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from millstream.errors import BrokerClosed
from millstream.permit_kinds import DeniedPermit, Need, WaitFor
from millstream.permit_link import GovernorLink
from millstream.ports import Clock
from millstream.safe_rates import UNREACHABLE
from millstream_schemas.permits import MAX_PERMITS, Acquire, Cancel, Denied, Granted, Wait

TOGETHER_S = 0.002
"""How long an acquire waits for others like it, while one like it is at the governor."""

ANSWER_MARGIN_S = 1.0
"""How much longer than the governor may hold a request its answer may take."""

UNREACHABLE_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Want:
    """What acquires must have in common to be sent as one request."""

    keys: tuple[str, ...]
    need: Need
    wait_s: float
    retry: bool


@dataclass(frozen=True, slots=True)
class Leased:
    """One lease of a grant, times on the monotonic clock: begin at `start_at`, at the latest at `use_by`."""

    permit: str
    start_at: float
    use_by: float
    lease_s: float
    epoch: int


Answer = Leased | WaitFor | DeniedPermit


@dataclass(slots=True, eq=False)
class Asker:
    """Somebody who waits for one permit, until `ends` on the monotonic clock."""

    ends: float
    task: str
    answer: asyncio.Future[Answer]
    batch: _Batch | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    """Askers whose request is at the governor."""

    line: _Line
    askers: list[Asker]
    asked_as: str = ""
    """The id of the request; empty before it is sent, and once it is answered."""
    again: bool = False
    """Another governor leads than the one that was asked."""


@dataclass(slots=True, eq=False)
class _Line:
    """Askers with the same want; those in `queue` are part of no request yet."""

    want: Want
    queue: deque[Asker] = field(default_factory=deque[Asker])
    in_flight: int = 0
    next_send: asyncio.Handle | None = None


class PermitRequests:
    """Sends acquires and shares out what comes back; what nobody waits for any more is returned at once.

    `granted` is called for each lease before its asker learns of it, `unused` with the permits to be returned.
    """

    def __init__(
        self,
        link: GovernorLink,
        worker: str,
        clock: Clock,
        granted: Callable[[Leased, Want], None],
        unused: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._link = link
        self._worker = worker
        self._clock = clock
        self._granted = granted
        self._unused = unused
        self._lines: dict[Want, _Line] = {}
        self._count = 0
        self._ids = f"{os.urandom(8).hex()}-"
        self._in_flight: dict[_Batch, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    def open(self, group: asyncio.TaskGroup) -> None:
        """Ask from here on, in tasks of `group`."""
        self._group = group

    def close(self) -> None:
        """Ask for nothing more: who waits is told that nobody answers."""
        self._group = None
        for asking in self._in_flight.values():
            asking.cancel()
        for line in tuple(self._lines.values()):
            _answer_all(line.queue, _NOBODY)
            line.queue.clear()

    def ask(self, want: Want, ends: float, task: str) -> Asker:
        """Have one permit asked for; the answer comes by the asker's future."""
        asker = Asker(ends, task, asyncio.get_running_loop().create_future())
        line = self._lines.get(want)
        if line is None:
            line = self._lines[want] = _Line(want)
        line.queue.append(asker)
        self._plan(line)
        return asker

    def leave(self, asker: Asker) -> Leased | None:
        """Stop asking; returns a lease that has already come, which the asker has to give back."""
        answer = asker.answer
        if answer.done() and not answer.cancelled():
            result = answer.result()
            return result if isinstance(result, Leased) else None
        answer.cancel()
        batch = asker.batch
        if batch in self._in_flight and all(one.answer.done() for one in batch.askers):
            self._in_flight[batch].cancel()
        return None

    def again(self) -> None:
        """Repeat all requests under way, because their governor may be gone; what that one still grants is not used."""
        for batch, asking in self._in_flight.items():
            batch.again = True
            asking.cancel()

    # --- sending -----------------------------------------------------------------------------------

    def _plan(self, line: _Line) -> None:
        if line.next_send is not None:
            return
        loop = asyncio.get_running_loop()
        if line.in_flight:
            line.next_send = loop.call_later(TOGETHER_S, self._send, line)
        else:
            line.next_send = loop.call_soon(self._send, line)  # with all that come in this turn of the loop

    def _send(self, line: _Line) -> None:
        line.next_send = None
        askers: list[Asker] = []
        while line.queue and len(askers) < MAX_PERMITS:
            asker = line.queue.popleft()
            if not asker.answer.done():
                askers.append(asker)
        if askers and self._group is not None:
            batch = _Batch(line, askers)
            for asker in askers:
                asker.batch = batch
            line.in_flight += 1
            asking = self._in_flight[batch] = self._group.create_task(self._ask(batch))
            asking.add_done_callback(lambda _: self._asked(batch))  # also where it is cancelled before it began
        else:
            _answer_all(askers, _NOBODY)
        if line.queue:
            self._plan(line)
        elif not line.in_flight:
            self._lines.pop(line.want, None)

    async def _ask(self, batch: _Batch) -> None:
        """Ask for a batch; whatever is wrong with its request is for its askers alone to hear. Raises BrokerClosed."""
        try:
            await self._ask_for(batch)
        except BrokerClosed:
            raise
        except ValueError as error:  # it cannot be written as JSON, and never will be
            key = batch.line.want.keys[0].encode(errors="backslashreplace").decode()
            _answer_all(batch.askers, DeniedPermit("bad_request", key, None, ascii(str(error))[:200]))
        except Exception:  # noqa: BLE001 - one request that fails must not end the requests of all others
            _answer_all(batch.askers, _NOBODY)

    async def _ask_for(self, batch: _Batch) -> None:
        want, askers = batch.line.want, batch.askers
        self._count += 1
        batch.asked_as = self._ids + str(self._count)
        sent_at = self._clock.monotonic()
        wait_s = max(0.0, min(asker.ends for asker in askers) - sent_at)
        need = want.need
        request = Acquire(
            id=batch.asked_as,
            worker=self._worker,
            keys=want.keys,
            n=len(askers),
            requests=need.requests,
            tokens_in=need.tokens_in,
            tokens_out=need.tokens_out,
            cost_usd=need.cost_usd,
            model=need.model,
            wait_ms=int(wait_s * 1000),
            task=askers[0].task,
            retry=want.retry,
            epoch=self._link.epoch,
        )
        reply = await self._link.ask("acquire", request, wait_s + ANSWER_MARGIN_S)
        if isinstance(reply, Granted | Wait | Denied):
            batch.asked_as = ""
            if isinstance(reply, Wait) and 0 < request.epoch < reply.epoch:
                batch.again = True  # another one leads by now, and takes nothing that was asked of its predecessor
            else:
                self._answer(batch, reply, sent_at)

    def _asked(self, batch: _Batch) -> None:
        """Clean up after a request, whether answered, cancelled or failed."""
        line = batch.line
        del self._in_flight[batch]
        if batch.asked_as:
            self._link.tell(Cancel(id=batch.asked_as))  # whatever it comes to is not wanted any more
        if batch.again and self._group is not None:
            line.queue.extendleft(reversed(batch.askers))
        else:
            _answer_all(batch.askers, _NOBODY)
        line.in_flight -= 1
        self._hurry(line)

    def _hurry(self, line: _Line) -> None:
        """Send those that waited for company: the one at the governor is back."""
        if line.next_send is not None:
            line.next_send.cancel()
            line.next_send = None
        self._send(line)

    # --- answers -----------------------------------------------------------------------------------

    def _answer(self, batch: _Batch, reply: Granted | Wait | Denied, sent_at: float) -> None:
        match reply:
            case Granted():
                self._share(batch, reply, sent_at)
            case Wait():
                _answer_all(batch.askers, WaitFor(reply.retry_after_ms / 1000, reply.limiting_key, reply.reason))
            case Denied():
                _answer_all(batch.askers, DeniedPermit(reply.reason, reply.key, reply.until_s, reply.detail))
            case _:
                assert_never(reply)

    def _share(self, batch: _Batch, grant: Granted, sent_at: float) -> None:
        """A lease for each asker, the longest waiting first; those left over ask again, before all others."""
        now = self._clock.monotonic()
        asked_at = sent_at + grant.held_ms / 1000
        waiting = deque(asker for asker in batch.askers if not asker.answer.done())
        unused: list[str] = []
        for lease in grant.leases:
            if not waiting:
                unused.append(lease.permit)
                continue
            start_s = lease.start_in_ms / 1000
            use_by = asked_at + start_s + grant.use_by_ms / 1000
            leased = Leased(lease.permit, now + start_s, use_by, grant.lease_ms / 1000, grant.epoch)
            self._granted(leased, batch.line.want)
            waiting.popleft().answer.set_result(leased)
        if unused:
            self._unused(tuple(unused))
        for asker in waiting:
            asker.batch = None
        batch.askers = []
        batch.line.queue.extendleft(reversed(waiting))


_NOBODY = WaitFor(UNREACHABLE_AGAIN_S, "", UNREACHABLE)


def _answer_all(askers: deque[Asker] | list[Asker], answer: Answer) -> None:
    for asker in askers:
        if not asker.answer.done():
            asker.answer.set_result(answer)
