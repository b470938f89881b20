"""The rate-governor's core: requests and the time in, answers and the next time to look out. No clock, no loop, no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf
from typing import assert_never

import msgspec

from millstream.policy.limit_state import KeyState, Limit, Need, Rules, SavedKey, Taken
from millstream.policy.pacing import ManualClock
from millstream.policy.waiters import Answer, Waiter, Waiters
from millstream_schemas.permits import (
    Acquire,
    Cancel,
    Denied,
    Granted,
    LimitKeys,
    Limits,
    LimitsListing,
    PermitReply,
    PermitRequest,
    Renew,
    Renewed,
    Return,
    Settle,
    Settled,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to send now, and when to call `due` next (None: nothing waits for time to pass).

    `reply` answers the message itself; None means that it is held, or that there was no message.
    """

    reply: PermitReply | None
    answers: tuple[Answer, ...]
    wake_at: float | None


class SavedPermit(msgspec.Struct, frozen=True, kw_only=True):
    """A live permit in a snapshot."""

    permit: str
    worker: str
    keys: LimitKeys
    lease_left_s: float


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a successor must know; `clean` only where the governor granted nothing after it."""

    keys: tuple[SavedKey, ...]
    permits: tuple[SavedPermit, ...]
    clean: bool
    epoch: int
    v: int = 1


@dataclass(slots=True, eq=False)
class _Permit:
    id: str
    worker: str
    taken: tuple[tuple[KeyState, Taken | None], ...]
    start: float
    lease_until: float


class Governor:
    """Grants permits so that no limit is passed.

    `now` is monotonic seconds. `epoch` differs from that of every predecessor and begins the names of permits.
    """

    def __init__(self, limits: Iterable[Limit], *, epoch: int, now: float, rules: Rules | None = None) -> None:
        self.rules = rules if rules is not None else Rules()
        self.epoch = epoch
        self._clock = ManualClock(now)
        self._states: dict[str, KeyState] = {}
        self._keys: dict[str, KeyState] = {}
        self._waiters = Waiters(self.rules)
        self._permits: dict[str, _Permit] = {}
        self._leases: list[tuple[float, str]] = []  # a heap; an entry may be older than its permit's lease
        self._granted: dict[str, tuple[_Permit, float]] = {}  # by acquire id; until when it is remembered
        self._cancelled: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._count = 0
        self.configure(limits, now)

    # --- in and out ----------------------------------------------------------------------------

    def handle(self, request: PermitRequest, now: float) -> Verdict:
        """Take one request in; its reply, and the answers to held ones that it sets free."""
        self._advance(now)
        answers: list[Answer] = []
        reply = self._reply_to(request, now, answers)
        verdict = self._serve(now, reply, answers)
        if reply is None and isinstance(request, Acquire):
            for answer in verdict.answers:
                if answer.acquire == request.id:
                    return Verdict(answer.reply, verdict.answers, verdict.wake_at)
        return verdict

    def due(self, now: float) -> Verdict:
        """Let time pass: leases run out, waiters are granted or told to come back."""
        self._advance(now)
        return self._serve(now, None, [])

    def configure(self, limits: Iterable[Limit], now: float) -> None:
        """Set all limits; known keys keep debt, window, pause and places, missing keys are unknown from now on."""
        self._clock.now = max(self._clock.now, now)
        self._keys = {}
        for limit in limits:
            state = self._states.get(limit.key)
            if state is None:
                state = self._states[limit.key] = KeyState(limit, self.rules, self._clock)
            else:
                state.set_limit(limit)
            self._keys[limit.key] = state

    def _reply_to(self, request: PermitRequest, now: float, answers: list[Answer]) -> PermitReply | None:
        match request:
            case Acquire():
                return self._acquire(request, now)
            case Settle():
                return self._settle(request, now)
            case Return():
                return Settled(ended=sum(self._return(permit, now) for permit in request.permits))
            case Renew():
                return self._renew(request, now)
            case Cancel():
                return self._cancel(request.id, now, answers)
            case Limits():
                items = tuple(state.shown(now) for _, state in sorted(self._keys.items()))
                return LimitsListing(items=items, epoch=self.epoch)
            case _:
                assert_never(request)

    def _serve(self, now: float, reply: PermitReply | None, answers: list[Answer]) -> Verdict:
        served, wake_at = self._waiters.serve(now, self._grant)
        if self._leases:
            wake_at = min(wake_at, self._leases[0][0])
        return Verdict(reply, (*answers, *served), wake_at if wake_at < inf else None)

    # --- acquire -------------------------------------------------------------------------------

    def _acquire(self, request: Acquire, now: float) -> PermitReply | None:
        if request.id in self._waiters:
            return None
        if request.id in self._cancelled:
            return Denied(reason="cancelled")
        if request.id in self._granted:
            permit, _ = self._granted[request.id]
            return self._granted_reply(permit, now) if permit.id in self._permits else Denied(reason="spent")
        need = Need(request.requests, request.tokens)
        states: list[KeyState] = []
        for key in dict.fromkeys(request.keys):
            state = self._keys.get(key)
            if state is None:
                return Denied(reason="unknown_limit", key=key)
            if not state.fits(need):
                return Denied(reason="too_large", key=key)
            states.append(state)
        return self._waiters.add(request, tuple(states), need, now)

    def _grant(self, waiter: Waiter, ahead_s: float) -> Granted:
        now = self._clock.now
        self._count += 1
        name = f"{self.epoch}-{self._count}"
        taken = tuple((state, state.take(name, waiter.need, ahead_s)) for state in waiter.states)
        start = now + ahead_s
        permit = _Permit(name, waiter.request.worker, taken, start, start + self.rules.lease_s)
        self._hold(permit)
        self._granted[waiter.request.id] = (permit, now + self.rules.remember_s)
        return self._granted_reply(permit, now, now - waiter.since)

    def _granted_reply(self, permit: _Permit, now: float, held_s: float = 0.0) -> Granted:
        use_by_s = permit.start + self.rules.use_by_s - max(now, permit.start)
        return Granted(
            permit=permit.id,
            start_in_ms=max(0, ceil((permit.start - now) * 1000)),
            use_by_ms=max(0, round(use_by_s * 1000)),
            lease_ms=round(self.rules.lease_s * 1000),
            epoch=self.epoch,
            held_ms=int(max(0.0, held_s) * 1000),
        )

    # --- permits -------------------------------------------------------------------------------

    def _settle(self, request: Settle, now: float) -> Settled:
        permit = self._permits.get(request.permit)
        if request.permit not in self._ended:
            self._learn(request, permit, now)
        if permit is None:
            self._ended.setdefault(request.permit, now + self.rules.remember_s)
            return Settled(ended=0)
        for state, taken in permit.taken:
            if taken is not None and request.outcome != "unknown":
                state.correct(taken, request.requests, request.tokens)
        self._end(permit, now)
        return Settled(ended=1)

    def _learn(self, request: Settle, permit: _Permit | None, now: float) -> None:
        """Feed what the provider said into the shared limits."""
        states = [state for state, _ in permit.taken] if permit is not None else []
        if request.keys:
            states = [self._keys[key] for key in dict.fromkeys(request.keys) if key in self._keys]
        for state in states:
            if request.outcome == "throttled":
                state.throttle(request.retry_after_s, now)
            elif request.outcome == "ok":
                state.throttles_in_a_row = 0

    def _return(self, name: str, now: float) -> int:
        permit = self._permits.get(name)
        if permit is None:
            return 0
        for state, taken in permit.taken:
            if taken is not None:
                state.correct(taken, 0, 0)
        self._end(permit, now)
        return 1

    def _cancel(self, acquire: str, now: float, answers: list[Answer]) -> Settled:
        self._cancelled[acquire] = now + self.rules.remember_s
        if self._waiters.remove(acquire):
            answers.append(Answer(acquire, Denied(reason="cancelled")))
        if acquire in self._granted:
            return Settled(ended=self._return(self._granted[acquire][0].id, now))
        return Settled(ended=0)

    def _renew(self, request: Renew, now: float) -> Renewed:
        lost: list[str] = []
        for held in request.permits:
            permit = self._permits.get(held.permit)
            if permit is not None:
                permit.lease_until = max(permit.lease_until, now + self.rules.lease_s)
            elif held.permit in self._ended or held.permit.startswith(f"{self.epoch}-"):
                lost.append(held.permit)
            else:
                self._adopt(held.permit, request.worker, held.keys, now, self.rules.lease_s)
        return Renewed(lost=tuple(lost), epoch=self.epoch)

    def _adopt(self, name: str, worker: str, keys: LimitKeys, now: float, lease_s: float) -> None:
        """Take over a predecessor's permit: its call runs, so it has its place, be there a free one or not."""
        states = [self._keys[key] for key in dict.fromkeys(keys) if key in self._keys]
        for state in states:
            state.in_use.add(name)
        self._hold(_Permit(name, worker, tuple((state, None) for state in states), now, now + lease_s))

    def _hold(self, permit: _Permit) -> None:
        self._permits[permit.id] = permit
        heappush(self._leases, (permit.lease_until, permit.id))

    def _end(self, permit: _Permit, now: float) -> None:
        del self._permits[permit.id]
        self._ended[permit.id] = now + self.rules.remember_s
        for state, _ in permit.taken:
            state.in_use.discard(permit.id)

    # --- time and restart ----------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        self._clock.now = max(self._clock.now, now)
        while self._leases and self._leases[0][0] <= now:
            permit = self._permits.get(heappop(self._leases)[1])
            if permit is not None and permit.lease_until > now:
                heappush(self._leases, (permit.lease_until, permit.id))
            elif permit is not None:
                self._end(permit, now)  # what it reserved stays charged: the provider may have billed it
        for memory in (self._cancelled, self._ended):
            while memory and memory[first := next(iter(memory))] <= now:
                del memory[first]
        while self._granted and self._granted[oldest := next(iter(self._granted))][1] <= now:
            del self._granted[oldest]

    def snapshot(self, now: float, *, clean: bool = False) -> Snapshot:
        """What a successor must know; say `clean` only when nothing will be granted any more."""
        self._advance(now)
        permits = (
            SavedPermit(
                permit=permit.id,
                worker=permit.worker,
                keys=tuple(state.limit.key for state, _ in permit.taken),
                lease_left_s=permit.lease_until - now,
            )
            for permit in self._permits.values()
            if permit.taken
        )
        keys = tuple(state.saved(now) for state in self._states.values())
        return Snapshot(keys=keys, permits=tuple(permits), clean=clean, epoch=self.epoch)

    def distrust(self) -> None:
        """Assume that a predecessor, of whom nothing is known, granted a start at each key just now."""
        for state in self._keys.values():
            state.distrust()

    def restore(self, snapshot: Snapshot, elapsed_s: float, now: float) -> None:
        """Take up a predecessor's state, `elapsed_s` (never negative) after it was saved, before the first request."""
        self._clock.now = max(self._clock.now, now)
        for saved in snapshot.keys:
            state = self._keys.get(saved.key)
            if state is not None:
                state.restore(saved, elapsed_s, now, clean=snapshot.clean)
        for permit in snapshot.permits:
            if permit.lease_left_s > elapsed_s:
                self._adopt(permit.permit, permit.worker, permit.keys, now, permit.lease_left_s - elapsed_s)
