"""Statements that write many rows at a time: fewer steps, and the interpreter's lock is let go and fought for once a step."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

ROWS_AT_ONCE: Final = 50


@dataclass(frozen=True, slots=True)
class Statement:
    """The same statement for one row and for ROWS_AT_ONCE rows."""

    one: str
    many: str

    def run(self, db: sqlite3.Connection, rows: Sequence[tuple[object, ...]]) -> None:
        """Execute it for all rows, in their order."""
        whole = len(rows) - len(rows) % ROWS_AT_ONCE
        for start in range(0, whole, ROWS_AT_ONCE):
            db.execute(self.many, list(chain.from_iterable(rows[start : start + ROWS_AT_ONCE])))
        if whole < len(rows):
            db.executemany(self.one, rows[whole:])


def insert(into: str, width: int) -> Statement:
    """`INSERT INTO task` or the like, with `width` values a row."""
    return Statement(f"{into} VALUES {_marks(width)}", f"{into} VALUES {_table(width)}")


def update(table: str, columns: Sequence[str], key: str) -> Statement:
    """Set columns of the row whose `key` is given as the last value."""
    settings = ", ".join(f"{column} = new.column{number}" for number, column in enumerate(columns, 1))
    width = len(columns) + 1
    head = f"UPDATE {table} SET {settings}"  # noqa: S608 - names from this package
    tail = f"WHERE {table}.{key} = new.column{width}"
    return Statement(
        f"{head} FROM (VALUES {_marks(width)}) AS new {tail}", f"{head} FROM (VALUES {_table(width)}) AS new {tail}"
    )


def _marks(width: int) -> str:
    return f"({', '.join('?' * width)})"


def _table(width: int) -> str:
    return ", ".join([_marks(width)] * ROWS_AT_ONCE)
