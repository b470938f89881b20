"""Where requests to the governor are answered in one term: the core decides at once, held ones are answered later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf

import msgspec

from millstream.governor_effects import Effects
from millstream.policy.budgets import Spend
from millstream.policy.permits import Governor, Verdict
from millstream.ports import Clock
from millstream.telemetry.events import Telemetry
from millstream_schemas.permits import (
    PERMITS_VERSION,
    Acquire,
    Denied,
    LimitsListing,
    Operate,
    PermitReply,
    PermitRequest,
)

AFTER_FAULT_S = 1.0
"""When the core is asked again after a fault in it."""

_decode = msgspec.json.Decoder(PermitRequest).decode
_encode = msgspec.json.Encoder().encode


class Desk:
    """Answers until `close`, but only while `may_answer`, asked again right before each reply, says that nobody else leads.

    `save` stores the state of the core, which an operator's command waits for; `listed` completes a listing.
    """

    def __init__(
        self,
        core: Governor,
        effects: Effects,
        clock: Clock,
        telemetry: Telemetry,
        *,
        may_answer: Callable[[], bool],
        save: Callable[[], Awaitable[None]],
        listed: Callable[[LimitsListing], LimitsListing],
    ) -> None:
        self._core = core
        self._effects = effects
        self._clock = clock
        self._telemetry = telemetry
        self._may_answer = may_answer
        self._save = save
        self._listed = listed
        self._held: dict[str, asyncio.Future[PermitReply]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = inf
        self._open = True
        self.dirty = False

    # --- requests --------------------------------------------------------------------------------

    def handle(self, body: bytes) -> Awaitable[bytes | None] | bytes | None:
        """The reply to one request, or what to await for it; None, which sends nothing, where another one may lead."""
        if not self._open or not self._may_answer():
            return None
        request = self._read(body)
        if request is None:
            return _encode(Denied(reason="bad_request", epoch=self._core.epoch))
        verdict = self._decided(request)
        if verdict is None:  # silence would look like an absent governor
            return _encode(Denied(reason="bad_request", epoch=self._core.epoch, detail="the governor failed at it"))
        spends = self._perform(verdict)
        reply = verdict.reply
        if reply is None:
            if spends:
                self._effects.store_later(spends)
            return self._once_decided(self._future_of(request.id)) if isinstance(request, Acquire) else None
        if spends:
            return self._once_stored(reply, spends)
        if isinstance(request, Operate):
            return self._once_saved(reply)
        return self._said(self._listed(reply) if isinstance(reply, LimitsListing) else reply)

    def told(self, _subject: str, body: bytes) -> None:
        """Take a request that needs no answer."""
        if not self._open or not self._may_answer():
            return
        request = self._read(body)
        verdict = None if request is None else self._decided(request)
        if verdict is not None:
            self._afterwards(verdict)

    def _decided(self, request: PermitRequest) -> Verdict | None:
        """The core's verdict; None after a fault in it. The one boundary of a request: all others go on."""
        try:
            return self._core.handle(request, self._clock.monotonic())
        except Exception as error:  # noqa: BLE001 - see above
            self._telemetry.emit("message.faulty", error=repr(error))
            return None

    def perform(self, verdict: Verdict) -> None:
        """Perform a verdict that no request has led to, as after a change of configuration."""
        if self._open:
            self._afterwards(verdict)

    def close(self) -> None:
        """Decide nothing from here on; whoever is still held gets no answer and asks again."""
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
        for future in self._held.values():
            future.cancel()
        self._held.clear()

    def _read(self, body: bytes) -> PermitRequest | None:
        try:
            request = _decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._telemetry.emit("message.unknown", error=str(error))
            return None
        if request.v != PERMITS_VERSION:
            self._telemetry.emit("message.unknown", error=f"version {request.v} is not known here")
            return None
        return request

    def _said(self, reply: PermitReply) -> bytes | None:
        return _encode(reply) if self._may_answer() else None

    async def _once_stored(self, reply: PermitReply, spends: list[Spend]) -> bytes | None:
        await self._effects.store(spends)
        return self._said(reply)

    async def _once_saved(self, reply: PermitReply) -> bytes | None:
        await self._save()
        return self._said(reply)

    def _future_of(self, acquire: str) -> asyncio.Future[PermitReply]:
        """Where the core's answer will be; made at once, since the next message may bring it before anybody awaits."""
        future = self._held.get(acquire)
        if future is None:
            future = self._held[acquire] = asyncio.get_running_loop().create_future()
        return future

    async def _once_decided(self, future: asyncio.Future[PermitReply]) -> bytes | None:
        await asyncio.wait([future])  # not awaited itself: two who ask for one id share it
        return None if future.cancelled() else self._said(future.result())

    # --- decisions -------------------------------------------------------------------------------

    def _perform(self, verdict: Verdict) -> list[Spend]:
        """Send the core's answers, set its next wake-up, and perform its effects; returns what is to be stored."""
        self.dirty = True
        for answer in verdict.answers:
            future = self._held.pop(answer.acquire, None)
            if future is not None and not future.done():
                future.set_result(answer.reply)
        if verdict.wake_at is not None and verdict.wake_at < self._wake_at:
            self._wake(verdict.wake_at)
        return self._effects.perform(verdict.effects) if verdict.effects else []

    def _afterwards(self, verdict: Verdict) -> None:
        spends = self._perform(verdict)
        if spends:
            self._effects.store_later(spends)

    def _wake(self, at: float) -> None:
        """Call the core's `due` at `at`, monotonic seconds; its verdict says when to do so next."""
        if self._timer is not None:
            self._timer.cancel()
        self._wake_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - self._clock.monotonic()), self._due)

    def _due(self) -> None:
        self._timer = None
        self._wake_at = inf
        if not self._open or not self._may_answer():
            return
        try:
            self._afterwards(self._core.due(self._clock.monotonic()))
        except Exception as error:  # noqa: BLE001 (the boundary of a timer: no waiter may be lost to one fault)
            self._telemetry.emit("message.faulty", error=repr(error))
            self._wake(self._clock.monotonic() + AFTER_FAULT_S)
