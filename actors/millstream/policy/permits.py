"""The rate-governor's core: takes requests and the time, returns replies, effects and when to be called next."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import assert_never

import msgspec

from millstream.policy.budgets import micro, priced
from millstream.policy.feedback import Heard, operate
from millstream.policy.holdings import Effect, GateChanged, Holdings
from millstream.policy.key_table import Pool
from millstream.policy.leases import Memory, granted
from millstream.policy.limit_state import Need, Rules
from millstream.policy.limits import Compiled, Price
from millstream.policy.listing import gate, listed, price_list, shown
from millstream.policy.pacing import NOTHING_S
from millstream.policy.snapshots import Snapshot
from millstream.policy.verdict import Verdict
from millstream.policy.waiters import Answer, Waiter, Waiters, wait
from millstream_schemas.permits import (
    Acquire,
    Cancel,
    DenialReason,
    Denied,
    Gates,
    GatesListing,
    Granted,
    Limits,
    LimitsListing,
    Operate,
    PermitReply,
    PermitRequest,
    Renew,
    Renewed,
    Report,
    Return,
    Settle,
    Settled,
    Wait,
)

__all__ = ["Effect", "GateChanged", "Governor", "Snapshot", "Verdict"]

CHORES_EVERY_S = 0.1


class Governor:
    """Grants permits so that no limit is passed.

    `now` is monotonic seconds. `epoch` differs from that of every predecessor and begins the names of permits. Wall
    time, which only the periods of budgets are read from, is `now` plus an offset.
    """

    def __init__(
        self,
        limits: Sequence[Compiled],
        *,
        epoch: int,
        now: float,
        rules: Rules | None = None,
        prices: Mapping[str, Price] | None = None,
        wall_offset_s: float = 0.0,
    ) -> None:
        self.rules = rules if rules is not None else Rules()
        self.epoch = epoch
        self._holdings = Holdings(self.rules, epoch, now, wall_offset_s)
        self._waiters = Waiters(self.rules, epoch)
        self._granted: Memory[tuple[str, ...]] = Memory(self.rules.remember_s, now)  # names of permits by acquire id
        self._cancelled: Memory[None] = Memory(self.rules.remember_s, now)
        self._answers: list[Answer] = []
        self._chores_at = now
        self.configure(limits, prices or {}, now)

    # --- in and out ----------------------------------------------------------------------------

    def handle(self, request: PermitRequest, now: float) -> Verdict:
        """Process one request: the verdict holds its reply, and the answers to waiting acquires that it let through."""
        self._advance(now)
        reply = self._reply_to(request, now)
        if isinstance(reply, Wait) and isinstance(request, Acquire):
            self._granted.put(request.id, ())
        verdict = self._verdict(reply, now)
        if reply is None and verdict.answers and isinstance(request, Acquire):
            own = next((answer.reply for answer in verdict.answers if answer.acquire == request.id), None)
            return msgspec.structs.replace(verdict, reply=own)
        return verdict

    def due(self, now: float) -> Verdict:
        """Let time pass: leases run out, waiting acquires are granted or told when to ask again."""
        self._advance(now)
        return self._verdict(None, now)

    def _reply_to(self, request: PermitRequest, now: float) -> PermitReply | None:
        match request:
            case Acquire():
                return self._acquire(request, now)
            case Settle():
                return self._settled(int(self._holdings.settle(request)))
            case Return():
                return self._settled(sum(self._holdings.give_back(permit) for permit in request.permits))
            case Renew():
                return self._renew(request, now)
            case Report():
                return self._report(request, now)
            case Cancel():
                return self._cancel(request.id)
            case Limits():
                return self._listing(request.key, now)
            case Gates():
                gates = tuple(gate(self._holdings.table, pool, now, self._holdings.wall) for pool in request.pools)
                return GatesListing(items=gates, epoch=self.epoch)
            case Operate():
                return self._operate(request, now)
            case _:
                assert_never(request)

    def _verdict(self, reply: PermitReply | None, now: float) -> Verdict:
        holdings, waiters = self._holdings, self._waiters
        if waiters and self._pass_is_due(now):
            self._answers += waiters.serve(now, self._grant_waiter)
        holdings.stirred = False
        if holdings.freed:
            holdings.freed.clear()
        wake_at = holdings.leases.next_end()
        if waiters:
            wake_at = min(wake_at, waiters.wake_at)
        if holdings.learning.active:
            wake_at = min(wake_at, holdings.learning.ends_at())
        answers: tuple[Answer, ...] = ()
        effects: tuple[Effect, ...] = ()
        if self._answers:
            answers, self._answers = tuple(self._answers), []
            for answer in answers:
                if isinstance(answer.reply, Wait):
                    self._granted.put(answer.acquire, ())  # who was told to ask again does so by another id
        if holdings.effects:
            effects, holdings.effects = tuple(holdings.effects), []
        return Verdict(reply, answers, wake_at if wake_at < inf else None, effects)

    def _advance(self, now: float) -> None:
        self._holdings.advance(now)
        if now >= self._chores_at:
            self._chores_at = now + CHORES_EVERY_S
            self._granted.age(now)
            self._cancelled.age(now)
            self._holdings.do_chores(now)

    def _denied(self, reason: DenialReason, key: str = "", until_s: float | None = None) -> Denied:
        return Denied(reason=reason, key=key, epoch=self.epoch, until_s=until_s)

    def _settled(self, ended: int) -> Settled:
        return Settled(ended=ended, epoch=self.epoch)

    # --- acquire -------------------------------------------------------------------------------

    def _acquire(self, request: Acquire, now: float) -> PermitReply | None:
        if request.id in self._waiters:
            return None
        if 0 < request.epoch < self.epoch:  # perhaps a late copy: what it would be granted nobody would use
            return wait(request.keys[0], "learning", 0.0, self.epoch)
        known = self._answered(request.id, now)
        if known is not None:
            return known
        self._holdings.seen(request.worker)
        pool = self._holdings.table.pool(request.keys)
        if isinstance(pool, str):
            return self._denied("unknown_limit", pool)
        need = self._need(request)
        denied = self._refused(pool, need)
        if denied is not None:
            return denied
        n = request.n
        if request.retry and pool.rations:
            n = pool.ration(n, now)
            if n < 1:
                return self._out_of_retries(pool, now)
        if not self._waiters or not pool.waited_for:
            ahead_s = pool.obstacle(need, now)[0]
            if ahead_s <= self.rules.book_s + NOTHING_S:
                return self._grant(request, pool, need, n, ahead_s, now)
        return self._join(Waiter(request, pool, need, n, now), now)

    def _answered(self, acquire: str, now: float) -> PermitReply | None:
        """The reply to an acquire id that came before: its open permits, or why there are none; None for a new id."""
        names = self._granted.get(acquire)
        if names is not None:
            permits = [permit for name in names if (permit := self._holdings.leases.get(name)) is not None]
            return granted(permits, self.rules, self.epoch, now) if permits else self._denied("spent")
        return self._denied("cancelled") if acquire in self._cancelled else None

    def _need(self, request: Acquire) -> Need:
        tokens_in, tokens_out = request.tokens_in, request.tokens_out
        amounts = (request.requests, tokens_in + tokens_out, tokens_in, tokens_out)
        if request.cost_usd:
            return Need(amounts, micro(request.cost_usd))
        if request.model:
            return Need(amounts, priced(self._holdings.prices.get(request.model), tokens_in, tokens_out))
        return Need(amounts)

    def _refused(self, pool: Pool, need: Need) -> Denied | Wait | None:
        """Why this can never be granted, or not before a budget's next period, or until others have settled."""
        for state in pool.states:
            if not state.fits(need):
                return self._denied("too_large", state.key)
        if pool.budgets:
            poor = self._holdings.over_budget(pool, need)
            if poor is not None and poor.budget is not None:
                if poor.budget.may_admit_later(need.micro_usd, self._holdings.wall):
                    return wait(poor.key, "cost", self.rules.place_retry_s, self.epoch)
                return self._denied("budget_exhausted", poor.key, poor.budget.left_s(self._holdings.wall))
        return None

    def _out_of_retries(self, pool: Pool, now: float) -> PermitReply:
        waits_s = [(state.ration.wait_s(now), state) for state in pool.states if state.ration is not None]
        seconds, limiting = max(waits_s, key=lambda one: one[0])
        back_at = limiting.place_in_line(now, now + seconds, 1.0)
        return wait(limiting.key, "retry_budget", back_at - now, self.epoch)

    def _join(self, waiter: Waiter, now: float) -> PermitReply | None:
        """Let an acquire wait, or turn it away where it cannot; None while it waits."""
        full = self._waiters.full(waiter.pool)
        if full is not None:
            return self._waiters.turn_away(waiter, full, "queue_full", self.rules.place_retry_s, now)
        self._waiters.add(waiter)
        return None if self._pass_is_due(now) else self._waiters.look(waiter, now, self._grant_waiter)

    def _pass_is_due(self, now: float) -> bool:
        holdings, waiters = self._holdings, self._waiters
        return holdings.stirred or now >= waiters.wake_at or bool(holdings.freed and waiters.awaits(holdings.freed))

    def _grant_waiter(self, waiter: Waiter, ahead_s: float, alone: bool) -> PermitReply:
        denied = self._refused(waiter.pool, waiter.need)
        if denied is not None:
            waiter.give_back_ration()
            return denied
        if alone:
            waiter.give_back_ration(waiter.n - 1)
        n = 1 if alone else waiter.n
        return self._grant(waiter.request, waiter.pool, waiter.need, n, ahead_s, waiter.since)

    def _grant(self, request: Acquire, pool: Pool, need: Need, n: int, ahead_s: float, since: float) -> Granted:
        """Grant the first of `n` permits in `ahead_s`, and as many more as can begin within `book_s`."""
        holdings = self._holdings
        now, soon_s = holdings.clock.now, self.rules.book_s + NOTHING_S
        permits = [holdings.take(request, pool, need, ahead_s, since)]
        while len(permits) < n:
            ahead_s = pool.obstacle(need, now)[0]
            if ahead_s > soon_s or (pool.budgets and holdings.over_budget(pool, need) is not None):
                break
            permits.append(holdings.take(request, pool, need, ahead_s, since))
        for ration in pool.rations:
            if request.retry:
                ration.take(len(permits) - n)
            else:
                ration.earn(len(permits))
        self._granted.put(request.id, tuple([permit.id for permit in permits]))
        return granted(permits, self.rules, self.epoch, now, now - since)

    # --- all else ------------------------------------------------------------------------------

    def _report(self, request: Report, now: float) -> Settled:
        started_at = now - request.started_ms_ago / 1000
        heard = Heard(request.outcome, started_at, request.retry_after_s, request.observed)
        self._holdings.hear(self._holdings.table.known(request.keys), heard)
        return self._settled(0)

    def _cancel(self, acquire: str) -> Settled:
        self._cancelled.put(acquire, None)
        waiter = self._waiters.remove(acquire)
        if waiter is not None:
            waiter.give_back_ration()
            self._holdings.stirred = True
            self._answers.append(Answer(acquire, self._denied("cancelled")))
        return self._settled(sum(self._holdings.give_back(name) for name in self._granted.get(acquire) or ()))

    def _renew(self, request: Renew, now: float) -> Renewed:
        holdings = self._holdings
        lost: list[str] = []
        if 0 < request.epoch < self.epoch:
            return Renewed(lost=(), epoch=self.epoch)
        holdings.heard_from(request)
        for one in request.permits:
            permit = holdings.leases.get(one.permit)
            if permit is not None:
                permit.lease_until = max(permit.lease_until, now + self.rules.lease_s)
            elif holdings.has_ended(one.permit):
                lost.append(one.permit)
            else:
                holdings.adopt(one, request.worker, self.rules.lease_s, learned=True)
        return Renewed(lost=tuple(lost), epoch=self.epoch)

    def _listing(self, key: str | None, now: float) -> LimitsListing:
        holdings = self._holdings
        items = listed(holdings.table, key, now, holdings.wall)
        if key is not None:
            return LimitsListing(items=items, epoch=self.epoch)
        unknown = holdings.table.unknown(now)
        return LimitsListing(items=items, epoch=self.epoch, prices=price_list(holdings.prices), unknown=unknown)

    def _operate(self, request: Operate, now: float) -> PermitReply:
        state = self._holdings.table.state(request.key)
        if state is None:
            return self._denied("unknown_limit", request.key)
        operate(state, request.operation, now, request.by)
        self._holdings.look_at((state,))
        return LimitsListing(items=(shown(state, now, self._holdings.wall),), epoch=self.epoch)

    def configure(self, limits: Iterable[Compiled], prices: Mapping[str, Price], now: float) -> None:
        """Set all limits and prices at once; known keys keep debt, window, pause and places, missing ones are unknown."""
        holdings = self._holdings
        holdings.clock.now = max(holdings.clock.now, now)
        holdings.prices = prices
        holdings.table.configure(limits)
        self._waiters.regroup(holdings.table.pool)
        holdings.stirred = True

    def set_wall(self, offset_s: float) -> None:
        """Wall time is `now` plus this."""
        self._holdings.wall_offset_s = offset_s

    def load_spent(self, spent: Mapping[tuple[str, str], float]) -> None:
        """Start the budgets from sums spent earlier: US dollars by key (or its hash, as subjects carry it) and period."""
        self._holdings.table.ledger.load(spent)

    def correct_spent(self, key: str, period: str, micro_usd: int) -> None:
        """Set what a key has spent in a period to the durable sum, in micro-dollars."""
        self._holdings.table.ledger.correct(key, period, micro_usd)

    # --- succession ----------------------------------------------------------------------------

    def snapshot(self, now: float, *, clean: bool = False) -> Snapshot:
        """What a successor must know; say `clean` only when nothing will be granted any more."""
        return self._holdings.snapshot(now, clean=clean)

    def restore(self, snapshot: Snapshot, elapsed_s: float, now: float) -> None:
        """Take up a predecessor's state, `elapsed_s` (never negative) after it was saved, before the first request."""
        self._holdings.restore(snapshot, elapsed_s, now)

    def distrust(self) -> None:
        """Assume that a predecessor, of whom nothing is known, granted a start at each key just now, and all places."""
        self._holdings.distrust()

    @property
    def learning(self) -> bool:
        """True while places are held back because workers have not yet said which ones they use."""
        return self._holdings.learning.active
