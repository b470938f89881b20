"""All lanes of HELD: learned of from bells and from the server's counts, read a little ahead, forgotten when empty."""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice

from millstream.dispatcher.context import Context
from millstream.dispatcher.lane import HeldLane, needs
from millstream.policy import release as policy
from millstream.policy.fairness import Lane, Take
from millstream.policy.metering import AGAIN, lane_token
from millstream.policy.release import Entry
from millstream.policy.supply import Room
from millstream.ports import Record
from millstream_schemas import permits
from millstream_schemas.codec import UnknownMessage, decode_work_item

READS_AT_ONCE = 64
MOST_READS = 512
"""Lanes that are read within one turn."""
MOST_STRANGE = 1000
MOST_BYTES = 64 * 1024 * 1024
"""Of entries in memory. Beyond that buffers are dropped, and read again when their lane's turn comes."""


class Lanes:
    """What waits in HELD, as far as this releaser has read it. Nothing of this must last: a new releaser reads it again."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lanes: dict[str, HeldLane] = {}
        self._bytes = 0
        self._strange: set[str] = set()
        """Subjects that are no lanes, each reported once."""

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
        """Ask the server how much every lane holds, and forget the empty ones; raises BrokerError."""
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
        """The lane of a subject, known or new; None for a subject that is no lane."""
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

    async def read_ahead(self, room: Room) -> bool:
        """Read lanes that are new, and those being released from before they run dry; True where some are left unread.

        Lanes of a pool without room are not read. Raises BrokerError.
        """
        full = room.full()
        wanting = (lane for lane in self._lanes.values() if lane.wants_reading)
        useful = (
            lane
            for lane in wanting
            if lane.tenant is None or (lane.pool not in room.shut and full.isdisjoint(lane.pool))
        )
        chosen = list(islice(useful, MOST_READS))
        for start in range(0, len(chosen), READS_AT_ONCE):
            some = chosen[start : start + READS_AT_ONCE]
            for end in await asyncio.gather(*map(self._read, some), return_exceptions=True):
                if end is not None:
                    raise end
        for lane in chosen:
            lane.taken = False
        return len(chosen) == MOST_READS or any(lane.more and lane.tenant is None for lane in chosen)

    async def read(self, subject: str) -> None:
        """Read further a lane that has run dry at its turn; raises BrokerError."""
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
        """The entry of a message, or None for one that cannot be read or released.

        Such a message stays where it is, since a newer version of the releaser may know what to do with it; those behind
        it in the lane go on.
        """
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
        """Raise ValueError for an entry that could not be released, or that does not belong in this lane."""
        names, card, address = self._context.names, entry.item.card, self._lanes[entry.lane].address
        lane = lane_token(entry.item.lane, again=address.lane.endswith(AGAIN))
        if names.held(card.queue, card.priority, lane) != entry.lane:
            raise ValueError(f"an entry for {card.queue}, {card.priority}, {lane} lies in {entry.lane}")
        names.life(card.tenant_id, card.key)
        policy.chosen(entry, self._context.clock.now())

    def shed(self) -> None:
        """Drop buffers where they take too much memory, those of lanes that are not in use first."""
        if self._bytes <= MOST_BYTES:
            return
        for lane in sorted(self._lanes.values(), key=lambda one: one.taken):
            if self._bytes <= MOST_BYTES // 2:
                return
            if lane.buffer:
                self._bytes -= lane.forget()

    # --- taking ----------------------------------------------------------------------------------

    def views(self) -> list[Lane]:
        """Every lane in which something waits, in the form that a plan reads."""
        return [lane.view() for lane in self._lanes.values() if lane.tenant is not None and lane.waits]

    def take(self, takes: Iterable[Take]) -> list[Entry]:
        """Take the entries that a plan chose, in its order; each is the first of its lane when it is taken."""
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
        """Take the first entry of a lane, outside of any plan."""
        self._pop(self._lanes[head.lane])

    def _pop(self, lane: HeldLane) -> Entry:
        entry, freed = lane.pop()
        self._bytes -= freed
        return entry

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Put entries that could not be released back into their lanes."""
        for entry in entries:
            self._lanes[entry.lane].put_back(entry)

    def removed(self, entry: Entry) -> None:
        """Note that an entry is gone from HELD."""
        lane = self._lanes.get(entry.lane)
        if lane is not None:
            lane.busy.discard(entry.seq)

    # --- who waits -------------------------------------------------------------------------------

    def queues(self) -> set[str]:
        """The queues in which something waits."""
        return {lane.address.queue for lane in self._lanes.values()}

    def pools(self) -> list[permits.Pool]:
        """The pools with limits in which something waits, and how many tokens one of their tasks takes on average."""
        return needs(self._lanes.values())

    def private(self) -> set[str]:
        """The limit keys that only one tenant's tasks wait for."""
        tenants: dict[str, str | None] = {}
        for lane in self._lanes.values():
            if lane.waits:
                for key in lane.pool:
                    if tenants.setdefault(key, lane.tenant) != lane.tenant:
                        tenants[key] = None
        return {key for key, tenant in tenants.items() if tenant is not None}
