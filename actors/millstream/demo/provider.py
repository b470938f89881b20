"""Where the demo's calls go: a model server of its own, as a process, or the endpoint that the environment names."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
import msgspec

from millstream.demo.documents import Plan
from millstream.demo.notes import Model, model_of
from millstream.demo.openai_client import ModelError, ModelThrottled, OpenAIClient, Usage
from millstream.demo.sliding import Stats
from millstream.errors import MillstreamError

_START_S = 30.0
_STOP_S = 5.0
_OK, _THROTTLED = 200, 429

T = TypeVar("T")


class ModelServerFailed(MillstreamError):
    """The local model server did not start."""


class Calls(msgspec.Struct, frozen=True):
    """What the provider counted."""

    calls: int = 0
    status_429: int = 0
    status_500: int = 0
    max_calls_in_any_minute: int = 0


@dataclass(frozen=True)
class Provider:
    """The model of a run, and how to learn what it was asked."""

    name: str
    model: Model
    counted: Callable[[], Awaitable[Calls]]
    flaky: bool
    """Whether it is known to answer 500 now and then."""


@dataclass
class Counted:
    """A model whose calls are counted on our side, for an endpoint that tells nobody what it saw."""

    model: Model
    stats: Stats = field(default_factory=Stats)

    async def summarize(self, text: str) -> tuple[str, Usage]:
        """As the model does."""
        return await self._count(self.model.summarize(text))

    async def embed(self, text: str) -> tuple[list[float], Usage]:
        """As the model does."""
        return await self._count(self.model.embed(text))

    async def calls(self) -> Calls:
        """What was counted so far."""
        return msgspec.convert(self.stats.snapshot(), Calls)

    async def _count(self, call: Awaitable[T]) -> T:
        self.stats.arrived(time.monotonic())
        status = _OK
        try:
            return await call
        except ModelThrottled:
            status = _THROTTLED
            raise
        except ModelError as error:
            status = error.status
            raise
        finally:
            self.stats.answered(status)


@contextlib.contextmanager
def provider(plan: Plan, environ: Mapping[str, str]) -> Generator[Provider]:
    """The endpoint of OPENAI_BASE_URL, else a local model server that enforces the plan's limits."""
    client = model_of(environ)
    if client is not None:
        counted = Counted(client)
        yield Provider(environ["OPENAI_BASE_URL"], counted, counted.calls, flaky=False)
        return
    http = httpx.AsyncClient(trust_env=False)  # a proxy of the environment cannot reach what listens on loopback
    with _model_server(plan) as (url, base_url):

        async def ask() -> Calls:
            answer = await http.get(f"{url}/stats", timeout=5.0)
            return msgspec.json.decode(answer.content, type=Calls)

        yield Provider(f"a local model server at {base_url}", OpenAIClient(base_url, http=http), ask, flaky=True)


@contextlib.contextmanager
def _model_server(plan: Plan) -> Generator[tuple[str, str]]:
    """The model server as a process of its own; its URL and that of its API."""
    options = {
        "--port": 0,
        "--requests-per-minute": plan.requests_per_minute,
        "--tokens-per-minute": plan.tokens_per_minute,
        "--error-every": plan.error_every,
    }
    command = [sys.executable, "-m", "millstream.demo.modelserver"]
    command += [str(part) for option in options.items() for part in option]
    # A session of its own: Ctrl-C reaches the actors first, which drain while the model still answers.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield _address(process)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _address(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _START_S)
    line = process.stdout.readline() if ready else b""
    if not line:
        raise ModelServerFailed("the local model server did not start")
    told = json.loads(line)
    return told["url"], told["base_url"]
