"""The order in which held acquires are served.

Waiters are served in order of arrival, each taking all of its keys or none. One that waits for a key keeps that key
from younger ones; its other keys stay open to them as long as that does not put it off. A waiter for a place that
frees up at no known time keeps nothing but that key. So of those who want the same keys only the oldest has to be
looked at, and between two passes a newcomer for a closed key only joins its queue.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil, inf

from millstream.policy.key_table import Pool
from millstream.policy.limit_state import FOREVER_S, KeyState, Need, Rules
from millstream.policy.pacing import NOTHING_S
from millstream_schemas.permits import MAX_MS, Acquire, PermitReply, Wait, WaitReason

LATE_S = 0.050
"""An acquire whose `deadline` has passed by more than this is not granted any more: its asker may have gone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to a held acquire, by its id."""

    acquire: str
    reply: PermitReply


class Waiter:
    """A held acquire; it came at `since` as the `number`th and must have been answered by `deadline`."""

    __slots__ = ("ahead", "alive", "deadline", "left", "n", "need", "number", "pool", "request", "since")

    def __init__(self, request: Acquire, pool: Pool, need: Need, n: int, now: float) -> None:
        self.request = request
        self.pool = pool
        self.need = need
        self.n = n
        self.since = now
        self.deadline = now + request.wait_ms / 1000
        self.number = 0
        self.alive = True
        busiest = max(pool.states, key=lambda state: state.waiting)
        self.ahead = busiest.waiting
        self.left = busiest.left

    def still_ahead(self, state: KeyState) -> int:
        """About how many older acquires still wait for a key."""
        return max(0, min(self.ahead - (state.left - self.left), state.waiting))

    def give_back_ration(self, count: int | None = None) -> None:
        """Give `count` of its repeated attempts back (None: all of them), because they were not granted."""
        if self.request.retry:
            for ration in self.pool.rations:
                ration.take(-(self.n if count is None else count))


Grant = Callable[[Waiter, float, bool], PermitReply]
"""Called with a waiter, in how many seconds it may begin, and whether it may get one permit only; returns the reply."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """When a waiter's turn comes and what makes it wait until then; `waits_s` has one entry per key."""

    ready: float
    limiting: KeyState
    reason: WaitReason
    waits_s: list[float]


@dataclass(slots=True)
class _Pass:
    """What the older waiters leave to the younger in one pass over the queue.

    It holds for newcomers too until the next pass: nobody's turn comes earlier than was found, unless a key becomes
    free that is closed, or time passes `wake_at`.
    """

    now: float
    closed: set[KeyState] = field(default_factory=set[KeyState])
    kept: dict[KeyState, tuple[float, Need]] = field(default_factory=dict[KeyState, tuple[float, Need]])
    answers: list[Answer] = field(default_factory=list[Answer])
    wake_at: float = inf


class Waiters:
    """Held acquires by id, in queues by their keys, bounded per key and in all; `wake_at` is when to serve again."""

    def __init__(self, rules: Rules, epoch: int) -> None:
        self._rules = rules
        self._epoch = epoch
        self._waiting: dict[str, Waiter] = {}
        self._queues: dict[Pool, deque[Waiter]] = {}
        self._deadlines: list[tuple[float, int, Waiter]] = []
        self._last = _Pass(0.0)
        self._count = 0
        self.wake_at = inf

    def __contains__(self, acquire: str) -> bool:
        return acquire in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def full(self, pool: Pool) -> KeyState | None:
        """A key at which no more may wait, any key where too many wait in all; None where one more may."""
        rules = self._rules
        if len(self._waiting) >= rules.max_waiting:
            return pool.states[0]
        return next((state for state in pool.states if state.waiting >= rules.max_waiting_per_key), None)

    def add(self, waiter: Waiter) -> None:
        """Let an acquire wait."""
        self._count += 1
        waiter.number = self._count
        self._waiting[waiter.request.id] = waiter
        queue = self._queues.get(waiter.pool)
        if queue is None:
            queue = self._queues[waiter.pool] = deque()
        queue.append(waiter)
        if len(self._deadlines) > 2 * len(self._waiting) + 64:
            self._compact()
        heappush(self._deadlines, (waiter.deadline, waiter.number, waiter))
        for state in waiter.pool.states:
            state.waiting += 1
        self.wake_at = min(self.wake_at, waiter.deadline)

    def look(self, waiter: Waiter, now: float, grant: Grant) -> PermitReply | None:
        """Decide on the newest waiter alone, between two passes; None where it has to wait."""
        this = self._last
        this.now = now
        if self._answered(waiter, this, grant):
            return this.answers.pop().reply
        self.wake_at = min(self.wake_at, this.wake_at)
        if waiter.deadline > now:
            return None
        self.remove(waiter.request.id)
        return self._refusal(waiter, now)

    def awaits(self, freed: set[KeyState]) -> bool:
        """True where somebody's turn may have come because places of these keys are free."""
        return not self._last.closed.isdisjoint(freed)

    def remove(self, acquire: str) -> Waiter | None:
        """Take an acquire out of its queue; None where it does not wait."""
        waiter = self._waiting.pop(acquire, None)
        if waiter is not None:
            waiter.alive = False
            for state in waiter.pool.states:
                state.waiting -= 1
                state.left += 1
            if not self._waiting:
                self._last = _Pass(waiter.since)
        return waiter

    def regroup(self, pool_of: Callable[[tuple[str, ...]], Pool | str]) -> None:
        """Queue everybody by the pools as configured now; a waiter with a key that is gone keeps its old pool."""
        self._queues = {}
        for waiter in self._waiting.values():
            found = pool_of(waiter.request.keys)
            if isinstance(found, Pool):
                waiter.pool = found
            self._queues.setdefault(waiter.pool, deque()).append(waiter)

    def _compact(self) -> None:
        """Drop the entries of those who left before their deadline, so that a storm of them leaves nothing behind."""
        self._deadlines = [entry for entry in self._deadlines if entry[2].alive]
        heapify(self._deadlines)
        for pool, queue in list(self._queues.items()):
            alive = deque(waiter for waiter in queue if waiter.alive)
            if alive:
                self._queues[pool] = alive
            else:
                del self._queues[pool]

    # --- a pass --------------------------------------------------------------------------------------

    def serve(self, now: float, grant: Grant) -> list[Answer]:
        """Grant and turn away whom time allows, oldest first; only the head of a queue can be anybody's turn."""
        this = _Pass(now)
        heads = [(queue[0].number, queue) for queue in self._queues.values() if _trim(queue)]
        heapify(heads)
        while heads and not self._all_closed(this):
            queue = heads[0][1]
            if self._answered(queue[0], this, grant) and _trim(queue):
                heapreplace(heads, (queue[0].number, queue))
            else:
                heappop(heads)
        self._last = this
        self._end_late(this)
        self._queues = {pool: queue for pool, queue in self._queues.items() if queue}
        self.wake_at = min(this.wake_at, self._deadlines[0][0] if self._deadlines else inf)
        answers, this.answers = this.answers, []
        return answers

    def _all_closed(self, this: _Pass) -> bool:
        """True where everybody waits for one key that is closed, as for the one provider of many tenants."""
        waiting = len(self._waiting)
        return len(this.closed) < 4 and any(state.waiting == waiting for state in this.closed)

    def _answered(self, waiter: Waiter, this: _Pass, grant: Grant) -> bool:
        """Decide on the head of a queue; False where it waits on, and all of its queue with it."""
        if not this.closed.isdisjoint(waiter.pool.states):
            return False
        now = this.now
        turn, alone = self._turn(waiter, this)
        if turn.ready <= now + self._rules.book_s + NOTHING_S and now <= waiter.deadline + LATE_S:
            self.remove(waiter.request.id)
            reply = grant(waiter, max(0.0, turn.ready - now), alone)
        elif waiter.deadline <= now or waiter.deadline < turn.ready < FOREVER_S:
            self.remove(waiter.request.id)
            seconds = max(0.0, turn.ready - now)
            reply = self.turn_away(waiter, turn.limiting, turn.reason, seconds, now)
        else:
            self._reserve(waiter, turn, this)
            this.wake_at = min(this.wake_at, turn.ready - self._rules.book_s)
            return False
        this.answers.append(Answer(waiter.request.id, reply))
        return True

    def _turn(self, waiter: Waiter, this: _Pass) -> tuple[_Turn, bool]:
        """When a waiter's turn comes, and whether it may take one permit only, so as not to put off an older one."""
        states = waiter.pool.states
        obstacles = [state.obstacle(waiter.need, this.now) for state in states]
        waits_s = [seconds for seconds, _ in obstacles]
        longest_s = max(waits_s)
        alone = False
        if this.kept and longest_s <= self._rules.book_s + NOTHING_S:
            for at, state in enumerate(states):
                kept = this.kept.get(state)
                if kept is None:
                    continue
                alone = True
                if not state.leaves(waiter.need, longest_s, kept[1], kept[0] - this.now):
                    waits_s[at] = inf
                    return _Turn(kept[0], state, obstacles[at][1], waits_s), True
        at = waits_s.index(longest_s)
        return _Turn(this.now + longest_s, states[at], obstacles[at][1], waits_s), alone

    def _reserve(self, waiter: Waiter, turn: _Turn, this: _Pass) -> None:
        """Close the limiting keys to younger waiters, and keep room on the others until the waiter's turn."""
        longest_s = max(turn.waits_s)
        for state, wait_s in zip(waiter.pool.states, turn.waits_s, strict=True):
            if wait_s >= longest_s:
                this.closed.add(state)
            elif turn.ready < FOREVER_S:
                this.kept.setdefault(state, (turn.ready, waiter.need))

    def _end_late(self, this: _Pass) -> None:
        """Turn away those whose time ended behind others."""
        while self._deadlines and (self._deadlines[0][0] <= this.now or not self._deadlines[0][2].alive):
            waiter = heappop(self._deadlines)[2]
            if waiter.alive:
                self.remove(waiter.request.id)
                this.answers.append(Answer(waiter.request.id, self._refusal(waiter, this.now)))

    # --- those who are turned away ---------------------------------------------------------------------

    def _refusal(self, waiter: Waiter, now: float) -> Wait:
        """The reply to a waiter whose time ended before its turn came."""
        states = waiter.pool.states
        limiting = next((state for state in states if state in self._last.closed), states[0])
        seconds, reason = limiting.obstacle(waiter.need, now)
        return self.turn_away(waiter, limiting, reason, seconds, now)

    def turn_away(self, waiter: Waiter, limiting: KeyState, reason: WaitReason, seconds: float, now: float) -> Wait:
        """Say when to ask again, one place in the line behind those ahead and those turned away before."""
        waiter.give_back_ration()
        if seconds == FOREVER_S:
            seconds = self._rules.place_retry_s
        interval_s = limiting.interval_s(waiter.need)
        earliest = now + seconds + waiter.still_ahead(limiting) * interval_s
        back_at = limiting.place_in_line(now, earliest, interval_s)
        return wait(limiting.key, reason, back_at - now, self._epoch)


def wait(key: str, reason: WaitReason, seconds: float, epoch: int) -> Wait:
    """The reply to ask again in `seconds`, within the bounds of the contract."""
    retry_after_ms = min(max(1, ceil(seconds * 1000)), MAX_MS)
    return Wait(retry_after_ms=retry_after_ms, limiting_key=key, reason=reason, epoch=epoch)


def _trim(queue: deque[Waiter]) -> bool:
    """Forget those at the front who have left; False where nobody is there any more."""
    while queue and not queue[0].alive:
        queue.popleft()
    return bool(queue)
