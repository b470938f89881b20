"""Rolling deploys: a process that is asked to end under load loses nothing and makes nobody run twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.processes import ActorProcess


async def _load(fleet: Fleet, seconds: float, enough: asyncio.Event) -> list[str]:
    """A steady load of tasks that take `seconds` each, until it is enough."""
    sent: list[str] = []
    async with fleet.plain() as client:
        while not enough.is_set():
            task_id = f"task-{len(sent):04d}"
            await fleet.submit(client, {"task_id": task_id, "task_type": "sleep", "payload": {"seconds": seconds}})
            sent.append(task_id)
            await asyncio.sleep(0.02)
    return sent


async def _all_completed(fleet: Fleet, expected: list[str]) -> None:
    async with fleet.broker() as broker:

        async def done() -> bool:
            outcomes = await fleet.outcomes(broker)
            return all(outcomes.get(task_id) for task_id in expected)

        await wait_until(done, f"{len(expected)} tasks have an outcome", timeout=60)
        outcomes = await fleet.outcomes(broker)
    assert outcomes == {task_id: Counter(completed=1) for task_id in expected}


async def _run_by(fleet: Fleet, worker: ActorProcess) -> None:
    """Wait until a worker runs something now."""

    def busy() -> bool:
        mine = [one for one in fleet.effects() if one["pid"] == worker.pid]
        kinds = Counter(one["what"] for one in mine)
        return kinds["start"] > kinds["end"]

    await wait_until(busy, f"worker {worker.pid} runs a task")


async def test_rolling_restart_of_workers_runs_every_task_once(fleet: Fleet) -> None:
    """SIGTERM, one worker after the other: each ends what it runs, exits 0, and no task starts twice."""
    fleet.dispatcher()
    worker = fleet.worker(concurrency=4)
    enough = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        load = group.create_task(_load(fleet, 0.1, enough))
        for _ in range(3):
            await _run_by(fleet, worker)
            successor = await asyncio.to_thread(fleet.worker, 4)
            worker.terminate()
            assert await asyncio.to_thread(worker.wait) == 0
            worker = successor
        enough.set()
    await _all_completed(fleet, load.result())
    assert Counter(one["task_id"] for one in fleet.starts()) == dict.fromkeys(load.result(), 1)


async def test_rolling_restart_of_dispatchers_admits_every_task_once(fleet: Fleet) -> None:
    """SIGTERM under load: what was taken is finished, what was only pulled is taken up by the next one."""
    dispatcher = fleet.dispatcher()
    fleet.worker(concurrency=20)
    enough = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        load = group.create_task(_load(fleet, 0.01, enough))
        for _ in range(2):
            await asyncio.to_thread(fleet.wait_for_starts, len(fleet.starts()) + 10)
            dispatcher.terminate()
            assert await asyncio.to_thread(dispatcher.wait) == 0
            dispatcher = await asyncio.to_thread(fleet.dispatcher)
        enough.set()
    await _all_completed(fleet, load.result())
    assert Counter(one["task_id"] for one in fleet.starts()) == dict.fromkeys(load.result(), 1)


async def test_task_beyond_the_grace_is_handed_back_at_once(fleet: Fleet) -> None:
    """It runs again elsewhere without waiting for its lease, at no cost in attempts, counted as an interruption."""
    fleet.all_at_once()
    fleet.actors["worker"].kill()
    leaving = fleet.worker(env={"MILLSTREAM_GRACE": "0.2s"})
    async with fleet.plain() as client:
        task = {"task_id": "long", "task_type": "sleep", "payload": {"seconds": 3}, "budget": {"max_attempts": 1}}
        await fleet.submit(client, task)
        await asyncio.to_thread(fleet.wait_for_starts, 1, ["long"])
        leaving.terminate()
        assert await asyncio.to_thread(leaving.wait) == 0
        fleet.worker()
        found = await fleet.wait_for("long", "completed", "failed")
    assert found["state"] == "completed", found["error"]
    assert (found["attempt"], found["interruptions"], found["crashes"], found["errors"]) == (1, 1, 0, 0)
    assert len(fleet.starts("long")) == 2
    kinds = [line["kind"] for line in found["timeline"]]
    assert kinds == ["queued", "started", "interrupted", "queued", "started", "completed"]


def test_second_sigterm_ends_a_draining_worker_at_once(fleet: Fleet) -> None:
    """Whoever asks twice does not wait for the grace: the process ends with 130 while its task still runs."""
    fleet.dispatcher()
    leaving = fleet.worker(env={"MILLSTREAM_GRACE": "60s"})
    task = {"task_id": "long", "task_type": "sleep", "payload": {"seconds": 60}}

    async def submit() -> None:
        async with fleet.plain() as client:
            await fleet.submit(client, task)

    asyncio.run(submit())
    fleet.wait_for_starts(1, ["long"])
    leaving.terminate()
    leaving.wait_for_log("actor.draining")
    assert leaving.running
    leaving.terminate()
    assert leaving.wait(timeout=20) == 130
    assert [one["what"] for one in fleet.effects()] == ["start"]


async def test_sync_handler_beyond_the_grace_does_not_hold_the_process(fleet: Fleet) -> None:
    """A thread cannot be cancelled: its task is handed back all the same, and the process ends without it."""
    fleet.all_at_once()
    fleet.actors["worker"].kill()
    leaving = fleet.worker(env={"MILLSTREAM_GRACE": "0.2s"})
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "stuck", "task_type": "sleep.sync", "payload": {"seconds": 4}})
        await asyncio.to_thread(fleet.wait_for_starts, 1, ["stuck"])
        leaving.terminate()
        assert await asyncio.to_thread(leaving.wait) == 0
        assert [one["what"] for one in fleet.effects()] == ["start"], "the process waited for the thread"
        fleet.worker()
        found = await fleet.wait_for("stuck", "completed", "failed")
    assert (found["state"], found["attempt"], found["interruptions"]) == ("completed", 1, 1)
