"""The whole core under a virtual clock, in any order of events, against books that a provider and a bank would keep.

The books know only what was answered and what workers do with it: each start is put off by up to what the contract
allows, permits are used, returned, settled twice or forgotten, limits change, and the governor is killed and followed by
another one that reads an old snapshot.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millstream.policy.budgets import Spend, micro
from millstream.policy.limit_state import Rules
from millstream.policy.limits import Compiled, Limit, Price, compiled, fill, is_template, matcher, named
from millstream.policy.permits import Governor, Verdict
from millstream.policy.snapshots import Snapshot
from millstream_schemas.permits import (
    Acquire,
    Cancel,
    Denied,
    Gates,
    GatesListing,
    Granted,
    HeldPermit,
    Limits,
    LimitsListing,
    Operate,
    Operation,
    OutcomeClass,
    PermitReply,
    PermitRequest,
    Pool,
    Renew,
    Renewed,
    Report,
    Return,
    Settle,
    Settled,
    Wait,
)

RULES = Rules(lease_s=20.0, relearn_s=15.0)
LATEST_S = RULES.use_by_s + RULES.network_s
SNAPSHOT_EVERY_S = 0.5
MS = 0.001

FULL = {
    "calls": Limit(requests="20/10s"),
    "words": Limit(tokens="1000/20s", tokens_out="600/10s"),
    "places": Limit(concurrency=3),
    "life": Limit(cost="2 USD", requests="100/10s"),
    "daily": Limit(cost="1 USD/day"),
    "u/{tenant_id}": Limit(requests="5/5s"),
}
LESS = {
    **FULL,
    "calls": Limit(requests="8/10s"),
    "places": Limit(concurrency=2),
    "words": Limit(tokens="500/20s", tokens_out="600/10s"),
    "life": Limit(cost="1 USD", requests="100/10s"),
}
GONE = {name: limit for name, limit in FULL.items() if name != "places"}
REVISIONS: tuple[tuple[Compiled, ...], ...] = tuple(
    tuple(compiled(limit) for limit in named(table)) for table in (FULL, LESS, GONE)
)
KEYS = ("calls", "words", "places", "life", "daily", fill("u/{tenant_id}", {"tenant_id": "a"}), "u/b")
WORKERS = ("w1", "w2", "w3")
PRICES = {"m": Price(tokens_in=500.0, tokens_out=1000.0)}
MIDNIGHT = datetime(2026, 3, 3, tzinfo=UTC).timestamp()
START = 1000.0
OFFSET_S = MIDNIGHT - START - 100.0
"""A new day begins 100 seconds after the start."""


@dataclass
class Held:
    """A permit in a worker's hands, and the call that it makes under it."""

    request: Acquire
    epoch: int
    granted_at: float
    arrives: float
    lease_until: float
    micro_usd: int
    period: str
    tokens_in: int
    tokens_out: int
    open: bool = True
    used: bool = True
    known: bool = True
    """The governor knows of it, by its own grant, a snapshot or a renewal."""


@dataclass
class Asked:
    """An acquire, and when it must have been answered."""

    request: Acquire
    since: float
    deadline: float
    late: float
    reply: PermitReply | None = None
    lost: bool = False


@dataclass
class Books:
    """What was durably spent, each permit and key once."""

    entries: dict[tuple[str, str], Spend] = field(default_factory=dict[tuple[str, str], Spend])

    def total(self, key: str, period: str) -> int:
        """Micro-dollars of a key in a period."""
        return sum(one.micro_usd for (name, _), one in self.entries.items() if (name, one.period) == (key, period))

    def totals(self) -> dict[tuple[str, str], float]:
        """All sums in dollars, as a new term reads them."""
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for (key, _), one in self.entries.items():
            sums[key, one.period] += one.micro_usd / 1e6
        return dict(sums)


def limit_of(revision: int, key: str) -> Compiled | None:
    """What a revision says of a key."""
    exact = next((one for one in REVISIONS[revision] if one.key == key), None)
    templates = (one for one in REVISIONS[revision] if is_template(one.key) and matcher(one.key)(key))
    return exact or next(templates, None)


class Fleet(RuleBasedStateMachine):
    """Workers, a provider, a bank and an operator around a governor."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.epoch = 0
        self.revision = 0
        self.revisions: list[tuple[float, int]] = [(START, 0)]
        self.asked: dict[str, Asked] = {}
        self.held: dict[str, Held] = {}
        self.paused: dict[str, float] = defaultdict(float)
        self.forced: set[str] = set()
        self.books = Books()
        self.told: set[tuple[str, str]] = set()  # spends of this term
        self.renewals: list[tuple[float, str]] = []
        self.wake_at: float | None = None
        self.saved_at = START
        self.saved_paused: dict[str, float] = {}

    @initialize()
    def begin(self) -> None:
        """The first governor, which follows nobody."""
        self.governor = self.successor()
        self.saved = self.save()

    def successor(self) -> Governor:
        """A governor of a new term, with what was durably spent."""
        self.epoch += 1
        self.told = set()
        governor = Governor(
            REVISIONS[self.revision],
            epoch=self.epoch,
            now=self.now,
            rules=RULES,
            prices=PRICES,
            wall_offset_s=OFFSET_S,
        )
        governor.load_spent(self.books.totals())
        return governor

    def save(self, *, clean: bool = False) -> Snapshot:
        """A snapshot as it is stored."""
        self.saved_at, self.saved_paused = self.now, dict(self.paused)
        return msgspec.json.decode(msgspec.json.encode(self.governor.snapshot(self.now, clean=clean)), type=Snapshot)

    # --- what comes back -------------------------------------------------------------------------

    def send(self, request: PermitRequest) -> PermitReply | None:
        """Hand over one request."""
        verdict = self.governor.handle(request, self.now)
        own = request.id if isinstance(request, Acquire) else ""
        self.take_in(verdict, own)
        return verdict.reply

    def take_in(self, verdict: Verdict, own: str = "") -> None:
        """Note what a verdict says and does."""
        self.wake_at = verdict.wake_at
        for effect in verdict.effects:
            if isinstance(effect, Spend):
                once = (effect.key, effect.permit)
                assert once not in self.told, "spent twice"
                self.told.add(once)
                self.books.entries.setdefault(once, effect)
        answers = {answer.acquire: answer.reply for answer in verdict.answers}
        assert len(answers) == len(verdict.answers)
        if own and verdict.reply is not None:
            assert answers.setdefault(own, verdict.reply) == verdict.reply
        for name, reply in answers.items():
            self.answered(name, reply)

    def answered(self, name: str, reply: PermitReply) -> None:
        """One acquire has its answer."""
        asked = self.asked[name]
        assert asked.reply is None, "answered twice"
        asked.reply = reply
        match reply:
            case Granted():
                assert reply.epoch == self.epoch
                assert 1 <= len(reply.leases) <= asked.request.n
                for lease in reply.leases:
                    self.granted(asked, lease.permit, lease.start_in_ms * MS, reply)
                self.check_grant(asked.request, held_before=asked.since <= self.revisions[-1][0])
            case Wait():
                assert reply.limiting_key in asked.request.keys
                assert reply.retry_after_ms >= 1
            case Denied():
                assert reply.reason in ("unknown_limit", "too_large", "budget_exhausted", "cancelled", "spent")
            case _:
                raise AssertionError(f"an acquire was answered {reply}")

    def granted(self, asked: Asked, permit: str, start_in_s: float, reply: Granted) -> None:
        """A worker has a permit: its call arrives as late as the contract allows, or earlier."""
        request, start = asked.request, self.now + start_in_s
        assert permit not in self.held, "the name of a permit was used twice"
        assert start_in_s <= RULES.book_s + 2 * MS
        for key in request.keys:
            assert start >= self.paused[key] - 2 * MS, "granted into a pause"
            assert key not in self.forced, "granted at a key that an operator closed"
        cost = request.cost_usd
        estimate = micro(cost) if cost else 0
        if not cost and request.model:
            price = PRICES[request.model]
            estimate = math.ceil(request.tokens_in * price.tokens_in + request.tokens_out * price.tokens_out)
        self.held[permit] = Held(
            request=request,
            epoch=self.epoch,
            granted_at=self.now,
            arrives=start + asked.late * (reply.use_by_ms * MS + RULES.network_s),
            lease_until=self.now + reply.lease_ms * MS,
            micro_usd=estimate,
            period=datetime.fromtimestamp(self.now + OFFSET_S, UTC).date().isoformat(),
            tokens_in=request.tokens_in,
            tokens_out=request.tokens_out,
        )

    def check_grant(self, request: Acquire, *, held_before: bool) -> None:
        """At each grant: not more in flight than places, not more spent and reserved than the budget."""
        for key in request.keys:
            limit = limit_of(self.revision, key)
            if limit is None:
                assert held_before, "granted at a key that is not configured"
                limit = limit_of(0, key)  # who waited already goes by what the key allowed
            assert limit is not None
            mine = [held for held in self.held.values() if held.open and key in held.request.keys]
            if limit.concurrency is not None:
                assert len(mine) <= limit.concurrency, "more in flight than places"
            if limit.cost is not None and all(held.known for held in mine):
                period = "total" if limit.cost.period == "total" else self.today()
                reserved = sum(held.micro_usd for held in mine if period in ("total", held.period))
                assert self.books.total(key, period) + reserved <= micro(limit.cost.usd), "more than the budget"

    def today(self) -> str:
        """The day on which a grant of now is paid."""
        return datetime.fromtimestamp(self.now + OFFSET_S, UTC).date().isoformat()

    def close(self, permit: str, *, used: bool = True) -> Held:
        """A worker is done with a permit."""
        held = self.held[permit]
        held.open = False
        held.used = used
        return held

    # --- time --------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass, waking the governor exactly when it asked for it, and saving what a successor reads."""
        end = self.now + seconds
        for _ in range(50_000):
            moments = [end, self.saved_at + SNAPSHOT_EVERY_S, *(at for at, _ in self.renewals)]
            if self.wake_at is not None:
                moments.append(self.wake_at)
            at = max(self.now, min(moments))
            wakes = self.wake_at is not None and self.wake_at <= at
            stuck = wakes and at == self.now
            self.now = at
            self.end_leases()
            for due in [one for one in self.renewals if one[0] <= at]:
                self.renewals.remove(due)
                self.renew_worker(due[1])
            if wakes:
                before = self.wake_at
                self.take_in(self.governor.due(self.now))
                assert not (stuck and self.wake_at == before), "it asks again for a moment that is over"
            if at >= self.saved_at + SNAPSHOT_EVERY_S:
                self.saved = self.save()
            if at >= end and not (self.wake_at is not None and self.wake_at <= at):
                return
        raise AssertionError("the governor never comes to rest")

    def end_leases(self) -> None:
        """A worker ends by itself what its lease no longer covers."""
        for permit, held in self.held.items():
            if held.open and held.lease_until <= self.now:
                self.close(permit)

    def open_of(self, worker: str) -> dict[str, Held]:
        """The permits in one worker's hands."""
        return {name: held for name, held in self.held.items() if held.open and held.request.worker == worker}

    def renew_worker(self, worker: str) -> None:
        """A worker says what it uses; what is lost it gives up."""
        mine = self.open_of(worker)
        permits = tuple(
            HeldPermit(permit=name, keys=held.request.keys, cost_usd=held.micro_usd / 1e6)
            for name, held in mine.items()
        )
        reply = self.send(Renew(worker=worker, permits=permits))
        assert isinstance(reply, Renewed)
        assert set(reply.lost) <= mine.keys()
        for name, held in mine.items():
            if name in reply.lost:
                assert not held.known or held.lease_until <= self.now + 2 * MS, "lost while its lease ran"
                self.close(name)
            elif not held.known and any(limit_of(self.revision, key) is None for key in held.request.keys):
                self.close(name)  # as at a takeover
            else:
                held.known = True
                held.lease_until = max(held.lease_until, self.now + RULES.lease_s)

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 4.0, 11.0, 25.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        """Nothing is asked for a while."""
        self.advance(seconds)

    # --- what workers do -----------------------------------------------------------------------------

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        tokens=st.sampled_from([(0, 0), (1, 1), (40, 10), (200, 100), (900, 500)]),
        requests=st.sampled_from([1, 1, 1, 3]),
        cost=st.sampled_from([0.0, 0.001, 0.3, 0.9]),
        model=st.sampled_from(["", "m"]),
        n=st.sampled_from([1, 1, 4, 30]),
        wait_s=st.sampled_from([0.0, 1.0, 8.0]),
        times=st.integers(1, 6),
        late=st.floats(0, 1),
        worker=st.sampled_from(WORKERS),
        retry=st.booleans(),
    )
    def acquire(
        self,
        keys: list[str],
        tokens: tuple[int, int],
        requests: int,
        cost: float,
        model: str,
        n: int,
        wait_s: float,
        times: int,
        late: float,
        worker: str,
        retry: bool,
    ) -> None:
        """A worker asks for the same several times."""
        for _ in range(times):
            self.ask(
                Acquire(
                    id=f"r{len(self.asked)}",
                    worker=worker,
                    keys=tuple(keys),
                    n=n,
                    requests=requests,
                    tokens_in=tokens[0],
                    tokens_out=tokens[1],
                    cost_usd=cost,
                    model=model,
                    wait_ms=round(wait_s * 1000),
                    retry=retry,
                ),
                late,
            )

    def ask(self, request: Acquire, late: float) -> None:
        """One acquire; its calls begin `late` of what the contract allows."""
        self.asked[request.id] = Asked(request, self.now, self.now + request.wait_ms * MS, late)
        self.send(request)
        assert request.wait_ms or self.asked[request.id].reply is not None, "held although it may not wait"

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True),
        tokens=st.sampled_from([(0, 0), (40, 10), (200, 100), (300, 300)]),
        seconds=st.sampled_from([2.0, 12.0, 25.0]),
        lates=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4),
        idle_s=st.sampled_from([0.0, 30.0]),
    )
    def rush(self, keys: list[str], tokens: tuple[int, int], seconds: float, lates: list[float], idle_s: float) -> None:
        """After a while of nothing, everybody wants more than there is."""
        self.advance(idle_s)
        self.load(keys, tokens, seconds, lates)

    def load(self, keys: list[str], tokens: tuple[int, int], seconds: float, lates: list[float]) -> None:
        """Workers ask for more than there is, and settle as soon as a call arrived."""
        for step in range(round(seconds * 4)):
            for worker in WORKERS[:2]:
                request = Acquire(
                    id=f"r{len(self.asked)}",
                    worker=worker,
                    keys=tuple(keys),
                    n=20,
                    tokens_in=tokens[0],
                    tokens_out=tokens[1],
                    wait_ms=200,
                )
                self.ask(request, lates[step * len(lates) // round(seconds * 4)])
            self.advance(0.25)
            for permit in [name for name, held in self.held.items() if held.open and held.arrives <= self.now]:
                self.check_settled(permit, self.close(permit), Settle(permit=permit, outcome="ok"))

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True),
        outcome=st.sampled_from(["throttled", "throttled", "ramp", "quota", "fault"]),
        seconds=st.sampled_from([0.5, 3.0, 15.0, None]),
    )
    def hear(self, keys: list[str], outcome: OutcomeClass, seconds: float | None) -> None:
        """A call that goes on hears a refusal."""
        self.send(Report(keys=tuple(keys), outcome=outcome, retry_after_s=seconds, started_ms_ago=50))
        self.note_pause(tuple(keys), outcome, seconds)

    @precondition(lambda self: any(held.open for held in self.held.values()))
    @rule(
        data=st.data(),
        share=st.sampled_from([0.0, 0.5, 1.0, None]),
        outcome=st.sampled_from(["ok", "ok", "ok", "unknown", "error", "client", "too_large"]),
        cost=st.sampled_from([None, None, 0.0, 0.0001, 0.5, 2.7]),
        count=st.integers(1, 4),
        twice=st.booleans(),
    )
    def settle(
        self,
        data: st.DataObject,
        share: float | None,
        outcome: OutcomeClass,
        cost: float | None,
        count: int,
        twice: bool,
    ) -> None:
        """Calls are over and cost what they cost; a worker may say so twice."""
        for _ in range(count):
            names = sorted(name for name, held in self.held.items() if held.open)
            if not names:
                return
            permit = data.draw(st.sampled_from(names))
            held = self.close(permit)
            request = Settle(
                permit=permit,
                outcome=outcome,
                tokens_in=None if share is None else int(held.tokens_in * share),
                tokens_out=None if share is None else int(held.tokens_out * share),
                cost_usd=cost,
            )
            if share is not None and outcome != "unknown" and held.known:
                held.tokens_in, held.tokens_out = int(held.tokens_in * share), int(held.tokens_out * share)
            self.check_settled(permit, held, request, twice=twice)

    def check_settled(self, permit: str, held: Held, request: Settle, *, twice: bool = False) -> None:
        """A settle ends its permit once, and pays for it once."""
        before = {key: self.books.entries.get((key, permit)) for key in held.request.keys}
        reply = self.send(request)
        assert isinstance(reply, Settled)
        if held.epoch == self.epoch:
            assert reply.ended == 1
        if twice:
            assert self.send(request) == Settled(ended=0, epoch=self.epoch)
        if reply.ended and request.cost_usd is not None and request.outcome != "unknown":
            for key in held.request.keys:
                entry = self.books.entries.get((key, permit))
                if limit_of(self.revision, key) in (None, *self.free()) or before[key] is not None:
                    continue
                assert (0 if entry is None else entry.micro_usd) == micro(request.cost_usd)

    def free(self) -> list[Compiled]:
        """The limits without a budget."""
        return [limit for limit in REVISIONS[self.revision] if limit.cost is None]

    @precondition(lambda self: any(held.open for held in self.held.values()))
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["throttled", "ramp", "quota", "fault", "overloaded"]),
        seconds=st.sampled_from([0.5, 2.0, 15.0, None]),
        first=st.booleans(),
    )
    def refuse(self, data: st.DataObject, outcome: OutcomeClass, seconds: float | None, first: bool) -> None:
        """The provider refuses a call, or breaks; the worker may tell it at once, before it settles."""
        permit = data.draw(st.sampled_from(sorted(name for name, held in self.held.items() if held.open)))
        held = self.close(permit)
        keys = held.request.keys
        if first:
            self.send(Report(keys=keys, outcome=outcome, retry_after_s=seconds, started_ms_ago=50))
            self.note_pause(keys, outcome, seconds)
        self.check_settled(
            permit, held, Settle(permit=permit, outcome=outcome, retry_after_s=seconds, reported=first, keys=keys)
        )
        if not first:
            self.note_pause(keys, outcome, seconds)

    def note_pause(self, keys: tuple[str, ...], outcome: OutcomeClass, seconds: float | None) -> None:
        if outcome in ("throttled", "ramp", "quota") and seconds is not None:
            for key in keys:
                if limit_of(self.revision, key) is not None:
                    self.paused[key] = max(self.paused[key], self.now + seconds)

    @precondition(lambda self: any(held.open and held.arrives > self.now for held in self.held.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A worker does not need its permit, or is too late for it."""
        names = sorted(name for name, held in self.held.items() if held.open and held.arrives > self.now)
        permit = data.draw(st.sampled_from(names))
        held = self.close(permit, used=False)
        reply = self.send(Return(permits=(permit,)))
        assert isinstance(reply, Settled)
        if held.epoch == self.epoch:
            assert reply.ended == 1
        assert self.send(Return(permits=(permit,))) == Settled(ended=0, epoch=self.epoch)

    @precondition(lambda self: any(one.reply is not None for one in self.asked.values()))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A granted request arrives a second time: nothing is charged, and a live grant is the same grant."""
        names = [name for name, one in self.asked.items() if isinstance(one.reply, Granted)]
        if not names:
            return
        asked = self.asked[data.draw(st.sampled_from(sorted(names)))]
        assert isinstance(asked.reply, Granted)
        live = [lease.permit for lease in asked.reply.leases if self.held[lease.permit].open]
        if asked.reply.epoch != self.epoch or not live or self.held[live[0]].granted_at < self.now - RULES.remember_s:
            return
        verdict = self.governor.handle(asked.request, self.now)
        assert isinstance(verdict.reply, Granted)
        assert {lease.permit for lease in verdict.reply.leases} >= set(live)
        assert all(lease.permit in self.held for lease in verdict.reply.leases)
        self.take_in(msgspec.structs.replace(verdict, reply=None))

    @precondition(lambda self: any(one.reply is None and not one.lost for one in self.asked.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A held request is given up."""
        names = sorted(name for name, one in self.asked.items() if one.reply is None and not one.lost)
        name = data.draw(st.sampled_from(names))
        self.send(Cancel(id=name))
        reply = self.asked[name].reply
        assert isinstance(reply, Denied)
        assert reply.reason == "cancelled"

    @precondition(lambda self: any(isinstance(one.reply, Granted) for one in self.asked.values()))
    @rule(data=st.data())
    def cancel_too_late(self, data: st.DataObject) -> None:
        """An asker that has gone cancels what was granted meanwhile: it is returned unused."""
        fresh = [
            name
            for name, one in self.asked.items()
            if isinstance(one.reply, Granted)
            and one.reply.epoch == self.epoch
            and all(self.held[lease.permit].open for lease in one.reply.leases)
            and all(self.held[lease.permit].arrives > self.now for lease in one.reply.leases)
            and self.held[one.reply.leases[0].permit].granted_at > self.now - 1.0
        ]
        if not fresh:
            return
        asked = self.asked[data.draw(st.sampled_from(sorted(fresh)))]
        assert isinstance(asked.reply, Granted)
        for lease in asked.reply.leases:
            self.close(lease.permit, used=False)
        reply = self.send(Cancel(id=asked.request.id))
        assert reply == Settled(ended=len(asked.reply.leases), epoch=self.epoch)

    @rule(worker=st.sampled_from(WORKERS))
    def renew(self, worker: str) -> None:
        """A worker keeps its leases."""
        self.renew_worker(worker)

    # --- what operators and fate do --------------------------------------------------------------------

    @rule(revision=st.sampled_from([0, 0, 1, 2]))
    def configure(self, revision: int) -> None:
        """Another revision of the limits."""
        self.revision = revision
        self.revisions.append((self.now, revision))
        self.governor.configure(REVISIONS[revision], PRICES, self.now)
        self.take_in(self.governor.due(self.now))

    @rule(key=st.sampled_from(KEYS), operation=st.sampled_from(["open", "auto", "disable", "resume"]))
    def operate(self, key: str, operation: Operation) -> None:
        """An operator closes a key, opens it again, or ends its pause."""
        known = limit_of(self.revision, key) is not None
        if operation == "resume" and known:
            self.paused[key] = 0.0
        if operation in ("auto", "disable"):
            self.forced.discard(key)
        self.send(Operate(key=key, operation=operation, by="me"))
        if operation == "open" and known:
            self.forced.add(key)
        self.saved = self.save()

    @rule(away_s=st.sampled_from([0.0, 2.0, 50.0]))
    def restart(self, away_s: float) -> None:
        """The governor stops in good order and is followed by another one."""
        self.saved = self.save(clean=True)
        self.follow(away_s, dict.fromkeys(WORKERS, 0.4))

    @rule(
        away_s=st.sampled_from([0.5, 3.0, 50.0]),
        delays=st.tuples(*[st.sampled_from([0.0, 0.4, 0.9, 6.0])] * 3),
        before=st.lists(st.sampled_from(KEYS), max_size=2, unique=True),
        load_s=st.sampled_from([0.0, 0.0, 11.75]),
    )
    def crash(self, away_s: float, delays: tuple[float, ...], before: list[str], load_s: float) -> None:
        """The governor is killed; workers renew when they hear of the next one, some of those that it knows late.

        Right before, and right after, they take what they can get.
        """
        if load_s and before:
            self.load(before, (200, 100), load_s, [1.0])
        self.grab(before)
        for held in self.held.values():
            held.known = held.known and any(held is self.held.get(one.permit) for one in self.saved.permits)
        self.paused = defaultdict(float, self.saved_paused)  # what came after is heard from the provider once more
        self.follow(away_s, dict(zip(WORKERS, delays, strict=True)))
        self.grab(before)
        self.advance(0.3)
        self.grab(before)
        if load_s and before:
            self.load(before, (200, 100), load_s, [0.0])

    def grab(self, keys: list[str]) -> None:
        """Ask for all there is at each key."""
        for key in keys:
            name = f"r{len(self.asked)}"
            self.ask(Acquire(id=name, worker="w1", keys=(key,), n=8, tokens_in=20, cost_usd=0.2), 1.0)

    def follow(self, away_s: float, delays: dict[str, float]) -> None:
        """A successor takes over after `away_s`."""
        for one in self.asked.values():
            one.lost = one.lost or one.reply is None
        self.renewals = []
        self.wake_at = None
        saved, saved_at = self.saved, self.saved_at
        unknown = {key for key in KEYS if limit_of(self.revision, key) is None}
        for name, held in self.held.items():
            if held.open and unknown & set(held.request.keys):
                self.close(name)  # a key that is not configured at a takeover begins anew when it comes back
        self.forced -= unknown
        for key in unknown:
            self.paused[key] = 0.0
        self.now += away_s
        self.end_leases()
        self.governor = self.successor()
        self.governor.restore(saved, self.now - saved_at, self.now)
        for worker, delay_s in delays.items():
            known = worker in saved.workers
            self.renewals.append((self.now + (delay_s if known or delay_s < 1.0 else 0.9), worker))
        self.take_in(self.governor.due(self.now))
        self.saved = self.save()

    # --- what must hold --------------------------------------------------------------------------------

    def allowed(self, key: str, dimension: str, since: float, until: float) -> int | None:
        """The most that any revision in force from `since` to `until` allows; None without a bound."""
        most = 0
        for number, (at, revision) in enumerate(self.revisions):
            ends = self.revisions[number + 1][0] if number + 1 < len(self.revisions) else math.inf
            if at <= until and ends >= since:
                limit = limit_of(revision, key)
                rate = None if limit is None else limit.rates.get(dimension)
                if limit is not None and rate is None:
                    return None
                most = max(most, 0 if rate is None else rate.amount)
        return most

    @invariant()
    def no_window_holds_more_than_its_limit(self) -> None:
        """Every window of every rate, as the provider saw it."""
        for key in KEYS:
            limit = limit_of(0, key)
            assert limit is not None
            calls = sorted(
                (held.arrives, held.request.requests, held.tokens_in + held.tokens_out, held.tokens_out)
                for held in self.held.values()
                if held.used and key in held.request.keys
            )
            for dimension, at in (("requests", 1), ("tokens", 2), ("tokens_out", 3)):
                rate = limit.rates.get(dimension)
                if rate is None:
                    continue
                first, used = 0, 0.0
                for call in calls:
                    used += call[at]
                    while calls[first][0] <= call[0] - rate.window_s:
                        used -= calls[first][at]
                        first += 1
                    allowed = self.allowed(key, dimension, calls[first][0] - 2 * LATEST_S, call[0])
                    assert allowed is None or used <= allowed, f"{used} {dimension} at {key} in {rate.window_s:g} s"

    @invariant()
    def everybody_is_answered_in_time(self) -> None:
        """Each acquire is granted, denied or told to come back by its deadline."""
        for name, one in self.asked.items():
            assert one.reply is not None or one.lost or one.deadline >= self.now - MS, f"{name} waits beyond its time"

    @invariant()
    def what_is_listed_is_what_is_in_use(self) -> None:
        """Each key counts exactly the permits that name it: an acquire takes all of its keys or none."""
        if self.epoch == 0:
            return
        listing = self.governor.handle(Limits(), self.now).reply
        assert isinstance(listing, LimitsListing)
        for item in listing.items:
            if is_template(item.key):
                continue
            mine = [held for held in self.held.values() if held.open and item.key in held.request.keys]
            sure = [held for held in mine if held.known]
            assert item.in_use >= len(sure), f"{item.key} has {item.in_use} in use, and {len(sure)} are"
            if self.epoch == 1:
                assert item.in_use <= len(
                    [
                        held
                        for held in self.held.values()
                        if item.key in held.request.keys and (held.open or held.lease_until > self.now - 1.0)
                    ]
                )
            waiting = [one for one in self.asked.values() if one.reply is None and not one.lost]
            assert item.waiting == sum(item.key in one.request.keys for one in waiting)
            for shown in item.dimensions:
                assert 0 <= shown.effective <= shown.configured
                if shown.dimension == "cost" and self.epoch == 1:
                    period = shown.period or ""
                    reserved = sum(held.micro_usd for held in mine if period in ("total", held.period))
                    assert micro(shown.used) == self.books.total(item.key, period)
                    ending = sum(
                        held.micro_usd for held in self.held.values() if 0 < held.lease_until - self.now + 1 <= 1
                    )
                    assert reserved <= micro(shown.reserved or 0.0) <= reserved + ending

    @invariant()
    def gates_say_what_the_governor_does(self) -> None:
        """A pool behind a pause or a closed key is closed; an open one has a rate and places."""
        if self.epoch == 0:
            return
        pools = tuple(Pool(keys=(key,), tokens_in=10, tokens_out=10) for key in KEYS)
        listing = self.governor.handle(Gates(pools=pools), self.now).reply
        assert isinstance(listing, GatesListing)
        for gate in listing.items:
            key = gate.keys[0]
            known = limit_of(self.revision, key) is not None
            closed = key in self.forced or self.paused[key] > self.now + 2 * MS
            assert not (gate.open and (closed or not known))
            assert gate.rate_per_s is None or gate.rate_per_s >= 0
            assert gate.open or gate.reason


TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=150,
    stateful_step_count=35,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_times_in_whole_milliseconds_do_not_stretch_a_window() -> None:
    """Starts are rounded up on the wire; the latest ones before the earliest ones still stay within a window."""
    for times in range(1, 20):
        fleet = Fleet()
        fleet.begin()
        for seconds in (*[0.01] * times, 11.0, 11.0):
            fleet.advance(seconds)
        fleet.crash(0.5, (0.0, 0.0, 0.0), [], 0.0)
        fleet.load(["u/a"], (0, 0), 12.0, [1.0, 0.0])
        fleet.no_window_holds_more_than_its_limit()
