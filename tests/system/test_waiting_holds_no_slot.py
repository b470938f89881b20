"""Work that waits for a limit holds up nothing else: other tasks of its queue go on in all slots of the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

SLOTS = 3
PAID = 12
FREE = 60
SECONDS = 0.1
PAUSE_S = 25.0
CONFIG = """
[limits.llm]
requests = "6000/min"
"""


async def test_free_tasks_go_on_in_all_slots_while_a_paid_pool_is_paused(make_fleet: Callable[..., Fleet]) -> None:
    """In one queue, the paid ones first; none of them loses an attempt, an execution or a delivery by its wait."""
    fleet = make_fleet(CONFIG)
    fleet.all_at_once(SLOTS)
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "first", "task_type": "limited.once", "payload": {"after": PAUSE_S}})
        await wait_until(lambda: fleet.starts("first"), "the paid pool is refused")
        for number in range(PAID):
            payload = {"seconds": SECONDS}
            await fleet.submit(client, {"task_id": f"paid-{number}", "task_type": "limited.sleep", "payload": payload})
        for number in range(FREE):
            payload = {"seconds": SECONDS}
            await fleet.submit(client, {"task_id": f"free-{number}", "task_type": "sleep", "payload": payload})
        await wait_until(lambda: len(_starts(fleet, "free")) == FREE, "every free task", PAUSE_S)
        assert _starts(fleet, "paid") == [], "the pool was still paused"
        await wait_until(lambda: len(_ends(fleet, "paid")) == PAID, "every paid task, once the pause was over")
        for number in range(PAID):
            found = await fleet.wait_for(f"paid-{number}", "completed", "failed")
            assert (found["state"], found["attempt"], found["errors"]) == ("completed", 1, 0)
            assert (found["crashes"], found["interruptions"]) == (0, 0)
    assert _most_at_once(fleet, "free") == SLOTS
    assert len(_starts(fleet, "paid")) == PAID


async def test_a_soft_stop_ends_a_worker_whose_deliveries_wait(make_fleet: Callable[..., Fleet]) -> None:
    """They go back at once, and are no executions: another worker finds them as they were."""
    fleet = make_fleet("[limits.llm]\nconcurrency = 1\n", lease_s=30.0)
    worker = fleet.all_at_once(SLOTS)["worker"]
    async with fleet.plain() as client:
        for number in range(SLOTS):
            payload = {"seconds": 2.0}
            await fleet.submit(client, {"task_id": f"paid-{number}", "task_type": "limited.sleep", "payload": payload})
        await wait_until(lambda: _starts(fleet, "paid"), "one runs, the others wait")
        worker.terminate()
        assert worker.wait() == 0
        fleet.worker(SLOTS)
        for number in range(SLOTS):
            found = await fleet.wait_for(f"paid-{number}", "completed", "failed", timeout=60)
            assert (found["state"], found["attempt"], found["crashes"]) == ("completed", 1, 0)
    assert len(_starts(fleet, "paid")) == SLOTS
    assert _most_at_once(fleet, "paid") == 1


def _starts(fleet: Fleet, kind: str) -> list[dict[str, Any]]:
    return [start for start in fleet.starts() if start["task_id"].startswith(kind)]


def _ends(fleet: Fleet, kind: str) -> list[dict[str, Any]]:
    return [line for line in fleet.effects() if line["what"] == "end" and line["task_id"].startswith(kind)]


def _most_at_once(fleet: Fleet, kind: str) -> int:
    """In the order in which starts and ends were appended."""
    running = most = 0
    for line in fleet.effects():
        if line["task_id"].startswith(kind):
            running += 1 if line["what"] == "start" else -1
            most = max(most, running)
    return most
