"""How many released tasks have not begun yet: the releaser counts them up, the events of their tasks count them down."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from millstream.dispatcher.context import Context
from millstream.policy.release import AHEAD_S, BEGUN_KINDS, Pause, paused, queue_room
from millstream.policy.supply import Need, Pool, Waiting, need_of
from millstream.ports import Feed, Record
from millstream_schemas.codec import UnknownMessage, decode_work_item
from millstream_schemas.commands import WorkerInfo
from millstream_schemas.events import Released, WorkItem
from millstream_schemas.names import PRIORITIES

SLOTS_EVERY_S = 0.5
TAKE = 1000
WAIT_S = 5.0
PAGE = 250
MOST_TAKEN_OVER = 2000
"""Messages of one class in WORK that a new releaser reads, so that a flood of plain tasks does not hold up its start."""
RECHECK_AFTER_S = 30.0
"""A released task that has not begun for so long is looked up: its message may be lost, and it would take up room."""
RECHECKS_AT_ONCE = 64
IDLE_S = 60.0
"""The events of a queue are no longer followed once nothing was held there for so long: they concern plain tasks only."""
MOST_CANCELLED = 10_000


@dataclass(frozen=True, slots=True)
class _Out:
    """A task that was released at `fence` and has not begun."""

    queue: str
    pool: Pool
    need: Need
    fence: int
    since: float


class Depth:
    """Counts, by queue and by pool, the released tasks that wait in WORK or at a worker for a slot or a permit.

    Each term begins with an empty count and takes over what WORK holds. `changed` is set when something has begun.
    `to_blame` says for which key, as a pool, a task of a pool that a worker sent back most likely waited.
    """

    def __init__(
        self, context: Context, changed: asyncio.Event, to_blame: Callable[[Pool, Need], Pool] = lambda pool, _: pool
    ) -> None:
        self._context = context
        self._changed = changed
        self._to_blame = to_blame
        self._out: dict[str, _Out] = {}
        self._by_queue: Counter[str] = Counter()
        self._by_need: Counter[tuple[Pool, Need]] = Counter()
        self._starts: dict[str, deque[float]] = {}
        self._pauses: dict[Pool, Pause] = {}
        self._cancelled: dict[str, int] = {}
        """Sequences of the newest cancels by key, of tasks that do not count as released.

        The feed may tell of a cancel before `released` does of its task; that one must not be counted then.
        """
        self._slots: Counter[str] = Counter()
        self._slots_at = -SLOTS_EVERY_S
        self._queues: frozenset[str] = frozenset()
        self._busy_at: dict[str, float] = {}
        self._position = 0
        self._feed: Feed | None = None
        self._watching = asyncio.Event()

    # --- what is asked ---------------------------------------------------------------------------

    def room(self, queue: str) -> int:
        """How many more tasks of a queue may be released; none while its events are not followed."""
        if queue not in self._queues:
            return 0
        return queue_room(self._slots[queue], self._recent_starts(queue), self._by_queue[queue])

    def waiting(self) -> Waiting:
        """How many tasks of each pool and need are released and have not begun."""
        return self._by_need

    def is_paused(self, pool: Pool) -> bool:
        """Whether a pool is to wait because workers sent tasks of it, or of one of its keys, back unbegun."""
        if not self._pauses:
            return False
        now = self._context.clock.monotonic()
        pauses = [self._pauses.get(one) for one in _scopes(pool)]
        return any(pause is not None and now < pause.until for pause in pauses)

    def resume(self, pools: Iterable[Pool]) -> None:
        """End the pauses of pools, and of keys as pools of their own, whose gates have changed."""
        for pool in pools:
            self._pauses.pop(pool, None)

    def _recent_starts(self, queue: str) -> int:
        """How many tasks of a queue began in the last half second."""
        starts = self._starts.get(queue)
        if not starts:
            return 0
        oldest = self._context.clock.monotonic() - AHEAD_S
        while starts and starts[0] < oldest:
            starts.popleft()
        return len(starts)

    # --- what is told ----------------------------------------------------------------------------

    def released(self, item: WorkItem) -> None:
        """Count a task that was released; `item` is what goes to WORK."""
        card = item.card
        self._forget(card.key)
        if self._cancelled.get(card.key, 0) > item.fence:
            return
        pool, need = tuple(item.limits), need_of(item.envelope.usage_estimate)
        self._out[card.key] = _Out(card.queue, pool, need, item.fence, self._context.clock.monotonic())
        self._by_queue[card.queue] += 1
        self._by_need[pool, need] += 1

    def _forget(self, key: str) -> _Out | None:
        out = self._out.pop(key, None)
        if out is not None:
            self._by_queue[out.queue] -= 1
            self._by_need[out.pool, out.need] -= 1
            if not self._by_need[out.pool, out.need]:
                del self._by_need[out.pool, out.need]
        return out

    def _begun(self, records: Iterable[Record]) -> None:
        """Take in events: after each of them its task waits in WORK no longer."""
        names, now = self._context.names, self._context.clock.monotonic()
        for record in records:
            self._position = max(self._position, record.seq)
            address = names.parse_event(record.subject)
            out = self._out.get(address.key)
            if out is None or record.seq <= out.fence:
                if address.kind == "cancelled":
                    self._note_cancel(address.key, record.seq)
                continue
            self._forget(address.key)
            self._changed.set()
            if address.kind == "parked":
                if out.pool:
                    scope = self._to_blame(out.pool, out.need)
                    self._pauses[scope] = paused(self._pauses.get(scope), now)
            else:
                self.resume(_scopes(out.pool))
                self._starts.setdefault(out.queue, deque(maxlen=1024)).append(now)

    def _note_cancel(self, key: str, seq: int) -> None:
        self._cancelled.pop(key, None)
        self._cancelled[key] = seq
        if len(self._cancelled) > MOST_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    # --- what is read ----------------------------------------------------------------------------

    async def count_slots(self) -> None:
        """Count the slots of live workers, at most twice a second; raises BrokerError."""
        now = self._context.clock.monotonic()
        if now - self._slots_at < SLOTS_EVERY_S:
            return
        entries = await self._context.broker.kv_all(self._context.names.workers_bucket)
        slots: Counter[str] = Counter()
        for entry in entries.values():
            with suppress(msgspec.MsgspecError):
                worker = msgspec.json.decode(entry, type=WorkerInfo)
                if not worker.draining:
                    for queue in worker.queues:
                        slots[queue] += worker.slots
        self._slots, self._slots_at = slots, now

    async def watch(self, queues: Iterable[str]) -> None:
        """Follow the events of these queues, and of those watched before that are not idle yet; raises BrokerError.

        Of a queue that is new, what an earlier releaser left in WORK is counted first. A queue without workers is left
        out: nothing is released there, and any producer may make up names of queues.
        """
        now = self._context.clock.monotonic()
        served = {queue for queue in queues if self._slots[queue]}
        for queue in served | {queue for queue, count in self._by_queue.items() if count}:
            self._busy_at[queue] = now
        wanted = frozenset(queue for queue, at in self._busy_at.items() if now - at < IDLE_S)
        if wanted == self._queues:
            return
        broker, names = self._context.broker, self._context.names
        start = self._position
        if not self._queues:
            info = await broker.stream_info(names.events_stream)
            start = 0 if info is None else info.last_seq
        for queue in sorted(wanted - self._queues):
            await self._take_over(queue)
        filters = [names.events_of_queue(queue, kind) for queue in sorted(wanted) for kind in BEGUN_KINDS]
        # From a position before the reading above: tasks that began during it are counted down by the feed, and events
        # of tasks that had begun by then change nothing.
        feed = await broker.feed(names.events_stream, filters, start, bodies=False) if wanted else None
        old, self._feed, self._queues, self._position = self._feed, feed, wanted, start
        self._busy_at = {queue: self._busy_at[queue] for queue in wanted}
        if feed is None:
            self._watching.clear()
        else:
            self._watching.set()
        if old is not None:
            await old.close()

    async def _take_over(self, queue: str) -> None:
        """Count what an earlier releaser released to a queue and nobody has begun yet."""
        broker, names = self._context.broker, self._context.names
        for priority in PRIORITIES:
            position, seen = 0, 0
            while seen < MOST_TAKEN_OVER:
                page = await broker.page(names.work_stream, names.work_class(queue, priority), position, PAGE)
                if not page:
                    break
                seen, position = seen + len(page), page[-1].seq
                items = [item for record in page if (item := _item(record)) is not None and item.lane]
                for item, waits in zip(items, await asyncio.gather(*map(self._is_waiting, items)), strict=True):
                    if waits:
                        self.released(item)

    async def _is_waiting(self, item: WorkItem) -> bool:
        """Whether a task still stands at the `released` event that its message in WORK follows from."""
        try:
            last = await self._context.journal.last(item.card.tenant_id, item.card.key)
        except UnknownMessage:
            return False
        return isinstance(last.event, Released) and last.seq == item.fence

    # --- following -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take in the events of the watched queues until cancelled. Raises BrokerClosed."""
        try:
            while True:
                await self._watching.wait()
                if self._feed is not None:
                    self._begun(await self._feed.take(TAKE, WAIT_S))
                await asyncio.sleep(0)
        finally:
            if self._feed is not None:
                await self._feed.close()

    async def recheck(self) -> None:
        """Look up the tasks that have not begun for long, and drop those that no longer can; raises BrokerError."""
        names, oldest = self._context.names, self._context.clock.monotonic() - RECHECK_AFTER_S
        late = [(key, out) for key, out in self._out.items() if out.since < oldest][:RECHECKS_AT_ONCE]
        for key, out in late:
            found = await self._context.broker.last(names.work_stream, names.work_of_key(key))
            if self._out.get(key) is not out:
                continue
            item = None if found is None else _item(found)
            if item is None or item.fence != out.fence or not await self._is_waiting(item):
                self._forget(key)
                self._changed.set()
            else:
                self._out[key] = replace(out, since=oldest + RECHECK_AFTER_S)


def _scopes(pool: Pool) -> list[Pool]:
    """What may be paused for a pool: it itself, and each of its keys."""
    return [pool, *((key,) for key in pool)] if len(pool) > 1 else [pool]


def _item(record: Record) -> WorkItem | None:
    try:
        return decode_work_item(record.body)
    except UnknownMessage:
        return None
