"""The root of the command line: its options, and where the commands come from."""

import os
from pathlib import Path
from typing import Any

import click

from millstream._version import __version__
from millstream.cli import actors, config, demo, dlq, limits, system, tasks
from millstream.errors import CallerError, MillstreamError
from millstream.telemetry.events import log_to_stderr


class Group(click.Group):
    """Says what went wrong in one line, with exit status 2 for wrong use and 1 for what failed."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MillstreamError as error:
            click.echo(f"millstream: {error}", err=True)
            ctx.exit(2 if isinstance(error, CallerError) else 1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="millstream")
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="Configuration file; default ./millstream.toml."
)
@click.option(
    "--log-level",
    default=lambda: os.environ.get("MILLSTREAM_LOG_LEVEL", "INFO"),
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    help="What to log to standard error.",
)
@click.pass_context
def main(ctx: click.Context, config_file: Path | None, log_level: str) -> None:
    """Millstream: a task system for slow, costly and flaky work, over NATS JetStream."""
    log_to_stderr(log_level)
    ctx.obj = config_file


for module in (actors, demo, tasks, dlq, limits, config, system):
    for command in module.COMMANDS:
        main.add_command(command)
