"""Commands on dead letters: list them, look at one, run them again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click

from millstream.cli import output as out
from millstream.cli.api import Tracker, http_url, open_tracker, quoted, tenant_option
from millstream.cli.output import Json, as_json, inert, relative
from millstream.cli.tasks import confirm, instant

CHUNK: Final = 100
"""Dead letters of one request."""
SHOWN: Final = 10


@click.group()
def dlq() -> None:
    """Dead letters: tasks that failed for good."""


@dlq.command("list")
@click.option("--queue", help="Of this queue.")
@click.option("--tenant", help="Of this tenant.")
@click.option("--type", "task_type", help="Of this type.")
@click.option("--run", "run_id", help="Of this run.")
@click.option("--since", help="Created after: an RFC 3339 time, or a duration back from now.")
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="Items of a page.")
@click.option("--cursor", help="The `next` of an earlier page.")
@http_url
@as_json
@click.pass_context
def list_(ctx: click.Context, /, http_url: str | None, as_json: bool, since: str | None, **query: Any) -> None:
    """List tasks that are failed now, newest first."""
    with open_tracker(ctx, http_url) as tracker:
        page = tracker.get("/v1/dlq", {**query, "since": instant(since, ahead=False)})
    if as_json:
        out.print_json(page)
        return
    now = time.time()
    columns = ("id", "tenant", "queue", "type", "reason", "failed", "error")
    out.print_table(columns, [_row(letter, now) for letter in page["items"]], empty="no dead letters")
    if page.get("next"):
        out.note(f"{len(page['items'])} of {page.get('total')}; more: --cursor {inert(page['next'], 200)}")


def _row(letter: Json, now: float) -> Sequence[object]:
    error = letter.get("error") or {}
    told = ": ".join(str(error[name]) for name in ("type", "message") if error.get(name))
    failed = relative(letter.get("failed_at"), now)
    names = ("task_id", "tenant_id", "queue", "task_type", "reason")
    return (*(letter.get(name) for name in names), failed, inert(told, 60))


@dlq.command()
@click.argument("ident", metavar="ID")
@tenant_option
@http_url
@as_json
@click.pass_context
def show(ctx: click.Context, ident: str, tenant: str | None, http_url: str | None, as_json: bool) -> None:
    """Show one dead letter: its error, every attempt, and the whole envelope."""
    with open_tracker(ctx, http_url) as tracker:
        letter = tracker.get(f"/v1/dlq/{quoted(ident)}", {"tenant": tenant})
    if as_json:
        out.print_json(letter)
        return
    names = ("task_id", "key", "tenant_id", "queue", "task_type", "generation", "state", "reason", "trace_id")
    out.print_fields(
        {name: letter.get(name) for name in names} | {"failed": relative(letter.get("failed_at"), time.time())}
    )
    failure = letter.get("failure") or {}
    out.say("\nerror")
    out.print_fields({name: failure.get(name) for name in ("reason", "error_type", "path", "fingerprint")})
    for text in (failure.get("message"), failure.get("traceback")):
        if text:
            out.say(out.inert_lines(text, 4000))
    history = letter.get("history") or []
    if history:
        columns = [name for name in history[0] if not isinstance(history[0][name], dict | list)]
        out.say("")
        out.print_table(columns, [[each.get(name) for name in columns] for each in history])
    if letter.get("envelope") is not None:
        out.say(f"\nenvelope\n{out.pretty(letter['envelope'])}")
    elif letter.get("raw_base64"):
        out.say(f"\nraw bytes ({letter.get('raw_bytes')}), base64\n{inert(letter['raw_base64'], 4000)}")


@dlq.command()
@click.argument("idents", metavar="[ID]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All that the filters leave.")
@click.option("--queue", help="With --all: of this queue.")
@click.option("--type", "task_type", help="With --all: of this type.")
@click.option("--run", "run_id", help="With --all: of this run.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say which.")
@click.option("--note", "reason", default="", help="Why; stays with the tasks.")
@tenant_option
@http_url
@as_json
@click.pass_context
def replay(
    ctx: click.Context,
    /,
    idents: tuple[str, ...],
    every: bool,
    yes: bool,
    dry_run: bool,
    reason: str,
    tenant: str | None,
    http_url: str | None,
    as_json: bool,
    **filters: str | None,
) -> None:
    """Run dead letters again, each as a new generation of its task."""
    if bool(idents) == every:
        raise click.UsageError("Expected IDs or --all, one of them")
    if idents and any(filters.values()):
        raise click.UsageError("--queue, --type and --run go with --all")
    with open_tracker(ctx, http_url) as tracker:
        chosen: list[Json]
        if every:
            chosen = list(tracker.items("/v1/dlq", {**filters, "tenant": tenant}))
        else:
            chosen = [tracker.get(f"/v1/dlq/{quoted(ident)}", {"tenant": tenant}) for ident in dict.fromkeys(idents)]
        if dry_run or not chosen:
            skipped = [{"task_id": one["task_id"], "state": one["state"]} for one in chosen if one["state"] != "failed"]
            chosen = [one for one in chosen if one["state"] == "failed"]
            _tell({"dry_run": dry_run, "replayed": 0, "skipped": skipped, "ids": _ids(chosen)}, as_json=as_json)
            return
        if every:
            confirm(f"Replay {len(chosen)} dead letters?", yes=yes)
        replayed, skipped = _replay(tracker, chosen, reason, quiet=as_json)
    _tell({"dry_run": False, "replayed": replayed, "skipped": skipped, "ids": _ids(chosen)}, as_json=as_json)
    ctx.exit(1 if skipped else 0)


def _ids(letters: Sequence[Json]) -> list[str]:
    return [letter["task_id"] for letter in letters]


def _replay(tracker: Tracker, letters: Sequence[Json], reason: str, *, quiet: bool) -> tuple[int, list[Json]]:
    replayed, skipped = 0, list[Json]()
    for chunk in _chunks(letters, quiet=quiet):
        # by key: an id may be another tenant's as well
        answer = tracker.post("/v1/dlq/replay", {"ids": [each["key"] for each in chunk], "by": "cli", "note": reason})
        replayed += answer["replayed"]
        skipped += answer["skipped"]
    return replayed, skipped


def _chunks(letters: Sequence[Json], *, quiet: bool) -> Iterator[Sequence[Json]]:
    starts = range(0, len(letters), CHUNK)
    chunks = (letters[start : start + CHUNK] for start in starts)
    if quiet or len(letters) <= CHUNK or not out.on_terminal():
        yield from chunks
        return
    from rich.progress import track

    yield from track(chunks, total=len(starts), description="replaying", console=out.console(), transient=True)


def _tell(answer: Json, *, as_json: bool) -> None:
    if as_json:
        out.print_json(answer)
        return
    if answer["dry_run"]:
        for ident in answer["ids"]:
            out.say(inert(ident))
        out.note(f"would replay {len(answer['ids'])}")
    elif not answer["ids"]:
        out.note("no dead letters")
    else:
        out.say(f"replaying {answer['replayed']} of {len(answer['ids'])}")
    for each in answer["skipped"]:
        out.note(f"skipped {inert(each.get('task_id'))}: it is {inert(each.get('state'))}")


COMMANDS: tuple[click.Command, ...] = (dlq,)
