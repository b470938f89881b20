"""Commands that run actors: all in one process, or each alone."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from millstream import supervisor
from millstream.loading import load_app
from millstream.server import LocalServer
from millstream.settings import Settings, layers, load


def settings_of(ctx: click.Context, **flags: Any) -> Settings:
    """The settings of this command: file, environment, flags."""
    return load(ctx.obj, os.environ, flags)


nats_url = click.option("--nats-url", help="Server to use; default MILLSTREAM_NATS_URL or nats://127.0.0.1:4222.")
http_host = click.option("--http-host", help="Address of the HTTP surface; default 127.0.0.1.")
http_port = click.option("--http-port", type=int, help="Port of the HTTP surface, 0 for a free one; default 8420.")
data_dir = click.option("--data-dir", type=click.Path(path_type=Path), help="Where state is kept; default .millstream.")
concurrency = click.option("--concurrency", type=int, help="Executions at once; default 10.")


@click.command()
@nats_url
@click.option("--port", type=int, default=0, show_default="a free one", help="Port of the server that is started.")
@http_host
@http_port
@data_dir
@concurrency
@click.option("--app", "apps", multiple=True, help="App whose handlers to run, as module:app.")
@click.pass_context
def up(
    ctx: click.Context,
    nats_url: str | None,
    port: int,
    http_host: str | None,
    http_port: int | None,
    data_dir: Path | None,
    concurrency: int | None,
    apps: Sequence[str],
) -> None:
    """Run everything in one process: a server (unless one is given), all actors and the HTTP surface.

    A server is given by --nats-url, MILLSTREAM_NATS_URL, or `nats.url` in the configuration file.
    """
    flags = {
        "nats.url": nats_url,
        "tracker.host": http_host,
        "tracker.port": http_port,
        "data_dir": None if data_dir is None else str(data_dir),
        "worker.concurrency": concurrency,
    }
    settings = settings_of(ctx, **flags)
    loaded = [load_app(path) for path in apps]
    starters = [supervisor.dispatcher(), supervisor.governor(), supervisor.tracker()]
    starters += [supervisor.worker(app) for app in loaded]
    if "url" in layers(ctx.obj, os.environ, flags).get("nats", {}):
        sys.exit(supervisor.run_process(settings, starters, on_ready=_announce(settings.nats.url)))
    with LocalServer(Path(settings.data_dir) / "nats", port=port) as server:
        settings = settings_of(ctx, **{**flags, "nats.url": server.url})
        sys.exit(supervisor.run_process(settings, starters, on_ready=_announce(server.url)))


def _announce(url: str) -> supervisor.Ready:
    def ready(http: str) -> None:
        click.echo(json.dumps({"nats": url, "http": http}))
        click.echo(f"Millstream runs: tasks to {url}, page at {http}  (Ctrl-C stops)", err=True)
        click.echo(f"For other terminals: export MILLSTREAM_NATS_URL={url} MILLSTREAM_HTTP_URL={http}", err=True)

    return ready


@click.command()
@nats_url
@click.pass_context
def dispatcher(ctx: click.Context, nats_url: str | None) -> None:
    """Run a dispatcher. Any number may run at once."""
    settings = settings_of(ctx, **{"nats.url": nats_url})
    sys.exit(supervisor.run_process(settings, [supervisor.dispatcher()]))


@click.command()
@nats_url
@click.pass_context
def governor(ctx: click.Context, nats_url: str | None) -> None:
    """Run a rate-governor. One leads; any others stand by, and one of them takes over when it ends."""
    settings = settings_of(ctx, **{"nats.url": nats_url})
    sys.exit(supervisor.run_process(settings, [supervisor.governor()]))


@click.command()
@nats_url
@http_host
@http_port
@data_dir
@click.pass_context
def tracker(
    ctx: click.Context, nats_url: str | None, http_host: str | None, http_port: int | None, data_dir: Path | None
) -> None:
    """Run a tracker with its HTTP surface and page."""
    flags = {
        "nats.url": nats_url,
        "tracker.host": http_host,
        "tracker.port": http_port,
        "data_dir": None if data_dir is None else str(data_dir),
    }
    settings = settings_of(ctx, **flags)
    sys.exit(supervisor.run_process(settings, [supervisor.tracker()], on_ready=_announce(settings.nats.url)))


@click.command()
@click.argument("app")
@click.option("--queues", help="Queues to work on, separated by commas; default: those of the app's handlers.")
@concurrency
@nats_url
@click.pass_context
def worker(ctx: click.Context, app: str, queues: str | None, concurrency: int | None, nats_url: str | None) -> None:
    """Run a worker for the handlers of APP, given as module:app."""
    settings = settings_of(ctx, **{"nats.url": nats_url, "worker.concurrency": concurrency})
    names = [name.strip() for name in queues.split(",") if name.strip()] if queues else []
    sys.exit(supervisor.run_process(settings, [supervisor.worker(load_app(app), names)]))


COMMANDS = (up, dispatcher, governor, tracker, worker)
