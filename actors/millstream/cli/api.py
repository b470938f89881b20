"""The tracker over HTTP, as commands use it: JSON in and out, errors that say what to do, streams that resume."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import quote, urlsplit

import click
import msgspec

from millstream.cli.output import Json, inert
from millstream.errors import CallerError, MillstreamError, NoAnswer, TaskNotFound
from millstream.settings import DEFAULT_HTTP_PORT, NatsSettings, Settings, load

if TYPE_CHECKING:
    import httpx

F = TypeVar("F", bound=Callable[..., Any])
Query = Mapping[str, "str | int | Sequence[str] | None"]

URL_VARIABLE: Final = "MILLSTREAM_HTTP_URL"
TIMEOUT_S: Final = 15.0
SILENCE_S: Final = 45.0
"""A stream that says nothing for so long, not even that it lives, is opened anew."""
PATIENCE_S: Final = 60.0
"""How long a stream that broke is tried again."""
RESUME_S: Final = 0.5
CONNECT_S: Final = 5.0
"""How long a command waits for a NATS server, unless the settings say otherwise."""
PAGE: Final = 200


def http_url(command: F) -> F:
    """The option `--http-url`."""
    text = f"Address of the tracker; default {URL_VARIABLE} or http://127.0.0.1:{DEFAULT_HTTP_PORT}."
    return click.option("--http-url", help=text)(command)


def tenant_option(command: F) -> F:
    """The option `--tenant`."""
    return click.option("--tenant", help="Whose task; default: the newest of this id.")(command)


def settings_of(ctx: click.Context, **flags: Any) -> Settings:
    """The settings of a command that does one thing and ends: it does not wait long for a server."""
    settings = load(cast("Path | None", ctx.obj), os.environ, flags)
    if settings.nats.connect_timeout_s != NatsSettings().connect_timeout_s:
        return settings
    return msgspec.structs.replace(settings, nats=msgspec.structs.replace(settings.nats, connect_timeout_s=CONNECT_S))


def base_url(ctx: click.Context, given: str | None) -> str:
    """The tracker's address: the flag, the environment, else where the settings have a tracker listen."""
    chosen = given or os.environ.get(URL_VARIABLE)
    if chosen is None:
        tracker = load(cast("Path | None", ctx.obj), os.environ).tracker
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(tracker.host, tracker.host)  # noqa: S104 - what to call, not to bind
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{tracker.port or DEFAULT_HTTP_PORT}"
    chosen = chosen.rstrip("/") if "://" in chosen else f"http://{chosen.rstrip('/')}"
    if urlsplit(chosen).scheme not in ("http", "https") or not urlsplit(chosen).hostname:
        raise CallerError(
            f"Expected an address such as http://127.0.0.1:{DEFAULT_HTTP_PORT}, got `{inert(given, 200)}`"
        )
    return chosen


@contextmanager
def open_tracker(ctx: click.Context, given: str | None) -> Generator[Tracker, None, None]:
    """The tracker of this command, closed at the end of the block."""
    import httpx

    url = base_url(ctx, given)
    # A proxy of the environment cannot reach what listens on this machine alone.
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=not _is_loopback(url)) as client:
        yield Tracker(url, client)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class ServerSent:
    """One event of a stream: `task`, `info`, `reset` (what followed is gone: read anew), `bye`, or `position`."""

    id: int | None
    """The sequence to resume after."""
    event: str
    data: Json


@dataclass(frozen=True, slots=True)
class Tracker:
    """Calls to one tracker.

    Raises NoAnswer where nothing answers, TaskNotFound for 404, CallerError for what was asked wrongly, and
    MillstreamError for all else.
    """

    url: str
    client: httpx.Client

    def get(self, path: str, query: Query | None = None) -> Json:
        """The JSON of one GET."""
        return self._call("GET", path, query, None)

    def post(self, path: str, body: object = None, query: Query | None = None) -> Json:
        """The JSON of one POST."""
        return self._call("POST", path, query, body)

    def items(self, path: str, query: Query | None = None) -> Iterator[Json]:
        """All items of a listing, page after page."""
        cursor: str | None = None
        while True:
            page = self.get(path, {**(query or {}), "limit": PAGE, "cursor": cursor})
            yield from page["items"]
            cursor = page.get("next")
            if not cursor:
                return

    def follow(self, query: Query, after: int | None = None) -> Iterator[ServerSent]:
        """The events of `/v1/stream` after a sequence, for ever; a stream that breaks is resumed where it was.

        A stream that ended with a `reset` begins anew with another: what happened between the two is not in it.
        Raises NoAnswer once the tracker has been away for a minute.
        """
        lost_at: float | None = None
        answered, missed = False, False
        while True:
            try:
                for event in self._stream("/v1/stream", query, after):
                    answered, lost_at = True, None
                    if event is None:
                        continue
                    if missed and event.event == "position":
                        event = ServerSent(event.id, "reset", event.data)  # noqa: PLW2901 - told as what it means here
                        after, missed = event.id, False
                    elif event.event == "reset":
                        after, missed = None, True
                    else:
                        after = event.id or after
                    yield event
            except CallerError:
                raise
            except MillstreamError:
                if not answered or (lost_at is not None and time.monotonic() - lost_at > PATIENCE_S):
                    raise
            lost_at = lost_at or time.monotonic()
            time.sleep(RESUME_S)

    def headers(self, path: str) -> Mapping[str, str]:
        """The headers of an answer, whatever its status."""
        return dict(self._send("GET", path, None, None).headers)

    def _call(self, method: str, path: str, query: Query | None, body: object) -> Json:
        return _document(self._send(method, path, query, body), self.url)

    def _send(self, method: str, path: str, query: Query | None, body: object) -> httpx.Response:
        import httpx

        try:
            return self.client.request(method, path, params=_params(query), json=body)
        except httpx.HTTPError as error:
            raise no_tracker(self.url, error) from None

    def _stream(self, path: str, query: Query, after: int | None) -> Iterator[ServerSent | None]:
        """None once the stream is open, then its events."""
        import httpx

        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = str(after)
        timeout = httpx.Timeout(TIMEOUT_S, read=SILENCE_S)
        try:
            with self.client.stream("GET", path, params=_params(query), headers=headers, timeout=timeout) as response:
                if response.status_code != 200:
                    response.read()
                    _document(response, self.url)
                yield None
                yield from parse_events(response.iter_bytes())
        except httpx.HTTPError as error:
            raise no_tracker(self.url, error) from None


def quoted(text: str) -> str:
    """`text` as one segment of a path."""
    return quote(text, safe="")


def task_path(ident: str, tail: str = "") -> str:
    """Where one task lies, whatever characters its id has."""
    return f"/v1/tasks/{quoted(ident)}{tail}"


def no_tracker(url: str, error: Exception) -> NoAnswer:
    """What to tell a person whose tracker does not answer."""
    from httpx import ConnectError

    if isinstance(error, ConnectError):
        start = "start it with `millstream up` or `millstream tracker`, or give --http-url"
        return NoAnswer(f"no tracker answers at {url}: {start}")
    return NoAnswer(f"the tracker at {url} did not answer: {inert(error, 200) or type(error).__name__}")


def parse_events(chunks: Iterator[bytes]) -> Iterator[ServerSent]:
    """Server-sent events of a byte stream; what holds no JSON object is skipped.

    Lines end at LF, CR or CRLF alone: a text may hold what other splitters take for the end of a line.
    """
    buffer = b""
    for chunk in chunks:
        buffer = (buffer + chunk).replace(b"\r\n", b"\n")
        *blocks, buffer = buffer.split(b"\n\n")
        for block in blocks:
            event = _parse_block(block)
            if event is not None:
                yield event


def _parse_block(block: bytes) -> ServerSent | None:
    fields: dict[bytes, list[bytes]] = {}
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        fields.setdefault(name, []).append(value.removeprefix(b" "))
    number = fields.get(b"id", [b""])[-1]
    seq = int(number) if number.isdigit() and len(number) < 20 else None
    if b"data" not in fields:
        return None if seq is None else ServerSent(seq, "position", {})
    try:
        data = msgspec.json.decode(b"\n".join(fields[b"data"]), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return ServerSent(seq, fields.get(b"event", [b"message"])[-1].decode("utf-8", "replace"), data)


def _params(query: Query | None) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    for name, value in (query or {}).items():
        if isinstance(value, str | int):
            pairs.append((name, str(value)))
        elif value is not None:
            pairs += [(name, each) for each in value]
    return tuple(pairs)


def _document(response: httpx.Response, url: str) -> Json:
    try:
        body = msgspec.json.decode(response.content, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        body = None
    if response.is_success and body is not None:
        return body
    if body is None or "code" not in body:
        raise NoAnswer(f"what answers at {url} is no Millstream tracker (HTTP {response.status_code}): give --http-url")
    raise problem_error(response.status_code, body)


def problem_error(status: int, problem: Json) -> MillstreamError:
    """A problem of the tracker as an exception; what was asked wrongly ends with exit status 2, all else with 1."""
    lines = [inert(problem.get("detail") or problem.get("title") or "the tracker refused", 1000)]
    lines[0] += f" ({inert(problem.get('code'), 64)}, HTTP {status})"
    for fault in problem.get("errors") or ():
        detail = inert(fault.get("detail"), 500)
        if detail and detail not in lines[0]:
            lines.append(f"  {inert(fault.get('pointer'), 200)}: {detail}")
    if problem.get("retry_after"):
        lines.append(f"  try again in {inert(problem['retry_after'], 20)} s")
    if problem.get("trace_id"):
        lines.append(f"  trace {inert(problem['trace_id'], 64)}")
    text = "\n".join(lines)
    if status == 404:
        return TaskNotFound(text)
    return CallerError(text) if status in (400, 405, 413, 422) else MillstreamError(text)
