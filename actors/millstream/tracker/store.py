"""The writing side of the read model: one transaction a batch, the stream position in it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from millstream.errors import AlreadyRunning
from millstream.tracker import schema
from millstream.tracker.model import Entry, TaskRow, lane_of, pool_of
from millstream.tracker.snapshot import Batch
from millstream.tracker.statements import insert, update

Tally = dict[tuple[str, str, str], int]
"""How many tasks there are, by tenant, queue and state."""

_row: Final = msgspec.msgpack.Decoder(TaskRow)
_batch: Final = msgspec.msgpack.Decoder(Batch)
_encode: Final = msgspec.msgpack.Encoder().encode
_IN_LIMIT: Final = 500


@dataclass(frozen=True, slots=True)
class Position:
    """The last record that was folded: its sequence and its time, Unix seconds."""

    seq: int
    at: float


@dataclass(slots=True)
class Writes:
    """All that one batch puts into the tables. `rows` holds each task once, as the whole batch leaves it."""

    rows: dict[str, TaskRow] = field(default_factory=dict[str, TaskRow])
    before: dict[str, TaskRow | None] = field(default_factory=dict[str, TaskRow | None])
    lines: list[tuple[int, int, int, float, str, str, int, int, str]] = field(default_factory=list)
    results: dict[int, bytes] = field(default_factory=dict[int, bytes])
    submits: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    aliases: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    batches: dict[str, Batch] = field(default_factory=dict[str, Batch])

    def add_line(self, task: int, entry: Entry, before: int, *, info: bool) -> None:
        """One more line of a task's timeline; `before` is the sequence of the line before it, 0 for the first."""
        detail = _storable(entry.detail)
        self.lines.append(
            (entry.seq, task, before, entry.at, entry.kind, entry.state, entry.attempt, int(info), detail)
        )


class Store:
    """Owns the writing connection; used by one thread at a time."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path = path
        self._db = schema.open_writer(path, prefix)

    def close(self) -> None:
        self._db.close()

    # --- reading what folding needs -------------------------------------------------------------

    def position(self) -> Position:
        seq, at = self._db.execute("SELECT position, position_at FROM meta").fetchone()
        return Position(seq, at)

    def rows(self, keys: Sequence[str]) -> dict[str, TaskRow]:
        """The rows of those keys that are known."""
        found: dict[str, TaskRow] = {}
        for start in range(0, len(keys), _IN_LIMIT):
            some = keys[start : start + _IN_LIMIT]
            marks = ",".join("?" * len(some))
            for key, doc in self._db.execute(f"SELECT key, doc FROM task WHERE key IN ({marks})", some):  # noqa: S608 - marks only
                found[key] = _row.decode(doc)
        return found

    def tally(self) -> Tally:
        query = "SELECT tenant, queue, state, COUNT(*) FROM task GROUP BY tenant, queue, state"
        return {(tenant, queue, state): count for tenant, queue, state, count in self._db.execute(query)}

    def batches(self) -> dict[str, Batch]:
        return {queue: _batch.decode(doc) for queue, doc in self._db.execute("SELECT queue, doc FROM batch")}

    # --- writing --------------------------------------------------------------------------------

    def write(self, writes: Writes, before: Position, after: Position) -> None:
        """All of it and the new position, or nothing; raises AlreadyRunning where another process moved the position."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._move(before, after)
            self._write_rows(writes)
            _ADD_LINES.run(self._db, writes.lines)
            _ADD_RESULTS.run(self._db, list(writes.results.items()))
            _ADD_SUBMITS.run(self._db, writes.submits)
            _ADD_ALIASES.run(self._db, writes.aliases)
            _ADD_BATCHES.run(self._db, [(queue, _encode(batch)) for queue, batch in writes.batches.items()])
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _move(self, before: Position, after: Position) -> None:
        moved = self._db.execute(
            "UPDATE meta SET position = ?, position_at = ? WHERE position = ?", (after.seq, after.at, before.seq)
        )
        if moved.rowcount != 1:
            raise AlreadyRunning(f"another tracker writes to {self.path}; give each its own `tracker.database`")

    def _write_rows(self, writes: Writes) -> None:
        new: list[TaskRow] = []
        renamed: list[TaskRow] = []
        moved: list[tuple[object, ...]] = []
        same: list[tuple[object, ...]] = []
        for before, row in zip(writes.before.values(), writes.rows.values(), strict=True):
            if before is None:
                new.append(row)
            elif _identity(before) != _identity(row):
                renamed.append(row)
            elif before.state != row.state or before.since != row.since or before.ended_at != row.ended_at:
                moved.append((row.state, row.since, row.ended_at, _encode(row), row.n))
            else:
                same.append((_encode(row), row.n))
        _ADD_TASKS.run(self._db, [_columns(row) for row in new])
        _REPLACE_TASKS.run(self._db, [_columns(row) for row in renamed])
        _ADD_TAGS.run(self._db, [(_storable(tag), row.n) for row in (*new, *renamed) for tag in row.tags])
        _MOVE_TASKS.run(self._db, moved)
        _CHANGE_TASKS.run(self._db, same)
        self._write_lanes(writes)

    def _write_lanes(self, writes: Writes) -> None:
        """Keep the table `held` to what is held now. A task that was held and released within one batch never enters it."""
        entered: list[tuple[object, ...]] = []
        left: list[tuple[int]] = []
        for before, row in zip(writes.before.values(), writes.rows.values(), strict=True):
            if row.state == "held":
                if before is None or before.state != "held" or before.held_seq != row.held_seq:
                    entered.append((row.n, _storable(pool_of(row)), lane_of(row), int(row.again), row.held_seq))
            elif before is not None and before.state == "held":
                left.append((row.n,))
        _ADD_HELD.run(self._db, entered)
        self._many("DELETE FROM held WHERE task = ?", left)

    def _many(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._db.executemany(statement, rows)

    def sweep(self, queues: Iterable[str], ended_before: float, limit: int) -> list[TaskRow]:
        """Forget up to `limit` tasks that ended before that time, with their timelines; returns them."""
        gone: list[TaskRow] = []
        for queue in queues:
            query = "SELECT doc FROM task WHERE queue = ? AND ended_at < ? ORDER BY ended_at LIMIT ?"
            found = self._db.execute(query, (queue, ended_before, limit - len(gone))).fetchall()
            gone += [_row.decode(doc) for (doc,) in found]
            if len(gone) >= limit:
                break
        if not gone:
            return []
        numbers = [(row.n,) for row in gone]
        ends = [(row.seq,) for row in gone]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._many(f"DELETE FROM timeline WHERE seq IN ({schema.LINES_UP_TO})", ends)  # noqa: S608 - a constant
            for statement in _FORGET:
                self._many(statement, numbers)
            self._many("DELETE FROM tag WHERE tag = ? AND task = ?", [(tag, row.n) for row in gone for tag in row.tags])
            self._many("DELETE FROM alias WHERE key = ?", [(row.key,) for row in gone])
            self._db.execute("UPDATE meta SET swept_seq = MAX(swept_seq, ?)", (max(row.seq for row in gone),))
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return gone


_ADD_TASKS: Final = insert("INSERT INTO task", 11)
_REPLACE_TASKS: Final = insert("INSERT OR REPLACE INTO task", 11)
_MOVE_TASKS: Final = update("task", ("state", "since", "ended_at", "doc"), "n")
_CHANGE_TASKS: Final = update("task", ("doc",), "n")
"""For what no index knows of, as progress."""
_ADD_HELD: Final = insert("INSERT OR REPLACE INTO held", 5)
_ADD_TAGS: Final = insert("INSERT OR IGNORE INTO tag", 2)
_ADD_LINES: Final = insert("INSERT INTO timeline", 9)
_ADD_RESULTS: Final = insert("INSERT OR REPLACE INTO result", 2)
_ADD_SUBMITS: Final = insert("INSERT OR REPLACE INTO submit", 2)
_ADD_ALIASES: Final = insert("INSERT OR REPLACE INTO alias", 3)
_ADD_BATCHES: Final = insert("INSERT OR REPLACE INTO batch", 2)
_FORGET: Final = (
    "DELETE FROM result WHERE task = ?",
    "DELETE FROM submit WHERE task = ?",
    "DELETE FROM task WHERE n = ?",
)


def _identity(row: TaskRow) -> tuple[object, ...]:
    return (row.task_id, row.queue, row.task_type, row.run_id, row.tags)


def _columns(row: TaskRow) -> tuple[object, ...]:
    return (
        row.n,
        row.key,
        row.tenant_id,
        _storable(row.task_id),
        row.queue,
        _storable(row.task_type),
        None if row.run_id is None else _storable(row.run_id),
        row.state,
        row.since,
        row.ended_at,
        _encode(row),
    )


def _storable(text: str) -> str:
    """`text` without what UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text
