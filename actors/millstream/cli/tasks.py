"""Commands on tasks: send, list, show, explain, cancel. `watch` stands in a module of its own."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, get_args

import click
import msgspec

from millstream.cli import api
from millstream.cli import output as out
from millstream.cli.api import http_url, open_tracker, settings_of, task_path, tenant_option
from millstream.cli.output import Json, as_json, inert, relative
from millstream.cli.watch import watch
from millstream.errors import ResultTimeout, TaskFailed
from millstream.policy.durations import seconds
from millstream_schemas.lifecycle import State
from millstream_schemas.names import PRIORITIES

STATES: Final = get_args(State)


def duration(_ctx: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """An option that holds a duration, as seconds."""
    try:
        return None if value is None else seconds(value)
    except ValueError as error:
        raise click.BadParameter(inert(error, 200)) from None


def instant(value: str | None, *, ahead: bool) -> str | None:
    """An instant: RFC 3339 with a zone, or a duration from now, `ahead` or back."""
    if value is None or out.parse_time(value) is not None:
        return value
    try:
        away = seconds(value)
        return datetime.fromtimestamp(time.time() + (away if ahead else -away), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        raise click.UsageError(
            f"Expected an RFC 3339 time with a zone, or a duration, got `{inert(value, 80)}`"
        ) from None


def read_json(text: str | None) -> Any:
    """The JSON of an argument: itself, `-` for standard input, `@file` for a file."""
    if text is None:
        return None
    try:
        if text == "-":
            body = sys.stdin.buffer.read()
        else:
            body = Path(text[1:]).read_bytes() if text.startswith("@") else text.encode("utf-8", "surrogateescape")
        return msgspec.json.decode(body)
    except OSError as error:
        raise click.UsageError(f"{inert(error.filename, 200)}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        hint = "" if text == "-" or text.startswith("@") else "; a text is JSON only in its own quotes: '\"like this\"'"
        raise click.UsageError(f"the input is no JSON: {inert(error, 200)}{hint}") from None


@click.command()
@click.argument("task_type", metavar="TYPE")
@click.argument("payload", metavar="JSON", required=False)
@click.option("--queue", help="Queue; default `default`.")
@click.option("--tenant", help="Tenant; default `default`.")
@click.option("--key", help="Idempotency key: the same key is the same task.")
@click.option("--priority", type=click.Choice(PRIORITIES), help="Default normal.")
@click.option("--delay", callback=duration, help="Start no earlier than so long from now: 30, 30s, 5m.")
@click.option("--deadline", help="Never start after: an RFC 3339 time, or a duration from now.")
@click.option("--title", help="For people.")
@click.option("--tag", "tags", multiple=True, help="For people; may be given again.")
@click.option("--run", "run_id", help="Groups the tasks of one run.")
@click.option("--nats-url", help="Server to use; default MILLSTREAM_NATS_URL or nats://127.0.0.1:4222.")
@click.option("--wait", is_flag=True, help="Wait for the outcome and print the result; exit 1 unless completed.")
@click.option("--timeout", callback=duration, help="How long to wait at most; the task goes on.")
@as_json
@click.pass_context
def send(ctx: click.Context, /, task_type: str, payload: str | None, as_json: bool, **given: Any) -> None:
    """Submit a task and print its id once it is stored. JSON may be `-` for standard input, or @FILE."""
    wait, timeout, nats_url = given.pop("wait"), given.pop("timeout"), given.pop("nats_url")
    options = {**given, "idempotency_key": given.pop("key"), "deadline_at": instant(given.pop("deadline"), ahead=True)}
    options = {
        name: value for name, value in options.items() if value not in (None, ()) and name not in ("key", "deadline")
    }
    if "tags" in options:
        options["tags"] = list(options["tags"])
    body = read_json(payload)
    settings = settings_of(ctx, **{"nats.url": nats_url})

    async def run() -> int:
        from millstream.client import Client

        async with Client.open(name="cli", settings=settings) as client:
            handle = await client.send(task_type, body, **options)
            told: Json = {
                "task_id": handle.task_id,
                "key": handle.key,
                "tenant_id": handle.tenant,
                "queue": handle.queue,
                "inbox_seq": handle.inbox_seq,
            }
            if not as_json:
                out.say(inert(handle.task_id))
            status = 0
            if wait:
                outcome, status = await _outcome(handle, timeout)
                told |= outcome
            _print_sent(told, as_json=as_json, waited=wait)
            return status

    ctx.exit(asyncio.run(run()))


async def _outcome(handle: Any, timeout: float | None) -> tuple[Json, int]:
    try:
        result = await handle.result(timeout)
    except TaskFailed as error:
        return {"state": error.state, "result": None, "error": error.error}, 1
    except ResultTimeout as error:
        return {"state": None, "result": None, "error": str(error)}, 1
    return {"state": "completed", "result": result, "error": None}, 0


def _print_sent(told: Json, *, as_json: bool, waited: bool) -> None:
    if as_json:
        out.print_json(told)
    elif waited and told["state"] == "completed":
        out.say(out.pretty(told["result"]))
    elif waited:
        out.note(inert(f"{told['state'] or 'no outcome yet'}: {told['error']}".removesuffix(": "), 1000))


@click.command()
@click.option("--state", "states", multiple=True, type=click.Choice(STATES), help="May be given again.")
@click.option("--queue", help="Of this queue.")
@click.option("--tenant", help="Of this tenant.")
@click.option("--type", "task_type", help="Of this type.")
@click.option("--run", "run_id", help="Of this run.")
@click.option("--tag", help="With this tag.")
@click.option("--since", help="Created after: an RFC 3339 time, or a duration back from now.")
@click.option("--until", help="Created before.")
@click.option("--search", "q", help="With this text in id, title or type.")
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="Items of a page.")
@click.option("--cursor", help="The `next` of an earlier page.")
@http_url
@as_json
@click.pass_context
def tasks(ctx: click.Context, /, http_url: str | None, as_json: bool, **given: Any) -> None:
    """List tasks, newest first."""
    query = {**given, "state": ",".join(given.pop("states")) or None}
    query.pop("states", None)
    query["since"] = instant(given["since"], ahead=False)
    query["until"] = instant(given["until"], ahead=False)
    with open_tracker(ctx, http_url) as tracker:
        page = tracker.get("/v1/tasks", query)
    if as_json:
        out.print_json(page)
        return
    now = time.time()
    rows = [_row(task, now) for task in page["items"]]
    out.print_table(("id", "state", "type", "queue", "attempt", "created", "about"), rows, empty="no tasks")
    if page.get("next"):
        out.note(f"{len(rows)} of {page.get('total')}; more: --cursor {inert(page['next'], 200)}")


def _row(task: Json, now: float) -> Sequence[object]:
    error = task.get("error") or {}
    progress = task.get("progress") or {}
    about = (
        error.get("message") or error.get("type") or error.get("reason") or progress.get("message") or task.get("title")
    )
    attempt = f"{task.get('attempt')}/{task['max_attempts']}" if task.get("max_attempts") else task.get("attempt")
    created = relative(task.get("created_at"), now)
    return (task["task_id"], task["state"], task["task_type"], task["queue"], attempt, created, inert(about, 60))


@click.command()
@click.argument("ident", metavar="ID")
@tenant_option
@http_url
@as_json
@click.pass_context
def show(ctx: click.Context, ident: str, tenant: str | None, http_url: str | None, as_json: bool) -> None:
    """Show one task: what it is, its attempts, its timeline, its error or result."""
    with open_tracker(ctx, http_url) as tracker:
        task = tracker.get(task_path(ident), {"tenant": tenant})
    if as_json:
        out.print_json(task)
        return
    now = time.time()
    out.print_fields(_facts(task, now))
    _print_error(task.get("error"))
    if task.get("attempts"):
        out.say("")
        out.print_table(
            ("attempt", "outcome", "started", "took", "worker", "why"),
            [_attempt(each, now) for each in task["attempts"]],
        )
    if task.get("timeline"):
        out.say("")
        lines = [
            (e["seq"], relative(e["at"], now), e["kind"], e["state"], e["attempt"], e["detail"])
            for e in task["timeline"]
        ]
        out.print_table(("seq", "when", "what", "state", "attempt", "detail"), lines)
    if task.get("result") is not None:
        out.say(f"\nresult\n{out.pretty(task['result'])}")
    elif task.get("result_url"):
        out.say(f"\nresult  {task.get('result_bytes')} bytes, at {inert(task['result_url'], 200)}")


def _facts(task: Json, now: float) -> Json:
    usage = task.get("usage") or {}
    used = [f"{name} {round(value, 3):g}" for name, value in usage.items() if value]
    progress = task.get("progress") or {}
    counts = [f"{task[name]} {name}" for name in ("errors", "crashes", "interruptions", "throttles") if task.get(name)]
    done = f"{progress['fraction']:.0%} {inert(progress.get('message'))}" if progress else ""
    return {
        "id": task["task_id"],
        "title": task.get("title"),
        "state": task["state"],
        "progress": done,
        "type": task["task_type"],
        "queue": f"{task['queue']} ({task.get('priority')})",
        "tenant": task["tenant_id"],
        "key": task.get("key") if task.get("key") != task["task_id"] else None,
        "run": task.get("run_id"),
        "tags": ", ".join(task.get("tags") or ()),
        "attempt": " of ".join(str(task[name]) for name in ("attempt", "max_attempts") if task.get(name)),
        "counted": ", ".join(counts),
        "limits": ", ".join(task.get("limits") or ()),
        "held": _held(task, now),
        "created": relative(task.get("created_at"), now),
        "started": relative(task.get("started_at"), now),
        "due": relative(task.get("due_at"), now),
        "ended": relative(task.get("ended_at"), now),
        "usage": ", ".join(used),
        "trace": task.get("trace_id"),
    }


def _held(task: Json, now: float) -> str:
    """How long limits and fairness have kept the task, until now."""
    since = out.parse_time(task.get("held_at"))
    held_s = (task.get("held_s") or 0.0) + (0.0 if since is None else max(now - since, 0.0))
    return f"for {out.span(held_s)}" if since is not None or held_s >= 0.001 else ""


def _print_error(error: Json | None) -> None:
    if not error:
        return
    out.say("\nerror")
    out.print_fields({name: error.get(name) for name in ("reason", "cause", "type", "fingerprint", "path")})
    for text in (error.get("message"), error.get("traceback")):
        if text:
            out.say(out.inert_lines(text, 4000))


def _attempt(attempt: Json, now: float) -> Sequence[object]:
    started, ended = out.parse_time(attempt.get("started_at")), out.parse_time(attempt.get("ended_at"))
    took = out.span(ended - started) if started is not None and ended is not None else ""
    why = ": ".join(str(attempt[name]) for name in ("reason", "error_type", "message") if attempt.get(name))
    when = relative(attempt.get("started_at"), now)
    return (attempt.get("attempt"), attempt.get("outcome"), when, took, attempt.get("worker_id"), why)


@click.command()
@click.argument("ident", metavar="ID")
@tenant_option
@http_url
@as_json
@click.pass_context
def why(ctx: click.Context, ident: str, tenant: str | None, http_url: str | None, as_json: bool) -> None:
    """Say what a task waits for, or how it ended, and where that was read."""
    with open_tracker(ctx, http_url) as tracker:
        answer = tracker.get(task_path(ident, "/why"), {"tenant": tenant})
    if as_json:
        out.print_json(answer)
        return
    out.say(f"{inert(answer['state'])}: {inert(answer['why'], 1000)}")
    out.say(f"(read from {inert(answer.get('source'), 200)})")


@click.command()
@click.argument("ident", metavar="ID", required=False)
@click.option("--queue", help="Cancel all that waits in this queue; what runs ends by itself.")
@click.option("--note", "reason", default="", help="Why; stays with the task.")
@click.option("--yes", is_flag=True, help="Do not ask before a whole queue is cancelled.")
@tenant_option
@http_url
@as_json
@click.pass_context
def cancel(
    ctx: click.Context,
    /,
    ident: str | None,
    queue: str | None,
    reason: str,
    yes: bool,
    tenant: str | None,
    http_url: str | None,
    as_json: bool,
) -> None:
    """Cancel one task, or all that waits in a queue."""
    if (ident is None) == (queue is None):
        raise click.UsageError("Expected an ID or --queue QUEUE, one of them")
    body = {"by": "cli", **({"note": reason} if reason else {})}
    if queue is not None:
        confirm(f"Cancel everything that waits in {inert(queue)}?", yes=yes)
    path = task_path(ident, "/cancel") if ident is not None else f"/v1/queues/{api.quoted(queue or '')}/cancel"
    with open_tracker(ctx, http_url) as tracker:
        answer = tracker.post(path, body, {"tenant": tenant})
    if as_json:
        out.print_json(answer)
    elif queue is not None:
        out.say(f"cancelling {answer['cancelled']} tasks of {inert(queue)}")
    else:
        out.say(f"cancelling {inert(answer['task_id'])} (it was {inert(answer['state'])})")


def confirm(question: str, *, yes: bool) -> None:
    """Go on only when a person agrees, or `--yes` was given; without a person to ask, that is wrong use."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} There is nobody to ask: give --yes")
    click.confirm(question, abort=True, err=True)


COMMANDS: tuple[click.Command, ...] = (send, watch, tasks, show, why, cancel)
