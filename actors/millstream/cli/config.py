"""The commands `config show` and `config apply`: the configuration that a fleet shares, in the server's bucket."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click

from millstream.cli import output as out
from millstream.cli.api import settings_of
from millstream.cli.output import Json, as_json, inert
from millstream.cli.problems import all_problems
from millstream.configuration import overlaid
from millstream.errors import ConfigurationChanged, MillstreamError, SettingsError
from millstream.ports import Broker, KeyValue
from millstream.settings import Settings

T = TypeVar("T")

nats_url = click.option("--nats-url", help="Server to use; default MILLSTREAM_NATS_URL or nats://127.0.0.1:4222.")
MAX_BYTES: Final = 512 * 1024


@click.group()
def config() -> None:
    """The limits, queues, task types, tenants and prices that a whole fleet shares, kept in the server.

    They go before millstream.toml, and take effect while everything runs: all of a new revision, or none of it.
    """


@config.command()
@nats_url
@as_json
@click.pass_context
def show(ctx: click.Context, nats_url: str | None, as_json: bool) -> None:
    """Show what is stored, with its revision."""
    settings = settings_of(ctx, **{"nats.url": nats_url})
    found = asyncio.run(_with_broker(settings, lambda broker: _read(broker, settings)))
    document = {} if found is None else _decoded(found.value)
    revision = 0 if found is None else found.revision
    if as_json:
        out.print_json({"revision": revision, "document": document})
    elif found is None:
        out.note("nothing is stored: millstream.toml is what counts")
    else:
        out.note(f"revision {revision}")
        out.say(out.pretty(document, limit=MAX_BYTES))


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--revision", type=click.IntRange(0), help="Only where the stored one is still this; 0: where none is.")
@click.option("--dry-run", is_flag=True, help="Check FILE and store nothing.")
@nats_url
@as_json
@click.pass_context
def apply(
    ctx: click.Context, file: Path, revision: int | None, dry_run: bool, nats_url: str | None, as_json: bool
) -> None:
    """Check FILE (TOML, or JSON by its name) as a whole and store it, in place of what was stored before.

    It may hold `limits`, `queues`, `task_types`, `tenants` and `prices`, as millstream.toml does, and is laid over
    that field by field. Nothing is stored where anything in it is wrong, or where somebody else stored another
    revision meanwhile.
    """
    settings = settings_of(ctx, **{"nats.url": nats_url})
    try:
        body = _document(file, settings)
    except SettingsError as error:
        _refused(file, error.problems, as_json=as_json)
        ctx.exit(1)
    stored = None
    if not dry_run:
        stored = asyncio.run(_with_broker(settings, lambda broker: _store(broker, settings, body, revision)))
    if as_json:
        out.print_json({"ok": True, "file": str(file), "problems": [], "revision": stored})
    else:
        out.say(f"{inert(file)} is good" if stored is None else f"stored as revision {stored}")


def _refused(file: Path, problems: list[str], *, as_json: bool) -> None:
    if as_json:
        out.print_json({"ok": False, "file": str(file), "problems": problems, "revision": None})
        return
    for problem in problems:
        out.say(f"{inert(file)}: {inert(problem, 1000)}")


def _document(file: Path, settings: Settings) -> bytes:
    """What to store: the file's tables, checked over the settings of this process; raises SettingsError."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise SettingsError(["the file does not exist"], str(file)) from None
    except OSError as error:
        raise SettingsError([error.strerror or str(error)], str(file)) from None
    if len(data) > MAX_BYTES:
        raise SettingsError([f"Expected at most {MAX_BYTES} bytes, got {len(data)}"], str(file))
    try:
        text = data.decode("utf-8")
        layer: Any = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        body = json.dumps(layer, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError([str(error) or type(error).__name__], str(file)) from None
    try:
        overlaid(settings, body)
    except SettingsError as error:
        raise SettingsError(all_problems(layer, error), str(file)) from None
    return body


async def _with_broker(settings: Settings, work: Callable[[Broker], Awaitable[T]]) -> T:
    from millstream.connecting import open_broker

    broker = await open_broker(settings, "config")
    try:
        return await work(broker)
    finally:
        await broker.close()


async def _read(broker: Broker, settings: Settings) -> KeyValue | None:
    return await broker.kv_get(settings.names.config_bucket, settings.names.config_key)


async def _store(broker: Broker, settings: Settings, body: bytes, expected: int | None) -> int:
    """Compare-and-set on the revision that stands, which must be `expected` where that is given."""
    found = await _read(broker, settings)
    standing = 0 if found is None else found.revision
    if expected is not None and expected != standing:
        raise ConfigurationChanged(standing)
    bucket, key = settings.names.config_bucket, settings.names.config_key
    if found is None:
        stored = await broker.kv_create(bucket, key, body)
    else:
        stored = await broker.kv_update(bucket, key, body, standing)
    if stored is None:
        raise ConfigurationChanged(None)
    return stored


def _decoded(value: bytes) -> Json:
    try:
        return cast("Json", json.loads(value))
    except (ValueError, RecursionError):
        raise MillstreamError(
            "the stored configuration is no JSON, so that actors keep their former one: "
            "store a good one with `millstream config apply FILE`"
        ) from None


COMMANDS: tuple[click.Command, ...] = (config,)
