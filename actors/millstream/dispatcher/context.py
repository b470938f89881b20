"""What the parts of the dispatcher share: the journal, the settings and the ways to tell others."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from millstream.journal import Journal
from millstream.policy.decide import DecideSettings, Seen
from millstream.ports import Broker, Clock, Ids
from millstream.settings import Settings
from millstream.telemetry.events import Telemetry
from millstream_schemas.events import WorkItem
from millstream_schemas.names import Names

BELL_HORIZON_S = 3600.0
BELL_TICK_S = 0.1
"""Bells that are due within one tick ring as one, so that a flood of retries keeps a short list."""

DueBell = tuple[int, str, str]
"""Tick, queue and priority."""


@dataclass
class Served:
    """The task types that live workers announced, refreshed by the actor; None until the registry was read."""

    task_types: frozenset[str] | None = None


@dataclass(frozen=True)
class Context:
    """Resources of one dispatcher, passed to its parts."""

    broker: Broker
    control: Broker
    journal: Journal
    names: Names
    settings: Settings
    clock: Clock
    ids: Ids
    telemetry: Telemetry
    bells: "Bells"
    served: Served = field(default_factory=Served)

    @property
    def decide_settings(self) -> DecideSettings:
        return DecideSettings(
            max_wait_s=self.settings.max_wait_s,
            max_throttle_s=self.settings.max_throttle_s,
            unserved_s=self.settings.unserved_s,
        )

    def is_served(self, seen: Seen) -> bool:
        """True when a live worker announced the task's type, or may have: nothing ends for want of a look."""
        return self.served.task_types is None or seen.event.card.task_type in self.served.task_types


@dataclass
class Bells:
    """Wakes idle workers: at once for released tasks, at the due time for those that the server delivers later."""

    broker: Broker
    names: Names
    clock: Clock
    due: list[DueBell] = field(default_factory=list[DueBell])  # a heap
    known: set[DueBell] = field(default_factory=set[DueBell])

    def ring(self, items: Iterable[WorkItem]) -> None:
        """Tell the workers of each queue which priorities have new work."""
        rung: dict[str, set[str]] = {}
        for item in items:
            rung.setdefault(item.card.queue, set()).add(item.card.priority)
        for queue, priorities in rung.items():
            self.broker.tell(self.names.bell(queue), ",".join(sorted(priorities)).encode())

    def ring_at(self, due_at: float, item: WorkItem) -> None:
        """Ring when a scheduled message is due; a bell that is lost costs a worker's polling interval."""
        if due_at - self.clock.now() < BELL_HORIZON_S:
            bell = (ceil(due_at / BELL_TICK_S), item.card.queue, item.card.priority)
            if bell not in self.known:
                self.known.add(bell)
                heappush(self.due, bell)

    def ring_due(self) -> None:
        """Ring what has become due; called a few times a second."""
        now = self.clock.now()
        ripe: set[tuple[str, str]] = set()
        while self.due and self.due[0][0] * BELL_TICK_S <= now:
            bell = heappop(self.due)
            self.known.discard(bell)
            ripe.add(bell[1:])
        for queue, priority in ripe:
            self.broker.tell(self.names.bell(queue), priority.encode())
