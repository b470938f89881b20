"""The keys that are known: as configured, made from templates when first asked for, and forgotten when idle."""

from collections import deque
from collections.abc import Iterable, Iterator

from millstream.policy.budgets import Budget, Ledger
from millstream.policy.limit_state import KeyState, Need, Rules
from millstream.policy.limits import ByKey, Compiled, is_template
from millstream.policy.pacing import Clock, Meter
from millstream.policy.rations import RetryRation
from millstream_schemas.permits import WaitReason

MAX_POOLS = 20_000
"""Most pools that are kept for reuse; beyond that all are made anew."""
MAX_UNKNOWN = 100
"""Most keys that are remembered because they were asked for and are not configured."""
UNKNOWN_S = 60.0
SWEPT_AT_ONCE = 500
"""Most keys that one sweep looks at: looking at all of them would delay requests."""


class Pool:
    """The states that one acquire takes from, each once, in the order of its keys."""

    __slots__ = ("budgets", "keys", "meters", "rations", "states")

    def __init__(self, states: tuple[KeyState, ...]) -> None:
        self.states = states
        self.keys = tuple(state.key for state in states)
        self.meters: tuple[Meter, ...] = tuple(meter for state in states for meter in state.meters)
        self.budgets: tuple[Budget, ...] = tuple(state.budget for state in states if state.budget is not None)
        self.rations: tuple[RetryRation, ...] = tuple(state.ration for state in states if state.ration is not None)

    def obstacle(self, need: Need, now: float) -> tuple[float, KeyState, WaitReason]:
        """For how many seconds `need` cannot be taken here, and which key is in the way longest, and why."""
        longest_s, limiting, reason = -1.0, self.states[0], self.states[0].usual_reason
        for state in self.states:
            seconds, of_state = state.obstacle(need, now)
            if seconds > longest_s:
                longest_s, limiting, reason = seconds, state, of_state
        return longest_s, limiting, reason

    def ration(self, count: int, now: float) -> int:
        """Take up to `count` repeated attempts out of the rations of its keys; returns how many all of them allow."""
        count = min(count, int(min(ration.left(now) for ration in self.rations)))
        if count > 0:
            for ration in self.rations:
                ration.take(count)
        return count

    @property
    def waited_for(self) -> bool:
        """True while somebody waits for one of its keys."""
        return any(state.waiting for state in self.states)


class KeyTable:
    """States by key. An exact name goes before templates, and those in the order of the configuration."""

    def __init__(self, rules: Rules, clock: Clock) -> None:
        self.ledger = Ledger()
        self._rules = rules
        self._clock = clock
        self._limits: ByKey[Compiled] = ByKey()
        self._states: dict[str, KeyState] = {}
        self._pools: dict[tuple[str, ...], Pool] = {}
        self._made: deque[str] = deque()  # keys from templates, in the order in which they are looked at for idleness
        self._swept_at = clock.time()
        self._unknown: dict[str, float] = {}  # keys that were asked for and are not configured, and when last
        self._doubt: tuple[float, float] | None = None
        self._places_gap_s = 0.0
        self.learning = False

    def configure(self, limits: Iterable[Compiled]) -> None:
        """Know these keys from now on. The states of all others are kept, in case they come back."""
        self._limits = ByKey((compiled.key, compiled) for compiled in limits)
        self._pools.clear()
        for key, state in self._states.items():
            found = self._limits.find(key)
            if found is not None and found != state.compiled:
                state.set_limit(found, self.ledger)
        for key in self._limits.exact:
            self.state(key)

    def state(self, key: str) -> KeyState | None:
        """The state of a key that is configured, or that a template stands for; None for an unknown one."""
        state = self._states.get(key)
        if state is not None and self.knows(state):
            return state
        compiled = self._limits.find(key)
        if compiled is None or is_template(key):
            return None
        if state is not None:
            return state
        state = self._states[key] = KeyState(key, compiled, self._rules, self._clock, self.ledger)
        if state.template:
            self._made.append(key)
        if self._doubt is not None:
            self._be_in_doubt(state)
        return state

    def pool(self, keys: tuple[str, ...]) -> Pool | str:
        """The states of all keys; the first unknown key where there is one."""
        pool = self._pools.get(keys)
        if pool is not None:
            return pool
        states: list[KeyState] = []
        for key in dict.fromkeys(keys):
            state = self.state(key)
            if state is None:
                self._note_unknown(keys)
                return key
            states.append(state)
        if len(self._pools) >= MAX_POOLS:
            self._pools.clear()
        pool = self._pools[keys] = Pool(tuple(states))
        return pool

    def _note_unknown(self, keys: tuple[str, ...]) -> None:
        now = self._clock.time()
        for key in keys:
            if self._limits.find(key) is None and (key in self._unknown or len(self._unknown) < MAX_UNKNOWN):
                self._unknown[key] = now

    def unknown(self, now: float) -> tuple[str, ...]:
        """Keys that were asked for in the last minute and are not configured now."""
        self._unknown = {
            key: at for key, at in self._unknown.items() if now - at < UNKNOWN_S and self._limits.find(key) is None
        }
        return tuple(sorted(self._unknown))

    def known(self, keys: Iterable[str]) -> tuple[KeyState, ...]:
        """The states of those keys that are known, each once."""
        found = (self.state(key) for key in dict.fromkeys(keys))
        return tuple(state for state in found if state is not None)

    def all(self) -> Iterator[KeyState]:
        """Every state, those of keys that are not configured any more included."""
        return iter(self._states.values())

    def knows(self, state: KeyState) -> bool:
        """False for a state that is only kept in case its key comes back."""
        return state.key in self._limits.exact if not state.template else self._limits.find(state.key) is not None

    def templates(self) -> Iterator[Compiled]:
        """The configured templates, in their order."""
        return (compiled for _, compiled in self._limits.templates)

    # --- a predecessor of whom not all is known ----------------------------------------------------

    def doubt(self, gap_s: float, *, places_gap_s: float | None = None) -> None:
        """Assume of keys made from templates later on that a predecessor granted all it could in the last `gap_s`.

        Places of all keys, known ones too, are assumed to be in use until `learning` is unset: those that may have been
        granted in that time, or in `places_gap_s` where that is given.
        """
        self._doubt = (self._clock.time(), gap_s)
        self._places_gap_s = gap_s if places_gap_s is None else places_gap_s
        self.learning = True
        for state in self._states.values():
            state.assume_places(self._places_gap_s)

    def _be_in_doubt(self, state: KeyState) -> None:
        assert self._doubt is not None
        at, gap_s = self._doubt
        ago_s = self._clock.time() - at
        for meter in state.meters:
            if ago_s < meter.log.span_s:
                meter.assume(gap_s + ago_s, ago_s)
        if self.learning:
            state.assume_places(self._places_gap_s)

    # --- idle keys -----------------------------------------------------------------------------------

    def sweep(self, now: float, wall: float) -> None:
        """Forget some keys from templates that are idle; cheap where it is not time yet."""
        if not self._made or now - self._swept_at < self._rules.sweep_s:
            return
        self._swept_at = now
        gone: set[str] = set()
        for _ in range(min(len(self._made), SWEPT_AT_ONCE)):
            key = self._made.popleft()
            state = self._states.get(key)
            if state is None:
                continue
            if state.idle(now, wall):
                del self._states[key]
                gone.add(key)
            else:
                self._made.append(key)
        if gone:
            self._pools = {keys: pool for keys, pool in self._pools.items() if gone.isdisjoint(keys)}
