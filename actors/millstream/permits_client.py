"""The worker's side of the rate-governor: ask, hold, renew, settle. No answer means no permit."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from millstream.clock import SystemClock
from millstream.errors import BrokerClosed, BrokerError
from millstream.ports import Broker, Clock
from millstream_schemas.names import Names
from millstream_schemas.permits import (
    MAX_AMOUNT,
    TOLD,
    Acquire,
    Cancel,
    Denied,
    Granted,
    HeldPermit,
    PermitOutcome,
    PermitReply,
    PermitRequest,
    Renew,
    Renewed,
    Return,
    Settle,
    Wait,
)

UNREACHABLE = "governor_unreachable"
LATE = "late_reply"

ANSWER_MARGIN_S = 1.0
"""How much longer than the governor may hold a request its answer may take."""

UNREACHABLE_AGAIN_S = 1.0
RETRY_EVERY_S = 0.25
RENEW_EVERY_S = 5.0
SETTLE_TIMEOUT_S = 2.0
SETTLE_FOR_S = 30.0
MAX_HOLD_S = 60.0
MAX_RETRY_AFTER_S = 86_400.0

_decoder = msgspec.json.Decoder(PermitReply)
_encode = msgspec.json.Encoder().encode


def _amount(tokens: int) -> int:
    """Tokens as a request may state them; one that states more would be refused as a whole."""
    return min(max(0, tokens), MAX_AMOUNT)


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to begin now, until `use_by` on the monotonic clock; to be settled or given back."""

    id: str
    keys: tuple[str, ...]
    tokens: int
    use_by: float
    epoch: int


@dataclass(frozen=True, slots=True)
class WaitFor:
    """No permit yet: ask again in `seconds`."""

    seconds: float
    limiting_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeniedPermit:
    """No permit, now or later, for what was asked."""

    reason: str
    key: str = ""


@dataclass(slots=True)
class _Unsent:
    request: Settle | Return
    give_up_at: float


class PermitClient:
    """Permits for one worker. While `run` runs, leases are renewed and settlements repeated until they are taken."""

    def __init__(self, broker: Broker, names: Names, worker_id: str, clock: Clock | None = None) -> None:
        self._broker = broker
        self._names = names
        self._worker = worker_id
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._held: dict[str, Permit] = {}
        self._unsent: deque[_Unsent] = deque()
        self._renew_every_s = RENEW_EVERY_S
        self._renew_at = 0.0
        self._epoch = 0
        self._wake = asyncio.Event()
        self._running = False
        self.lost_total = 0

    # --- asking ----------------------------------------------------------------------------------

    async def acquire(
        self, keys: Sequence[str], tokens: int, wait_s: float, task: str = ""
    ) -> Permit | WaitFor | DeniedPermit:
        """One permit on all of `keys`, held for up to `wait_s` seconds; returns when its start has come.

        A governor that does not answer grants nothing: `WaitFor` with the reason `governor_unreachable`.
        """
        ends = self._clock.monotonic() + min(max(0.0, wait_s), MAX_HOLD_S)
        while True:
            left_s = max(0.0, ends - self._clock.monotonic())
            answer = await self._ask(tuple(keys), tokens, left_s, task)
            if isinstance(answer, Permit | DeniedPermit) or answer.reason not in (UNREACHABLE, LATE):
                return answer
            if self._clock.monotonic() + RETRY_EVERY_S >= ends:
                return answer
            await asyncio.sleep(RETRY_EVERY_S)

    async def _ask(
        self, keys: tuple[str, ...], tokens: int, wait_s: float, task: str
    ) -> Permit | WaitFor | DeniedPermit:
        request = Acquire(
            id=uuid.uuid4().hex,
            worker=self._worker,
            keys=keys,
            tokens=_amount(tokens),
            wait_ms=int(wait_s * 1000),
            task=task[:512],
        )
        sent_at = self._clock.monotonic()
        try:
            reply = await self._request("acquire", request, wait_s + ANSWER_MARGIN_S)
            match reply:
                case Granted():
                    return await self._begin(reply, request, sent_at)
                case Wait():
                    return WaitFor(reply.retry_after_ms / 1000, reply.limiting_key, reply.reason)
                case Denied():
                    return DeniedPermit(reply.reason, reply.key)
                case _:
                    self._cancel(request.id)
                    return WaitFor(UNREACHABLE_AGAIN_S, "", UNREACHABLE)
        except asyncio.CancelledError:
            self._cancel(request.id)
            raise

    async def _begin(self, grant: Granted, request: Acquire, sent_at: float) -> Permit | WaitFor:
        """Wait for the booked start; a grant that has grown too old on its way is handed back."""
        use_by = sent_at + (grant.held_ms + grant.start_in_ms + grant.use_by_ms) / 1000
        permit = Permit(grant.permit, request.keys, request.tokens, use_by, grant.epoch)
        self._held[permit.id] = permit
        self._renew_every_s = grant.lease_ms / 3000
        if grant.epoch != self._epoch:
            self._epoch = grant.epoch
            self._renew_at = 0.0  # a new governor knows of our other permits only what we tell it
            self._wake.set()
        try:
            await asyncio.sleep(grant.start_in_ms / 1000)
        except asyncio.CancelledError:
            self.give_back(permit)
            raise
        if self._clock.monotonic() > use_by:
            self.give_back(permit)
            return WaitFor(RETRY_EVERY_S, request.keys[0], LATE)
        return permit

    def _cancel(self, acquire: str) -> None:
        """Whatever an unanswered request comes to is not wanted any more."""
        self._broker.tell(self._names.governor(TOLD), _encode(Cancel(id=acquire)))

    async def _request(self, verb: str, request: PermitRequest, timeout_s: float) -> PermitReply | None:
        """The governor's reply; None where there is none, or none that is understood."""
        try:
            return _decoder.decode(await self._broker.request(self._names.governor(verb), _encode(request), timeout_s))
        except BrokerClosed:
            raise
        except (BrokerError, msgspec.MsgspecError):
            return None

    # --- ending ----------------------------------------------------------------------------------

    def settle(
        self,
        permit: Permit,
        outcome: PermitOutcome,
        tokens: int | None = None,
        retry_after_s: float | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        """Say how a used permit's call ended and what it cost (None: as estimated).

        `throttled` pauses `keys`, or else all keys of the permit, for the whole fleet.
        """
        if retry_after_s is not None:
            retry_after_s = min(max(0.0, float(retry_after_s)), MAX_RETRY_AFTER_S)
        request = Settle(
            permit=permit.id,
            outcome=outcome,
            tokens=None if tokens is None else _amount(tokens),
            retry_after_s=retry_after_s,
            keys=tuple(keys) or permit.keys,
        )
        self._end(permit, request)

    def give_back(self, permit: Permit) -> None:
        """Return a permit under which no call was begun."""
        self._end(permit, Return(permits=(permit.id,)))

    def _end(self, permit: Permit, request: Settle | Return) -> None:
        self._held.pop(permit.id, None)
        if not self._running:
            self._broker.tell(self._names.governor(TOLD), _encode(request))
            return
        self._unsent.append(_Unsent(request, self._clock.monotonic() + SETTLE_FOR_S))
        self._wake.set()

    # --- beside the work ---------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Renew leases and send settlements until `stop` is set and nothing is held any more.

        When cancelled it sends the rest without waiting for answers.
        """
        self._running = True
        try:
            while not (stop.is_set() and not self._held and not self._unsent):
                self._wake.clear()
                sent_all = await self._send_unsent()
                await self._renew_due()
                if stop.is_set() and not self._held and not self._unsent:
                    return
                await self._pause(stop, sent_all)
        finally:
            self._running = False
            while self._unsent:
                self._broker.tell(self._names.governor(TOLD), _encode(self._unsent.popleft().request))

    async def _send_unsent(self) -> bool:
        """Send what ended meanwhile, all at once; False where some of it must be sent again."""
        batch, self._unsent = list(self._unsent), deque()
        taken = [False] * len(batch)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(batch)):
                    group.create_task(self._send(batch, index, taken))
        finally:  # when cancelled too: `run` has the rest told
            now = self._clock.monotonic()
            left = [each for each, done in zip(batch, taken, strict=True) if not done and each.give_up_at > now]
            self._unsent.extendleft(reversed(left))
        return not left

    async def _send(self, batch: list[_Unsent], index: int, taken: list[bool]) -> None:
        request = batch[index].request
        verb = "settle" if isinstance(request, Settle) else "return"
        taken[index] = await self._request(verb, request, SETTLE_TIMEOUT_S) is not None

    async def _renew_due(self) -> None:
        now = self._clock.monotonic()
        if not self._held or now < self._renew_at:
            return
        self._renew_at = now + self._renew_every_s
        held = tuple(HeldPermit(permit=permit.id, keys=permit.keys) for permit in self._held.values())
        reply = await self._request("renew", Renew(worker=self._worker, permits=held), SETTLE_TIMEOUT_S)
        if not isinstance(reply, Renewed):
            self._renew_at = now + RETRY_EVERY_S
            return
        self._epoch = reply.epoch
        for permit in reply.lost:
            if self._held.pop(permit, None) is not None:
                self.lost_total += 1  # its call goes on; the governor has given its place away

    async def _pause(self, stop: asyncio.Event, sent_all: bool) -> None:
        """Until there is something to send, or a lease to renew; shortly where the governor did not answer."""
        limit_s = RETRY_EVERY_S if stop.is_set() or not sent_all else self._renew_every_s / 2
        if not sent_all:
            await asyncio.sleep(limit_s)
            return
        if self._held:
            limit_s = min(limit_s, max(0.0, self._renew_at - self._clock.monotonic()))
        try:
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        except TimeoutError:
            return
