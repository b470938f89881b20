"""What commands print: one JSON document, or text and tables for people, with the texts of strangers made inert."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

F = TypeVar("F", bound=Callable[..., Any])

Json = dict[str, Any]

REPLACEMENT: Final = "\ufffd"
CELL_LIMIT: Final = 80
"""Characters of one cell; what is longer is cut with a mark."""

# C0, DEL and C1 drive a terminal; surrogates cannot be printed; the rest reorders, hides or breaks a line.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_UNSAFE_BUT_LINES: Final = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))

STYLES: Final[Mapping[str, str]] = {
    "queued": "cyan",
    "held": "cyan",
    "scheduled": "blue",
    "processing": "yellow",
    "retrying": "magenta",
    "completed": "green",
    "failed": "red",
    "cancelled": "dim",
    "expired": "red",
    "ok": "green",
    "warn": "yellow",
    "fail": "red",
}


def as_json(command: F) -> F:
    """The option `--json`, passed as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def print_json(document: object) -> None:
    """Print one line of JSON, in ASCII: no text in it can drive a terminal."""
    click.echo(json.dumps(document, ensure_ascii=True, separators=(", ", ": ")))


def inert(text: object, limit: int | None = None) -> str:
    """`text` on one line: nothing in it can move a cursor, reorder or hide what stands beside it."""
    return _cut(_UNSAFE.sub(_visible, "" if text is None else str(text)), limit)


def inert_lines(text: object, limit: int | None = None) -> str:
    """As `inert`, for texts of several lines: line breaks and tabs stay."""
    cleaned = ("" if text is None else str(text)).replace("\r\n", "\n")
    return _cut(_UNSAFE_BUT_LINES.sub(REPLACEMENT, cleaned), limit)


def _visible(found: re.Match[str]) -> str:
    return " " if found[0] in "\n\t" else REPLACEMENT


def _cut(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def say(text: str) -> None:
    """Print a text that is ours, or was made inert."""
    click.echo(text)


def note(text: str) -> None:
    """Tell a person something that is no result: on standard error."""
    click.echo(text, err=True)


def on_terminal() -> bool:
    """Whether a person looks at standard output."""
    return sys.stdout.isatty()


def console() -> Console:
    """A console on standard output that interprets nothing: no markup, no emoji, no highlighting."""
    from rich.console import Console

    return Console(file=sys.stdout, markup=False, emoji=False, highlight=False)


def styled(text: object, limit: int | None = CELL_LIMIT) -> Text:
    """An inert text; the names of states carry their colour."""
    from rich.text import Text

    shown = inert(text, limit)
    return Text(shown, style=STYLES.get(shown, ""), overflow="fold" if limit == CELL_LIMIT else "ellipsis")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "nothing") -> None:
    """Print a table: drawn on a terminal, in plain aligned columns elsewhere."""
    if not rows:
        note(empty)
        return
    if on_terminal():
        console().print(table(columns, rows))
        return
    cells = [[inert(cell) or "-" for cell in row] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    for line in ([column.upper() for column in columns], *cells):
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Any:
    """A table that rich can draw."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        drawn.add_column(column, overflow="fold", no_wrap=number == 0)  # ids are copied from the first one
    for row in rows:
        drawn.add_row(*(styled(cell) for cell in row))
    return drawn


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one a line, without those that are empty."""
    shown = {name: inert(value) for name, value in fields.items() if value not in (None, "", [], {})}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        say(f"{name.ljust(width)}  {value}")


def pretty(value: object, limit: int = 4000) -> str:
    """Any JSON as indented text for people."""
    return inert_lines(json.dumps(value, ensure_ascii=False, indent=2), limit)


# --- times ----------------------------------------------------------------------------------------


def parse_time(text: object) -> float | None:
    """Unix seconds of an RFC 3339 time with a zone; None for anything else."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment.timestamp()


def relative(text: object, now: float) -> str:
    """A time as people say it: `12s ago`, `in 5m`; empty where there is none."""
    at = parse_time(text)
    if at is None:
        return ""
    away = at - now
    return f"in {span(away)}" if away > 0.5 else f"{span(-away)} ago"


def span(seconds: float) -> str:
    """A length of time in its largest fitting unit: `340ms`, `1.5s`, `12s`, `5m`, `3h`, `2d`."""
    seconds = max(seconds, 0.0)
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    for unit, length_s, until_s in (("s", 1, 120), ("m", 60, 7200), ("h", 3600, 172_800)):
        if seconds < until_s:
            return f"{seconds / length_s:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def size(count: object) -> str:
    """Bytes as people say them."""
    left = float(cast("float", count)) if isinstance(count, int | float) else 0.0
    for unit in ("B", "KiB", "MiB", "GiB"):
        if left < 1024:
            return f"{left:.0f} {unit}" if unit == "B" else f"{left:.1f} {unit}"
        left /= 1024
    return f"{left:.1f} TiB"
