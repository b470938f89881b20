"""A small OpenAI-compatible model server for the demo: `python -m millstream.demo.modelserver --port 0`.

It summarises and embeds for real (`text.py`), enforces its limits for real, and fails now and then. Its first line on
stdout is JSON: `{"url", "base_url", "port", "pid"}`. It counts every call, so that what the demo reports is what the
provider saw. It ends on SIGTERM, and when its parent ends.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from millstream.demo import bundled_texts
from millstream.demo.sliding import MINUTE_S, SlidingWindow, Stats
from millstream.demo.text import DEFAULT_DIMS, embed, estimate_tokens, summarize, term_rarity

_MAX_DIMS = 4096
_PARENT_POLL_S = 0.25
_GRACE_S = 1

T = TypeVar("T")
Lifespan = Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]


class ModelServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the server allows and how it behaves; a limit of 0 is no limit, `error_every` 0 is no errors."""

    requests_per_minute: int = 60
    tokens_per_minute: int = 100_000
    window_s: float = MINUTE_S
    error_every: int = 0
    latency_min_s: float = 0.05
    latency_max_s: float = 0.2
    seed: int = 0


class _Part(msgspec.Struct, frozen=True):
    text: str = ""


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] = ""

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatRequest(msgspec.Struct, frozen=True):
    """The part of a chat completion request that this server reads."""

    model: str
    messages: list[_Message]


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """The part of an embeddings request that this server reads."""

    model: str
    input: str | list[str]
    dimensions: int = DEFAULT_DIMS


class ModelServer:
    """The endpoints. Calls that were let in are charged when they arrive, failed ones too; refused ones are not."""

    def __init__(self, settings: ModelServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = Stats()
        self._settings = settings
        self._clock = clock
        self._requests = SlidingWindow(settings.requests_per_minute, settings.window_s)
        self._tokens = SlidingWindow(settings.tokens_per_minute, settings.window_s)
        self._let_in = 0
        self._latency = random.Random(settings.seed)
        self._rarity = term_rarity(bundled_texts().values())

    def app(self, lifespan: Lifespan | None = None) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            lifespan=lifespan,
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/embeddings", self._embeddings, methods=["POST"]),
                Route("/stats", self._show_stats),
            ],
        )

    async def _show_stats(self, _request: Request) -> Response:
        return JSONResponse(self.stats.snapshot())

    async def _chat(self, request: Request) -> Response:
        return await self._serve(request, ChatRequest, self._complete)

    async def _embeddings(self, request: Request) -> Response:
        return await self._serve(request, EmbeddingRequest, self._embed)

    async def _serve(self, request: Request, kind: type[T], answer: Callable[[T], dict[str, Any]]) -> Response:
        """Take one call through arrival, decoding, limits, latency and answer."""
        self.stats.arrived(self._clock())
        try:
            body = answer(msgspec.json.decode(await request.body(), type=kind))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            response = _error(400, "invalid_request_error", "invalid_request", str(error))
        else:
            response = self._refusal(self._clock(), body["usage"]["total_tokens"]) or await self._work(body)
        response.headers.update(self._limit_headers(self._clock()))
        self.stats.answered(response.status_code)
        return response

    def _refusal(self, now: float, tokens: int) -> Response | None:
        """Charge the call to both limits, or to none and return the 429; a call over the limit itself gets a 400."""
        waits = {"requests": self._requests.wait_s(now, 1), "tokens": self._tokens.wait_s(now, tokens)}
        what = max(waits, key=lambda name: waits[name])
        if math.isinf(waits[what]):
            limit = self._settings.tokens_per_minute
            message = f"This call needs {tokens} tokens, the limit is {limit} per minute."
            return _error(400, "invalid_request_error", "context_length_exceeded", message)
        if waits[what] > 0:
            return _throttled(what, waits[what])
        self._requests.take(now, 1)
        self._tokens.take(now, tokens)
        self.stats.tokens += tokens
        return None

    async def _work(self, body: dict[str, Any]) -> Response:
        self._let_in += 1
        number = self._let_in
        await asyncio.sleep(self._latency.uniform(self._settings.latency_min_s, self._settings.latency_max_s))
        if self._settings.error_every and number % self._settings.error_every == 0:
            return _error(500, "server_error", None, "The server had an error while processing your request.")
        return JSONResponse({"id": f"local-{number}", "created": int(time.time())} | body)

    def _complete(self, call: ChatRequest) -> dict[str, Any]:
        note = "\n\n".join(message.text for message in call.messages if message.role == "user")
        if not note.strip():
            raise ValueError("Expected a user message with text - at `$.messages`")
        summary = summarize(note)
        usage = _usage(sum(estimate_tokens(message.text) for message in call.messages), estimate_tokens(summary))
        choice = {"index": 0, "message": {"role": "assistant", "content": summary}, "finish_reason": "stop"}
        return {"object": "chat.completion", "model": call.model, "choices": [choice], "usage": usage}

    def _embed(self, call: EmbeddingRequest) -> dict[str, Any]:
        if not 1 <= call.dimensions <= _MAX_DIMS:
            raise ValueError(f"Expected 1 to {_MAX_DIMS}, got {call.dimensions} - at `$.dimensions`")
        texts = [call.input] if isinstance(call.input, str) else call.input
        data = [
            {"object": "embedding", "index": i, "embedding": embed(text, call.dimensions, self._rarity)}
            for i, text in enumerate(texts)
        ]
        usage = _usage(sum(map(estimate_tokens, texts)), 0)
        return {"object": "list", "model": call.model, "data": data, "usage": usage}

    def _limit_headers(self, now: float) -> dict[str, str]:
        headers: dict[str, str] = {}
        limits = (
            ("requests", self._requests, self._settings.requests_per_minute),
            ("tokens", self._tokens, self._settings.tokens_per_minute),
        )
        for name, window, limit in limits:
            if limit > 0:
                headers[f"x-ratelimit-limit-{name}"] = str(limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(limit - window.used(now))
                headers[f"x-ratelimit-reset-{name}"] = f"{window.full_refill_s(now):.3f}s"
        return headers


def _usage(tokens_in: int, tokens_out: int) -> dict[str, int]:
    return {"prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}


def _throttled(what: str, wait_s: float) -> Response:
    message = f"Rate limit reached for {what} per minute. Please try again in {wait_s:.3f}s."
    response = _error(429, what, "rate_limit_exceeded", message)
    response.headers["retry-after"] = str(math.ceil(wait_s))
    response.headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
    return response


def _error(status: int, kind: str, code: str | None, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


@contextlib.asynccontextmanager
async def watching_parent(parent_pid: int) -> AsyncGenerator[None]:
    """End this process by SIGTERM once its parent is no longer `parent_pid`.

    Asked again and again instead of by Linux's parent-death signal, which follows the *thread* that started us.
    """

    async def watch() -> None:
        while os.getppid() == parent_pid:  # noqa: ASYNC110 - nothing else tells of a parent's end on every system
            await asyncio.sleep(_PARENT_POLL_S)
        signal.raise_signal(signal.SIGTERM)

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch())
        yield
        watcher.cancel()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM, or until the parent ends; exit status 0 for both."""
    options = _parser().parse_args(argv)
    server = ModelServer(_settings(options))
    listener = socket.create_server((options.host, options.port), backlog=128)
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"
    ready = json.dumps({"url": url, "base_url": f"{url}/v1", "port": port, "pid": os.getpid()})

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        async with watching_parent(options.parent_pid):
            sys.stdout.write(ready + "\n")
            sys.stdout.flush()
            _write(options.port_file, ready)
            yield
        _write(options.stats_file, json.dumps(server.stats.snapshot()))

    # uvicorn raises the signal once more after its own clean end: that is where this handler takes over.
    signal.signal(signal.SIGTERM, _leave)
    config = uvicorn.Config(
        server.app(lifespan), lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE_S
    )
    uvicorn.Server(config).run(sockets=[listener])


def _leave(_signal: int, _frame: object) -> None:
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    usual = ModelServerSettings()
    parser = argparse.ArgumentParser(
        prog="python -m millstream.demo.modelserver", description="A local OpenAI-compatible model server."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--requests-per-minute", type=int, default=usual.requests_per_minute, help="0 is no limit")
    parser.add_argument("--tokens-per-minute", type=int, default=usual.tokens_per_minute, help="0 is no limit")
    parser.add_argument("--window-s", type=float, default=usual.window_s, help="the limits' minute, for tests")
    parser.add_argument("--error-every", type=int, default=usual.error_every, help="every K-th call let in answers 500")
    parser.add_argument("--latency-min-ms", type=float, default=usual.latency_min_s * 1000)
    parser.add_argument("--latency-max-ms", type=float, default=usual.latency_max_s * 1000)
    parser.add_argument("--seed", type=int, default=usual.seed, help="of the latencies")
    parser.add_argument("--port-file", type=Path, help="gets the first line of stdout too")
    parser.add_argument("--stats-file", type=Path, help="gets the counts of /stats at the end")
    parser.add_argument("--parent-pid", type=int, default=os.getppid(), help="ends when this is no longer the parent")
    return parser


def _settings(options: argparse.Namespace) -> ModelServerSettings:
    return ModelServerSettings(
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
        window_s=options.window_s,
        error_every=options.error_every,
        latency_min_s=options.latency_min_ms / 1000,
        latency_max_s=options.latency_max_ms / 1000,
        seed=options.seed,
    )


def _write(path: Path | None, text: str) -> None:
    """Write a file that readers see whole or not at all."""
    if path is not None:
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)


if __name__ == "__main__":
    main()
