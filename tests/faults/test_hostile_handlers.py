"""Handlers that break the rules of asyncio: the worker neither loops, hangs nor lingers because of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.fleet import Fleet
from tests.support.processes import ActorProcess
from tests.support.waiting import wait_until

OUTLAWS = "tests.support.outlaws:app"


def _worker(fleet: Fleet, **env: str) -> ActorProcess:
    worker = fleet.start("worker", OUTLAWS, "--concurrency", "4", env=env)
    worker.wait_for_log("actor.started")
    return worker


async def test_handler_that_cancels_itself_has_failed(fleet: Fleet) -> None:
    """It is an error of the attempt, not an interruption: that would run it again at once, for ever."""
    fleet.dispatcher()
    fleet.tracker()
    _worker(fleet)
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "self", "task_type": "cancels.itself", "budget": {"max_attempts": 2}})
    found = await fleet.wait_for("self", "failed")
    assert found["error"]["type"] == "CancelledError"
    assert (found["errors"], found["interruptions"], len(fleet.starts("self"))) == (2, 0, 2)


async def test_handler_that_ignores_its_time_limit_gives_its_slot_back(fleet: Fleet) -> None:
    """Cancelled in vain, it is left behind; its attempt has timed out."""
    fleet.dispatcher()
    fleet.tracker()
    _worker(fleet)
    task = {"task_id": "deaf", "task_type": "deaf.timed", "budget": {"max_attempts": 1}}
    async with fleet.plain() as client:
        await fleet.submit(client, task)
    found = await fleet.wait_for("deaf", "failed")
    assert found["error"]["cause"] == "timeout"


async def test_worker_ends_though_a_handler_ignores_its_cancellation(fleet: Fleet) -> None:
    """The task is handed back as interrupted, and the process is gone soon after the grace."""
    fleet.dispatcher()
    fleet.tracker()
    worker = _worker(fleet, MILLSTREAM_GRACE="500ms")
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "deaf", "task_type": "deaf"})
    fleet.wait_for_starts(1)
    worker.terminate()
    assert worker.wait(20) == 0
    found = await fleet.wait_for("deaf", "queued")
    assert found["interruptions"] == 1


@pytest.mark.parametrize("kind", ["exits.aside", "stops.loop"])
async def test_worker_whose_loop_a_handler_ended_does_not_linger(fleet: Fleet, kind: str) -> None:
    """The process ends with a reason instead of waiting for answers that no loop reads; leases see to the task."""
    fleet.dispatcher()
    worker = _worker(fleet)
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "aside", "task_type": kind})
    assert worker.wait(20) == 1
    assert "ended its event loop" in worker.log()


async def test_class_at_its_limit_holds_nothing_up(make_fleet: Callable[..., Fleet]) -> None:
    """With `max_running` 1 the next task starts as soon as the one before has ended, and never beside it."""
    fleet = make_fleet("[queues.agent-run]\nmax_running = 1\n")
    fleet.dispatcher()
    worker = fleet.worker()
    tasks = 20
    async with fleet.plain() as client:
        for number in range(tasks):
            task = {"task_id": f"task-{number}", "task_type": "sleep", "payload": {"seconds": 0.02}}
            await fleet.submit(client, task)
    await wait_until(lambda: len([one for one in fleet.effects() if one["what"] == "end"]) == tasks, "all have ended")
    effects = sorted(fleet.effects(), key=lambda one: one["at"])
    assert [one["what"] for one in effects] == ["start", "end"] * tasks
    gaps = sorted(after["at"] - end["at"] for end, after in zip(effects[1::2], effects[2::2], strict=False))
    assert gaps[len(gaps) // 2] < 0.2, gaps
    worker.terminate()
    assert worker.wait() == 0


async def test_task_that_ends_its_workers_is_given_up_and_the_others_are_done(make_fleet: Callable[..., Fleet]) -> None:
    """After three workers it is dead-lettered; those that ran beside it complete."""
    fleet = make_fleet(lease_s=1.0)
    fleet.dispatcher()
    fleet.tracker()
    worker = _worker(fleet)
    innocent = [f"innocent-{number}" for number in range(6)]
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "poison", "task_type": "kills.worker"})
        for task_id in innocent:
            await fleet.submit(client, {"task_id": task_id, "task_type": "slow"})
    deaths = 0

    async def given_up() -> bool:
        nonlocal worker, deaths
        if not worker.running:
            deaths += 1
            worker = fleet.start("worker", OUTLAWS, "--concurrency", "4")
        found = await fleet.task("poison")
        return found is not None and found["state"] == "failed"

    await wait_until(given_up, "the task is given up", timeout=60)
    assert (await fleet.wait_for("poison", "failed"))["error"]["reason"] == "worker_crashed"
    for task_id in innocent:
        await fleet.wait_for(task_id, "completed")
    assert deaths == 3
