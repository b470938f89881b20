"""The worker's side of the rate-governor: ask, hold, renew, settle. No answer means no permit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from millstream.clock import SystemClock
from millstream.errors import BrokerClosed
from millstream.permit_kinds import (
    DeniedPermit,
    Need,
    Permit,
    Settlement,
    WaitFor,
    in_bounds,
    report_request,
    settle_request,
)
from millstream.permit_link import GovernorLink
from millstream.permit_requests import Leased, PermitRequests, Want
from millstream.ports import Broker, Clock
from millstream.safe_rates import SAFE_AFTER_S, UNREACHABLE, SafeRates
from millstream.settings import Settings
from millstream_schemas.names import Names
from millstream_schemas.permits import MAX_RENEWED, HeldPermit, Observed, OutcomeClass, Renew, Renewed, Return, Settle

__all__ = ["DeniedPermit", "Need", "Permit", "PermitClient", "Settlement", "WaitFor"]

LATE = "late_reply"

SAFE_USE_BY_S = 0.3
RETRY_EVERY_S = 0.25
RENEW_EVERY_S = 5.0
SETTLE_TIMEOUT_S = 2.0
SETTLE_FOR_S = 30.0
MAX_HOLD_S = 60.0


class PermitClient:
    """Permits for one worker, while `run` runs. `settings` gives those in effect now, for limits with a safe rate."""

    def __init__(
        self,
        broker: Broker,
        names: Names,
        worker_id: str,
        clock: Clock | None = None,
        settings: Callable[[], Settings] | None = None,
    ) -> None:
        self._broker = broker
        self._names = names
        self._worker = worker_id
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._link = GovernorLink(
            broker,
            names,
            self._clock,
            on_epoch=self._renew_at_once,
            on_began=self._ask_again,
            on_closed=self._revoke,
        )
        self._requests = PermitRequests(self._link, worker_id, self._clock, self._granted, self._unused)
        self._safe = SafeRates(settings) if settings is not None else None
        self._held: dict[str, HeldPermit] = {}
        self._lost: set[str] = set()
        self._use_by: dict[str, float] = {}
        self._revoked: set[str] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._renew_every_s = RENEW_EVERY_S
        self._renew_at = 0.0
        self._must_renew = True  # to begin with: what is asked then names the governor that it is asked of
        self._local = 0
        self._wake = asyncio.Event()
        self._begun = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self.lost_total = 0

    @property
    def held(self) -> int:
        """How many permits are in hand."""
        return len(self._held)

    @property
    def ready(self) -> bool:
        """Whether it runs, and can ask."""
        return self._begun.is_set() and self._group is not None

    # --- asking ----------------------------------------------------------------------------------

    async def acquire(
        self, keys: Sequence[str], need: Need, wait_s: float, task: str = "", retry: bool = False
    ) -> Permit | WaitFor | DeniedPermit:
        """One permit on all of `keys`, held for up to `wait_s` seconds; returns when its start has come.

        A governor that does not answer grants nothing: `WaitFor` with the reason `governor_unreachable`.
        """
        wait_s = min(max(0.0, wait_s), MAX_HOLD_S)
        want = Want(tuple(dict.fromkeys(keys)), in_bounds(need), wait_s, retry)
        ends = self._clock.monotonic() + wait_s
        while True:
            answer = await self._ask(want, ends, task[:512])
            if isinstance(answer, Permit | DeniedPermit) or answer.reason not in (UNREACHABLE, LATE):
                return answer
            if answer.reason == UNREACHABLE:
                local = await self._take_local(want, ends)
                if local is not None:
                    return local
            if self._clock.monotonic() + RETRY_EVERY_S >= ends:
                return answer
            await asyncio.sleep(RETRY_EVERY_S)

    async def _ask(self, want: Want, ends: float, task: str) -> Permit | WaitFor | DeniedPermit:
        if not self._begun.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, ends - self._clock.monotonic())):
                    await self._begun.wait()
        asker = self._requests.ask(want, ends, task)
        try:
            answer = await asker.answer
        except asyncio.CancelledError:
            leased = self._requests.leave(asker)
            if leased is not None:
                self._return((leased.permit,))
            raise
        return await self._begin(answer, want) if isinstance(answer, Leased) else answer

    async def _begin(self, leased: Leased, want: Want) -> Permit | WaitFor:
        """Wait for the booked start; a grant that has grown too old on its way is handed back."""
        wait_s = leased.start_at - self._clock.monotonic()
        if wait_s > 0:
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                self._return((leased.permit,))
                raise
        if self._clock.monotonic() > leased.use_by or leased.permit in self._revoked:
            self._return((leased.permit,))
            return WaitFor(RETRY_EVERY_S, want.keys[0], LATE)
        return Permit(leased.permit, want.keys, want.need, leased.use_by, leased.epoch)

    async def _take_local(self, want: Want, ends: float) -> Permit | None:
        """A start at the safe rate of all keys, once the governor has been silent for too long."""
        now, since = self._clock.monotonic(), self._link.silent_since
        if self._safe is None or since is None or now - since < SAFE_AFTER_S:
            return None
        wait_s = self._safe.take(want.keys, want.need.requests, max(0.0, ends - now), now)
        if wait_s is None:
            return None
        await asyncio.sleep(wait_s)
        self._local += 1
        use_by = max(now + wait_s, self._clock.monotonic()) + SAFE_USE_BY_S
        return Permit(f"local-{self._local}", want.keys, want.need, use_by, 0, local=True)

    def _granted(self, leased: Leased, want: Want) -> None:
        self._held[leased.permit] = HeldPermit(permit=leased.permit, keys=want.keys, cost_usd=want.need.cost_usd)
        self._use_by[leased.permit] = leased.use_by
        if self._renew_every_s != leased.lease_s / 3:
            self._renew_every_s = leased.lease_s / 3
            self._renew_at = min(self._renew_at, self._clock.monotonic() + self._renew_every_s)
            self._wake.set()

    def may_begin(self, permit: Permit) -> bool:
        """Whether a call under `permit` may still begin: it is not too old, and none of its keys was closed since."""
        return self._clock.monotonic() <= permit.use_by and permit.id not in self._revoked

    def _revoke(self, keys: Collection[str]) -> None:
        """Let nothing begin under what was granted on `keys`; calls that have begun go on."""
        now, closed = self._clock.monotonic(), frozenset(keys)
        for permit, use_by in self._use_by.items():
            if use_by >= now and not closed.isdisjoint(self._held[permit].keys):
                self._revoked.add(permit)

    def _unused(self, permits: tuple[str, ...]) -> None:
        self._send("return", Return(permits=permits))

    # --- ending ----------------------------------------------------------------------------------

    def settle(self, permit: Permit, settlement: Settlement) -> None:
        """Say how a used permit's call ended; sent again until it is answered. Of several ends the first counts."""
        if not self._ends(permit.id):
            return
        self._send("settle", settle_request(permit, settlement))

    def give_back(self, permit: Permit) -> None:
        """Return a permit under which no call was begun."""
        self._return((permit.id,))

    def report(
        self,
        keys: Sequence[str],
        outcome: OutcomeClass,
        retry_after_s: float | None = None,
        observed: Sequence[Observed] = (),
        started_ago_s: float = 0.0,
    ) -> None:
        """Tell at once what a provider answered to one call, for the whole fleet; ends no permit."""
        self._link.tell(report_request(keys, outcome, retry_after_s, observed, started_ago_s))

    def _return(self, permits: tuple[str, ...]) -> None:
        ended = tuple(permit for permit in permits if self._ends(permit))
        if ended:
            self._send("return", Return(permits=ended))

    def _ends(self, permit: str) -> bool:
        """Whether this is the first end of a permit that the governor knows of."""
        self._use_by.pop(permit, None)
        self._revoked.discard(permit)
        if self._held.pop(permit, None) is None:
            if permit not in self._lost:
                return False
            self._lost.discard(permit)
        if not self._held:
            self._wake.set()
        return True

    def _send(self, verb: str, request: Settle | Return) -> None:
        if self._group is None:
            self._link.tell(request)
            return
        task = self._group.create_task(self._deliver(verb, request))
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not self._ending:
            self._wake.set()

    async def _deliver(self, verb: str, request: Settle | Return) -> None:
        """Send until it is answered; what is cut short is told at least."""
        give_up_at = self._clock.monotonic() + SETTLE_FOR_S
        try:
            while await self._link.ask(verb, request, SETTLE_TIMEOUT_S) is None:
                if self._clock.monotonic() > give_up_at:
                    return
                await asyncio.sleep(RETRY_EVERY_S)
        except asyncio.CancelledError:
            self._link.tell(request)
            raise
        except BrokerClosed:
            raise
        except Exception:  # noqa: BLE001 - the lease runs out then; the ends of other permits must not go with it
            return

    # --- beside the work ---------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Renew leases and send settlements until `stop` is set and nothing is held any more.

        When cancelled it sends the rest without waiting for answers. Raises BrokerClosed.
        """
        said = await self._broker.listen(self._names.governor_said, self._link.heard)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._requests.open(group)
                watch = group.create_task(self._watch(stop))
                try:
                    while not (stop.is_set() and not self._held and not self._ending):
                        self._wake.clear()
                        await self._renew_due()
                        self._begun.set()
                        await self._pause()
                finally:
                    self._group = None
                    self._requests.close()
                    watch.cancel()
        finally:
            await said.close()

    async def _watch(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._wake.set()

    async def _pause(self) -> None:
        """Until something has changed, or the next renewal is due."""
        until = self._clock.monotonic() + self._renew_every_s
        if self._held or self._must_renew:
            until = min(until, self._renew_at)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - self._clock.monotonic())):
                await self._wake.wait()

    def _renew_at_once(self) -> None:
        """A new governor knows of our permits only what we tell it, and waits to hear from us."""
        self._must_renew = True
        self._renew_at = 0.0
        self._wake.set()

    def _ask_again(self) -> None:
        """Who asked its predecessor would wait for an answer in vain."""
        self._requests.again()

    async def _renew_due(self) -> None:
        now = self._clock.monotonic()
        if now < self._renew_at or not (self._held or self._must_renew):
            return
        self._renew_at = now + self._renew_every_s
        self._must_renew = False
        held = tuple(self._held.values())
        for start in range(0, max(1, len(held)), MAX_RENEWED):
            part = held[start : start + MAX_RENEWED]
            renew = Renew(worker=self._worker, permits=part, epoch=self._link.epoch)
            reply = await self._link.ask("renew", renew, SETTLE_TIMEOUT_S)
            if not isinstance(reply, Renewed):
                self._must_renew = True
                self._renew_at = now + RETRY_EVERY_S
                return
            for permit in reply.lost:
                self._use_by.pop(permit, None)
                if self._held.pop(permit, None) is not None:
                    self._lost.add(permit)  # its call goes on; the governor has given its place away
                    self.lost_total += 1
