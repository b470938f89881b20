"""The read model's SQLite file: its tables, and opening it or beginning it anew."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Final

USER_VERSION: Final = 3
"""Raised with every change of a table or of what a row means; another number in a file means: rebuild it."""

_TABLES: Final = """
CREATE TABLE meta (
  id INTEGER PRIMARY KEY CHECK (id = 1), prefix TEXT NOT NULL, position INTEGER NOT NULL, position_at REAL NOT NULL,
  swept_seq INTEGER NOT NULL
) STRICT;
CREATE TABLE task (
  n INTEGER PRIMARY KEY, key TEXT NOT NULL, tenant TEXT NOT NULL, task_id TEXT NOT NULL, queue TEXT NOT NULL,
  task_type TEXT NOT NULL, run_id TEXT, state TEXT NOT NULL, since REAL NOT NULL, ended_at REAL, doc BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX task_key ON task (key);
CREATE INDEX task_id ON task (task_id);
CREATE INDEX task_tenant ON task (tenant);
CREATE INDEX task_queue ON task (queue);
CREATE INDEX task_type ON task (task_type);
CREATE INDEX task_run ON task (run_id) WHERE run_id IS NOT NULL;
CREATE INDEX task_state ON task (state);
CREATE INDEX task_queue_state ON task (queue, state);
CREATE INDEX task_ended ON task (queue, ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE held (
  task INTEGER PRIMARY KEY, pool TEXT NOT NULL, lane TEXT NOT NULL, again INTEGER NOT NULL, seq INTEGER NOT NULL
) STRICT;
CREATE INDEX held_place ON held (pool, lane, again DESC, seq);
CREATE TABLE timeline (
  seq INTEGER PRIMARY KEY, task INTEGER NOT NULL, before INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL,
  state TEXT NOT NULL, attempt INTEGER NOT NULL, info INTEGER NOT NULL, detail TEXT NOT NULL
) STRICT;
CREATE TABLE result (task INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE tag (tag TEXT NOT NULL, task INTEGER NOT NULL, PRIMARY KEY (tag, task)) STRICT, WITHOUT ROWID;
CREATE TABLE submit (inbox_seq INTEGER PRIMARY KEY, task INTEGER NOT NULL) STRICT;
CREATE INDEX submit_task ON submit (task);
CREATE TABLE alias (task_id TEXT NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (task_id, tenant))
  STRICT, WITHOUT ROWID;
CREATE INDEX alias_key ON alias (key);
CREATE TABLE batch (queue TEXT PRIMARY KEY, doc BLOB NOT NULL) STRICT, WITHOUT ROWID;
"""

LINES_UP_TO: Final = """
WITH RECURSIVE line (seq, before) AS (
  SELECT seq, before FROM timeline WHERE seq = ?
  UNION ALL SELECT timeline.seq, timeline.before FROM line JOIN timeline ON timeline.seq = line.before
) SELECT seq FROM line
"""
"""The sequences of one task's lines, by its last one: each line names the one before, which is cheaper than an index."""

_WRITER_PRAGMAS: Final = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",  # a power cut may lose the last batches: their position goes with them
    "PRAGMA busy_timeout = 5000",
    "PRAGMA cache_size = -65536",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA wal_autocheckpoint = 16000",  # 64 MB: keys and ids are random, so most pages are written over and over
)


def open_writer(path: Path, prefix: str) -> sqlite3.Connection:
    """The one writing connection; a file of another version or prefix, or a damaged one, is deleted and begun anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        connection = _connect(path)
    except sqlite3.DatabaseError:
        remove(path)
        connection = _connect(path)
    if not _is_ours(connection, prefix):
        connection.close()
        remove(path)
        connection = _connect(path)
        _create(connection, prefix)
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write; any thread may use it, one at a time."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA busy_timeout = 5000")
    connection.execute("PRAGMA query_only = 1")
    return connection


def remove(path: Path) -> None:
    """Delete the file and what lies beside it; the stream still has all of it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        for pragma in _WRITER_PRAGMAS:
            connection.execute(pragma)
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection


def _is_ours(connection: sqlite3.Connection, prefix: str) -> bool:
    with contextlib.suppress(sqlite3.DatabaseError):
        if connection.execute("PRAGMA user_version").fetchone()[0] != USER_VERSION:
            return False
        row = connection.execute("SELECT prefix FROM meta").fetchone()
        return row is not None and row[0] == prefix
    return False


def _create(connection: sqlite3.Connection, prefix: str) -> None:
    connection.executescript(f"BEGIN; {_TABLES} COMMIT;")
    connection.execute("INSERT INTO meta VALUES (1, ?, 0, 0.0, 0)", (prefix,))
    connection.execute(f"PRAGMA user_version = {USER_VERSION}")
