"""A whole Millstream as real processes: one for each actor, against a real server, seen over HTTP."""

from __future__ import annotations

import json
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import nats

from millstream.client import Client
from millstream.connecting import open_broker
from millstream.settings import Settings, build
from millstream_schemas.codec import decode_event
from millstream_schemas.lifecycle import TERMINAL_KINDS
from millstream_schemas.names import DEFAULT_PREFIX
from tests.support.processes import ActorProcess, Processes
from tests.support.waiting import wait_until, wait_until_sync

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from nats.aio.client import Client as NatsClient

    from millstream.ports import Broker, Record
    from millstream.server import LocalServer

HANDLERS = "tests.support.handlers:app"
READY = '"http"'


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Fleet:
    """Starts actors with one configuration and asks what became of tasks."""

    def __init__(
        self,
        server: LocalServer,
        processes: Processes,
        folder: Path,
        *,
        lease_s: float = 2.0,
        config: str = "",
        prefix: str = DEFAULT_PREFIX,
    ) -> None:
        self.server = server
        self.processes = processes
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.effects_path = folder / "effects.jsonl"
        self.data_dir = folder / "data"
        self.config_path = folder / "millstream.toml"
        self.config_path.write_text(config, encoding="utf-8")
        self.env = {
            "MILLSTREAM_NATS_URL": server.url,
            "MILLSTREAM_LEASE": f"{lease_s}s",
            "MILLSTREAM_HTTP_PORT": str(self.port),
            "MILLSTREAM_DATA_DIR": str(self.data_dir),
            "MILLSTREAM_EFFECTS": str(self.effects_path),
            "MILLSTREAM_GRACE": "5s",
            "MILLSTREAM_PREFIX": prefix,
        }
        self.settings: Settings = build({"nats": {"url": server.url, "prefix": prefix}, "lease_s": lease_s})
        self.names = self.settings.names
        self.actors: dict[str, ActorProcess] = {}

    # --- actors ---

    def start(self, *args: str, env: Mapping[str, str] | None = None, name: str | None = None) -> ActorProcess:
        """Run one command of ours with the fleet's configuration."""
        return self.processes.start(
            "--config", str(self.config_path), *args, name=name or args[0], env={**self.env, **(env or {})}
        )

    def dispatcher(self, env: Mapping[str, str] | None = None) -> ActorProcess:
        actor = self.start("dispatcher", env=env)
        actor.wait_for_log("actor.started")
        return actor

    def governor(self) -> ActorProcess:
        actor = self.start("governor")
        actor.wait_for_log("actor.started")
        return actor

    def tracker(self) -> ActorProcess:
        actor = self.start("tracker")
        actor.wait_for_log(READY)
        return actor

    def worker(
        self,
        concurrency: int = 10,
        env: Mapping[str, str] | None = None,
        queues: str | None = None,
        app: str = HANDLERS,
    ) -> ActorProcess:
        more = ["--queues", queues] if queues else []
        actor = self.start("worker", app, "--concurrency", str(concurrency), *more, env=env)
        actor.wait_for_log("actor.started")
        return actor

    def all(self, concurrency: int = 10) -> dict[str, ActorProcess]:
        """One process of each actor."""
        return {
            "dispatcher": self.dispatcher(),
            "governor": self.governor(),
            "tracker": self.tracker(),
            "worker": self.worker(concurrency),
        }

    def all_at_once(self, concurrency: int = 10) -> dict[str, ActorProcess]:
        """One process of each actor, the dispatcher first (it declares the topology), the others side by side."""
        actors = {"dispatcher": self.dispatcher()}
        actors["governor"] = self.start("governor")
        actors["tracker"] = self.start("tracker")
        actors["worker"] = self.start("worker", HANDLERS, "--concurrency", str(concurrency))
        for name, actor in actors.items():
            actor.wait_for_log(READY if name == "tracker" else "actor.started")
        self.actors = actors
        return actors

    def cli(self, *args: str) -> str:
        """Run a command that asks the tracker, to its good end; returns what it printed."""
        return self.processes.run(*args, env={**self.env, "MILLSTREAM_HTTP_URL": self.url})

    # --- a client of ours ---

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client]:
        """A connected client, as an application has it."""
        async with Client.open(self.server.url, settings=self.settings) as client:
            yield client

    # --- a plain client, as a producer in any language would be ---

    @asynccontextmanager
    async def plain(self) -> AsyncGenerator[NatsClient]:
        """A bare NATS client, with none of our code."""

        async def quiet(_: Exception) -> None:
            return

        client = await nats.connect(self.server.url, max_reconnect_attempts=-1, error_cb=quiet)
        try:
            yield client
        finally:
            await client.close()

    async def submit(
        self,
        client: NatsClient,
        task: Mapping[str, Any] | bytes,
        tenant: str = "acme",
        queue: str = "agent-run",
        headers: dict[str, Any] | None = None,
    ) -> int:
        """Publish an envelope and return its INBOX sequence."""
        body = task if isinstance(task, bytes) else json.dumps(task).encode()
        ack = await client.jetstream().publish(f"{self.names.prefix}.submit.{tenant}.{queue}", body, headers=headers)
        return ack.seq

    @asynccontextmanager
    async def broker(self) -> AsyncGenerator[Broker]:
        """A broker of ours, to read the streams with."""
        broker = await open_broker(self.settings, "test")
        try:
            yield broker
        finally:
            await broker.close()

    # --- what became of tasks ---

    async def get(self, path: str, **params: Any) -> httpx.Response:
        """One request to the tracker."""
        async with httpx.AsyncClient(base_url=self.url, timeout=10) as client:
            return await client.get(path, params=params)

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """One command to the tracker."""
        async with httpx.AsyncClient(base_url=self.url, timeout=40) as client:
            return await client.post(path, json=body, **kwargs)

    async def task(self, task_id: str, tenant: str | None = None) -> dict[str, Any] | None:
        """A task as HTTP shows it, None where it is not (yet) known, or the tracker is down or not ready."""
        try:
            answer = await self.get(f"/v1/tasks/{task_id}", **({"tenant": tenant} if tenant else {}))
        except httpx.HTTPError:
            return None
        if answer.status_code == 404 or answer.status_code >= 500:
            return None
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def wait_for(
        self, task_id: str, *states: str, tenant: str | None = None, timeout: float = 30.0
    ) -> dict[str, Any]:
        """Wait until a task is in one of `states`."""

        async def reached() -> dict[str, Any] | None:
            found = await self.task(task_id, tenant)
            return found if found is not None and found["state"] in states else None

        return await wait_until(reached, f"task {task_id} is {' or '.join(states)}", timeout)

    async def life(self, broker: Broker) -> dict[str, list[tuple[str, Record]]]:
        """Every event of every task, by key, read from the stream."""
        lives: dict[str, list[tuple[str, Record]]] = defaultdict(list)
        feed = await broker.feed(self.names.events_stream, [self.names.event_filter], 0)
        try:
            while records := await feed.take(1000, 0.5):
                for record in records:
                    address = self.names.parse_event(record.subject)
                    lives[address.key].append((address.kind, record))
        finally:
            await feed.close()
        return lives

    async def outcomes(self, broker: Broker) -> dict[str, Counter[str]]:
        """For each task id, how many terminal events of each kind the stream holds, over all keys that name it."""
        found: dict[str, Counter[str]] = {}
        for events in (await self.life(broker)).values():
            if events[0][0] == "alias":
                continue
            task_id = decode_event(events[0][1].body).card.task_id
            found.setdefault(task_id, Counter()).update(kind for kind, _ in events if kind in TERMINAL_KINDS)
        return found

    def effects(self) -> list[dict[str, Any]]:
        """What the handlers wrote, one entry an execution's start or end."""
        if not self.effects_path.exists():
            return []
        return [json.loads(line) for line in self.effects_path.read_text("utf-8").splitlines()]

    def starts(self, task_id: str | None = None) -> list[dict[str, Any]]:
        """The executions that began, of one task or of all."""
        return [
            entry
            for entry in self.effects()
            if entry["what"] == "start" and (task_id is None or entry["task_id"] == task_id)
        ]

    def wait_for_starts(self, count: int, task_ids: Sequence[str] = (), timeout: float = 30.0) -> None:
        """Wait until so many executions began."""

        def enough() -> bool:
            starts = self.starts()
            return len([one for one in starts if not task_ids or one["task_id"] in task_ids]) >= count

        wait_until_sync(enough, f"{count} executions began", timeout)
