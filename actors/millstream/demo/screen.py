"""What the demo shows: live bars, counts and events on a terminal, a line now and then elsewhere, a table at the end."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from millstream.cli.output import STYLES, inert
from millstream.demo.notes import KINDS
from millstream.demo.provider import Calls
from millstream.demo.report import Figures, TaskShown

EVENTS_SHOWN = 6
LINE_EVERY_S = 5.0
TITLE_CHARS = 60
SUMMARY_CHARS = 160
_COUNTED = ("parked", "scheduled")


class Screen:
    """Shows one run. Titles and errors come from files and strangers: they are made inert before they are printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._ids = {kind: self._bars.add_task(kind, total=None) for kind in KINDS}
        self._counts = Text()
        self._events: deque[Text] = deque(maxlen=EVENTS_SHOWN)
        self._live: Live | None = None
        self._line_at = 0.0

    def say(self, text: str) -> None:
        """Print a line above what is live."""
        self._console.print(Text(text), soft_wrap=True)

    @contextmanager
    def running(self) -> Generator[None]:
        """Show what `update` and `event` report, until the end of the block."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False, get_renderable=self._drawn) as self._live:
            yield
        self._live = None

    def update(self, tasks: Sequence[TaskShown], calls: Calls, expected: int) -> None:
        """Show where the run stands; `expected` is how many tasks of each kind there will be."""
        over = Counter(task.task_type for task in tasks if task.over)
        failed = sum(task.over and task.state != "completed" for task in tasks)
        for kind, bar in self._ids.items():
            self._bars.update(bar, completed=over[kind], total=expected + (kind == KINDS[0]))
        waiting = sum(task.state in ("queued", "scheduled", "held") for task in tasks)
        self._counts = Text(
            f"{waiting} wait · {sum(task.waits for task in tasks)} × put off by the limit · "
            f"{sum(task.attempt - 1 for task in tasks)} retried · {failed} failed · "
            f"{calls.calls} calls of the model ({calls.status_429} × 429, {calls.status_500} × 500)"
        )
        if self._live is not None:
            self._live.refresh()
        elif not self._console.is_terminal and time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_EVERY_S
            done = " · ".join(f"{kind} {over[kind]}/{expected + (kind == KINDS[0])}" for kind in KINDS)
            self.say(f"{done} · {self._counts.plain}")

    def event(self, event: Mapping[str, Any]) -> None:
        """Show one event of the tracker's stream; waits for the limit are counted instead, they are so many."""
        if event.get("kind") in _COUNTED:
            return
        kind, title = inert(event.get("kind"), 20), inert(event.get("title"), TITLE_CHARS)
        line = Text(f"  {kind:<15}", style=STYLES.get(str(event.get("state")), ""))
        line.append(f"{inert(event.get('task_type'), 20):<16} {title}", style="default")
        if event.get("detail"):
            line.append(f"  {inert(event['detail'], TITLE_CHARS)}", style="dim")
        self._events.append(line)

    def _drawn(self) -> RenderableType:
        return Group(self._bars, self._counts, *self._events)

    # --- the end ---------------------------------------------------------------------------------

    def notes(self, found: Figures) -> None:
        """Print each note with its summary in one line and the notes that it is close to."""
        for note in found.notes:
            self._console.print()
            self._console.print(Text(inert(note.title, TITLE_CHARS), style="bold"))
            self._console.print(Text(inert(first_line(note.summary, note.title), SUMMARY_CHARS)))
            if note.related:
                near = ", ".join(f"{inert(other.title, TITLE_CHARS)} ({other.score:.2f})" for other in note.related)
                self._console.print(Text(f"→ {near}", style="dim"))

    def failures(self, tasks: Sequence[TaskShown]) -> None:
        """Print why tasks failed."""
        for task in tasks:
            if task.over and task.state != "completed":
                why = task.error.message if task.error is not None else task.state
                title = inert(task.title, TITLE_CHARS)
                self._console.print(Text(f"✗ {task.task_type} {title}: {inert(why, SUMMARY_CHARS)}", style="red"))

    def table(self, found: Figures) -> None:
        """Print the figures."""
        table = Table(title="\nWhat happened", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_column(style="dim")
        rows = (
            ("tasks", found.submitted, "three for each note, one for the file that no handler can read"),
            ("completed", found.completed, ""),
            ("failed", found.failed, "in the dead-letter queue"),
            ("retried", found.retried, "attempts after an error of the model"),
            ("throttled", found.throttled, "times that a task waited for the limit; uses up no attempt"),
            ("calls of the model", found.provider_calls, "counted by the model server"),
            ("… refused with 429", found.provider_429, ""),
            ("… most in any minute", found.max_calls_in_any_minute, f"the limit is {found.limit_per_minute}"),
            ("seconds", found.elapsed_s, ""),
        )
        for name, value, remark in rows:
            table.add_row(name, str(value), remark)
        self._console.print(table)


def first_line(summary: str, title: str) -> str:
    """A summary on one line, without the title that it may begin with."""
    line = " ".join(summary.split())
    rest = line.removeprefix(title).lstrip(" .:-–—")
    return rest or line
