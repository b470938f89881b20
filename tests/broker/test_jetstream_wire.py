"""The file that reaches into nats-py: the names it relies on, and that its reader reads whatever way bytes arrive."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from nats.aio.client import Client
from nats.errors import ProtocolError

from millstream.jetstream.wire import Wire, WireReader

_STREAM = (
    b"MSG a.b 1 5\r\nhello\r\n"
    b"MSG a.b 1 $JS.ACK.S.C.1.2.3.4.5 0\r\n\r\n"
    b"HMSG h 2 reply.to 21 26\r\nNATS/1.0\r\nName: v\r\n\r\n\r\nxyz\r\n"
    b"+OK\r\n"
    b"MSG unknown 9 2\r\nno\r\n"
    b"HMSG status 2 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
)
_READ = [
    (b"a.b", b"", None, b"hello"),
    (b"a.b", b"$JS.ACK.S.C.1.2.3.4.5", None, b""),
    (b"h", b"reply.to", b"NATS/1.0\r\nName: v\r\n\r\n", b"\r\nxyz"),
    (b"status", b"", b"NATS/1.0 503\r\n\r\n", b""),
]


def _reader() -> tuple[WireReader, list[tuple[bytes, bytes, bytes | None, bytes]]]:
    reader = WireReader(Client())
    read: list[tuple[bytes, bytes, bytes | None, bytes]] = []
    for sid in (b"1", b"2"):
        reader.heard[sid] = lambda subject, reply, header, body: read.append((subject, reply, header, body))
    return reader, read


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50, 1000])
async def test_messages_are_read_whatever_way_they_arrive(step: int) -> None:
    """Cut anywhere, they come out whole and in order."""
    reader, read = _reader()
    for start in range(0, len(_STREAM), step):
        await reader.parse(_STREAM[start : start + step])
    assert read == _READ


async def test_half_a_message_is_forgotten_with_its_connection() -> None:
    """What follows a reconnect is read from its start."""
    reader, read = _reader()
    await reader.parse(b"MSG a.b 1 5\r\nhel")
    reader.reset()
    await reader.parse(_STREAM)
    assert read == _READ


async def test_a_faulty_receiver_does_not_end_the_reading() -> None:
    """Its fault is logged; the others get theirs."""
    reader, read = _reader()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    reader.heard[b"1"] = fail
    await reader.parse(_STREAM)
    assert read == _READ[2:]


@pytest.mark.parametrize("data", [b"NONSENSE\r\n", b"MSG a\r\n", b"MSG a 1 x\r\n", b"HMSG a 1 x 5\r\n", b"INFO {\r\n"])
async def test_what_is_no_protocol_asks_for_a_reconnect(data: bytes) -> None:
    """ProtocolError is the one exception that nats-py's read loop answers with a new connection."""
    reader, _ = _reader()
    with pytest.raises(ProtocolError):
        await reader.parse(data)


async def test_a_cancelled_flush_does_no_harm() -> None:
    """The pong that nobody waits for any more is passed over."""
    client = Client()
    reader = WireReader(client)
    gone: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    gone.cancel()
    client._pongs = [gone]
    await reader.parse(b"PONG\r\n")
    assert client._pongs == []


async def test_nats_py_has_the_names_that_the_wire_relies_on() -> None:
    """A release that renames one of them fails here, not at night."""
    client = Wire().client
    state = {
        "_ps": WireReader,
        "_subs": dict,
        "_pongs": list,
        "_pings_outstanding": int,
        "_server_info": dict,
        "_transport": type(None),
    }
    assert {name: type(getattr(client, name)) for name in state} == state
    for name in ("_process_err", "_process_info"):
        assert inspect.iscoroutinefunction(getattr(client, name))
    source = inspect.getsource(Client)
    used = {line.split("self._ps.")[1].split("(")[0] for line in source.splitlines() if "self._ps." in line}
    assert used == {"reset", "parse"}
    replayed = inspect.getsource(Client._attempt_reconnect)
    assert "for sid, sub in self._subs.items()" in replayed
    assert "sub_cmd(sub._subject, sub._queue, sid)" in replayed
