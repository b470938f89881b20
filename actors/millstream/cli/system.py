"""Commands on the installation: queues, limits, doctor, check, schema, version."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

import click

from millstream import settings as configuration
from millstream._version import __version__
from millstream.cli import output as out
from millstream.cli.api import http_url, open_tracker, settings_of, tenant_option
from millstream.cli.output import Json, as_json, inert
from millstream.cli.watch import ALL_STATES
from millstream.errors import MillstreamError, SettingsError
from millstream.settings import Settings

DEFAULT_FILE: Final = "millstream.toml"
Layer = dict[str, Any]


@click.command()
@tenant_option
@http_url
@as_json
@click.pass_context
def queues(ctx: click.Context, tenant: str | None, http_url: str | None, as_json: bool) -> None:
    """Show every queue and how many of its tasks are in which state."""
    with open_tracker(ctx, http_url) as tracker:
        listing = tracker.get("/v1/queues", {"tenant": tenant})
    if as_json:
        out.print_json(listing)
        return
    rows: list[tuple[object, ...]] = []
    for each in listing["items"]:
        age = each.get("oldest_ready_age_s")
        waits = "" if age is None else out.span(age)
        rows.append((each["queue"], *(each["states"].get(state, 0) for state in ALL_STATES), waits))
    out.print_table(("queue", *ALL_STATES, "oldest"), rows, empty="no queues")


@click.command()
@http_url
@as_json
@click.pass_context
def limits(ctx: click.Context, http_url: str | None, as_json: bool) -> None:
    """Show every limit: what it allows, what is in use, who waits."""
    with open_tracker(ctx, http_url) as tracker:
        listing = tracker.get("/v1/limits")
    if as_json:
        out.print_json(listing)
        return
    columns = (
        "limit",
        "requests/min",
        "tokens/min",
        "concurrency",
        "in use",
        "waiting",
        "paused",
        "granted",
        "throttled",
    )
    out.print_table(columns, [_limit_row(each) for each in listing["items"]], empty="no limits")


def _limit_row(limit: Json) -> tuple[object, ...]:
    paused = limit.get("paused_until_s")
    names = ("key", "requests_per_minute", "tokens_per_minute", "concurrency", "in_use", "waiting")
    shown = tuple(limit.get(name) for name in names)
    return (
        *shown,
        "" if paused is None else out.span(paused),
        limit.get("granted_total"),
        limit.get("throttled_total"),
    )


@click.command()
@click.option("--nats-url", help="Server to look at; default MILLSTREAM_NATS_URL or nats://127.0.0.1:4222.")
@http_url
@as_json
@click.pass_context
def doctor(ctx: click.Context, nats_url: str | None, http_url: str | None, as_json: bool) -> None:
    """Look at everything and say what to do about it; exit 1 where something fails."""
    from millstream.cli.doctor import Check, examine, examine_settings, examine_tracker

    settings = settings_of(ctx, **{"nats.url": nats_url})
    checks: list[Check] = [*examine_settings(settings), *asyncio.run(examine(settings))]
    with open_tracker(ctx, http_url) as tracker:
        checks += examine_tracker(tracker)
    good = all(check.status != "fail" for check in checks)
    if as_json:
        out.print_json({"ok": good, "checks": [asdict(check) for check in checks]})
    else:
        _print_checks(checks)
    ctx.exit(0 if good else 1)


def _print_checks(checks: list[Any]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        colour = out.STYLES[check.status]
        click.echo(f"{click.style(check.status.ljust(4), fg=colour)}  {check.name.ljust(width)}  {check.detail}")
        if check.todo and check.status != "ok":
            click.echo(f"{' ' * (width + 8)}-> {check.todo}")


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@as_json
@click.pass_context
def check(ctx: click.Context, file: Path | None, as_json: bool) -> None:
    """Check a configuration file, ./millstream.toml by default, and print every problem; nothing is started."""
    path = file or cast("Path | None", ctx.obj) or Path(DEFAULT_FILE)
    wrong: SettingsError | None = None
    remarks: list[str] = []
    try:
        remarks = configuration.warnings(configuration.load(path, {}))
    except SettingsError as error:
        wrong = error
    problems = all_problems(path, wrong) if wrong is not None else []
    if as_json:
        out.print_json({"ok": not problems, "file": str(path), "problems": problems, "warnings": remarks})
    else:
        for problem in problems:
            out.say(f"{inert(path)}: {inert(problem, 1000)}")
        for remark in remarks:
            out.say(f"{inert(path)}: warning: {inert(remark, 1000)}")
        if not problems:
            out.say(f"{inert(path)} is good")
    ctx.exit(1 if problems else 0)


def all_problems(path: Path, first: SettingsError) -> list[str]:
    """Every problem of a file; reading it as a whole stops at the first value that does not fit.

    So each value is tried by itself as well. Problems between values are known only once all of them fit.
    """
    try:
        layer = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return first.problems
    found: list[str] = []
    for where, value in _leaves(layer, ()):
        try:
            configuration.build(_nested(where, value))
        except SettingsError as error:
            fits = error.__context__ is None
            found += [
                each if fits else _placed(each, where) for each in error.problems if not fits or _alone(each, where)
            ]
    return list(dict.fromkeys(found)) or first.problems


def _placed(problem: str, where: tuple[str, ...]) -> str:
    """The problem of one value, with its whole path: decoding knows no names of tables."""
    return f"{problem.partition(' - at ')[0]} - at `{'.'.join(where)}`"


def _alone(problem: str, where: tuple[str, ...]) -> bool:
    """Whether the problem concerns this value and no other setting, which was left out here."""
    named = set(re.findall(r"`([a-z_]+)`", problem)) & set(Settings.__struct_fields__)
    return named <= {where[0]}


def _leaves(layer: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in layer.items():
        if isinstance(value, dict) and value:
            yield from _leaves(cast("Layer", value), (*above, name))
        else:
            yield (*above, name), value


def _nested(where: tuple[str, ...], value: Any) -> Layer:
    for name in reversed(where):
        value = {name: value}
    return cast("Layer", value)


@click.group()
def schema() -> None:
    """The contract, for producers and consumers in other languages."""


@schema.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("json-schema"))
@as_json
def export(folder: Path, as_json: bool) -> None:
    """Write the contract as JSON Schema into FOLDER, by default ./json-schema; other files there stay."""
    from millstream_schemas.export import documents

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in documents().items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise MillstreamError(f"{inert(error.filename, 300)}: {error.strerror}") from None
    files = sorted(str(folder / name) for name in documents())
    if as_json:
        out.print_json({"folder": str(folder), "files": files})
    else:
        for file in files:
            out.say(inert(file))


@click.command()
@as_json
def version(as_json: bool) -> None:
    """Say which version this is."""
    told = {"millstream": __version__, "python": platform.python_version(), "system": f"{os.uname().sysname}"}
    if as_json:
        out.print_json(told)
    else:
        out.say(f"millstream {__version__} (Python {told['python']}, {told['system']})")


COMMANDS: tuple[click.Command, ...] = (queues, limits, doctor, check, schema, version)
