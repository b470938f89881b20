"""The demo: real files through all four actors, against a model that allows only so many calls a minute."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click
import httpx
import msgspec
from rich.console import Console

from millstream import supervisor
from millstream.client import Client
from millstream.demo.documents import Chosen, Document, Plan, broken_document, choose, plan
from millstream.demo.notes import LIMIT, QUEUE, SUMMARIZE, Note, Shelf, build, estimate
from millstream.demo.provider import Provider, provider
from millstream.demo.report import Figures, Reader, TaskShown, complete, figures, problems
from millstream.demo.screen import Screen
from millstream.errors import CallerError, MillstreamError
from millstream.policy.limits import Limit
from millstream.server import LocalServer
from millstream.settings import NatsSettings, QueueSettings, Settings, TrackerSettings, WorkerSettings
from millstream_schemas.envelope import RetryPolicy

CONCURRENCY = 8
GRACE_S = 5.0
POLL_S = 0.25
SETTLE_S = 3.0
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command was asked for; None is the default that fits the rest."""

    folder: Path | None = None
    limit: int | None = None
    max_files: int | None = None
    timeout_s: float = 240.0
    http_port: int = 0
    data_dir: Path | None = None
    keep: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """All that a run works with."""

    options: Options
    chosen: Chosen
    broken: Document
    plan: Plan
    provider: Provider
    settings: Settings
    run_id: str
    screen: Screen


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; None for figures where it was interrupted before there were any."""

    found: Figures
    tasks: list[TaskShown]
    problems: list[str]


def run_demo(options: Options) -> int:
    """Run the demo to its end; returns the exit status: 0 only where the figures add up.

    Raises CallerError for a folder without texts, MillstreamError where a part of it cannot run.
    """
    screen = Screen(Console(stderr=options.as_json, highlight=False, emoji=False, markup=False))
    with _data_folder(options) as folder:
        chosen = choose(options.folder, folder / "notes", options.max_files, options.limit)
        limits = plan(chosen.documents, options.limit)
        _log_to_file(folder)
        with provider(limits, os.environ) as model, LocalServer(folder / "nats") as server:
            job = Job(
                options=options,
                chosen=chosen,
                broken=broken_document(folder / "notes"),
                plan=limits,
                provider=model,
                settings=_settings(options, limits, server.url, folder),
                run_id=f"demo-{uuid.uuid4().hex[:8]}",
                screen=screen,
            )
            _announce(job)
            outcome = asyncio.run(_Demo(job).run())
        if options.keep or options.data_dir is not None:
            screen.say(f"Data and log are kept in {folder}")
    return _conclude(options, screen, outcome)


class _Demo:
    """One run: actors in the background, the chain of each note in front."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._supervisor = supervisor.Supervisor(job.settings, on_ready=self._ready)
        self._page: asyncio.Future[str] | None = None
        self._tasks: list[TaskShown] = []

    async def run(self) -> Outcome | None:
        """Run until all is done, the time is over, or a signal comes (None)."""
        self._page = asyncio.get_running_loop().create_future()
        job = self._job
        app = build(job.provider.model, Shelf(Path(job.settings.data_dir) / "embeddings"))
        actors = [supervisor.dispatcher(), supervisor.governor(), supervisor.tracker(), supervisor.worker(app)]
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(self._supervisor.run(actors))
                running.add_done_callback(lambda _: self._ready(""))  # a signal may come before the page
                try:
                    url = await self._page
                    return await self._work(url) if url else None
                finally:
                    self._supervisor.stop.set()
        except* MillstreamError as errors:
            raise _first(errors) from None

    def _ready(self, url: str) -> None:
        if self._page is not None and not self._page.done():
            self._page.set_result(url)

    async def _work(self, url: str) -> Outcome | None:
        job, screen = self._job, self._job.screen
        screen.say(f"Watch it live: {url}")
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=url, timeout=10.0, trust_env=False) as http:
            reader = Reader(http, job.run_id)
            await self._submit()
            async with asyncio.TaskGroup() as group:
                listener = group.create_task(self._listen(http))
                with screen.running():
                    whole = await self._watch(reader, began + job.options.timeout_s)
                listener.cancel()
            elapsed_s = time.monotonic() - began
            if self._supervisor.stop.is_set():
                return None
            return await self._sum_up(reader, elapsed_s, whole=whole)

    async def _submit(self) -> None:
        """One task for each note; the others follow from it."""
        job = self._job
        async with Client.open(name="demo", settings=job.settings) as client:
            for number, document in enumerate([job.broken, *job.chosen.documents]):
                await client.send(
                    SUMMARIZE,
                    Note(path=str(document.path), title=document.title),
                    queue=QUEUE,
                    idempotency_key=f"{job.run_id}:{number}",
                    run_id=job.run_id,
                    title=document.title,
                    tags=["demo"],
                    usage_estimate=estimate(document.tokens),
                )

    async def _watch(self, reader: Reader, deadline: float) -> bool:
        """Show the run until nothing is left to come (True), the time is over, or a signal came."""
        job = self._job
        submitted = len(job.chosen.documents) + 1
        while time.monotonic() < deadline and not self._supervisor.stop.is_set():
            with suppress(httpx.HTTPError):  # the next look will tell
                self._tasks = await reader.tasks()
                job.screen.update(self._tasks, await job.provider.counted(), len(job.chosen.documents))
                if complete(self._tasks, submitted):
                    return True
            await asyncio.sleep(POLL_S)
        return False

    async def _listen(self, http: httpx.AsyncClient) -> None:
        """Show events as they come; a stream that breaks is opened anew."""
        query = {"run_id": self._job.run_id}
        while True:
            with suppress(httpx.HTTPError, msgspec.DecodeError):
                async with http.stream("GET", "/v1/stream", params=query, timeout=None) as stream:
                    async for line in stream.aiter_lines():
                        if line.startswith("data: {") and '"kind"' in line:
                            self._job.screen.event(json.loads(line.removeprefix("data: ")))
            await asyncio.sleep(POLL_S)

    async def _sum_up(self, reader: Reader, elapsed_s: float, *, whole: bool) -> Outcome:
        """Read the figures; the dead letter follows its event, so it may take a moment longer."""
        job = self._job
        try:
            unburied = await reader.without_letter(self._tasks)
            if unburied:
                await asyncio.sleep(SETTLE_S)
                unburied = await reader.without_letter(self._tasks)
            found = figures(
                self._tasks,
                await job.provider.counted(),
                await reader.notes(self._tasks),
                limit_per_minute=job.plan.requests_per_minute,
                elapsed_s=elapsed_s,
            )
        except httpx.HTTPError as error:
            raise MillstreamError(f"the figures cannot be read: {type(error).__name__}: {error}") from None
        paced = job.options.limit is None
        wrong = problems(found, unburied, whole=whole, paced=paced, flaky=job.provider.flaky)
        return Outcome(found, self._tasks, wrong)


def _first(errors: BaseExceptionGroup[MillstreamError]) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _settings(options: Options, limits: Plan, url: str, folder: Path) -> Settings:
    """Settings of the demo alone: no file and no variable changes what it shows."""
    return Settings(
        nats=NatsSettings(url=url),
        data_dir=str(folder),
        queues={QUEUE: QueueSettings(max_attempts=5, retry_policy=RetryPolicy(base_seconds=1.0), limits=(LIMIT,))},
        limits={
            LIMIT: Limit(
                key=LIMIT,
                requests=f"{limits.requests_per_minute}/min",
                tokens=f"{limits.tokens_per_minute}/min",
            )
        },
        tracker=TrackerSettings(port=options.http_port),
        worker=WorkerSettings(concurrency=CONCURRENCY, grace_s=GRACE_S),
    )


@contextmanager
def _data_folder(options: Options) -> Generator[Path]:
    """A fresh folder: a temporary one that is removed at the end, or the one that was named.

    Raises CallerError where that one holds anything, or cannot be made.
    """
    if options.data_dir is not None:
        try:
            options.data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CallerError(f"{options.data_dir} cannot be made: {error.strerror}; name another --data-dir") from None
        if any(options.data_dir.iterdir()):
            raise CallerError(f"{options.data_dir} is not empty: the demo begins with a fresh folder")
        yield options.data_dir.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="millstream-demo-"))
    try:
        yield folder
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _log_to_file(folder: Path) -> None:
    """Log lines would tear the live view apart: they go to a file beside the data."""
    handler = logging.FileHandler(folder / "millstream.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("millstream")
    logger.handlers[:] = [handler]
    logger.propagate = False


def _announce(job: Job) -> None:
    chosen, limits = job.chosen, job.plan
    count = len(chosen.documents)
    of = f" (of {chosen.found}: the others would take too long, see --max-files)" if chosen.found > count else ""
    job.screen.say(f"{count} notes from {chosen.source}{of}, and one file that no handler can read")
    job.screen.say(
        f"{limits.calls} calls to {job.provider.name}, which allows {limits.requests_per_minute} calls and "
        f"{limits.tokens_per_minute} tokens a minute: this takes {max(limits.calls / limits.requests_per_minute, 0.1):.1f} minutes"
    )


def _conclude(options: Options, screen: Screen, outcome: Outcome | None) -> int:
    if outcome is None:
        screen.say("Stopped by a signal: the actors have drained and ended")
        return EXIT_INTERRUPTED
    screen.notes(outcome.found)
    screen.table(outcome.found)
    screen.failures(outcome.tasks)
    for problem in outcome.problems:
        screen.say(f"PROBLEM: {problem}")
    if options.as_json:
        click.echo(msgspec.json.encode(outcome.found))
    return 1 if outcome.problems else 0
