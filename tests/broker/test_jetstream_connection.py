"""Coming and going: start in any order, servers too old, the end of a connection, the room that a server has."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from millstream.errors import BrokerClosed, BrokerUnreachable, InvalidName, MessageTooLarge, ServerTooOld
from millstream.jetstream.connection import connect, parse_version
from millstream.ports import Outgoing, Stored
from millstream.server import LocalServer, ServerLimits
from millstream_schemas.names import Names
from millstream_schemas.topology import Lifetimes, topology
from tests.support.waiting import wait_until

_NAMES = Names("mill")


async def test_an_actor_may_start_before_the_server(nats_server: LocalServer) -> None:
    """Connecting tries until the server is there."""
    nats_server.stop()
    async with asyncio.TaskGroup() as group:
        connecting = group.create_task(connect(nats_server.url, _NAMES, client_name="early", connect_timeout_s=20))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(nats_server.start)
    broker = connecting.result()
    assert broker.connected
    await broker.close()


async def test_no_server_is_said_in_time(nats_server: LocalServer) -> None:
    """With the address, and without the password that stood in it."""
    nats_server.stop()
    url = nats_server.url.replace("//", "//user:secret@")
    with pytest.raises(BrokerUnreachable, match="no NATS server at nats://127") as caught:
        await connect(url, _NAMES, client_name="x", connect_timeout_s=0.5)
    assert "secret" not in str(caught.value)


async def test_an_old_server_is_refused() -> None:
    """With its version and the one that is needed."""

    async def old_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.10.4","max_payload":1048576,"headers":true}\r\n')
        while line := await reader.readline():
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(old_server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ServerTooOld, match=r"2\.10\.4.*2\.14\.3"):
        await connect(f"nats://127.0.0.1:{port}", _NAMES, client_name="x")
    server.close()


@pytest.mark.parametrize(
    ("text", "version"), [("2.14.3", (2, 14, 3)), ("2.15.0-RC.1", (2, 15, 0)), ("v3.0.0", (3, 0, 0)), ("", (0, 0, 0))]
)
def test_versions_are_read(text: str, version: tuple[int, int, int]) -> None:
    """Release candidates count as their release."""
    assert parse_version(text) == version


async def test_a_connection_that_ends_for_good_ends_all_that_waits(nats_server: LocalServer) -> None:
    """The process hears of it once, and everything that waits raises BrokerClosed."""
    ended: list[bool] = []
    broker = await connect(nats_server.url, _NAMES, client_name="x", on_closed=lambda: ended.append(True))
    await broker.declare(topology(_NAMES, Lifetimes()))
    mailbox = await broker.mailbox(_NAMES.inbox_stream, _NAMES.inbox_consumer, 10)
    feed = await broker.feed(_NAMES.events_stream, [], 0)

    async def break_it() -> None:
        await asyncio.sleep(0.1)
        broker._wire.send(b"PUB too.large 9999999\r\n")  # what a bug would do: the server closes, nats-py gives up

    nobody = Outgoing("nobody.listens", b"")
    results = await asyncio.gather(
        mailbox.take(1), feed.take(1, 30.0), broker.publish(nobody), break_it(), return_exceptions=True
    )
    assert [type(one) for one in results[:3]] == [BrokerClosed] * 3
    with pytest.raises(BrokerClosed):
        await broker.publish(Outgoing(_NAMES.submit("a", "q"), b""))
    with pytest.raises(BrokerClosed):
        await broker.last(_NAMES.events_stream, ">")
    assert ended == [True]
    await broker.close()
    assert ended == [True]


async def test_closing_on_purpose_is_no_surprise(nats_server: LocalServer) -> None:
    """Twice is fine, and without a server too."""
    ended: list[bool] = []
    broker = await connect(nats_server.url, _NAMES, client_name="x", on_closed=lambda: ended.append(True))
    await asyncio.to_thread(nats_server.kill)
    await wait_until(lambda: not broker.connected, "the connection to be gone")
    async with asyncio.timeout(10):
        await broker.close()
        await broker.close()
    assert ended == []


async def test_too_much_is_refused_before_it_is_sent(nats_server: LocalServer) -> None:
    """Body with headers, a long subject, a subject that is none: the connection lives, and nothing of the batch is stored."""
    broker = await connect(nats_server.url, _NAMES, client_name="x")
    await broker.declare(topology(_NAMES, Lifetimes()))
    good = Outgoing(_NAMES.submit("acme", "q"), b"1")
    limit = (await broker.server_info()).max_payload_bytes
    for bad in (
        Outgoing(good.subject, b"x" * (limit + 1)),
        Outgoing(good.subject, b"x" * (limit - 10), headers={"a": "b" * 20}),
        Outgoing(good.subject + "q" * 5000, b""),
    ):
        with pytest.raises(MessageTooLarge):
            await broker.publish_all([good, bad])
        with pytest.raises(MessageTooLarge):
            broker.inform(bad)
    for subject in ("", "a b", "a\r\nPUB x 0", "a\tb", "a\x00"):
        with pytest.raises(InvalidName):
            await broker.publish(Outgoing(subject, b""))
    assert await broker.publish(Outgoing(good.subject, b"x" * limit)) == Stored(1)
    await broker.close()


@pytest.mark.parametrize("size", [256 * 1024**2, 1000 * 1024**2 + 12345])
async def test_the_inbox_gets_its_share_of_the_store(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    """A quarter of what the server may store, found out without leaving anything behind, and the same again later."""
    limits = ServerLimits(max_file_store_bytes=size)
    with LocalServer(tmp_path_factory.mktemp("nats"), limits=limits) as server:
        names = Names(f"t{uuid.uuid4().hex[:6]}")
        for _ in range(2):
            broker = await connect(server.url, names, client_name="x")
            await broker.declare(topology(names, Lifetimes()))
            info = await broker.stream_info(names.inbox_stream)
            assert info is not None
            store = (await broker.server_info()).store_bytes
            assert size - 1024**2 <= store <= size
            assert info.max_bytes == store // 4
            events = await broker.stream_info(names.events_stream)
            assert events is not None
            assert events.max_bytes == -1
            assert await broker.stream_info(f"{names.events_stream}-room") is None
            await broker.close()
