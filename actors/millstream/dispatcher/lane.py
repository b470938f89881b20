"""One lane of HELD as the releaser sees it: the entries it has read, those it has taken, and how far it has read."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from millstream.policy.fairness import Lane
from millstream.policy.metering import AGAIN
from millstream.policy.release import Entry
from millstream.policy.supply import Pool
from millstream_schemas import permits
from millstream_schemas.names import HeldAddress

FIRST_READ = 8
MOST_READ = 128
PAGE_BYTES = 1024 * 1024
"""A page that is so large may have been cut for its size, so there may be more behind it."""


@dataclass
class HeldLane:
    """One subject of HELD, and what of it is in memory.

    `buffer` has the entries that were read and wait. `busy` has the sequences of those that were taken and are not yet
    removed from HELD, or that cannot be read and are left alone. `position` is the last sequence that was read.
    """

    subject: str
    address: HeldAddress
    tenant: str | None = None
    """None until the first entry was read; then it and `pool` are known, which all entries of a lane share."""
    pool: Pool = ()
    buffer: deque[Entry] = field(default_factory=deque[Entry])
    busy: set[int] = field(default_factory=set[int])
    position: int = 0
    more: bool = True
    """There may be entries beyond `position`."""
    ahead: int = FIRST_READ
    """How many entries to read next time."""
    size_bytes: int = 0
    shed: bool = False
    """What was read ahead was dropped to save memory; it is read again only when its turn comes."""
    taken: bool = False
    """Something was taken from it since the last reading, so more is likely to be."""
    _searched_from: int = -1
    """Where reading went on when a count last said that there is more than is known."""
    _view: Lane | None = None
    """What `view` returned last; None once it no longer holds."""

    @property
    def waits(self) -> bool:
        """Whether something waits in it, or may wait."""
        return bool(self.buffer) or self.more

    @property
    def wants_reading(self) -> bool:
        """Whether to read on: the buffer is empty or, in a lane that is being released from, half used up."""
        low = self.ahead // 2 if self.taken else 0
        return self.more and not self.shed and len(self.buffer) <= low

    def heard(self) -> None:
        """Something may have been added to it."""
        self.more, self._view = True, None

    def counted(self, count: int) -> None:
        """Compare with the server, which counts `count` entries; where that is more than are known, read on.

        They usually lie beyond `position`. Where they were looked for there before and not found, the lane is read anew
        from its beginning.
        """
        if self.more or count <= len(self.buffer) + len(self.busy):
            return
        if self._searched_from == self.position:
            self.position = 0
        self._searched_from = self.position
        self.heard()

    # --- reading ---------------------------------------------------------------------------------

    def begin_read(self) -> int:
        """Begin a reading; returns how many entries to ask for. A bell that rings meanwhile calls for another reading."""
        self.more, self.shed, self._view = False, False, None
        return self.ahead

    def end_read(self, limit: int, size_bytes: int, count: int) -> None:
        """A page of `count` entries came. The next one is longer where it was full, and shorter where it was large."""
        if size_bytes >= PAGE_BYTES:
            self.more, self.ahead = True, max(limit // 2, 1)
        elif count >= limit:
            self.more, self.ahead = True, min(limit * 4, MOST_READ)

    def known(self) -> set[int]:
        """Sequences of the entries that are in the buffer or busy already."""
        return self.busy | {entry.seq for entry in self.buffer}

    def add(self, entries: Sequence[Entry]) -> None:
        """Add entries to the buffer, in the order of their sequences."""
        in_order = not self.buffer or self.buffer[-1].seq < entries[0].seq
        self.buffer.extend(entries)
        if not in_order:
            self.buffer = deque(sorted(self.buffer, key=lambda entry: entry.seq))
        self.tenant, self.pool = entries[0].item.card.tenant_id, tuple(entries[0].item.limits)
        self._view = None

    def forget(self) -> int:
        """Empty the buffer, to be read again when its turn comes; returns how many bytes that frees."""
        freed = self.size_bytes
        self.position = min(self.position, self.buffer[0].seq - 1)
        self.buffer.clear()
        self.size_bytes, self.more, self.shed, self.ahead, self._view = 0, True, True, FIRST_READ, None
        return freed

    # --- taking ----------------------------------------------------------------------------------

    def pop(self) -> tuple[Entry, int]:
        """Take the first entry; returns it and about how many bytes that frees."""
        entry = self.buffer.popleft()
        freed = self.size_bytes // (len(self.buffer) + 1)
        self.size_bytes -= freed
        self.busy.add(entry.seq)
        self._view = None
        return entry, freed

    def put_back(self, entry: Entry) -> None:
        """Put an entry that was taken back into the buffer."""
        self.busy.discard(entry.seq)
        self.add([entry])

    def view(self) -> Lane:
        """The lane in the form that `policy.fairness.plan` reads."""
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
                needs=tuple(entry.need for entry in self.buffer) if self.pool else (),
            )
        return self._view


def needs(lanes: Iterable[HeldLane]) -> list[permits.Pool]:
    """The pools with limits in which something waits, and how many tokens one of their tasks takes on average."""
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
