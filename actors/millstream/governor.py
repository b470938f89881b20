"""The rate-governor: one leads, the core decides, this carries its verdicts over request/reply."""

import asyncio
import os
import socket
from dataclasses import dataclass

import msgspec

from millstream.errors import BrokerClosed, BrokerError
from millstream.leadership import Leadership
from millstream.policy.limit_state import Limit, Rules
from millstream.policy.permits import Governor, Snapshot, Verdict
from millstream.ports import Broker, Clock, Ids, Subscription
from millstream.telemetry.events import Telemetry
from millstream_schemas.names import Names
from millstream_schemas.permits import TOLD, VERBS, Denied, PermitReply, PermitRequest
from millstream_schemas.topology import LEADER_TTL_S

VERSION = 1
RENEW_EVERY_S = 1.0
SAVE_EVERY_S = 0.5
AFTER_FAULT_S = 1.0

_decoder = msgspec.json.Decoder(PermitRequest)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class GovernorSettings:
    """The limits and how to keep them. `state_bucket` holds what a successor must know; it must outlive a minute."""

    names: Names
    limits: tuple[Limit, ...]
    rules: Rules
    state_bucket: str | None = None
    lock_ttl_s: float = LEADER_TTL_S


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot and when it was taken, Unix seconds."""

    at: float
    snapshot: Snapshot


class RateGovernor:
    """Answers permit requests while it leads, and is silent as soon as another may lead."""

    def __init__(
        self, broker: Broker, settings: GovernorSettings, clock: Clock, ids: Ids, telemetry: Telemetry
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        names = settings.names
        holder = f"{socket.gethostname()}/{os.getpid()}"
        self._lock = Leadership(
            broker, names.leaders_bucket, names.governor_lock, clock, settings.lock_ttl_s, holder, ids.new()
        )
        self._core: Governor | None = None
        self._held: dict[str, asyncio.Future[PermitReply]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._dirty = False
        self._last: Saved | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Lead until `stop` is set; a lapse of the connection begins a new term.

        Raises GovernorAlreadyRunning where another one leads, and BrokerClosed.
        """
        while not stop.is_set():
            epoch = await self._lock.win(stop)
            if epoch is not None:
                await self._lead(epoch, stop)

    # --- a term ----------------------------------------------------------------------------------

    async def _lead(self, epoch: int, stop: asyncio.Event) -> None:
        settings = self._settings
        core = Governor(settings.limits, epoch=epoch, now=self._clock.monotonic(), rules=settings.rules)
        lapsed = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            ends = [group.create_task(stop.wait()), group.create_task(lapsed.wait())]
            chores = [group.create_task(self._keep_lead(lapsed))]
            await self._restore(core)
            await self._save_now(core)  # before the first grant: a successor must know that there was somebody
            served = await self._open(core)
            try:
                chores.append(group.create_task(self._keep_saved(core)))
                self._telemetry.emit("actor.started", epoch=epoch, limits=len(settings.limits))
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._retire()
                for subscription in served:
                    await subscription.close()
            for task in (*ends, *chores):
                task.cancel()
        self._last = Saved(at=self._clock.now(), snapshot=core.snapshot(self._clock.monotonic(), clean=True))
        await self._save(self._last)
        await self._lock.release()
        self._telemetry.emit("actor.stopped", epoch=epoch)

    async def _open(self, core: Governor) -> list[Subscription]:
        """Answer from here on."""
        names = self._settings.names
        self._core = core
        served = [await self._broker.serve(names.governor(verb), self._handle) for verb in VERBS]
        return [*served, await self._broker.listen(names.governor(TOLD), self._told)]

    def _retire(self) -> None:
        """Decide nothing from here on; whoever is still held gets no answer and asks again."""
        self._core = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for future in self._held.values():
            future.cancel()
        self._held.clear()

    async def _keep_lead(self, lapsed: asyncio.Event) -> None:
        while True:
            if not await self._lock.renew():
                break
            await asyncio.sleep(min(RENEW_EVERY_S, self._settings.lock_ttl_s / 3))
        self._telemetry.emit("broker.trouble", error="the governor's lock is lost, or may be")
        lapsed.set()

    # --- messages --------------------------------------------------------------------------------

    async def _handle(self, body: bytes) -> bytes | None:
        """The reply to one request; None, silence, wherever another one may lead."""
        if self._core is None or not self._lock.held():
            return None
        request = self._decode(body)
        if request is None:
            return _encode(Denied(reason="bad_request"))
        reply = self._perform(self._core.handle(request, self._clock.monotonic())).reply
        if reply is None:
            reply = await self._answer_to(getattr(request, "id", ""))
        return _encode(reply) if reply is not None and self._lock.held() else None

    async def _answer_to(self, acquire: str) -> PermitReply | None:
        """The answer to a held acquire, once the core has it."""
        future = self._held.get(acquire)
        if future is None:
            future = self._held[acquire] = asyncio.get_running_loop().create_future()
        await asyncio.wait([future])  # not awaited itself: two who ask for one id share it
        return None if future.cancelled() else future.result()

    def _told(self, _subject: str, body: bytes) -> None:
        request = self._decode(body)
        if request is not None and self._core is not None and self._lock.held():
            self._perform(self._core.handle(request, self._clock.monotonic()))

    def _decode(self, body: bytes) -> PermitRequest | None:
        try:
            request = _decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._telemetry.emit("message.unknown", error=str(error))
            return None
        if request.v != VERSION:
            self._telemetry.emit("message.unknown", error=f"version {request.v} is not known here")
            return None
        return request

    def _perform(self, verdict: Verdict) -> Verdict:
        """Answer whom the core answered, and wake it when it asked for it."""
        self._dirty = True
        for answer in verdict.answers:
            future = self._held.pop(answer.acquire, None)
            if future is not None and not future.done():
                future.set_result(answer.reply)
        if verdict.wake_at is not None:
            self._wake_in(verdict.wake_at - self._clock.monotonic())
        return verdict

    def _wake_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, seconds)
        if self._timer is not None and not self._timer.cancelled():
            if self._timer.when() <= at:
                return  # it will ask anew then
            self._timer.cancel()
        self._timer = loop.call_at(at, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._core is None or not self._lock.held():
            return
        try:
            self._perform(self._core.due(self._clock.monotonic()))
        except Exception as error:  # noqa: BLE001 (the boundary of a timer: no waiter may be lost to one fault)
            self._telemetry.emit("message.faulty", error=repr(error))
            self._wake_in(AFTER_FAULT_S)

    # --- what a successor must know ----------------------------------------------------------------

    async def _restore(self, core: Governor) -> None:
        """Take up what a predecessor left, this process's own earlier term included."""
        bucket = self._settings.state_bucket
        found = await self._read(bucket) if bucket is not None else None
        try:
            saved = None if found is None else msgspec.json.decode(found, type=Saved)
        except msgspec.MsgspecError as error:
            self._telemetry.emit("message.unknown", error=str(error))
            saved = None
        if self._last is not None and (saved is None or saved.snapshot.epoch <= self._last.snapshot.epoch):
            saved = self._last  # nobody else led in between
        if saved is not None:
            elapsed_s = max(0.0, self._clock.now() - saved.at)
            core.restore(saved.snapshot, elapsed_s, self._clock.monotonic())
        elif found is not None or bucket is None:
            core.distrust()

    async def _read(self, bucket: str) -> bytes | None:
        while True:
            try:
                found = await self._broker.kv_get(bucket, self._settings.names.governor_lock)
            except BrokerClosed:
                raise
            except BrokerError as error:
                self._telemetry.emit("broker.trouble", error=str(error))
                await asyncio.sleep(SAVE_EVERY_S)
            else:
                return None if found is None else found.value

    async def _keep_saved(self, core: Governor) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            if self._dirty:
                await self._save_now(core)

    async def _save_now(self, core: Governor) -> None:
        self._dirty = False
        await self._save(Saved(at=self._clock.now(), snapshot=core.snapshot(self._clock.monotonic())))

    async def _save(self, saved: Saved) -> None:
        if self._settings.state_bucket is None or not self._lock.held():
            return
        try:
            await self._broker.kv_put(self._settings.state_bucket, self._settings.names.governor_lock, _encode(saved))
        except BrokerClosed:
            raise
        except BrokerError as error:
            self._dirty = True
            self._telemetry.emit("broker.trouble", error=str(error))
