"""Kill -9 of each actor and of the server, with tasks running: what was accepted has exactly one outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.support.draining import drained
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until, wait_until_sync

if TYPE_CHECKING:
    from collections import Counter

    from nats.aio.client import Client as NatsClient

LIMITS = """
[limits.llm]
requests_per_minute = 6000
concurrency = 4
"""
TASKS = 120


class Load:
    """A plain producer that keeps publishing until told to stop; it knows what was acknowledged."""

    def __init__(self, fleet: Fleet, client: NatsClient) -> None:
        self._fleet = fleet
        self._client = client
        self.acked: list[str] = []
        self.attempted: list[str] = []

    async def run(self) -> None:
        """Publish tasks of several kinds; one that is not acknowledged stays unknown, as it would for any producer."""
        for number in range(TASKS):
            task_id = f"task-{number:04d}"
            self.attempted.append(task_id)
            with contextlib.suppress(Exception):
                await self._fleet.submit(self._client, _task(number, task_id))
                self.acked.append(task_id)
            await asyncio.sleep(0.03)


def _task(number: int, task_id: str) -> dict[str, object]:
    base: dict[str, object] = {"task_id": task_id, "retry_policy": {"base_seconds": 0.2, "jitter": False}}
    match number % 4:
        case 0:
            return {**base, "task_type": "sleep", "payload": {"seconds": 0.4}}
        case 1:
            return {**base, "task_type": "flaky", "payload": {"failures": 1}}
        case 2:
            return {**base, "task_type": "limited", "payload": number}
        case _:
            return {**base, "task_type": "echo", "payload": number, "priority": "high"}


def _processing(fleet: Fleet) -> set[str]:
    """The tasks that sleep in a worker now."""
    seen: dict[str, set[str]] = {"start": set(), "end": set()}
    for entry in fleet.effects():
        seen[entry["what"]].add(entry["task_id"])
    sleepers = {f"task-{number:04d}" for number in range(0, TASKS, 4)}
    return (seen["start"] & sleepers) - seen["end"]


async def _settled(fleet: Fleet, expected: list[str]) -> dict[str, Counter[str]]:
    """Wait until every acknowledged task has an outcome and nothing is left that could give it another.

    Returns all outcomes. No task id may have two keys: its execution under one would be unknown under the other.
    """
    async with fleet.broker() as broker:

        async def all_ended() -> bool:
            outcomes = await fleet.outcomes(broker)
            return all(sum(outcomes.get(task_id, {}).values()) >= 1 for task_id in expected)

        await wait_until(all_ended, f"{len(expected)} acknowledged tasks have an outcome", timeout=90)
        await drained(fleet, broker)
        outcomes = await fleet.outcomes(broker)
        keys = [key for key, events in (await fleet.life(broker)).items() if events[0][0] != "alias"]
        assert len(keys) == len(outcomes), "a task has two keys"
        return outcomes


def _check(load: Load, outcomes: dict[str, Counter[str]]) -> None:
    assert set(outcomes) <= set(load.attempted), "something ran that nobody sent"
    for task_id in load.acked:
        assert sum(outcomes[task_id].values()) == 1, f"{task_id}: {outcomes[task_id]}"
    for task_id, kinds in outcomes.items():
        assert sum(kinds.values()) <= 1, f"{task_id} has two outcomes: {kinds}"
        assert set(kinds) <= {"completed"}, f"{task_id} did not complete: {kinds}"


@pytest.mark.parametrize("victim", ["dispatcher", "governor", "worker", "tracker"])
async def test_killed_actor_loses_nothing_and_doubles_nothing(make_fleet: Callable[..., Fleet], victim: str) -> None:
    """One actor is killed with tasks in `processing`, then started again."""
    fleet = make_fleet(LIMITS)
    actors = fleet.all()
    async with fleet.plain() as client:
        load = Load(fleet, client)
        async with asyncio.TaskGroup() as group:
            producing = group.create_task(load.run())
            await wait_until(lambda: len(fleet.starts()) >= 15 and _processing(fleet), "a task is processing")
            actors[victim].kill()
            await asyncio.sleep(1.0)  # the outage itself, not a hope: others go on meanwhile
            assert not actors[victim].running
            getattr(fleet, victim)()
            await producing
    assert len(load.acked) == TASKS
    outcomes = await _settled(fleet, load.acked)
    _check(load, outcomes)
    found = await fleet.wait_for(load.acked[-1], "completed")
    assert found["state"] == "completed"


async def test_killed_server_loses_nothing_that_was_acknowledged(make_fleet: Callable[..., Fleet]) -> None:
    """The server itself is killed with tasks in `processing`, and comes back on its data."""
    fleet = make_fleet(LIMITS)
    actors = fleet.all()
    async with fleet.plain() as client:
        load = Load(fleet, client)
        async with asyncio.TaskGroup() as group:
            producing = group.create_task(load.run())
            await wait_until(lambda: len(fleet.starts()) >= 15 and _processing(fleet), "a task is processing")
            fleet.server.kill()
            await asyncio.sleep(1.0)
            fleet.server.restart()
            await producing
    assert all(actor.running for actor in actors.values()), "no actor may need a restart"
    assert len(load.acked) > TASKS // 2
    outcomes = await _settled(fleet, load.acked)
    _check(load, outcomes)


async def test_task_of_a_killed_worker_runs_again_within_a_lease(make_fleet: Callable[..., Fleet]) -> None:
    """The redelivered task is taken over by another worker, which counts one crash and no attempt."""
    fleet = make_fleet()
    fleet.dispatcher()
    fleet.tracker()
    first = fleet.worker()
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "long", "task_type": "sleep", "payload": {"seconds": 3}})
        await wait_until(lambda: len(fleet.starts("long")) == 1, "the task runs")
        fleet.worker()
        first.kill()
        wait_until_sync(lambda: len(fleet.starts("long")) == 2, "the task runs again", timeout=20)
        found = await fleet.wait_for("long", "completed")
    assert found["attempt"] == 1
    assert found["crashes"] == 1
