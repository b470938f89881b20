"""`millstream watch`: follow one task, the tasks of a run, or all that happens, over the tracker's event stream."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click

from millstream.cli import output as out
from millstream.cli.api import ServerSent, Tracker, http_url, open_tracker, task_path, tenant_option
from millstream.cli.output import Json, as_json, inert, styled
from millstream.errors import MillstreamError, TaskNotFound
from millstream_schemas.lifecycle import TERMINAL

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESH_S: Final = 0.25
RECENT: Final = 12
ALL_STATES: Final = (
    "queued",
    "held",
    "scheduled",
    "retrying",
    "processing",
    "completed",
    "failed",
    "cancelled",
    "expired",
)


@click.command()
@click.argument("ident", metavar="[ID]", required=False)
@click.option("--run", "run_id", help="Follow all tasks of this run.")
@tenant_option
@http_url
@as_json
@click.pass_context
def watch(
    ctx: click.Context, ident: str | None, run_id: str | None, tenant: str | None, http_url: str | None, as_json: bool
) -> None:
    """Follow a task or a run to its end; exit 1 unless all of it completed. Without either: follow everything.

    With --json the last state is printed once it has ended; without an ID, one line of JSON for each event.
    """
    if ident is not None and run_id is not None:
        raise click.UsageError("Expected an ID or --run RUN, not both")
    with open_tracker(ctx, http_url) as tracker:
        if ident is not None:
            ctx.exit(_watch_task(tracker, ident, tenant, as_json=as_json))
        if run_id is not None:
            ctx.exit(_watch_run(tracker, run_id, tenant, as_json=as_json))
        try:
            _watch_all(tracker, {"tenant": tenant}, as_json=as_json)
        except KeyboardInterrupt:
            ctx.exit(0)


# --- one task -------------------------------------------------------------------------------------


def _watch_task(tracker: Tracker, ident: str, tenant: str | None, *, as_json: bool) -> int:
    def read() -> Json:
        return tracker.get(task_path(ident), {"tenant": tenant})

    task = read()
    if task["state"] not in TERMINAL:
        # by its key, which is not the id of another tenant's task
        query = {"task_id": task["key"], "tenant": task["tenant_id"]}
        with _bar(quiet=as_json) as bar:
            bar.show(task)
            task = _until_final(tracker.follow(query, task["seq"]), read, bar)
    if as_json:
        out.print_json(task)
    else:
        _print_end(task)
    return 0 if task["state"] == "completed" else 1


def _until_final(events: Iterator[ServerSent], read: Any, bar: Bar) -> Json:
    read_at = 0.0
    for event in events:
        if event.event == "position":
            continue
        bar.happened(event)
        final = event.event == "reset" or (event.event == "task" and event.data.get("state") in TERMINAL)
        if final or (bar.progress is not None and time.monotonic() - read_at > REFRESH_S):
            task: Json = read()
            read_at = time.monotonic()
            bar.show(task)
            if final and task["state"] in TERMINAL:
                return task
    raise AssertionError("a stream that is followed does not end")


def _print_end(task: Json) -> None:
    error = task.get("error") or {}
    why = ": ".join(inert(error[name], 500) for name in ("reason", "type", "message") if error.get(name))
    out.say(f"{inert(task['task_id'])} {inert(task['state'])}{f': {why}' if why else ''}")
    if task.get("result") is not None:
        out.say(out.pretty(task["result"]))


@dataclass
class Bar:
    """What a person sees while a task runs: a bar on a terminal, a line for each event elsewhere, nothing if quiet."""

    progress: Progress | None
    quiet: bool
    _row: Any = None

    def show(self, task: Json) -> None:
        """Move the bar to where the task is."""
        if self.progress is None:
            return
        progress = task.get("progress") or {}
        about = " ".join(part for part in (inert(task["state"]), inert(progress.get("message"), 60)) if part)
        fraction = 1.0 if task["state"] == "completed" else progress.get("fraction")
        if self._row is None:
            self._row = self.progress.add_task("", total=1.0)
        described = f"{inert(task['task_id'], 40)} {about}"
        self.progress.update(self._row, completed=fraction or 0.0, description=described)

    def happened(self, event: ServerSent) -> None:
        """Tell what happened, where there is no bar to show it."""
        if self.progress is None and not self.quiet and event.data.get("kind"):
            out.say(line_of(event.data))


@contextmanager
def _bar(*, quiet: bool) -> Generator[Bar, None, None]:
    if quiet or not out.on_terminal():
        yield Bar(None, quiet)
        return
    with _progress() as progress:
        yield Bar(progress, quiet)


def _progress() -> Progress:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=out.console(), transient=True)


def line_of(event: Json) -> str:
    """One event on one line."""
    at = out.parse_time(event.get("at"))
    clock = time.strftime("%H:%M:%S", time.localtime(at)) if at is not None else ""
    parts = (
        clock,
        event.get("task_id"),
        event.get("kind"),
        f"-> {event.get('state')}",
        f"attempt {event.get('attempt')}",
    )
    detail = inert(event.get("detail"), 200)
    return "  ".join(inert(part) for part in parts) + (f"  {detail}" if detail else "")


# --- a run ----------------------------------------------------------------------------------------


@dataclass
class Run:
    """The tasks of a run as they are known."""

    items: dict[str, Json] = field(default_factory=dict[str, Json])

    @property
    def over(self) -> bool:
        return all(task["state"] in TERMINAL for task in self.items.values())

    @property
    def ended(self) -> int:
        return sum(task["state"] in TERMINAL for task in self.items.values())

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(str(task["state"]) for task in self.items.values()))

    def take(self, event: Json) -> None:
        """Move a task; an event that is older than what is known of it changes nothing."""
        known = self.items.get(event["key"], {})
        if event["seq"] > known.get("seq", 0):
            shown = {
                name: event[name] for name in ("task_id", "key", "state", "seq", "tenant_id", "queue", "task_type")
            }
            self.items[event["key"]] = known | shown


def _watch_run(tracker: Tracker, run_id: str, tenant: str | None, *, as_json: bool) -> int:
    query = {"run_id": run_id, "tenant": tenant}

    def read() -> tuple[Run, int]:
        first = tracker.get("/v1/tasks", {**query, "limit": 1})
        return Run({task["key"]: task for task in tracker.items("/v1/tasks", query)}), first["seq"]

    run, seq = read()
    if not run.items:
        raise TaskNotFound(f"no task of run {inert(run_id, 128)} is known")
    if not run.over:
        with _bar(quiet=as_json) as bar:
            _show_run(bar, run_id, run)
            run = _until_over(tracker.follow(query, seq), run, lambda: read()[0], bar, run_id)
    failed = [task for task in run.items.values() if task["state"] != "completed"]
    if as_json:
        items = list(run.items.values())
        out.print_json({"run_id": run_id, "states": run.counts, "items": items, "total": len(items)})
    else:
        for task in failed:
            _print_end(task)
        counts = ", ".join(f"{count} {state}" for state, count in sorted(run.counts.items()))
        out.say(f"run {inert(run_id)}: {len(run.items)} tasks, {counts}")
    return 1 if failed else 0


def _until_over(events: Iterator[ServerSent], run: Run, read: Any, bar: Bar, run_id: str) -> Run:
    for event in events:
        if event.event in ("task", "info"):
            bar.happened(event)
            run.take(event.data)
        # what a task submitted before it ended may not be known yet: a last look decides
        if event.event == "reset" or (event.event != "position" and run.over):
            run = read()
        _show_run(bar, run_id, run)
        if event.event != "position" and run.over:
            return run
    raise AssertionError("a stream that is followed does not end")


def _show_run(bar: Bar, run_id: str, run: Run) -> None:
    total = len(run.items) or 1
    message = f"{run.ended} of {total}"
    bar.show({"task_id": run_id, "state": "run", "progress": {"fraction": run.ended / total, "message": message}})


# --- everything -----------------------------------------------------------------------------------


def _watch_all(tracker: Tracker, query: dict[str, str | None], *, as_json: bool) -> None:
    """Until interrupted: a live table on a terminal, else a line for each event."""
    if not as_json and out.on_terminal():
        _watch_live(tracker, query)
        return
    for event in tracker.follow(query):
        if event.event not in ("task", "info"):
            continue
        if as_json:
            out.print_json(event.data)
        else:
            out.say(line_of(event.data))


def _watch_live(tracker: Tracker, query: dict[str, str | None]) -> None:
    from rich.live import Live

    heard: queue.SimpleQueue[ServerSent | MillstreamError] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for event in tracker.follow(query):
                heard.put(event)
        except MillstreamError as error:
            heard.put(error)
        except RuntimeError:
            return  # the view has ended and closed the connection

    queues = tracker.get("/v1/queues", query)["items"]
    threading.Thread(target=listen, daemon=True).start()
    recent: deque[Json] = deque(maxlen=RECENT)
    with Live(_overview(queues, recent), console=out.console(), auto_refresh=False) as live:
        while True:
            moved = _drain(heard, recent)
            if moved:
                try:
                    queues = tracker.get("/v1/queues", query)["items"]
                except MillstreamError:
                    moved = False  # the listener tells when it has been away for too long
            live.update(_overview(queues, recent), refresh=True)


def _drain(heard: queue.SimpleQueue[ServerSent | MillstreamError], recent: deque[Json]) -> bool:
    """Take what was heard within a second; True where any of it was an event."""
    until, moved = time.monotonic() + 1.0, False
    while (left := until - time.monotonic()) > 0:
        try:
            event = heard.get(timeout=left)
        except queue.Empty:
            break
        if isinstance(event, MillstreamError):
            raise event
        if event.event in ("task", "info"):
            recent.append(event.data)
            moved = True
    return moved


def _overview(queues: list[Json], recent: deque[Json]) -> Any:
    from rich.console import Group

    states = [state for state in ALL_STATES if any(each["states"].get(state) for each in queues)]
    rows = [(each["queue"], *(each["states"].get(state, 0) for state in states)) for each in queues]
    lines = [styled(line_of(event), None) for event in recent]
    for line in lines:
        line.no_wrap = True
    return Group(out.table(("queue", *states), rows), *lines, styled("Ctrl-C ends this view"))
