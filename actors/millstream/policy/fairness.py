"""Whose turn it is: start-time fair queueing over queues, classes and tenants; a tenant's lanes go by their oldest head.

Every flow has a tag, the virtual time at which its next task may start. The flow with the least tag goes first, and its
tag moves on by cost over weight. A flow that had nothing to release comes back at the present, with no turns saved up.
One that waits for room stands still: its tag keeps its distance to the present, so that what others use meanwhile
neither earns it turns nor makes those who wait for the same room forget who of them was served.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heapreplace
from operator import itemgetter

from millstream.policy.supply import ONE, Need, Pool, Room, Used

CLASS_WEIGHTS: Mapping[str, float] = {"high": 8.0, "normal": 3.0, "low": 1.0}


@dataclass(frozen=True, slots=True)
class Lane:
    """What waits in one lane: the sequences of its oldest entries, as far as they are known, and whether more follow.

    `needs` is what each of these takes of its limits; one request where it is left out.
    """

    id: str
    queue: str
    priority: str
    tenant: str
    pool: Pool
    heads: Sequence[int]
    more: bool = False
    again: bool = False
    needs: Sequence[Need] = ()

    def need(self, at: int) -> Need:
        """What the entry at a place of `heads` takes."""
        return self.needs[at] if self.needs else ONE


NEVER = 2**62

Tag = tuple[float, float]
"""When a flow may start next, and its place among those of the same time: kept for as long as the flow waits."""


@dataclass(frozen=True, slots=True)
class Turns:
    """One level: `at`, the virtual time at which the last task started, and the tags of flows that are not behind it."""

    at: float = 0.0
    tags: Mapping[str, Tag] = field(default_factory=dict[str, Tag])


Path = tuple[str, ...]
"""Which level: `()` the queues, `(queue,)` its classes, `(queue, class)` the tenants in it."""

Order = Mapping[Path, Turns]
"""The turns of each level in which something waits. A level that was empty begins anew, with all flows equal."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What a tenant weighs, and what a task of a pool with this need costs; both above zero."""

    weight: Callable[[str], float]
    cost: Callable[[Pool, Need], float]


@dataclass(frozen=True, slots=True)
class Take:
    """One entry to release."""

    lane: str
    seq: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Entries in the order of their release, where everybody's turn stands then, and the room that is left.

    `dry` is the lane whose turn it is, but whose next entry is not known: read on, and plan anew with `order`.
    """

    takes: tuple[Take, ...]
    order: Order
    room: Room
    dry: str | None = None


def plan(order: Order, lanes: Iterable[Lane], room: Room, shares: Shares, most: int) -> Plan:
    """Up to `most` entries whose turn it is, for which there is room."""
    every = list(lanes)
    left = _Left(room)
    root = _grown(order, every, shares, left)
    taken: Counter[str] = Counter()
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
        need = found.lane.need(found.at)
        taken[found.lane.id] += 1
        left.take(found.lane, need, len(takes))
        root.take(shares.cost(found.lane.pool, need), len(takes))
    waiting = [lane for lane in every if lane.more or len(lane.heads) > taken[lane.id]]
    return Plan(tuple(takes), _settled(order, root, _stopped(waiting, left)), left.room(), dry)


class _Left:
    """The room that is left within one plan."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._queues = dict(room.queues)
        self._used = dict(room.used)
        self._full = dict.fromkeys(room.full(), 0)
        self._done: dict[str, int] = {}

    def has(self, lane: Lane) -> bool:
        if self._queues.get(lane.queue, 0) <= 0:
            return False
        return not lane.pool or (lane.pool not in self._room.shut and self._full.keys().isdisjoint(lane.pool))

    def take(self, lane: Lane, need: Need, number: int) -> None:
        """Make room smaller by the task that is taken as the `number`th of the plan."""
        self._queues[lane.queue] -= 1
        if self._queues[lane.queue] <= 0:
            self._done[lane.queue] = number
        for key in lane.pool:
            bound = self._room.bound(key)
            used = self._used[key] = self._used.get(key, Used()).more(bound.seconds(need))
            if used.fills(bound):
                self._full.setdefault(key, number)

    def stopped(self, lane: Lane) -> int:
        """After how many of the plan's takes a lane had no room any more; `NEVER` where it still has."""
        if self.has(lane):
            return NEVER
        if lane.pool in self._room.shut:
            return 0
        since = [self._full[key] for key in lane.pool if key in self._full]
        if self._queues.get(lane.queue, 0) <= 0:
            since.append(self._done.get(lane.queue, 0))
        return min(since)

    def room(self) -> Room:
        return replace(self._room, queues=self._queues, used=self._used)


class _Cursor:
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
        self._lanes: list[tuple[tuple[bool, float], str, _Cursor]] = []
        self._oldest: list[tuple[float, Lane]] = []

    def add(self, lane: Lane) -> None:
        one = _Cursor(lane)
        self._lanes.append((one.rank, lane.id, one))
        self._oldest.append((one.rank[1], lane))

    def ready(self) -> None:
        heapify(self._lanes)
        self._oldest.sort(key=itemgetter(0), reverse=True)

    def next(self) -> _Cursor | None:
        while self._lanes:
            one = self._lanes[0][2]
            if self._left.has(one.lane) and (one.at < len(one.lane.heads) or one.lane.more):
                return one
            heappop(self._lanes)
        return None

    @property
    def place(self) -> float:
        """Its place among tenants with equal tags until it is served: the oldest entry that has room goes first."""
        while self._oldest and not self._left.has(self._oldest[-1][1]):
            self._oldest.pop()
        return self._oldest[-1][0] if self._oldest else float("inf")

    def take(self, _cost: float, _number: int) -> None:
        one = self._lanes[0][2]
        one.at += 1
        heapreplace(self._lanes, (one.rank, one.lane.id, one))


class _Level:
    """The flows of one level, the least tag first. A flow with nothing that may be released leaves the plan."""

    def __init__(self, path: Path, turns: Turns, weight: Callable[[str], float]) -> None:
        self.path = path
        self.at = turns.at
        self.tags = turns.tags
        self.moved: dict[str, Tag] = {}
        self.steps: list[tuple[int, float]] = [(0, turns.at)]
        self.flows: dict[str, _Level | _Tenant] = {}
        self.place = 0.0
        self._weight = weight
        self._heap: list[tuple[Tag, str]] = []
        self._fresh: set[str] = set()

    def ready(self) -> None:
        for name, flow in self.flows.items():
            flow.ready()
            tag = self.tags.get(name)
            if tag is None or tag[0] < self.at:
                tag = (self.at, flow.place)
                self._fresh.add(name)
            self._heap.append((tag, name))
        heapify(self._heap)

    def next(self) -> _Cursor | None:
        while self._heap:
            (tag, place), name = self._heap[0]
            flow = self.flows[name]
            found = flow.next()
            if found is None:
                heappop(self._heap)
            elif name in self._fresh and flow.place > place:
                # The entry that gave it its place has no room any more: in a plan that began now it would not count.
                heapreplace(self._heap, ((tag, flow.place), name))
            else:
                return found
        return None

    def take(self, cost: float, number: int) -> None:
        """Charge the flow that `next` found, and all below it, for the `number`th take of the plan."""
        (tag, place), name = self._heap[0]
        self._fresh.discard(name)
        self.flows[name].take(cost, number)
        self.at = tag
        self.steps.append((number, tag))
        self.moved[name] = (tag + cost / self._weight(name), place)
        heapreplace(self._heap, (self.moved[name], name))


def _grown(order: Order, lanes: Iterable[Lane], shares: Shares, left: _Left) -> _Level:
    """All lanes in which something waits that has room, in a tree of queues, classes and tenants."""
    root = _Level((), order.get((), Turns()), _even)
    for lane in lanes:
        if not (lane.heads or lane.more) or not left.has(lane):
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


def _stopped(waiting: Iterable[Lane], left: _Left) -> dict[Path, dict[str, int]]:
    """For each level the flows in which something waits after a plan, and after which of its takes they had no room."""
    levels: dict[Path, dict[str, int]] = {}
    for lane in waiting:
        since = left.stopped(lane)
        path: Path = (lane.queue, lane.priority)
        tenants = levels.get(path)
        if tenants is None:
            tenants = levels[path] = {}
        tenants[lane.tenant] = max(since, tenants.get(lane.tenant, 0))
    for path in list(levels):
        for depth in (1, 0):
            flows, latest = levels.setdefault(path[:depth], {}), max(levels[path[: depth + 1]].values())
            flows[path[depth]] = max(latest, flows.get(path[depth], 0))
    return levels


def _settled(order: Order, root: _Level, stopped: Mapping[Path, Mapping[str, int]]) -> Order:
    """The order after a plan, without the tags that are behind the present: they mean the same as none."""
    after = {path: turns for path, turns in order.items() if path in stopped}
    levels = [root]
    while levels:
        level = levels.pop()
        if level.moved and level.path in stopped:
            tags = _stood(level, {**level.tags, **level.moved}, stopped[level.path])
            after[level.path] = Turns(level.at, {name: tag for name, tag in tags.items() if tag[0] >= level.at})
        levels += [flow for flow in level.flows.values() if isinstance(flow, _Level)]
    return after


def _stood(level: _Level, tags: Mapping[str, Tag], stopped: Mapping[str, int]) -> dict[str, Tag]:
    """Tags in which no time has passed for those who waited for room: as much later as the present has moved meanwhile."""
    after = dict(tags)
    for name, (tag, place) in tags.items():
        since = stopped.get(name, NEVER)
        if since != NEVER:
            then = level.steps[bisect_right(level.steps, since, key=itemgetter(0)) - 1][1]
            after[name] = (max(tag, then) + (level.at - then), place)
    return after
