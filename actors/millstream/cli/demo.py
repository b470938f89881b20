"""The command `demo`: the whole path on real files."""

import sys
from pathlib import Path

import click


@click.command()
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--limit", type=click.IntRange(1, 100_000), help="Calls a minute; default: so many that the notes wait.")
@click.option("--max-files", type=click.IntRange(1, 10_000), help="Take no more files; default: what fits 4 minutes.")
@click.option("--timeout", type=click.FloatRange(1), default=240.0, show_default=True, help="Give up after seconds.")
@click.option("--http-port", type=click.IntRange(0, 65535), default=0, help="Port of the page; default: a free one.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="An empty folder for the data; default: temporary.",
)
@click.option("--keep", is_flag=True, help="Leave the data and the log behind, and say where.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON; all else goes to standard error.")
def demo(
    folder: Path | None,
    limit: int | None,
    max_files: int | None,
    timeout: float,
    http_port: int,
    data_dir: Path | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Summarise, embed and relate the Markdown and text files of FOLDER, through all actors, at a limited rate.

    Starts a server, all actors and a small model server of its own; with OPENAI_BASE_URL (and OPENAI_API_KEY) set,
    calls that endpoint instead. Without FOLDER, works on this repository's docs or on notes that come along.
    """
    from millstream.demo.run import Options, run_demo

    options = Options(
        folder=folder,
        limit=limit,
        max_files=max_files,
        timeout_s=timeout,
        http_port=http_port,
        data_dir=data_dir,
        keep=keep,
        as_json=as_json,
    )
    sys.exit(run_demo(options))


COMMANDS = (demo,)
