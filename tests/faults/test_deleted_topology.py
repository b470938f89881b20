"""Somebody deletes parts of the topology under running actors: what can be mended is, what is lost is told and ends them."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest

from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

NAMES = ("inbox", "decisions", "work")


@pytest.mark.parametrize("which", NAMES)
async def test_deleted_consumer_is_declared_anew(fleet: Fleet, which: str) -> None:
    """No actor is restarted; a task that meets the gap fails once, is retried and completes."""
    actors = [fleet.dispatcher(), fleet.worker()]
    names = fleet.names
    stream, consumer = {
        "inbox": (names.inbox_stream, names.inbox_consumer),
        "decisions": (names.events_stream, names.decisions_consumer),
        "work": (names.work_stream, names.work_consumer("agent-run", "normal")),
    }[which]
    retried = {"task_type": "flaky", "payload": {"failures": 1}, "retry_policy": {"base_seconds": 0.1}}
    async with fleet.plain() as client, fleet.broker() as broker:
        await client.jetstream().delete_consumer(stream, consumer)
        await fleet.submit(client, {"task_id": "after", **retried})

        async def completed() -> bool:
            return (await fleet.outcomes(broker)).get("after") == Counter(completed=1)

        await wait_until(completed, "the task completes")
    assert any("consumer.redeclared" in actor.log() for actor in actors)
    assert all(actor.running for actor in actors)


async def test_lost_store_ends_every_actor_with_a_reason_and_a_restart_goes_on(fleet: Fleet) -> None:
    """The server comes back with an empty data folder: no actor pretends to work on, and started again all is well."""
    actors = fleet.all()
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "before", "task_type": "sleep", "payload": {"seconds": 60}})
    fleet.wait_for_starts(1)
    fleet.server.kill()
    shutil.rmtree(fleet.server.data_dir / "jetstream")
    fleet.server.start()
    for actor in actors.values():
        assert actor.wait() == 1
        assert "is gone" in actor.log()
    fleet.all()
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "after", "task_type": "echo"})
    await fleet.wait_for("after", "completed")
    assert await fleet.task("before") is None
