"""Folding: a batch of records becomes rows, lines and sums, written in one transaction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import asdict

from millstream.ports import Record
from millstream.tracker.model import Change, Counts, Step, TaskRow
from millstream.tracker.projection import apply, apply_info
from millstream.tracker.snapshot import Batch, bucket_of, moved
from millstream.tracker.store import Position, Store, Tally, Writes
from millstream_schemas.codec import UnknownMessage, decode_event, decode_info
from millstream_schemas.events import Alias
from millstream_schemas.infos import Conflict, Duplicate
from millstream_schemas.names import EventAddress, Names

CACHED_ROWS = 20_000
"""Rows of tasks without an outcome that are kept in memory: about 25 MB."""
SWEEP_LIMIT = 500
_NOWHERE = EventAddress("", "", "", "")


@dataclass(frozen=True, slots=True)
class Folded:
    """What a batch changed: for those who follow live, and for the sums that are kept in memory."""

    position: Position
    changes: list[Change]
    moves: Tally
    """Differences to the tally."""
    batches: dict[str, Batch]
    counts: Counts


class Folder:
    """Folds records into the store, exactly once each; used by one thread at a time."""

    def __init__(self, store: Store, names: Names, batch_ends_after_s: float) -> None:
        self._store = store
        self._names = names
        self._ends_after_s = batch_ends_after_s
        self._info_root = names.info_filter.removesuffix(">")
        self._inbox_stream = names.inbox_stream
        self._position = store.position()
        self._batches = store.batches()
        self._rows: dict[str, TaskRow] = {}

    @property
    def position(self) -> Position:
        return self._position

    def fold(self, records: Sequence[Record]) -> Folded:
        """Fold records that follow the position, in their order. Nothing in them is fatal.

        Raises what the database raises, and then nothing of the batch was folded.
        """
        try:
            return self._fold(records)
        except OverflowError:  # a number that JSON can hold and the file cannot: its record is found by halving
            if len(records) == 1:
                return self._pass_over(records[0])
            middle = len(records) // 2
            return _joined(self.fold(records[:middle]), self.fold(records[middle:]))

    def _pass_over(self, record: Record) -> Folded:
        after = Position(record.seq, record.at)
        self._store.write(Writes(), self._position, after)
        self._position = after
        return Folded(after, [], {}, {}, Counts(skipped=1))

    def _fold(self, records: Sequence[Record]) -> Folded:
        addresses = [self._address(record) for record in records]
        pending = _Pending(self._known(addresses), dict(self._batches))
        for record, address in zip(records, addresses, strict=True):
            self._one(pending, record, address)
        after = Position(records[-1].seq, records[-1].at)
        self._store.write(pending.writes, self._position, after)
        self._keep(pending.writes.rows)
        self._batches.update(pending.writes.batches)
        self._position = after
        return Folded(after, pending.changes, _moves(pending.writes), pending.writes.batches, pending.counts)

    def sweep(self, queues: Sequence[str], ended_before: float) -> Tally:
        """Forget some tasks that ended before that time; returns the differences to the tally."""
        moves: Tally = {}
        for row in self._store.sweep(queues, ended_before, SWEEP_LIMIT):
            self._rows.pop(row.key, None)
            _count(moves, row, -1)
        return moves

    def _known(self, addresses: Iterable[EventAddress]) -> dict[str, TaskRow]:
        cached = self._rows
        keys = {address.key for address in addresses}
        found = self._store.rows([key for key in keys if key not in cached])
        for key in keys & cached.keys():
            found[key] = cached[key]
        return found

    def _address(self, record: Record) -> EventAddress:
        try:
            return self._names.parse_event(record.subject)
        except ValueError:
            return _NOWHERE

    def _one(self, pending: "_Pending", record: Record, address: EventAddress) -> None:
        try:
            if record.subject.startswith(self._info_root):
                self._info(pending, record, address)
            else:
                self._event(pending, record, address)
        except UnknownMessage:
            pending.counts.skipped += 1

    def _event(self, pending: "_Pending", record: Record, address: EventAddress) -> None:
        event = decode_event(record.body)
        if isinstance(event, Alias):
            pending.writes.aliases.append((event.card.task_id, address.tenant, event.points_to))
            pending.counts.folded += 1
            return
        if event.card.key != address.key or event.card.tenant_id != address.tenant:
            pending.counts.illegal += 1  # the subject is what permissions guard: a card cannot speak for another task
            return
        step = apply(pending.rows.get(address.key), event, record.seq, record.at, self._inbox_stream)
        self._take(pending, step, info=False)

    def _info(self, pending: "_Pending", record: Record, address: EventAddress) -> None:
        info = decode_info(record.body)
        row = pending.rows.get(address.key)
        if row is None or row.tenant_id != address.tenant:
            pending.counts.orphaned += 1
            return
        if isinstance(info, Duplicate | Conflict):
            pending.writes.submits.append((info.inbox_seq, row.n))
        self._take(pending, apply_info(row, info, record.seq, record.at), info=True)

    def _take(self, pending: "_Pending", step: Step, *, info: bool) -> None:
        row, before = step.row, pending.rows.get(step.row.key)
        pending.put(row, before)
        pending.writes.add_line(row.n, step.entry, 0 if before is None else before.seq, info=info)
        pending.changes.append(Change(row=row, entry=step.entry, info=info))
        if step.verdict == "folded":
            pending.counts.folded += 1
        else:
            pending.counts.illegal += 1
        if step.result is not None and step.verdict == "folded":
            pending.writes.results[row.n] = step.result
        if row.inbox_seq is not None and (before is None or before.inbox_seq != row.inbox_seq):
            pending.writes.submits.append((row.inbox_seq, row.n))
        if before is None or before.state != row.state or before.queue != row.queue:
            pending.move(before, row, self._ends_after_s)

    def _keep(self, rows: dict[str, TaskRow]) -> None:
        """Remember what will be asked for again; a task that has ended seldom is, and can be read."""
        for key, row in rows.items():
            if row.ended_at is None:
                self._rows[key] = row
            else:
                self._rows.pop(key, None)
        if len(self._rows) > CACHED_ROWS:
            self._rows = dict(islice(self._rows.items(), CACHED_ROWS // 2, None))


def _joined(first: Folded, second: Folded) -> Folded:
    moves = dict(first.moves)
    for key, by in second.moves.items():
        moves[key] = moves.get(key, 0) + by
    counts = Counts(**{name: n + getattr(second.counts, name) for name, n in asdict(first.counts).items()})
    batches = first.batches | second.batches
    return Folded(second.position, [*first.changes, *second.changes], moves, batches, counts)


class _Pending:
    """A batch while it is folded; nothing outside it changes before the transaction has ended."""

    def __init__(self, rows: dict[str, TaskRow], batches: dict[str, Batch]) -> None:
        self.rows = rows
        self.all_batches = batches
        self.writes = Writes()
        self.changes: list[Change] = []
        self.counts = Counts()

    def put(self, row: TaskRow, before: TaskRow | None) -> None:
        self.writes.before.setdefault(row.key, before)
        self.writes.rows[row.key] = self.rows[row.key] = row

    def move(self, before: TaskRow | None, row: TaskRow, ends_after_s: float) -> None:
        here = before if before is not None and before.queue == row.queue else None
        if here is not None and bucket_of(here.state) == bucket_of(row.state) and here.generation == row.generation:
            return
        batch = moved(self.all_batches.get(row.queue), here, row, ends_after_s)
        self.all_batches[row.queue] = self.writes.batches[row.queue] = batch


def _moves(writes: Writes) -> Tally:
    moves: Tally = {}
    for before, row in zip(writes.before.values(), writes.rows.values(), strict=True):
        if before is None or before.state != row.state or before.queue != row.queue:
            if before is not None:
                _count(moves, before, -1)
            _count(moves, row, 1)
    return moves


def _count(tally: Tally, row: TaskRow, by: int) -> None:
    key = (row.tenant_id, row.queue, row.state)
    tally[key] = tally.get(key, 0) + by
