"""A worker that was frozen past its lease wakes up: what it still does changes nothing."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable

from tests.support.fleet import Fleet
from tests.support.waiting import wait_until, wait_until_sync


async def test_frozen_worker_cannot_change_the_outcome(make_fleet: Callable[..., Fleet]) -> None:
    """Its successor's outcome stands, its own is told as stale, and it goes on to work."""
    fleet = make_fleet(lease_s=1.0)
    fleet.dispatcher()
    fleet.tracker()
    zombie = fleet.worker()
    async with fleet.plain() as client, fleet.broker() as broker:
        await fleet.submit(client, {"task_id": "long", "task_type": "sleep", "payload": {"seconds": 2}})
        await wait_until(lambda: len(fleet.starts("long")) == 1, "the task runs")
        zombie.send_signal(signal.SIGSTOP)
        successor = fleet.worker()
        await wait_until(lambda: len(fleet.starts("long")) == 2, "another worker runs it")
        zombie.send_signal(signal.SIGCONT)  # both run it now
        found = await fleet.wait_for("long", "completed")
        wait_until_sync(lambda: "task.stale_outcome" in zombie.log(), "the late outcome is dropped")
        assert (found["attempt"], found["crashes"], found["errors"]) == (1, 1, 0)
        assert found["execution_id"] == fleet.starts("long")[1]["execution"]
        successor.kill()
        await fleet.submit(client, {"task_id": "next", "task_type": "echo"})
        await fleet.wait_for("next", "completed")
        assert await fleet.outcomes(broker) == {"long": Counter(completed=1), "next": Counter(completed=1)}

        async def gone() -> bool:
            left = await broker.stream_info(fleet.names.work_stream)
            return left is not None and left.messages == 0

        await wait_until(gone, "WORK is empty")
    assert len(fleet.starts("long")) == 2
