"""What is too large is refused with a typed error before anything is sent, and the connection lives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from millstream.errors import CallerError, InvalidName, InvalidTask, MessageTooLarge, PayloadTooLarge
from millstream.ports import Outgoing
from millstream.server import LocalServer, ServerLimits
from millstream_schemas.codec import decode_dead_letter
from millstream_schemas.envelope import MAX_ENVELOPE_BYTES
from tests.support.fleet import Fleet
from tests.support.handlers import nested
from tests.support.processes import Processes
from tests.support.waiting import wait_until

SERVER_LIMIT_BYTES = 1024 * 1024
RESULT_LIMIT_BYTES = 256 * 1024
LEASE_S = 30.0

TOO_MUCH: dict[str, tuple[type[CallerError], dict[str, object]]] = {
    "payload over the envelope's limit": (PayloadTooLarge, {"payload": "x" * MAX_ENVELOPE_BYTES}),
    "payload over the server's limit": (PayloadTooLarge, {"payload": "x" * (2 * SERVER_LIMIT_BYTES)}),
    "payload of 64 MB": (PayloadTooLarge, {"payload": "x" * 64_000_000}),
    "context over the limit": (PayloadTooLarge, {"context": "x" * MAX_ENVELOPE_BYTES}),
    "queue of 5,000 bytes": (InvalidName, {"queue": "q" * 5000}),
    "tenant of 5,000 bytes": (InvalidName, {"tenant": "t" * 5000}),
    "queue with a line break": (InvalidName, {"queue": "q\r\nPUB x 0"}),
    "wildcard tenant": (InvalidName, {"tenant": "*"}),
    "id of 10 kB": (InvalidTask, {"task_id": "i" * 10_000}),
    "key of 10 kB": (InvalidTask, {"idempotency_key": "k" * 10_000}),
    "payload nested 100 deep": (InvalidTask, {"payload": nested(100)}),
}


async def test_client_refuses_before_anything_is_sent_and_goes_on(shared_fleet: Fleet) -> None:
    """One connection for all of it: each is a typed error, the inbox has not moved, and a good task runs."""
    fleet = shared_fleet
    async with fleet.client() as client:
        before = await client.broker.stream_info(fleet.names.inbox_stream)
        for name, (error, options) in TOO_MUCH.items():
            with pytest.raises(error) as raised:
                await client.send("echo", **{"queue": "agent-run", **options})
            assert len(str(raised.value)) < 1000, name
            assert client.broker.connected, name
        with pytest.raises(PayloadTooLarge):
            await client.send_many("echo", ["small", "x" * MAX_ENVELOPE_BYTES], queue="agent-run")
        after = await client.broker.stream_info(fleet.names.inbox_stream)
        handle = await client.send("echo", "good", queue="agent-run")
        assert await handle.result(timeout=LEASE_S) == "good"
    assert before is not None
    assert after is not None
    assert before.last_seq == after.last_seq


async def test_broker_refuses_what_the_server_would_close_the_connection_for(shared_fleet: Fleet) -> None:
    """Body, body with headers, and subject are measured before they are sent; the same connection goes on."""
    fleet = shared_fleet
    subject = fleet.names.submit("acme", "agent-run")
    many = {f"x-{number}": "v" * 1000 for number in range(200)}
    async with fleet.broker() as broker:
        for outgoing in (
            Outgoing(subject, b"x" * (SERVER_LIMIT_BYTES + 1)),
            Outgoing(subject, b"x" * (SERVER_LIMIT_BYTES - 1000), headers=many),
            Outgoing(f"mill.submit.acme.{'q' * 5000}", b"{}"),
        ):
            with pytest.raises(MessageTooLarge):
                await broker.publish(outgoing)
            assert broker.connected
    async with fleet.client() as client:
        assert await (await client.send("echo", 1, queue="agent-run")).result(timeout=LEASE_S) == 1


async def test_envelope_at_the_limit_runs_and_one_byte_more_does_not(shared_fleet: Fleet) -> None:
    """From a plain producer: the limit itself is good, one more byte is a dead letter with its first 4 KiB."""
    fleet = shared_fleet
    shell = len(b'{"task_id":"at","task_type":"echo","payload":""}')
    at = b'{"task_id":"at","task_type":"echo","payload":"%b"}' % (b"x" * (MAX_ENVELOPE_BYTES - shell))
    over = at.replace(b'"at"', b'"ov"').replace(b'"}', b'x"}')
    assert (len(at), len(over)) == (MAX_ENVELOPE_BYTES, MAX_ENVELOPE_BYTES + 1)
    async with fleet.plain() as client, fleet.broker() as broker:
        await fleet.submit(client, over, tenant="edge")
        await fleet.submit(client, at, tenant="edge")
        found = await fleet.wait_for("at", "completed", "failed", tenant="edge")
        records = await wait_until(lambda: broker.history(fleet.names.dlq_stream, "mill.dlq.edge.>"), "a dead letter")
    assert found["state"] == "completed"
    (record,) = records
    letter = decode_dead_letter(record.body)
    assert letter.reason == "invalid_envelope"
    assert letter.raw_bytes == MAX_ENVELOPE_BYTES + 1
    assert len(letter.raw_base64 or "") < 6000


async def test_http_answers_413_and_goes_on(shared_fleet: Fleet) -> None:
    """A body over the limit, with and without a length given beforehand, then a good one."""

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * 65536

    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=30) as http:
        for content in (b"x" * (MAX_ENVELOPE_BYTES + 1), b"x" * 5_000_000, chunks(8)):
            answer = await http.post("/v1/tasks", content=content)
            assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")
        task = {"task_type": "echo", "queue": "agent-run", "payload": "x" * 200_000}
        answer = await http.post("/v1/tasks", json=task, headers={"Prefer": "wait=20"})
        assert (answer.status_code, answer.json()["state"]) == (202, "completed")


@pytest.mark.parametrize("size", [RESULT_LIMIT_BYTES + 1, 5_000_000])
async def test_result_over_the_limit_is_result_too_large(shared_fleet: Fleet, size: int) -> None:
    """Fatal, with a dead letter that says both sizes; a result at the limit is kept."""
    fleet = shared_fleet
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": f"large-{size}", "task_type": "large", "payload": size})
        await fleet.submit(client, {"task_id": f"fits-{size}", "task_type": "large", "payload": RESULT_LIMIT_BYTES - 2})
    found = await fleet.wait_for(f"large-{size}", "completed", "failed")
    assert found["state"] == "failed"
    assert (found["error"]["reason"], found["error"]["cause"]) == ("fatal", "result_too_large")
    assert str(RESULT_LIMIT_BYTES) in found["error"]["message"]
    fits = await fleet.wait_for(f"fits-{size}", "completed", "failed")
    assert fits["state"] == "completed"
    assert fits["result_bytes"] == RESULT_LIMIT_BYTES


async def test_result_over_the_servers_limit_is_result_too_large(tmp_path: Path) -> None:
    """A server that takes less than the worker allows: the outcome shrinks until it fits, and the worker goes on."""
    config = "[worker]\nmax_result_bytes = 4_000_000"
    with LocalServer(tmp_path / "nats", limits=ServerLimits(max_payload_bytes=512 * 1024)) as server:
        processes = Processes(tmp_path / "logs", {"MILLSTREAM_NATS_URL": server.url})
        fleet = Fleet(server, processes, tmp_path, config=config)
        try:
            fleet.all_at_once()
            async with fleet.client() as client:
                await client.send("large", 600_000, queue="agent-run", task_id="large")
                found = await fleet.wait_for("large", "failed", "completed", tenant="default")
                assert (found["error"]["reason"], found["error"]["cause"]) == ("fatal", "result_too_large")
                full = {"failures": 2, "ballast": "x" * 250_000}  # with its errors and history still within the limit
                retry_policy = {"base_seconds": 0.05, "jitter": False}
                handle = await client.send("flaky", full, queue="agent-run", retry_policy=retry_policy)
                assert await handle.result(timeout=LEASE_S) == 3
        finally:
            processes.close()
