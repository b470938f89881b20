"""Whose turn it is: start-time fair queueing over queues, classes and tenants; a tenant's lanes go by their oldest head.

Every flow has a tag, the virtual time at which its next task may start. The flow with the least tag goes first, and its
tag moves on by cost over weight; who had nothing to go for comes back at the present and has saved up nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

CLASS_WEIGHTS: Mapping[str, float] = {"high": 8.0, "normal": 3.0, "low": 1.0}

Pool = tuple[str, ...]
"""The limit keys that a task needs; empty for one that is held for fairness alone."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What waits in one lane: the sequences of its oldest entries, as far as they are known, and whether more follow."""

    id: str
    queue: str
    priority: str
    tenant: str
    pool: Pool
    heads: Sequence[int]
    more: bool = False
    again: bool = False


Tag = tuple[float, float]
"""When a flow may start next, and its place among those of the same time: kept for as long as the flow waits."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The flows of one level: the virtual time `at` which the last one started, and tags that are not behind it."""

    at: float = 0.0
    tags: Mapping[str, Tag] = field(default_factory=dict[str, Tag])


Path = tuple[str, ...]
"""Which level: `()` the queues, `(queue,)` its classes, `(queue, class)` the tenants in it."""

Order = Mapping[Path, Turns]
"""Where everybody's turn stands, for levels in which something waits; a new rush begins even."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many may be released now: of a queue (0 where it is not named) and of a pool (any number)."""

    queues: Mapping[str, int]
    pools: Mapping[Pool, int]


@dataclass(frozen=True, slots=True)
class Shares:
    """What a tenant weighs, and what one task of a pool costs; both above zero."""

    weight: Callable[[str], float]
    cost: Callable[[Pool], float]


@dataclass(frozen=True, slots=True)
class Take:
    """One entry to release."""

    lane: str
    seq: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Entries in the order of their release, and where everybody's turn stands then.

    `dry` is the lane whose turn it is, but whose next entry is not known: read on, and plan anew with `order`.
    """

    takes: tuple[Take, ...]
    order: Order
    dry: str | None = None


def plan(order: Order, lanes: Iterable[Lane], room: Room, shares: Shares, most: int) -> Plan:
    """Up to `most` entries whose turn it is, for which there is room."""
    every = list(lanes)
    left = _Left(dict(room.queues), dict(room.pools))
    root = _grown(order, every, shares, left)
    takes: list[Take] = []
    dry: str | None = None
    while len(takes) < most:
        found = root.next()
        if found is None:
            break
        if found.at >= len(found.lane.heads):
            dry = found.lane.id
            break
        takes.append(Take(found.lane.id, found.lane.heads[found.at]))
        left.take(found.lane)
        root.take(shares.cost(found.lane.pool))
    return Plan(tuple(takes), _settled(order, root, _waiting(every, takes)), dry)


class _Left:
    """The room that is left within one plan."""

    def __init__(self, queues: dict[str, int], pools: dict[Pool, int]) -> None:
        self.queues = queues
        self.pools = pools

    def has(self, lane: Lane) -> bool:
        return self.queues.get(lane.queue, 0) > 0 and self.pools.get(lane.pool, 1) > 0

    def take(self, lane: Lane) -> None:
        self.queues[lane.queue] -= 1
        if lane.pool in self.pools:
            self.pools[lane.pool] -= 1


class _Next:
    """A lane and how many of its heads are taken."""

    __slots__ = ("at", "lane")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.at = 0

    @property
    def rank(self) -> tuple[bool, float]:
        """What ran or waited before goes first, then the oldest; what is not known yet is younger than all that is."""
        heads = self.lane.heads
        return (not self.lane.again, heads[self.at] if self.at < len(heads) else float("inf"))


class _Tenant:
    """The lanes of one tenant in one class. Room only shrinks within a plan: who is refused once is out."""

    def __init__(self, left: _Left) -> None:
        self._left = left
        self._lanes: list[tuple[tuple[bool, float], str, _Next]] = []

    def add(self, lane: Lane) -> None:
        one = _Next(lane)
        self._lanes.append((one.rank, lane.id, one))

    def ready(self) -> None:
        heapify(self._lanes)

    def next(self) -> _Next | None:
        while self._lanes:
            one = self._lanes[0][2]
            if self._left.has(one.lane) and (one.at < len(one.lane.heads) or one.lane.more):
                return one
            heappop(self._lanes)
        return None

    @property
    def place(self) -> float:
        """Before whoever came later."""
        return self._lanes[0][0][1]

    def take(self, _cost: float) -> None:
        one = self._lanes[0][2]
        one.at += 1
        heapreplace(self._lanes, (one.rank, one.lane.id, one))


class _Level:
    """Flows beside each other, the one with the least tag on top. A flow with nothing to go for leaves the plan."""

    def __init__(self, path: Path, turns: Turns, weight: Callable[[str], float]) -> None:
        self.path = path
        self.at = turns.at
        self.tags = turns.tags
        self.moved: dict[str, Tag] = {}
        self.flows: dict[str, _Level | _Tenant] = {}
        self.place = 0.0
        self._weight = weight
        self._heap: list[tuple[Tag, str]] = []

    def ready(self) -> None:
        for name, flow in self.flows.items():
            flow.ready()
            tag = self.tags.get(name)
            self._heap.append((tag if tag is not None and tag[0] >= self.at else (self.at, flow.place), name))
        heapify(self._heap)

    def next(self) -> _Next | None:
        while self._heap:
            found = self.flows[self._heap[0][1]].next()
            if found is not None:
                return found
            heappop(self._heap)
        return None

    def take(self, cost: float) -> None:
        """Charge the flow that `next` found, and all below it."""
        (tag, place), name = self._heap[0]
        self.flows[name].take(cost)
        self.at = tag
        self.moved[name] = (tag + cost / self._weight(name), place)
        heapreplace(self._heap, (self.moved[name], name))


def _grown(order: Order, lanes: Iterable[Lane], shares: Shares, left: _Left) -> _Level:
    """All lanes with room in a tree of queues, classes and tenants."""
    root = _Level((), order.get((), Turns()), _even)
    for lane in lanes:
        if not left.has(lane):
            continue
        queue = _under(root, lane.queue, order, _class_weight)
        tenants = _under(queue, lane.priority, order, shares.weight)
        tenant = tenants.flows.get(lane.tenant)
        if not isinstance(tenant, _Tenant):
            tenant = tenants.flows[lane.tenant] = _Tenant(left)
        tenant.add(lane)
    root.ready()
    return root


def _under(level: _Level, name: str, order: Order, weight: Callable[[str], float]) -> _Level:
    found = level.flows.get(name)
    if not isinstance(found, _Level):
        path = (*level.path, name)
        found = level.flows[name] = _Level(path, order.get(path, Turns()), weight)
    return found


def _even(_queue: str) -> float:
    return 1.0


def _class_weight(name: str) -> float:
    return CLASS_WEIGHTS.get(name, 1.0)


def _waiting(lanes: Iterable[Lane], takes: Iterable[Take]) -> set[Path]:
    """The levels in which something waits after a plan."""
    taken = Counter(take.lane for take in takes)
    paths: set[Path] = set()
    for lane in lanes:
        if lane.more or len(lane.heads) > taken[lane.id]:
            paths |= {(), (lane.queue,), (lane.queue, lane.priority)}
    return paths


def _settled(order: Order, root: _Level, waiting: set[Path]) -> Order:
    """The order after a plan. A tag that time has passed says nothing any more."""
    after = {path: turns for path, turns in order.items() if path in waiting}
    levels = [root]
    while levels:
        level = levels.pop()
        if level.moved and level.path in waiting:
            tags = {**level.tags, **level.moved}
            after[level.path] = Turns(level.at, {name: tag for name, tag in tags.items() if tag[0] >= level.at})
        levels += [flow for flow in level.flows.values() if isinstance(flow, _Level)]
    return after
