"""The order in which held acquires are served.

Waiters are served in order of arrival, each taking all of its keys or none. One that waits for a key keeps that key
from younger ones; its other keys stay open to them as long as that does not put it off. A waiter for a place that
frees up at no known time keeps nothing but that key.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf

from millstream.policy.limit_state import FOREVER_S, KeyState, Need, Rules
from millstream.policy.pacing import NOTHING_S
from millstream_schemas.permits import Acquire, Granted, PermitReply, Wait, WaitReason

LATE_S = 0.050
"""A held request whose time ended this long ago is not granted any more: its asker may have gone."""

Grant = Callable[["Waiter", float], Granted]


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to a held acquire, by its id."""

    acquire: str
    reply: PermitReply


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A held acquire with the states of its keys; it came at `since` and must have been answered by `deadline`."""

    request: Acquire
    states: tuple[KeyState, ...]
    keys: frozenset[str]
    need: Need
    since: float
    deadline: float


@dataclass(frozen=True, slots=True)
class _Turn:
    """When a waiter's turn comes and what makes it wait until then; `waits_s` has one entry per key."""

    ready: float
    limiting: KeyState
    reason: WaitReason
    waits_s: tuple[float, ...]


@dataclass(slots=True)
class _Pass:
    """What the older waiters leave to the younger in one pass over the queue."""

    now: float
    closed: set[str] = field(default_factory=set[str])
    kept: dict[str, tuple[float, Need]] = field(default_factory=dict[str, tuple[float, Need]])
    ahead: dict[str, int] = field(default_factory=dict[str, int])

    def count(self, waiter: Waiter) -> None:
        """Let those who come after know how many stand before them."""
        for key in waiter.keys:
            self.ahead[key] = self.ahead.get(key, 0) + 1


class Waiters:
    """Held acquires by id, oldest first, bounded per key and in all."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._waiting: dict[str, Waiter] = {}

    def __contains__(self, acquire: str) -> bool:
        return acquire in self._waiting

    def add(self, request: Acquire, states: tuple[KeyState, ...], need: Need, now: float) -> Wait | None:
        """Hold an acquire, or answer with `Wait` where a queue is full."""
        rules = self._rules
        for state in states:
            if state.waiting >= rules.max_waiting_per_key or len(self._waiting) >= rules.max_waiting:
                return self._wait(state, need, now, rules.slot_retry_s, state.waiting, "queue_full")
        keys = frozenset(state.limit.key for state in states)
        self._waiting[request.id] = Waiter(request, states, keys, need, now, now + request.wait_ms / 1000)
        for state in states:
            state.waiting += 1
        return None

    def remove(self, acquire: str) -> bool:
        """Forget a held acquire; False where it is not held."""
        waiter = self._waiting.pop(acquire, None)
        if waiter is None:
            return False
        for state in waiter.states:
            state.waiting -= 1
        return True

    def serve(self, now: float, grant: Grant) -> tuple[list[Answer], float]:
        """Grant and turn away whom time allows; the answers, and when to serve again (infinite: on a message)."""
        this = _Pass(now)
        answers: list[Answer] = []
        wake_at = inf
        for waiter in list(self._waiting.values()):
            if waiter.deadline > now and not this.closed.isdisjoint(waiter.keys):  # most of a long queue ends here
                this.count(waiter)
                wake_at = min(wake_at, waiter.deadline)
                continue
            turn = self._turn(waiter, this)
            reply, wait_until = self._decide(waiter, turn, this, grant)
            if reply is None:
                wake_at = min(wake_at, wait_until)
            else:
                answers.append(Answer(waiter.request.id, reply))
        return answers, wake_at

    def _decide(
        self, waiter: Waiter, turn: _Turn | None, this: _Pass, grant: Grant
    ) -> tuple[PermitReply | None, float]:
        """The waiter's answer, or None and when to look at it again."""
        now, over = this.now, waiter.deadline <= this.now
        if turn is not None and turn.ready <= now + self._rules.book_s + NOTHING_S and now <= waiter.deadline + LATE_S:
            self.remove(waiter.request.id)
            return grant(waiter, max(0.0, turn.ready - now)), inf
        hopeless = turn is not None and waiter.deadline < turn.ready < FOREVER_S
        if over or hopeless:
            self.remove(waiter.request.id)
            reply = self._turn_away(waiter, turn, this)
        else:
            reply = None
            if turn is not None:
                self._reserve(waiter, turn, this)
        this.count(waiter)
        return reply, min(waiter.deadline, turn.ready - self._rules.book_s if turn is not None else inf)

    def _turn(self, waiter: Waiter, this: _Pass) -> _Turn | None:
        """When a waiter's turn comes; None while older ones stand before it at one of its keys."""
        if not this.closed.isdisjoint(waiter.keys):
            return None
        obstacles = [state.obstacle(waiter.need, this.now) for state in waiter.states]
        waits_s = tuple(obstacle.seconds for obstacle in obstacles)
        longest_s = max(waits_s)
        at = waits_s.index(longest_s)
        if longest_s <= self._rules.book_s + NOTHING_S:
            for index, state in enumerate(waiter.states):
                kept = this.kept.get(state.limit.key)
                if kept is not None and not state.leaves(waiter.need, longest_s, kept[1], kept[0] - this.now):
                    waits_s = tuple(inf if i == index else wait_s for i, wait_s in enumerate(waits_s))
                    return _Turn(kept[0], state, obstacles[index].reason, waits_s)
        return _Turn(this.now + longest_s, waiter.states[at], obstacles[at].reason, waits_s)

    def _reserve(self, waiter: Waiter, turn: _Turn, this: _Pass) -> None:
        """Close the limiting keys to younger waiters, and keep room on the others until the waiter's turn."""
        longest_s = max(turn.waits_s)
        for state, wait_s in zip(waiter.states, turn.waits_s, strict=True):
            if wait_s >= longest_s:
                this.closed.add(state.limit.key)
            elif turn.ready < FOREVER_S:
                this.kept.setdefault(state.limit.key, (turn.ready, waiter.need))

    def _turn_away(self, waiter: Waiter, turn: _Turn | None, this: _Pass) -> Wait:
        if turn is not None:
            limiting, reason, seconds = turn.limiting, turn.reason, max(0.0, turn.ready - this.now)
        else:
            limiting = next(state for state in waiter.states if state.limit.key in this.closed)
            obstacle = limiting.obstacle(waiter.need, this.now)
            reason, seconds = obstacle.reason, obstacle.seconds
        ahead = this.ahead.get(limiting.limit.key, 0)
        return self._wait(limiting, waiter.need, this.now, seconds, ahead, reason)

    def _wait(self, state: KeyState, need: Need, now: float, seconds: float, ahead: int, reason: WaitReason) -> Wait:
        """Say when to ask again, one place in the line behind those `ahead` and those turned away before."""
        if seconds == FOREVER_S:
            seconds = self._rules.slot_retry_s
        interval_s = state.interval_s(need)
        back_at = state.place_in_line(now, now + seconds + ahead * interval_s, interval_s)
        retry_after_ms = min(max(1, ceil((back_at - now) * 1000)), 86_400_000)
        return Wait(retry_after_ms=retry_after_ms, limiting_key=state.limit.key, reason=reason)
