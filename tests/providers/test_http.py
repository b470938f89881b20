"""The client that reports: what it tells, when, and that the answer reaches the handler as it came."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from millstream.providers import Classified
from millstream.providers.http import PEEK_BYTES, reporting_client

Told = list[tuple[httpx.Response, Classified, float]]
QUOTA = json.dumps({"error": {"type": "insufficient_quota", "code": "insufficient_quota", "message": "empty"}}).encode()


class Chunks(httpx.AsyncByteStream):
    """A body in pieces that knows how far it was read."""

    def __init__(self, *chunks: bytes | Exception) -> None:
        self._chunks = chunks
        self.given = 0
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            self.given += 1
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def aclose(self) -> None:
        self.closed = True


@asynccontextmanager
async def client(
    told: Told, answer: Callable[[httpx.Request], httpx.Response], **options: object
) -> AsyncGenerator[httpx.AsyncClient]:
    """A reporting client whose requests `answer` answers."""
    made = reporting_client(
        lambda response, said, ago_s: told.append((response, said, ago_s)),
        transport=httpx.MockTransport(answer),
        base_url="http://provider.test/v1",
        **options,
    )
    async with made:
        yield made


async def test_a_success_is_told_with_the_limits_that_it_shows() -> None:
    """From its headers, and with the very answer that the handler gets; base_url works as usual."""
    told: Told = []
    headers = {"x-ratelimit-limit-requests": "10", "x-ratelimit-remaining-requests": "9"}
    async with client(
        told, lambda request: httpx.Response(200, headers=headers, json={"at": str(request.url)})
    ) as http:
        response = await http.post("/chat", json={})
    assert response.json() == {"at": "http://provider.test/v1/chat"}
    [(same, said, started_ago_s)] = told
    assert same is response
    assert said.outcome == "ok"
    assert said.observed[0].remaining == 9
    assert 0 <= started_ago_s < 60


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_a_refusal_is_told_by_its_body_and_reaches_the_handler_whole(streamed: bool, encoding: str) -> None:
    """Which of the five kinds of 429 it is stands in the body only."""
    told: Told = []
    raw = gzip.compress(QUOTA) if encoding == "gzip" else QUOTA
    body = Chunks(raw[:20], raw[20:])
    async with client(
        told, lambda request: httpx.Response(429, headers={"content-encoding": encoding}, stream=body)
    ) as http:
        if streamed:
            async with http.stream("POST", "/chat") as response:
                assert told[0][1].outcome == "quota"
                assert b"".join([chunk async for chunk in response.aiter_raw()]) == raw
        else:
            response = await http.post("/chat")
            assert response.content == QUOTA
            assert response.json()["error"]["code"] == "insufficient_quota"
    assert [said.outcome for _, said, _ in told] == ["quota"]
    assert body.closed


async def test_a_successful_stream_is_told_before_it_is_read() -> None:
    """Nothing of it is taken: the handler reads it in its own time."""
    told: Told = []
    body = Chunks(b"one", b"two", b"three")
    async with (
        client(told, lambda request: httpx.Response(200, stream=body)) as http,
        http.stream("POST", "/chat") as response,
    ):
        assert [said.outcome for _, said, _ in told] == ["ok"]
        assert body.given == 0
        assert [chunk async for chunk in response.aiter_raw()] == [b"one", b"two", b"three"]


async def test_a_long_error_is_read_in_part_and_handed_on_whole() -> None:
    """It goes by its status and headers then."""
    told: Told = []
    piece = b"x" * (PEEK_BYTES // 2)
    body = Chunks(*[piece] * 6)
    async with (
        client(told, lambda request: httpx.Response(429, headers={"retry-after": "4"}, stream=body)) as http,
        http.stream("GET", "/chat") as response,
    ):
        assert body.given == 3
        assert (told[0][1].outcome, told[0][1].retry_after_s) == ("throttled", 4.0)
        assert len(await response.aread()) == 6 * len(piece)


async def test_an_error_that_breaks_off_breaks_off_for_the_handler() -> None:
    """At the same place, with the same exception; the refusal is told all the same."""
    told: Told = []
    body = Chunks(b"{", httpx.ReadError("gone"))
    async with (
        client(told, lambda request: httpx.Response(429, stream=body)) as http,
        http.stream("GET", "/chat") as response,
    ):
        assert told[0][1].outcome == "throttled"
        with pytest.raises(httpx.ReadError, match="gone"):
            await response.aread()


async def test_nothing_is_repeated_and_the_status_error_carries_what_was_told() -> None:
    """One request, one report; `raise_for_status` works as ever."""
    told: Told = []
    seen: list[httpx.Request] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(429, headers={"retry-after": "1"}, json={})

    async with client(told, refuse) as http:
        response = await http.get("/chat")
        with pytest.raises(httpx.HTTPStatusError) as caught:
            response.raise_for_status()
    assert len(seen) == len(told) == 1
    assert caught.value.response is told[0][0]


async def test_hooks_and_options_of_the_caller_stay() -> None:
    """Its own hooks run as well, and see the answer after it was told."""
    told: Told = []
    order: list[str] = []

    async def mine(response: httpx.Response) -> None:
        order.append(f"hook after {len(told)} report")

    hooks = {"response": [mine]}
    async with client(
        told,
        lambda request: httpx.Response(200, text=request.headers["x-key"]),
        event_hooks=hooks,
        headers={"x-key": "k"},
    ) as http:
        assert (await http.get("/")).text == "k"
    assert order == ["hook after 1 report"]
    assert hooks == {"response": [mine]}


async def test_every_hop_of_a_redirect_is_an_answer_of_its_own() -> None:
    """A refusal after a redirect is told like any other."""
    told: Told = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/old"):
            return httpx.Response(307, headers={"location": "/v1/new"})
        return httpx.Response(529)

    async with client(told, answer, follow_redirects=True) as http:
        await http.get("/old")
    assert [said.outcome for _, said, _ in told] == ["ok", "overloaded"]


async def test_against_a_real_server_the_answer_comes_through_and_the_connection_is_used_again() -> None:
    """Sockets, chunked bodies and keep-alive, as a provider has them."""
    connections = 0
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.readuntil(b"\r\n\r\n"):
            head = b"HTTP/1.1 429 Too Many Requests\r\ntransfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\n"
            writer.write(head + f"{len(QUOTA):x}\r\n".encode() + QUOTA + b"\r\n0\r\n\r\n")
            await writer.drain()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        left.set()

    told: Told = []
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reporting = reporting_client(lambda response, said, ago_s: told.append((response, said, ago_s)), trust_env=False)
    async with server:
        async with reporting as http:
            for _ in range(3):
                assert (await http.get(f"http://127.0.0.1:{port}/")).content == QUOTA
        await asyncio.wait_for(left.wait(), 30)  # the server's end of the connection
    assert [said.outcome for _, said, _ in told] == ["quota"] * 3
    assert connections == 1
