"""An HTTP client that reports what the answers say, and leaves them as they are."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import httpx

from millstream.providers.classifying import Classified, classify

Report = Callable[[httpx.Response, Classified, float], None]
"""Gets the answer itself, what it says, and how many seconds ago its request began."""

PEEK_BYTES = 64 * 1024
"""How much of an error's body is read before the answer is handed on; a longer one is classified by its headers."""
_STARTED = "millstream.started"


@dataclass(frozen=True, slots=True)
class Peeked:
    """An answer whose body has been read ahead; `body` is None where that was not possible."""

    status_code: int
    headers: httpx.Headers
    body: bytes | None


class Replayed(httpx.AsyncByteStream):
    """A stream of which the beginning was read: it is given out again, then the rest, or the error that ended it."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream
        self._chunks = stream.__aiter__()
        self._held: list[bytes] = []
        self._failed: Exception | None = None

    async def peek(self, limit: int) -> bytes | None:
        """The whole body; None where it is longer than `limit`, or breaks off."""
        size = 0
        try:
            async for chunk in self._chunks:
                self._held.append(chunk)
                size += len(chunk)
                if size > limit:
                    return None
        except Exception as error:  # noqa: BLE001 - whoever reads the answer gets it, at its place
            self._failed = error
            return None
        return b"".join(self._held)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._held:
            yield self._held.pop(0)
        if self._failed is not None:
            raise self._failed
        async for chunk in self._chunks:
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def reporting_client(report: Report, **options: Any) -> httpx.AsyncClient:
    """An `httpx.AsyncClient(**options)` that tells `report` of every answer, as soon as its headers are there.

    Of a refusal or error the body is read as well, up to 64 KiB, since it says which kind it is; the handler still gets
    it whole, streamed or not. A successful body is never touched, so no usage is told. It repeats nothing by itself.
    Of a call without an answer nothing is told: the exception that the handler gets says all there is.
    """

    async def began(request: httpx.Request) -> None:
        request.extensions[_STARTED] = monotonic()

    async def answered(response: httpx.Response) -> None:
        said = classify(response if response.status_code < 400 else await _peeked(response))
        report(response, said, monotonic() - response.request.extensions.get(_STARTED, monotonic()))

    hooks = {kind: list(given) for kind, given in (options.pop("event_hooks", None) or {}).items()}
    hooks["request"] = [*hooks.get("request", []), began]
    hooks["response"] = [answered, *hooks.get("response", [])]
    return httpx.AsyncClient(event_hooks=hooks, **options)


async def _peeked(response: httpx.Response) -> Peeked:
    """The answer with its body, which stays there for whoever reads it next."""
    if response.is_closed or not isinstance(response.stream, httpx.AsyncByteStream):
        return Peeked(response.status_code, response.headers, None)
    stream = Replayed(response.stream)
    response.stream = stream
    return Peeked(response.status_code, response.headers, _decoded(response, await stream.peek(PEEK_BYTES)))


def _decoded(response: httpx.Response, raw: bytes | None) -> bytes | None:
    if raw is None or "content-encoding" not in response.headers:
        return raw
    try:
        return httpx.Response(response.status_code, headers=response.headers, content=raw).content
    except httpx.HTTPError:
        return None
