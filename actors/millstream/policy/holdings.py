"""All that the governor holds: limits, permits in use, money; and what the calls under those permits do to them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from millstream.policy.budgets import MICRO, SoftPassed, Spend, micro
from millstream.policy.feedback import Heard, hear
from millstream.policy.key_table import KeyTable, Pool
from millstream.policy.learning import Learning
from millstream.policy.leases import Leases, Memory, Permit
from millstream.policy.limit_state import FOREVER_S, KeyState, Need, Rules
from millstream.policy.limits import Price
from millstream.policy.listing import closed_by
from millstream.policy.pacing import ManualClock
from millstream.policy.settling import end_probes, give_back, run_out, settle
from millstream.policy.snapshots import SavedKey, Snapshot, restore_key, saved_key, saved_permits
from millstream_schemas.permits import MAX_RENEWED, Acquire, HeldPermit, Renew, Settle


@dataclass(frozen=True, slots=True)
class GateChanged:
    """The gate of a key has closed, or opened again."""

    key: str
    closed: bool


Effect = Spend | SoftPassed | GateChanged


class Holdings:
    """Limits by key and permits by name.

    `stirred`: every waiting acquire has to be looked at again. `freed`: keys with waiting acquires at which a place has
    become free. `effects`: what the actor has to do because of a change, collected for the next verdict.
    """

    def __init__(self, rules: Rules, epoch: int, now: float, wall_offset_s: float) -> None:
        self.rules = rules
        self.epoch = epoch
        self.clock = ManualClock(now)
        self.wall_offset_s = wall_offset_s
        self.prices: Mapping[str, Price] = {}
        self.table = KeyTable(rules, self.clock)
        self.leases = Leases()
        self.learning = Learning(rules)
        self.effects: list[Effect] = []
        self.stirred = False
        self.freed: set[KeyState] = set()
        self._own = f"{epoch}-"
        self._count = 0
        self._ended: Memory[None] = Memory(rules.remember_s, now)  # of predecessors: our own are known by name
        self._workers: dict[str, float] = {}
        self._shut: dict[KeyState, None] = {}

    @property
    def wall(self) -> float:
        """Unix time."""
        return self.clock.now + self.wall_offset_s

    def heard_from(self, request: Renew) -> None:
        """Take a worker's list of the permits it uses.

        The first one while learning also ends the permits that the snapshot lists for the worker and the worker does
        not. One that has reserved money is kept until it is settled or its lease runs out.
        """
        self.seen(request.worker)
        if not self.learning.heard(request.worker) or len(request.permits) >= MAX_RENEWED:
            return  # a list of that length may go on in another message
        used = {held.permit for held in request.permits}
        for permit in [one for one in self.leases if one.worker == request.worker]:
            if permit.id not in used and not permit.id.startswith(self._own) and not permit.accounts:
                self._free(permit)

    def seen(self, worker: str) -> None:
        """Note that a worker is alive."""
        self._workers[worker] = self.clock.now

    def take(self, request: Acquire, pool: Pool, need: Need, ahead_s: float, since: float) -> Permit:
        """Grant one permit that begins in `ahead_s`; its acquire has waited since the time `since`."""
        self._count += 1
        start = self.clock.now + ahead_s
        permit = Permit(f"{self._own}{self._count}", request.worker, pool, need, start, start + self.rules.lease_s)
        for state in pool.states:
            state.take(need, ahead_s, since, permit.charges)
            if state.barred and state.breaker is not None and state.breaker.may_start(self.clock.now) == "probe":
                permit.probes = (*permit.probes, (state, state.breaker.begin_probe()))
        if pool.budgets:
            wall = self.wall
            permit.accounts = tuple([budget.reserve(need.micro_usd, wall) for budget in pool.budgets])
            permit.price = self.prices.get(request.model)
            permit.task = request.task
        self.leases.add(permit)
        return permit

    def over_budget(self, pool: Pool, need: Need) -> KeyState | None:
        """The first key whose budget `need` would exceed."""
        for state in pool.states:
            budget = state.budget
            if budget is not None and not state.shadow and not budget.admits(need.micro_usd, self.wall):
                self.look_at((state,))
                return state
        return None

    # --- how a permit ends -----------------------------------------------------------------------

    def settle(self, request: Settle) -> bool:
        """End a permit by what its call took; False where it had ended before, or is of a predecessor unknown here."""
        permit = self.leases.get(request.permit)
        if permit is None and request.keys and not self.has_ended(request.permit):
            # A predecessor granted it after its last snapshot: what its call cost has to be paid all the same.
            self.adopt(HeldPermit(permit=request.permit, keys=request.keys), "", self.rules.lease_s)
            permit = self.leases.get(request.permit)
        if permit is not None:
            settle(permit, request, self.prices, self.effects.append)
            self._end(permit)
            self._learn(request, permit, self.clock.now)
        elif not self.has_ended(request.permit):
            self._ended.put(request.permit, None)
            self._learn(request, None, self.clock.now)
        return permit is not None

    def give_back(self, name: str) -> bool:
        """End a permit under which no call was begun."""
        permit = self.leases.get(name)
        if permit is not None:
            give_back(permit)
            self._end(permit)
        return permit is not None

    def has_ended(self, name: str) -> bool:
        """True for a permit that is not in use, and is not one of a predecessor that may still be."""
        return name.startswith(self._own) or name in self._ended

    def _end(self, permit: Permit) -> None:
        if not permit.id.startswith(self._own):
            self._ended.put(permit.id, None)
        self._free(permit)

    def _free(self, permit: Permit) -> None:
        self.leases.remove(permit)
        for state in permit.pool.states:
            state.in_use -= 1
            if state.waiting:
                self.freed.add(state)

    def _learn(self, request: Settle, permit: Permit | None, now: float) -> None:
        """Feed what the provider said into the shared limits, unless that was told before."""
        states = permit.pool.states if permit is not None else ()
        if request.keys:
            states = self.table.known(request.keys)
        if not request.reported:
            started_at = now if permit is None else permit.start
            heard = Heard(request.outcome, started_at, request.retry_after_s, request.observed)
            self.hear(states, heard)
        if permit is not None and permit.probes:
            end_probes(permit, request.outcome, states, now)
            self.look_at(permit.pool.states)

    def hear(self, states: Iterable[KeyState], heard: Heard) -> None:
        """Feed one answer of a provider into some limits."""
        now = self.clock.now
        for state in states:
            hear(state, heard, now)
            if state.barred or state.gate_said or state.budget is not None:
                self.look_at((state,))

    def look_at(self, states: Iterable[KeyState]) -> None:
        """Report gates that have closed or opened since the last look, and look again at the acquires that wait there."""
        now = self.clock.now
        for state in states:
            self.stirred |= state.waiting > 0
            closed = closed_by(state, now, self.wall)
            said = "" if closed is None else closed[1]
            if said == state.gate_said:
                continue
            state.gate_said = said
            self.effects.append(GateChanged(state.key, closed=bool(said)))
            if said:
                self._shut[state] = None
            else:
                self._shut.pop(state, None)
                state.line_until = 0.0  # who was told to come back after the pause stands in nobody's way before it

    def adopt(self, held: HeldPermit, worker: str, lease_s: float, *, task: str = "", learned: bool = False) -> None:
        """Count a predecessor's permit as in use, even beyond the limit, because its call is running.

        With `learned` it takes one of the places that were assumed to be in use.
        """
        now = self.clock.now
        states = self.table.known(held.keys)
        if not states:
            return
        pool = self.table.pool(tuple(state.key for state in states))
        assert isinstance(pool, Pool)
        permit = Permit(held.permit, worker, pool, Need((0, 0, 0, 0), micro(held.cost_usd)), now, now + lease_s)
        permit.accounts = tuple(budget.reserve(permit.need.micro_usd, self.wall) for budget in pool.budgets)
        permit.task = task
        for state in states:
            state.in_use += 1
            if learned and state.assumed:
                state.assumed -= 1
        self.leases.add(permit)

    # --- time ------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Let leases run out, and learning end."""
        self.clock.now = max(self.clock.now, now)
        if self.leases.next_end() <= now:
            for permit in self.leases.run_out(now):
                run_out(permit, now, self.effects.append)
                self._end(permit)
                self.look_at(permit.pool.states)
        if self.learning.active and now >= self.learning.ends_at():
            self.learned()

    def do_chores(self, now: float) -> None:
        """Forget ended permits and idle keys whose time has come, and report gates that have opened by themselves."""
        self._ended.age(now)
        if self._shut:
            self.look_at(tuple(self._shut))
        self.table.sweep(now, self.wall)

    # --- succession --------------------------------------------------------------------------------

    def snapshot(self, now: float, *, clean: bool = False) -> Snapshot:
        """What a successor must know; say `clean` only when nothing will be granted any more.

        What this governor has still to learn from workers, its successor has too.
        """
        self.advance(now)
        self._workers = {name: at for name, at in self._workers.items() if now - at < self.rules.worker_s}
        wall = self.wall
        return Snapshot(
            keys=tuple(saved_key(state, now) for state in self.table.all() if not state.forgettable(now, wall)),
            permits=saved_permits(self.leases, now),
            clean=clean and not self.learning.active,
            epoch=self.epoch,
            workers=tuple(sorted({*self._workers, *self.learning.awaited})),
        )

    def restore(self, snapshot: Snapshot, elapsed_s: float, now: float) -> None:
        """Take up a predecessor's state, `elapsed_s` (never negative) after it was saved, before the first request."""
        self.clock.now = max(self.clock.now, now)
        gap_s = None if snapshot.clean else max(elapsed_s, self.rules.unseen_s)
        saved = {key.key: key for key in snapshot.keys}
        self.table.known(saved)
        for state in self.table.all():
            known = saved.get(state.key, SavedKey(key=state.key))
            restore_key(state, known, elapsed_s, now, gap_s=gap_s)
            self.look_at((state,))
        for permit in snapshot.permits:
            if permit.lease_left_s > elapsed_s:
                held = HeldPermit(permit=permit.permit, keys=permit.keys, cost_usd=permit.micro_usd / MICRO)
                self.adopt(held, permit.worker, permit.lease_left_s - elapsed_s, task=permit.task)
        if gap_s is not None:
            self.table.doubt(gap_s)
            self.learning.begin(snapshot.workers, now)

    def distrust(self) -> None:
        """Assume that a predecessor, of whom nothing is known, granted a start at each key just now, and all places.

        Which of the places are in use is for the workers to say, and nobody knows which workers there are.
        """
        for state in self.table.all():
            for meter in state.meters:
                meter.assume(0.0)
        self.table.doubt(0.0, places_gap_s=FOREVER_S)
        self.learning.begin(None, self.clock.now)

    def learned(self) -> None:
        """End learning: places that no worker has named are free."""
        self.learning.end()
        self.table.learning = False
        for state in self.table.all():
            if state.assumed:
                state.assumed = 0
                self.stirred = True
