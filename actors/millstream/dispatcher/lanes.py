"""The lanes of HELD: found by bell and by count, read ahead a little, forgotten when they are empty."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from millstream.dispatcher.context import Context
from millstream.dispatcher.lane import HeldLane, needs
from millstream.policy import release as policy
from millstream.policy.fairness import Lane, Pool, Take
from millstream.policy.metering import AGAIN, lane_token
from millstream.policy.release import Entry
from millstream.ports import Record
from millstream_schemas import permits
from millstream_schemas.codec import UnknownMessage, decode_work_item

READS_AT_ONCE = 64
MOST_NEW = 512
"""Lanes that are read for the first time within one turn."""
MOST_STRANGE = 1000
MOST_BYTES = 64 * 1024 * 1024
"""Of entries that were read ahead; beyond that lanes are read when their turn comes."""


class Lanes:
    """What waits in HELD, as far as this releaser knows; a restart finds all of it again."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lanes: dict[str, HeldLane] = {}
        self._bytes = 0
        self._strange: set[str] = set()
        """Subjects that are no lanes, and were reported."""

    def __bool__(self) -> bool:
        return bool(self._lanes)

    # --- what there is ---------------------------------------------------------------------------

    def heard(self, subjects: Iterable[str]) -> None:
        """A bell: these lanes have something new."""
        for subject in subjects:
            lane = self._lane(subject)
            if lane is not None:
                lane.heard()

    async def look(self) -> None:
        """Count what every lane holds; raises BrokerError."""
        names = self._context.names
        counts = await self._context.broker.subjects(names.held_stream, names.held_filter)
        for subject, count in counts.items():
            lane = self._lane(subject)
            if lane is not None:
                lane.counted(count)
        for subject in [one.subject for one in self._lanes.values() if not (one.waits or one.busy)]:
            if subject not in counts:
                del self._lanes[subject]

    def _lane(self, subject: str) -> HeldLane | None:
        lane = self._lanes.get(subject)
        if lane is None and subject not in self._strange:
            names = self._context.names
            try:
                address = names.parse_held(subject)
                names.held(address.queue, address.priority, address.lane)  # the server stores wildcards as they stand
            except ValueError as error:
                self._context.telemetry.emit("message.unknown", stream=names.held_stream, error=str(error))
                if len(self._strange) < MOST_STRANGE:
                    self._strange.add(subject)
            else:
                lane = self._lanes[subject] = HeldLane(subject, address)
        return lane

    # --- reading ---------------------------------------------------------------------------------

    async def read_ahead(self, rooms: Mapping[Pool, int]) -> bool:
        """Read lanes that nothing is known of, and those in use before they run dry; True where that is not all.

        `rooms` has what may be released of pools with limits: a lane of a full one waits. Raises BrokerError.
        """
        wanting = (lane for lane in self._lanes.values() if lane.wants_reading)
        useful = (lane for lane in wanting if lane.tenant is None or rooms.get(lane.pool, 1) > 0)
        chosen = list(islice(useful, MOST_NEW))
        for start in range(0, len(chosen), READS_AT_ONCE):
            some = chosen[start : start + READS_AT_ONCE]
            for end in await asyncio.gather(*map(self._read, some), return_exceptions=True):
                if end is not None:
                    raise end
        for lane in chosen:
            lane.taken = False
        return len(chosen) == MOST_NEW or any(lane.more and lane.tenant is None for lane in chosen)

    async def read(self, subject: str) -> None:
        """Read one lane further whose turn it is; raises BrokerError."""
        await self._read(self._lanes[subject])

    async def _read(self, lane: HeldLane) -> None:
        stream, limit = self._context.names.held_stream, lane.begin_read()
        try:
            page = await self._context.broker.page(stream, lane.subject, lane.position, limit)
        except BaseException:
            lane.heard()
            raise
        lane.end_read(limit, sum(len(record.body) for record in page), len(page))
        self._take_in(lane, page)

    def _take_in(self, lane: HeldLane, page: Sequence[Record]) -> None:
        known = lane.known()
        fresh: list[Entry] = []
        for record in page:
            lane.position = max(lane.position, record.seq)
            entry = None if record.seq in known else self._decode(lane, record)
            if entry is not None:
                fresh.append(entry)
                lane.size_bytes += len(record.body)
                self._bytes += len(record.body)
        if fresh:
            lane.add(fresh)

    def _decode(self, lane: HeldLane, record: Record) -> Entry | None:
        """The entry; one that a newer peer wrote, or that is none, is left alone: the lane goes on behind it."""
        stream = self._context.names.held_stream
        try:
            entry = Entry(lane.subject, stream, record.seq, record.at, decode_work_item(record.body))
            self._check(entry)
        except (UnknownMessage, ValueError, ArithmeticError) as error:
            lane.busy.add(record.seq)
            self._context.telemetry.emit("message.unknown", stream=stream, seq=record.seq, error=str(error))
            return None
        return entry

    def _check(self, entry: Entry) -> None:
        """Raise ValueError for an entry that could not be released, or that lies in the lane of others."""
        names, card, address = self._context.names, entry.item.card, self._lanes[entry.lane].address
        lane = lane_token(entry.item.lane, again=address.lane.endswith(AGAIN))
        if names.held(card.queue, card.priority, lane) != entry.lane:
            raise ValueError(f"an entry for {card.queue}, {card.priority}, {lane} lies in {entry.lane}")
        names.life(card.tenant_id, card.key)
        policy.chosen(entry, self._context.clock.now())

    def shed(self) -> None:
        """Forget what was read ahead where that has become too much; it is read again when its turn comes."""
        if self._bytes <= MOST_BYTES:
            return
        for lane in sorted(self._lanes.values(), key=lambda one: one.taken):
            if self._bytes <= MOST_BYTES // 2:
                return
            if lane.buffer:
                self._bytes -= lane.forget()

    # --- taking ----------------------------------------------------------------------------------

    def views(self) -> list[Lane]:
        """Every lane that something waits in, for a plan."""
        return [lane.view() for lane in self._lanes.values() if lane.tenant is not None and lane.waits]

    def take(self, takes: Iterable[Take]) -> list[Entry]:
        """Hand over what a plan chose: each is the first of its lane by then."""
        taken: list[Entry] = []
        for take in takes:
            lane = self._lanes[take.lane]
            assert lane.buffer[0].seq == take.seq, "a plan takes the first of a lane"
            lane.taken = True
            taken.append(self._pop(lane))
        return taken

    def heads(self) -> list[Entry]:
        """The first entry of every lane."""
        return [lane.buffer[0] for lane in self._lanes.values() if lane.buffer]

    def take_head(self, head: Entry) -> None:
        """Take a lane's first entry out of turn."""
        self._pop(self._lanes[head.lane])

    def _pop(self, lane: HeldLane) -> Entry:
        entry, freed = lane.pop()
        self._bytes -= freed
        return entry

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Let entries wait again that could not be finished."""
        for entry in entries:
            self._lanes[entry.lane].put_back(entry)

    def removed(self, entry: Entry) -> None:
        """The entry lies no longer in HELD."""
        lane = self._lanes.get(entry.lane)
        if lane is not None:
            lane.busy.discard(entry.seq)

    # --- who waits -------------------------------------------------------------------------------

    def queues(self) -> set[str]:
        """The queues in which something waits."""
        return {lane.address.queue for lane in self._lanes.values()}

    def pools(self) -> list[permits.Pool]:
        """The pools with limits in which something waits, with what one of their tasks takes on average."""
        return needs(self._lanes.values())
