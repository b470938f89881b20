"""Commands on the installation: queues, doctor, check, schema, version."""

from __future__ import annotations

import asyncio
import os
import platform
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

import click

from millstream import settings as configuration
from millstream._version import __version__
from millstream.cli import output as out
from millstream.cli.api import http_url, open_tracker, settings_of, tenant_option
from millstream.cli.checks import Check
from millstream.cli.doctor_limits import remarks
from millstream.cli.output import as_json, inert
from millstream.cli.problems import all_problems
from millstream.cli.watch import ALL_STATES
from millstream.errors import MillstreamError, SettingsError

DEFAULT_FILE: Final = "millstream.toml"


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
@click.option("--nats-url", help="Server to look at; default MILLSTREAM_NATS_URL or nats://127.0.0.1:4222.")
@http_url
@as_json
@click.pass_context
def doctor(ctx: click.Context, nats_url: str | None, http_url: str | None, as_json: bool) -> None:
    """Look at everything and say what to do about it; exit 1 where something fails."""
    from millstream.cli.doctor import examine, examine_settings, examine_tracker

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
    found: list[str] = []
    try:
        settings = configuration.load(path, {})
        found = [*configuration.warnings(settings), *remarks(settings)]
    except SettingsError as error:
        wrong = error
    problems = all_problems(_layer(path), wrong) if wrong is not None else []
    if as_json:
        out.print_json({"ok": not problems, "file": str(path), "problems": problems, "warnings": found})
    else:
        for problem in problems:
            out.say(f"{inert(path)}: {inert(problem, 1000)}")
        for remark in found:
            out.say(f"{inert(path)}: warning: {inert(remark, 1000)}")
        if not problems:
            out.say(f"{inert(path)} is good")
    ctx.exit(1 if problems else 0)


def _layer(path: Path) -> object:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


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


COMMANDS: tuple[click.Command, ...] = (queues, doctor, check, schema, version)
