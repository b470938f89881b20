"""A producer's `Nats-Msg-Id` is nobody's business but the server's: it never makes two tasks one."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from millstream.faults import EXIT_STATUS
from millstream_schemas.names import MSG_ID
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient

BODY = b'{"task_type": "echo", "payload": 7}'
TENANTS = ("acme", "globex")


async def _accepted(client: NatsClient, tenant: str) -> int:
    """Publish until the server takes it: it forgets an id some time after its window, and says `duplicate` before."""

    async def stored() -> int | None:
        ack = await client.jetstream().publish(
            f"mill.submit.{tenant}.agent-run", BODY, headers={MSG_ID: "equal-for-both"}
        )
        return None if ack.duplicate else ack.seq

    seq = await wait_until(stored, f"the submit of {tenant} is accepted")
    assert seq is not None
    return seq


@pytest.mark.parametrize(
    "plan",
    ["publish_all[.queued]:after:1:exit", "publish_all[mill.work.]:after:1:exit", "ack[mill.submit.]:before:1:exit"],
    ids=["after_queued", "after_work", "before_ack"],
)
async def test_equal_message_ids_of_two_tenants_are_two_tasks(make_fleet: Callable[..., Fleet], plan: str) -> None:
    """No id and no key, and the dispatcher dies between `queued` and ack: each tenant has one task, run once."""
    fleet = make_fleet(lease_s=1.0)
    fleet.tracker()
    fleet.worker()
    async with fleet.plain() as client, fleet.broker() as broker:
        sequences = [await _accepted(client, tenant) for tenant in TENANTS]
        assert len(set(sequences)) == 2
        doomed = fleet.dispatcher(env={"MILLSTREAM_FAULTS": plan})  # finds both at once
        assert doomed.wait() == EXIT_STATUS
        fleet.dispatcher()
        tasks = [await _completed(fleet, seq) for seq in sequences]
        assert [task["tenant_id"] for task in tasks] == list(TENANTS)
        assert len({task["task_id"] for task in tasks}) == 2
        assert await fleet.outcomes(broker) == {task["task_id"]: Counter(completed=1) for task in tasks}
    assert Counter(one["task_id"] for one in fleet.starts()) == {task["task_id"]: 1 for task in tasks}


async def test_duplicate_puback_is_no_acceptance(fleet: Fleet) -> None:
    """Within the server's shortest window the second message is dropped, and the PubAck says so, as the wire document does."""
    fleet.tracker()  # declares the streams
    async with fleet.plain() as client, fleet.broker() as broker:

        async def dropped() -> int | None:
            headers = {MSG_ID: uuid.uuid4().hex}
            stream = client.jetstream()
            first, second = [
                await stream.publish(f"mill.submit.{tenant}.agent-run", BODY, headers=dict(headers))
                for tenant in TENANTS
            ]
            assert not first.duplicate
            return first.seq if second.duplicate else None

        seq = await wait_until(dropped, "the second of two messages comes within the window")
        stored = await broker.stream_info(fleet.names.inbox_stream)
        assert stored is not None
        assert stored.last_seq == seq


async def _completed(fleet: Fleet, inbox_seq: int) -> dict[str, Any]:
    async def done() -> list[dict[str, Any]]:
        answer = await fleet.get("/v1/tasks", inbox_seq=inbox_seq, state="completed")
        found: list[dict[str, Any]] = answer.json()["items"]
        return found

    task: dict[str, Any] = (await wait_until(done, f"the task of submit {inbox_seq} is completed"))[0]
    return task
