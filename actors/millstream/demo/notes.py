"""The notes application: each note is summarised, embedded and related to the others, one task after the other.

All three kinds call the model once and share the limit `llm`. `build` gives the App; `from_environment` one that
calls the endpoint of OPENAI_BASE_URL, for a worker of its own.
"""

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from millstream.app import App
from millstream.context import Context
from millstream.demo.documents import Unreadable, read_text
from millstream.demo.openai_client import (
    DEFAULT_CHAT_MODEL,
    DEFAULT_EMBEDDING_MODEL,
    ModelError,
    ModelThrottled,
    OpenAIClient,
    Usage,
)
from millstream.demo.text import cosine, estimate_tokens, split_sentences
from millstream.errors import CallerError, Fatal, Retry, Throttled

QUEUE = "agent-run"
LIMIT = "llm"
SUMMARIZE, EMBED, RELATE = KINDS = ("notes.summarize", "notes.embed", "notes.relate")

TIMEOUT = "2m"
RELATED_AT_MOST = 3
RELATED_FROM = 0.05
EXCERPT_CHARS = 300
PROMPT_TOKENS = 100
SUMMARY_TOKENS = 500

T = TypeVar("T")


class Model(Protocol):
    """What the handlers ask for; raises ModelThrottled and ModelError."""

    async def summarize(self, text: str) -> tuple[str, Usage]: ...

    async def embed(self, text: str) -> tuple[list[float], Usage]: ...


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A file to summarise: the payload of `notes.summarize`."""

    path: str
    title: str


class Summarized(msgspec.Struct, frozen=True, kw_only=True):
    """A note with its summary: the result of `notes.summarize`, and the payload of the two that follow."""

    path: str
    title: str
    summary: str


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `notes.embed`, with what a reader of another note is told about this one."""

    path: str
    title: str
    summary: str
    vector: list[float]


class Related(msgspec.Struct, frozen=True, kw_only=True):
    """Another note, and how close it is: the cosine of both embeddings."""

    path: str
    title: str
    score: float


class Relation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `notes.relate`: the notes closest to this one, and one sentence of the model about them."""

    path: str
    title: str
    summary: str
    related: list[Related]
    remark: str


class Shelf:
    """The embeddings known so far: one file each, written whole or not at all, shared by any number of workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, embedding: Embedding) -> None:
        """Keep an embedding; a second one of the same note replaces the first."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{hashlib.sha256(embedding.path.encode()).hexdigest()[:32]}.json"
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.encode(embedding))
        part.replace(path)

    def all(self) -> list[Embedding]:
        """All embeddings, in the order of their notes' paths."""
        found = [msgspec.json.decode(path.read_bytes(), type=Embedding) for path in self._folder.glob("*.json")]
        return sorted(found, key=lambda embedding: embedding.path)


def build(model: Model, shelf: Shelf) -> App:
    """The app with its three handlers, chained from the last to the first."""
    app = App("notes")

    @app.task(RELATE, queue=QUEUE, limits=[LIMIT], timeout=TIMEOUT)
    async def relate(ctx: Context, note: Summarized) -> Relation:
        return await _relate(ctx, note, model, shelf)

    @app.task(EMBED, queue=QUEUE, limits=[LIMIT], timeout=TIMEOUT)
    async def embed(ctx: Context, note: Summarized) -> Embedding:
        text = await _text(note.path)
        ctx.progress(0.2, "asking for an embedding")
        vector = await _ask(ctx, model.embed(text))
        vector = [round(x, 6) for x in vector]
        embedding = Embedding(path=note.path, title=note.title, summary=note.summary, vector=vector)
        await asyncio.to_thread(shelf.put, embedding)
        tokens_in = estimate_tokens(note.summary) + RELATED_AT_MOST * EXCERPT_CHARS
        await ctx.spawn(relate, note, **_options(ctx, tokens_in=tokens_in))
        return embedding

    @app.task(SUMMARIZE, queue=QUEUE, limits=[LIMIT], timeout=TIMEOUT)
    async def summarize(ctx: Context, note: Note) -> Summarized:
        text = await _text(note.path)
        ctx.progress(0.2, "asking for a summary")
        summary = await _ask(ctx, model.summarize(text))
        summarized = Summarized(path=note.path, title=note.title, summary=summary)
        await ctx.spawn(embed, summarized, **_options(ctx, tokens_in=estimate_tokens(text), tokens_out=0))
        return summarized

    return app


def from_environment(environ: Mapping[str, str] = os.environ) -> App:
    """The app for the endpoint of OPENAI_BASE_URL and OPENAI_API_KEY; embeddings lie in NOTES_DIR.

    Raises CallerError where OPENAI_BASE_URL is not set.
    """
    model = model_of(environ)
    if model is None:
        raise CallerError("set OPENAI_BASE_URL to the endpoint that the notes application is to call")
    return build(model, Shelf(Path(environ.get("NOTES_DIR", ".notes"))))


def model_of(environ: Mapping[str, str]) -> OpenAIClient | None:
    """A client for the endpoint that the environment names, None where it names none."""
    base_url = environ.get("OPENAI_BASE_URL")
    if not base_url:
        return None
    return OpenAIClient(
        base_url,
        environ.get("OPENAI_API_KEY", ""),
        chat_model=environ.get("OPENAI_MODEL", DEFAULT_CHAT_MODEL),
        embedding_model=environ.get("OPENAI_EMBEDDING_MODEL", DEFAULT_EMBEDDING_MODEL),
    )


async def _relate(ctx: Context, note: Summarized, model: Model, shelf: Shelf) -> Relation:
    """Compare with what is known by now; a note that comes later finds this one in its turn."""
    known = await asyncio.to_thread(shelf.all)
    related = closest(note.path, known)
    ctx.progress(0.3, f"comparing with {len(known) - 1} notes")
    near = {other.path for other in related}
    excerpts = [other.summary[:EXCERPT_CHARS] for other in known if other.path in near]
    answer = await _ask(ctx, model.summarize("\n\n".join([note.summary, *excerpts])))
    sentences = split_sentences(answer)
    return Relation(
        path=note.path,
        title=note.title,
        summary=note.summary,
        related=related,
        remark=sentences[0] if sentences else answer,
    )


def closest(path: str, known: list[Embedding]) -> list[Related]:
    """The notes closest to the one at `path`, closest first."""
    own = next((embedding.vector for embedding in known if embedding.path == path), None)
    if own is None:
        return []
    scored = [
        Related(path=other.path, title=other.title, score=round(cosine(own, other.vector), 3))
        for other in known
        if other.path != path and len(other.vector) == len(own)
    ]
    near = [related for related in scored if related.score >= RELATED_FROM]
    return sorted(near, key=lambda related: -related.score)[:RELATED_AT_MOST]


async def _text(path: str) -> str:
    """The text of a note; what cannot be read now will not be readable later either."""
    try:
        return await asyncio.to_thread(read_text, Path(path))
    except Unreadable as error:
        raise Fatal(str(error)) from None


async def _ask(ctx: Context, call: Awaitable[tuple[T, Usage]]) -> T:
    """One call of the model; says to Millstream what its failure means, and what it cost."""
    try:
        answer, used = await call
    except ModelThrottled as error:
        raise Throttled(error.retry_after_s, str(error)) from error
    except ModelError as error:
        if error.retryable:
            raise Retry(reason=str(error)) from error
        raise Fatal(str(error)) from error
    ctx.usage(tokens_in=used.tokens_in, tokens_out=used.tokens_out)
    ctx.progress(0.9, "answered")
    return answer


def estimate(tokens_in: int, tokens_out: int = SUMMARY_TOKENS) -> dict[str, int]:
    """What a call reserves at the governor: an upper bound, corrected once the call has ended."""
    return {"tokens_in": tokens_in + PROMPT_TOKENS, "tokens_out": tokens_out}


def _options(ctx: Context, tokens_in: int, tokens_out: int = SUMMARY_TOKENS) -> dict[str, Any]:
    """How the next task of a note is submitted: under the same title, with what it is likely to use."""
    task = ctx.task
    return {"title": task.title, "tags": list(task.tags), "usage_estimate": estimate(tokens_in, tokens_out)}
