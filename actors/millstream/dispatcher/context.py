"""What the parts of the dispatcher share: the journal, the settings and the ways to tell others."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil
from typing import Protocol, TypeVar

from millstream.journal import Journal
from millstream.policy.decide import DecideSettings, Seen
from millstream.policy.holding import Onward, ToHeld
from millstream.policy.metering import Metered, Metering, lane_token, metering
from millstream.ports import Broker, Clock, Conflict, Delivery, Ids, Outgoing, Published, Stored
from millstream.settings import Settings
from millstream.telemetry.events import Telemetry
from millstream_schemas.commands import WorkerInfo
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import WorkItem
from millstream_schemas.names import Names

BELL_HORIZON_S = 3600.0
BELL_TICK_S = 0.1
"""Bells that are due within one tick ring as one, so that a flood of retries keeps a short list."""

MESSAGES_AT_ONCE = 32
"""Of those that are handled each by itself."""

T = TypeVar("T")
R = TypeVar("R")

DueBell = tuple[int, str, str]
"""Tick, queue and priority."""


class Configured(Protocol):
    """Holds the settings that are in effect now: a `Configuration`, or `Fixed` ones."""

    @property
    def settings(self) -> Settings:
        """Replaced as a whole when the configuration changes; ask again instead of keeping them."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Settings that stay as they were at the start."""

    settings: Settings


@dataclass
class Served:
    """What workers announced; the actor refreshes it from the registry.

    `task_types` are those that live workers serve, None until the registry was read for the first time. `limits` holds
    the limit keys of each task type. They are kept when the last worker of a type has gone: its tasks are still metered,
    and wait in their lanes until a worker is back.
    """

    task_types: frozenset[str] | None = None
    limits: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def refresh(self, workers: Iterable[WorkerInfo]) -> None:
        """Take in what the registry holds now."""
        announced: dict[str, set[str]] = {}
        for worker in workers:
            for handler in worker.handlers:
                announced.setdefault(handler.task_type, set()).update(handler.limits)
        self.task_types = frozenset(announced)
        limits = {**self.limits, **{task_type: tuple(sorted(keys)) for task_type, keys in announced.items()}}
        if limits != self.limits:
            self.limits = limits


Kind = tuple[str, str, str]
"""Queue, task type and tenant."""
MOST_KINDS = 10_000


@dataclass
class MeteringTable:
    """How each kind of task is metered, worked out once per kind, so that a plain task costs one look into a table."""

    served: Served
    known: dict[Kind, tuple[Metered, ...]] = field(default_factory=dict[Kind, tuple[Metered, ...]])
    made_from: tuple[Settings | None, Mapping[str, tuple[str, ...]]] = (None, {})
    """The settings and announced limits that `known` was worked out from; when either changes, `known` is dropped."""

    def metered(self, settings: Settings, kind: Kind) -> tuple[Metered, ...]:
        """What configuration and workers ask of tasks of this kind; empty where they are plain."""
        made_from = (settings, self.served.limits)
        stale = self.made_from[0] is not made_from[0] or self.made_from[1] is not made_from[1]
        if stale or len(self.known) >= MOST_KINDS:
            self.known, self.made_from = {}, made_from
        found = self.known.get(kind)
        if found is None:
            queue, task_type, tenant = kind
            announced = Metered(limits=self.served.limits.get(task_type, ()))
            each = (announced, *settings.metered(queue, task_type, tenant))
            found = self.known[kind] = tuple(one for one in each if one.limits or one.fair)
        return found


@dataclass(frozen=True, slots=True)
class Standing:
    """A delivery whose event is in the stream; `onward` is what to publish next, None where nothing follows."""

    delivery: Delivery
    onward: Onward | None


@dataclass(frozen=True)
class Context:
    """Resources of one dispatcher, passed to its parts."""

    broker: Broker
    control: Broker
    journal: Journal
    names: Names
    configured: Configured
    clock: Clock
    ids: Ids
    telemetry: Telemetry
    bells: "Bells"
    served: Served
    metering_table: MeteringTable

    @property
    def settings(self) -> Settings:
        """The settings that are in effect now."""
        return self.configured.settings

    def metered(self, queue: str, task_type: str, tenant: str) -> tuple[Metered, ...]:
        """How tasks of one queue, type and tenant are metered; empty for plain ones."""
        return self.metering_table.metered(self.settings, (queue, task_type, tenant))

    def metering(self, envelope: Envelope) -> Metering | None:
        """How an admitted task would be metered now; None for a plain one."""
        metered = self.metered(envelope.queue or "", envelope.task_type, envelope.tenant_id or "")
        return metering(envelope, metered) if metered or envelope.limits else None

    async def publish(self, groups: Sequence[Sequence[Outgoing]]) -> list[Published | None]:
        """Store the messages of all groups at once; returns one verdict per group.

        None where all of a group's messages are stored, else the first answer after which one of them may be missing. A
        conflict counts as stored: the same message was published before.
        """
        flat = [outgoing for group in groups for outgoing in group]
        answers = iter(await self.broker.publish_all(flat) if flat else ())
        return [_missing([next(answers) for _ in group]) for group in groups]

    async def publish_onward(self, standing: Sequence[Standing], unanswered: str) -> list[Delivery]:
        """Publish to WORK or HELD what follows from events, and tell those who wait for it.

        Returns the deliveries that are finished; each other one is an `unanswered` event, and comes again.
        """
        if not standing:
            return []
        missing = await self.publish([self.journal.onward(one.onward) if one.onward else () for one in standing])
        done: list[Standing] = []
        for one, answer in zip(standing, missing, strict=True):
            if answer is None:
                done.append(one)
            else:
                self.telemetry.emit(unanswered, seq=one.delivery.seq, answer=repr(answer))
        self.bells.announce(one.onward for one in done if one.onward is not None)
        return [one.delivery for one in done]

    @property
    def decide_settings(self) -> DecideSettings:
        return DecideSettings(
            max_wait_s=self.settings.max_wait_s,
            max_throttle_s=self.settings.max_throttle_s,
            unserved_s=self.settings.unserved_s,
        )

    def is_served(self, seen: Seen) -> bool:
        """True when a live worker announced the task's type; also before the registry was read, as one may have."""
        return self.served.task_types is None or seen.event.card.task_type in self.served.task_types


async def together(handle: Callable[[T], Awaitable[R]], items: Sequence[T]) -> list[R]:
    """Handle each item by itself, some at once; results in their order. Raises the first fault, once none is at work."""
    results: list[R] = []
    for start in range(0, len(items), MESSAGES_AT_ONCE):
        some = items[start : start + MESSAGES_AT_ONCE]
        for end in await asyncio.gather(*(handle(one) for one in some), return_exceptions=True):
            if isinstance(end, BaseException):
                raise end
            results.append(end)
    return results


def _missing(answers: Sequence[Published]) -> Published | None:
    return next((answer for answer in answers if not isinstance(answer, Stored | Conflict)), None)


@dataclass
class Bells:
    """Wakes those who wait for new work: workers and the releaser.

    Workers are woken at once for tasks that went to WORK, and at the due time for those that the server delivers later.
    The releaser is woken for tasks that are held.
    """

    broker: Broker
    names: Names
    clock: Clock
    due: list[DueBell] = field(default_factory=list[DueBell])  # a heap
    known: set[DueBell] = field(default_factory=set[DueBell])

    def announce(self, published: Iterable[Onward]) -> None:
        """Ring for all that was just published. What is due later and metered needs no bell: a tick brings it back here."""
        at_once: list[WorkItem] = []
        lanes: set[str] = set()
        for one in published:
            item = one.item
            if isinstance(one, ToHeld):
                lane = lane_token(item.lane, again=one.again)
                lanes.add(self.names.held(item.card.queue, item.card.priority, lane))
            elif one.due_at is None:
                at_once.append(item)
            elif not item.lane:
                self.ring_at(one.due_at, item)
        if at_once:
            self.ring(at_once)
        if lanes:
            self.broker.tell(self.names.held_bell, "\n".join(sorted(lanes)).encode())

    def ring(self, items: Iterable[WorkItem]) -> None:
        """Tell the workers of each queue which priorities have new work."""
        rung: dict[str, set[str]] = {}
        for item in items:
            rung.setdefault(item.card.queue, set()).add(item.card.priority)
        for queue, priorities in rung.items():
            self.broker.tell(self.names.bell(queue), ",".join(sorted(priorities)).encode())

    def ring_at(self, due_at: float, item: WorkItem) -> None:
        """Ring when a scheduled message is due. If that bell is lost, workers find the message when they next poll."""
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
