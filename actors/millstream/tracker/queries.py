"""The reading side of the read model: bounded queries on threads of their own, so that the event loop never waits."""

import asyncio
import contextlib
import queue
import sqlite3
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from millstream.tracker.model import Change, Entry, TaskRow, lane_of, pool_of
from millstream.tracker.schema import LINES_UP_TO, open_reader
from millstream_schemas.keys import is_key
from millstream_schemas.lifecycle import WAITING

T = TypeVar("T")

READERS: Final = 2
QUERY_LIMIT_S: Final = 2.0
COUNT_CAP: Final = 10_000
"""A `total` that had to be counted row by row stops here."""
SEARCH_WINDOW: Final = 10_000
"""Tasks that one page of a text search looks at."""
TIMELINE_CAP: Final = 1_000
_STEPS_PER_CHECK: Final = 5_000

_row: Final = msgspec.msgpack.Decoder(TaskRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which tasks: all that is set must hold. `since` and `until` are Unix seconds of creation."""

    states: tuple[str, ...] = ()
    queue: str | None = None
    tenant: str | None = None
    task_type: str | None = None
    run_id: str | None = None
    tag: str | None = None
    inbox_seq: int | None = None
    since: float | None = None
    until: float | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Tasks, newest first; `next` is where the following page begins, None on the last one."""

    items: list[TaskRow]
    next: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a held task stands: `place`, from 1, among `of` tasks in its lane; `lanes` and `waiting` count its pool's."""

    place: int
    of: int
    lanes: int
    waiting: int


class Reader:
    """Runs queries on a few threads, each with a connection of its own; raises TimeoutError for one that takes too long."""

    def __init__(self, path: Path, limit_s: float = QUERY_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="tracker-read")
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        self._all = [open_reader(path) for _ in range(READERS)]
        for connection in self._all:
            self._idle.put(connection)

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        for connection in self._all:
            connection.close()

    async def find(self, ident: str, tenant: str | None = None) -> TaskRow | None:
        """The task of a key or id; of several tenants' tasks with one id, the newest."""
        return await self._run(lambda db: _find(db, ident, tenant))

    async def page(self, wanted: Filter, limit: int, before: int | None = None) -> Page:
        """Up to `limit` tasks older than `before`, newest first."""
        return await self._run(lambda db: _page(db, wanted, limit, before))

    async def count(self, wanted: Filter) -> int:
        """How many tasks there are, counted up to COUNT_CAP."""
        return await self._run(lambda db: _count(db, wanted))

    async def timeline(self, row: TaskRow) -> list[Change]:
        """The first lines of a task's timeline, oldest first."""
        return await self._run(lambda db: _timeline(db, row))

    async def result(self, row: TaskRow) -> bytes | None:
        """The JSON of a completed task's result."""
        if not row.has_result:
            return None
        return await self._run(lambda db: _result(db, row.n))

    async def lines_after(self, seq: int, limit: int, upto: int | None = None) -> list[Change]:
        """The lines of all tasks that follow a sequence, in order; with `upto`, none beyond that one."""
        return await self._run(lambda db: _lines_after(db, seq, limit, upto))

    async def swept_seq(self) -> int:
        """Lines at or below this sequence may have been forgotten."""
        return await self._run(lambda db: int(db.execute("SELECT swept_seq FROM meta").fetchone()[0]))

    async def waiting(self, queue_name: str, tenant: str | None, after: int, limit: int) -> list[TaskRow]:
        """Tasks of a queue that wait, oldest first, after a row number."""
        return await self._run(lambda db: _waiting(db, queue_name, tenant, after, limit))

    async def watched(self, queue_name: str, ended_after: float, limit: int) -> list[TaskRow]:
        """What a person looks at first: running tasks, then waiting ones, then those that ended last."""
        return await self._run(lambda db: _watched(db, queue_name, ended_after, limit))

    async def place(self, row: TaskRow) -> Place:
        """Where a held task stands now."""
        return await self._run(lambda db: _place(db, row))

    async def ready_since(self, queue_name: str) -> float | None:
        """Since when the task waits that has been ready longest, judged by the oldest hundred."""
        return await self._run(lambda db: _ready_since(db, queue_name))

    async def _run(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._with_connection, query)

    def _with_connection(self, query: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._idle.get()
        try:
            with _time_limit(connection, self._limit_s):
                return query(connection)
        finally:
            self._idle.put(connection)


@contextlib.contextmanager
def _time_limit(connection: sqlite3.Connection, limit_s: float) -> Generator[None]:
    deadline = time.monotonic() + limit_s
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_PER_CHECK)
    try:
        yield
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            raise TimeoutError(f"the query took longer than {limit_s:g} s") from None
        raise
    finally:
        connection.set_progress_handler(None, 0)


def _find(db: sqlite3.Connection, ident: str, tenant: str | None) -> TaskRow | None:
    if is_key(ident):
        found = _first(db, "SELECT doc FROM task WHERE key = ?", (ident,))
        if found is not None and tenant in (None, found.tenant_id):
            return found
    both = (ident,) if tenant is None else (ident, tenant)
    and_tenant = "" if tenant is None else " AND tenant = ?"
    found = _first(db, f"SELECT doc FROM task WHERE task_id = ?{and_tenant} ORDER BY n DESC LIMIT 1", both)  # noqa: S608
    if found is not None:
        return found
    pointed = "SELECT doc FROM alias JOIN task USING (key) WHERE alias.task_id = ?"
    return _first(db, pointed + and_tenant.replace("tenant", "alias.tenant") + " ORDER BY n DESC LIMIT 1", both)


def _first(db: sqlite3.Connection, query: str, values: tuple[object, ...]) -> TaskRow | None:
    found = db.execute(query, values).fetchone()
    return None if found is None else _row.decode(found[0])


def _conditions(db: sqlite3.Connection, wanted: Filter, before: int | None) -> tuple[str, list[Any]]:
    parts: list[str] = ["1"]
    values: list[Any] = []

    def add(part: str, *more: Any) -> None:
        parts.append(part)
        values.extend(more)

    if wanted.states:
        add(f"state IN ({','.join('?' * len(wanted.states))})", *wanted.states)
    for column in ("queue", "tenant", "task_type", "run_id"):
        if (value := getattr(wanted, column)) is not None:
            add(f"{column} = ?", value)
    if wanted.tag is not None:
        add("n IN (SELECT task FROM tag WHERE tag = ?)", wanted.tag)
    if wanted.inbox_seq is not None:
        add("n = (SELECT task FROM submit WHERE inbox_seq = ?)", wanted.inbox_seq)
    if wanted.since is not None:
        add("n >= ?", _first_at(db, wanted.since))
    if wanted.until is not None:
        add("n < ?", _first_at(db, wanted.until))
    if before is not None:
        add("n < ?", before)
    return " AND ".join(parts), values


def _first_at(db: sqlite3.Connection, at: float) -> int:
    """The number of the first task whose first event is not older than `at`; rows are ordered by both."""
    low = 0
    high = (db.execute("SELECT MAX(n) FROM task").fetchone()[0] or 0) + 1
    while low < high:
        middle = (low + high) // 2
        found = db.execute("SELECT n, doc FROM task WHERE n >= ? ORDER BY n LIMIT 1", (middle,)).fetchone()
        if found is None or _row.decode(found[1]).created_at >= at:
            high = middle
        else:
            low = int(found[0]) + 1
    return low


def _page(db: sqlite3.Connection, wanted: Filter, limit: int, before: int | None) -> Page:
    where, values = _conditions(db, wanted, before)
    if wanted.text is not None:
        return _search(db, where, values, wanted.text.casefold(), limit)
    query = f"SELECT doc FROM task WHERE {where} ORDER BY n DESC LIMIT ?"  # noqa: S608 - fixed parts and marks
    rows = [_row.decode(doc) for (doc,) in db.execute(query, [*values, limit + 1])]
    return Page(rows[:limit], rows[limit - 1].n if len(rows) > limit else None)


def _search(db: sqlite3.Connection, where: str, values: list[Any], text: str, limit: int) -> Page:
    found: list[TaskRow] = []
    seen, last = 0, None
    query = f"SELECT doc FROM task WHERE {where} ORDER BY n DESC LIMIT ?"  # noqa: S608 - fixed parts and marks
    for (doc,) in db.execute(query, [*values, SEARCH_WINDOW + 1]):
        if len(found) == limit or seen == SEARCH_WINDOW:
            return Page(found, last)
        row = _row.decode(doc)
        seen, last = seen + 1, row.n
        if any(text in field.casefold() for field in (row.task_id, row.key, row.title, row.task_type)):
            found.append(row)
    return Page(found, None)


def _count(db: sqlite3.Connection, wanted: Filter) -> int:
    if wanted.text is not None:
        return len(_page(db, wanted, SEARCH_WINDOW, None).items)
    where, values = _conditions(db, wanted, None)
    query = f"SELECT COUNT(*) FROM (SELECT 1 FROM task WHERE {where} LIMIT ?)"  # noqa: S608 - fixed parts and marks
    return int(db.execute(query, [*values, COUNT_CAP]).fetchone()[0])


def _timeline(db: sqlite3.Connection, row: TaskRow) -> list[Change]:
    of_task = f"seq IN ({LINES_UP_TO})"
    query = f"SELECT seq, at, kind, state, attempt, info, detail FROM timeline WHERE {of_task} ORDER BY seq LIMIT ?"  # noqa: S608 - a constant
    return [
        Change(row=row, entry=_entry(found), info=bool(found[5]))
        for found in db.execute(query, (row.seq, TIMELINE_CAP))
    ]


def _lines_after(db: sqlite3.Connection, seq: int, limit: int, upto: int | None) -> list[Change]:
    query = (
        "SELECT seq, timeline.at, kind, timeline.state, attempt, info, detail, doc"
        " FROM timeline JOIN task ON task.n = timeline.task WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
    )
    end = upto if upto is not None else 2**63 - 1
    return [
        Change(row=_row.decode(found[7]), entry=_entry(found), info=bool(found[5]))
        for found in db.execute(query, (seq, end, limit))
    ]


def _entry(found: tuple[Any, ...]) -> Entry:
    return Entry(seq=found[0], at=found[1], kind=found[2], state=found[3], attempt=found[4], detail=found[6])


def _result(db: sqlite3.Connection, number: int) -> bytes | None:
    found = db.execute("SELECT body FROM result WHERE task = ?", (number,)).fetchone()
    return None if found is None else bytes(found[0])


_WAITING: Final = ",".join(f"'{state}'" for state in sorted(WAITING))


def _waiting(db: sqlite3.Connection, name: str, tenant: str | None, after: int, limit: int) -> list[TaskRow]:
    and_tenant = "" if tenant is None else "AND tenant = ?"
    values = (name, after) if tenant is None else (name, after, tenant)
    query = f"SELECT doc FROM task WHERE queue = ? AND state IN ({_WAITING}) AND n > ? {and_tenant} ORDER BY n LIMIT ?"  # noqa: S608
    return [_row.decode(doc) for (doc,) in db.execute(query, (*values, limit))]


def _watched(db: sqlite3.Connection, name: str, ended_after: float, limit: int) -> list[TaskRow]:
    found: list[TaskRow] = []
    for states in ("'processing'", "'retrying'", "'queued'", "'held'", "'scheduled'"):
        query = f"SELECT doc FROM task WHERE queue = ? AND state = {states} ORDER BY n LIMIT ?"  # noqa: S608
        found += [_row.decode(doc) for (doc,) in db.execute(query, (name, limit * 3 // 4 - len(found)))]
        if len(found) >= limit * 3 // 4:
            break
    query = "SELECT doc FROM task WHERE queue = ? AND ended_at >= ? ORDER BY ended_at DESC LIMIT ?"
    found += [_row.decode(doc) for (doc,) in db.execute(query, (name, ended_after, limit - len(found)))]
    return found


def _place(db: sqlite3.Connection, row: TaskRow) -> Place:
    pool, lane = pool_of(row), lane_of(row)
    again = int(row.again)
    ahead_of = "SELECT COUNT(*) FROM held WHERE pool = ? AND lane = ? AND (again > ? OR (again = ? AND seq < ?))"
    (ahead,) = db.execute(ahead_of, (pool, lane, again, again, row.held_seq)).fetchone()
    (of,) = db.execute("SELECT COUNT(*) FROM held WHERE pool = ? AND lane = ?", (pool, lane)).fetchone()
    lanes, waiting = db.execute("SELECT COUNT(DISTINCT lane), COUNT(*) FROM held WHERE pool = ?", (pool,)).fetchone()
    return Place(ahead + 1, max(of, ahead + 1), max(lanes, 1), max(waiting, ahead + 1))


def _ready_since(db: sqlite3.Connection, name: str) -> float | None:
    query = "SELECT MIN(since) FROM (SELECT since FROM task WHERE queue = ? AND state = 'queued' ORDER BY n LIMIT 100)"
    found = db.execute(query, (name,)).fetchone()[0]
    return None if found is None else float(found)
