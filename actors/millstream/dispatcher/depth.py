"""How much of what was released has not begun: counted up by the releaser, down by what the stream tells of each task."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from millstream.dispatcher.context import Context
from millstream.policy.fairness import Pool
from millstream.policy.release import AHEAD_S, BEGUN_KINDS, Pause, paused, queue_room
from millstream.ports import Feed, Record
from millstream_schemas.codec import UnknownMessage, decode_work_item
from millstream_schemas.commands import WorkerInfo
from millstream_schemas.events import Released, WorkItem
from millstream_schemas.names import PRIORITIES

SLOTS_EVERY_S = 0.5
TAKE = 1000
WAIT_S = 5.0
PAGE = 250
MOST_STOCK = 2000
"""Messages of one class in WORK that a new releaser looks through; a plain flood before them is no work of its own."""
DOUBT_S = 30.0
IDLE_S = 60.0
"""A queue in which nothing was held for so long is followed no more: its plain tasks are nobody's business here."""
DOUBTS_AT_ONCE = 64
MOST_CANCELLED = 10_000


@dataclass(frozen=True, slots=True)
class _Out:
    """A task that was released at `fence` and has not begun."""

    queue: str
    pool: Pool
    fence: int
    since: float


class Depth:
    """Knows what lies in WORK for want of a slot or a permit. Begins anew with each term, from what WORK holds.

    `changed` is called when something has begun.
    """

    def __init__(self, context: Context, changed: asyncio.Event) -> None:
        self._context = context
        self._changed = changed
        self._out: dict[str, _Out] = {}
        self._by_queue: Counter[str] = Counter()
        self._by_pool: Counter[Pool] = Counter()
        self._starts: dict[str, deque[float]] = {}
        self._pauses: dict[Pool, Pause] = {}
        self._cancelled: dict[str, int] = {}
        """The last cancels of tasks that were not known as released: they may have come between event and answer."""
        self._slots: Counter[str] = Counter()
        self._slots_at = -SLOTS_EVERY_S
        self._queues: frozenset[str] = frozenset()
        self._busy_at: dict[str, float] = {}
        self._position = 0
        self._feed: Feed | None = None
        self._watching = asyncio.Event()

    # --- what is asked ---------------------------------------------------------------------------

    def room(self, queue: str) -> int:
        """How many more tasks of a queue may be released; none where nobody looks what becomes of them."""
        if queue not in self._queues:
            return 0
        return queue_room(self._slots[queue], self._recent(queue), self._by_queue[queue])

    def waiting(self, pool: Pool) -> int:
        """How many tasks of a pool are released and have not begun."""
        return self._by_pool[pool]

    def pauses(self, pool: Pool) -> bool:
        """Whether a pool waits because its tasks came back unbegun."""
        pause = self._pauses.get(pool)
        return pause is not None and self._context.clock.monotonic() < pause.until

    def resume(self, pools: Iterable[Pool]) -> None:
        """End the pauses of pools whose gates have changed."""
        for pool in pools:
            self._pauses.pop(pool, None)

    def _recent(self, queue: str) -> int:
        starts = self._starts.get(queue)
        if not starts:
            return 0
        oldest = self._context.clock.monotonic() - AHEAD_S
        while starts and starts[0] < oldest:
            starts.popleft()
        return len(starts)

    # --- what is told ----------------------------------------------------------------------------

    def released(self, item: WorkItem) -> None:
        """A task was released; `item` is what goes to WORK."""
        card = item.card
        self._forget(card.key)
        if self._cancelled.get(card.key, 0) > item.fence:
            return
        pool, now = tuple(item.limits), self._context.clock.monotonic()
        self._out[card.key] = _Out(card.queue, pool, item.fence, now)
        self._by_queue[card.queue] += 1
        self._by_pool[pool] += 1

    def _forget(self, key: str) -> _Out | None:
        out = self._out.pop(key, None)
        if out is not None:
            self._by_queue[out.queue] -= 1
            self._by_pool[out.pool] -= 1
            if not self._by_pool[out.pool]:
                del self._by_pool[out.pool]
        return out

    def _begun(self, records: Iterable[Record]) -> None:
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
                    self._pauses[out.pool] = paused(self._pauses.get(out.pool), now)
            else:
                self._pauses.pop(out.pool, None)
                self._starts.setdefault(out.queue, deque(maxlen=1024)).append(now)

    def _note_cancel(self, key: str, seq: int) -> None:
        self._cancelled.pop(key, None)
        self._cancelled[key] = seq
        if len(self._cancelled) > MOST_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    # --- what is read ----------------------------------------------------------------------------

    async def look(self) -> None:
        """Count the slots of live workers, not more than twice a second; raises BrokerError."""
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
        """Count what queues have in WORK, and follow them from there, until they are idle; raises BrokerError.

        A queue without workers is left out: nothing is released there, and anybody may make up names of queues.
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
            await self._stock(queue)
        filters = [names.events_of_queue(queue, kind) for queue in sorted(wanted) for kind in BEGUN_KINDS]
        # From before the stock: what began since comes now, and what had begun by then is no news.
        feed = await broker.feed(names.events_stream, filters, start, bodies=False) if wanted else None
        old, self._feed, self._queues, self._position = self._feed, feed, wanted, start
        self._busy_at = {queue: self._busy_at[queue] for queue in wanted}
        if feed is None:
            self._watching.clear()
        else:
            self._watching.set()
        if old is not None:
            await old.close()

    async def _stock(self, queue: str) -> None:
        """Take over what an earlier releaser let go and nobody has begun yet."""
        broker, names = self._context.broker, self._context.names
        for priority in PRIORITIES:
            position, seen = 0, 0
            while seen < MOST_STOCK:
                page = await broker.page(names.work_stream, names.work_class(queue, priority), position, PAGE)
                if not page:
                    break
                seen, position = seen + len(page), page[-1].seq
                items = [item for record in page if (item := _item(record)) is not None and item.lane]
                for item, waits in zip(items, await asyncio.gather(*map(self._waits, items)), strict=True):
                    if waits:
                        self.released(item)

    async def _waits(self, item: WorkItem) -> bool:
        try:
            last = await self._context.journal.last(item.card.tenant_id, item.card.key)
        except UnknownMessage:
            return False
        return isinstance(last.event, Released) and last.seq == item.fence

    # --- following -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow what begins until cancelled. Raises BrokerClosed."""
        try:
            while True:
                await self._watching.wait()
                if self._feed is not None:
                    self._begun(await self._feed.take(TAKE, WAIT_S))
                await asyncio.sleep(0)
        finally:
            if self._feed is not None:
                await self._feed.close()

    async def doubt(self) -> None:
        """Ask of those that have not begun for long whether they still may: a lost message holds no place for ever."""
        names, oldest = self._context.names, self._context.clock.monotonic() - DOUBT_S
        doubtful = [(key, out) for key, out in self._out.items() if out.since < oldest][:DOUBTS_AT_ONCE]
        for key, out in doubtful:
            found = await self._context.broker.last(names.work_stream, names.work_of_key(key))
            if self._out.get(key) is not out:
                continue
            item = None if found is None else _item(found)
            if item is None or item.fence != out.fence or not await self._waits(item):
                self._forget(key)
                self._changed.set()
            else:
                self._out[key] = _Out(out.queue, out.pool, out.fence, oldest + DOUBT_S)


def _item(record: Record) -> WorkItem | None:
    try:
        return decode_work_item(record.body)
    except UnknownMessage:
        return None
