"""One lane of HELD as the releaser sees it: entries read ahead, entries taken, and how far it was read."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from millstream.policy.fairness import Lane, Pool
from millstream.policy.metering import AGAIN
from millstream.policy.release import Entry
from millstream_schemas import permits
from millstream_schemas.names import HeldAddress

FIRST_READ = 8
MOST_READ = 128
PAGE_BYTES = 1024 * 1024
"""A page with so much in it may have been cut by its size: there may be more behind it."""


@dataclass
class HeldLane:
    """One subject of HELD. `busy` are entries that were taken, or are left alone; `position` is how far it was read."""

    subject: str
    address: HeldAddress
    tenant: str | None = None
    """With `pool`, known from the first entry: a lane is made of both."""
    pool: Pool = ()
    buffer: deque[Entry] = field(default_factory=deque[Entry])
    busy: set[int] = field(default_factory=set[int])
    position: int = 0
    more: bool = True
    """There may be entries beyond `position`."""
    ahead: int = FIRST_READ
    """How many to read next time."""
    size_bytes: int = 0
    shed: bool = False
    """Read again only when its turn comes."""
    taken: bool = False
    """Something was taken since it was read."""
    _looked_at: int = -1
    _view: Lane | None = None

    @property
    def waits(self) -> bool:
        return bool(self.buffer) or self.more

    @property
    def wants_reading(self) -> bool:
        """Nothing is known of it, or what is known will soon be used up."""
        low = self.ahead // 2 if self.taken else 0
        return self.more and not self.shed and len(self.buffer) <= low

    def heard(self) -> None:
        """It has something new."""
        self.more, self._view = True, None

    def counted(self, count: int) -> None:
        """It holds `count` entries: more than are known lie further on, or, where that was looked for in vain, before."""
        if self.more or count <= len(self.buffer) + len(self.busy):
            return
        if self._looked_at == self.position:
            self.position = 0
        self._looked_at = self.position
        self.heard()

    # --- reading ---------------------------------------------------------------------------------

    def begin_read(self) -> int:
        """How many to read; a bell that rings meanwhile counts for what comes after."""
        self.more, self.shed, self._view = False, False, None
        return self.ahead

    def end_read(self, limit: int, size_bytes: int, count: int) -> None:
        """A page of `count` entries came; a full one asks for a longer one, a large one for a shorter."""
        if size_bytes >= PAGE_BYTES:
            self.more, self.ahead = True, max(limit // 2, 1)
        elif count >= limit:
            self.more, self.ahead = True, min(limit * 4, MOST_READ)

    def known(self) -> set[int]:
        """The entries that need not be read again."""
        return self.busy | {entry.seq for entry in self.buffer}

    def add(self, entries: Sequence[Entry]) -> None:
        """Let entries wait, each in its place."""
        in_order = not self.buffer or self.buffer[-1].seq < entries[0].seq
        self.buffer.extend(entries)
        if not in_order:
            self.buffer = deque(sorted(self.buffer, key=lambda entry: entry.seq))
        self.tenant, self.pool = entries[0].item.card.tenant_id, tuple(entries[0].item.limits)
        self._view = None

    def forget(self) -> int:
        """Drop what was read ahead, to be read again; returns its bytes."""
        freed = self.size_bytes
        self.position = min(self.position, self.buffer[0].seq - 1)
        self.buffer.clear()
        self.size_bytes, self.more, self.shed, self.ahead, self._view = 0, True, True, FIRST_READ, None
        return freed

    # --- taking ----------------------------------------------------------------------------------

    def pop(self) -> tuple[Entry, int]:
        """Take the first entry; with it, about its bytes."""
        entry = self.buffer.popleft()
        freed = self.size_bytes // (len(self.buffer) + 1)
        self.size_bytes -= freed
        self.busy.add(entry.seq)
        self._view = None
        return entry, freed

    def put_back(self, entry: Entry) -> None:
        """Let a taken entry wait again."""
        self.busy.discard(entry.seq)
        self.add([entry])

    def view(self) -> Lane:
        """The lane as a plan reads it."""
        if self._view is None:
            self._view = Lane(
                id=self.subject,
                queue=self.address.queue,
                priority=self.address.priority,
                tenant=self.tenant or "",
                pool=self.pool,
                heads=tuple(entry.seq for entry in self.buffer),
                more=self.more,
                again=self.address.lane.endswith(AGAIN),
            )
        return self._view


def needs(lanes: Iterable[HeldLane]) -> list[permits.Pool]:
    """The pools with limits in which something waits, with what one of their tasks takes on average."""
    heads: dict[Pool, list[Entry]] = {}
    for lane in lanes:
        if lane.pool and lane.waits:
            heads.setdefault(lane.pool, []).extend(islice(lane.buffer, FIRST_READ))
    return [_need(pool, entries) for pool, entries in heads.items()]


def _need(pool: Pool, entries: Sequence[Entry]) -> permits.Pool:
    estimates = [entry.item.envelope.usage_estimate for entry in entries]
    count = max(len(estimates), 1)
    return permits.Pool(
        keys=pool,
        tokens_in=sum((one.tokens_in or 0) for one in estimates if one) // count,
        tokens_out=sum((one.tokens_out or 0) for one in estimates if one) // count,
    )
