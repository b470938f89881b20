"""Two dispatchers, of which the releasing one is killed again and again, under tasks that end in every possible way."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.support.draining import drained, messages
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from millstream.client import Client, Handle
    from tests.support.processes import ActorProcess

CONFIG = """
dedupe_s = 1

[queues.agent-run]
fair = true

[limits.llm]
requests = "60/s"
adaptive = false
"""
KILLS = 6
RETRY = {"strategy": "fixed", "base_seconds": 0.2, "jitter": False}
KINDS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("echo", 1, {}),
    ("flaky", {"failures": 1}, {"retry_policy": RETRY}),
    ("flaky", {"failures": 9}, {"retry_policy": RETRY, "budget": {"max_attempts": 2}}),
    ("limited", 1, {}),
    ("limited.once", {"after": 0.3}, {}),
    ("echo", 2, {"delay": 0.7}),
)
"""Completed, retried, dead-lettered, metered, throttled and parked, delayed; some with a deadline, some cancelled."""


class Load:
    """Keeps sending until told to stop; every fifth task has a short deadline, every fourth is cancelled soon."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.task_ids: list[str] = []
        self.enough = asyncio.Event()

    async def run(self) -> None:
        """Several tasks every few milliseconds: a little more than the workers can do."""
        young: list[Handle] = []
        while not self.enough.is_set():
            number = len(self.task_ids)
            task_type, payload, more = KINDS[number % len(KINDS)]
            if number % 5 == 0:
                more = {**more, "deadline_at": time.time() + 0.4 + number % 7}
            handle = await self._client.send(
                task_type, payload, task_id=f"task-{number:05d}", tenant=f"t{number % 3}", queue="agent-run", **more
            )
            self.task_ids.append(handle.task_id)
            if number % 4 == 0:
                young.append(handle)
            if len(young) > 20:
                await asyncio.gather(*(one.cancel() for one in young))
                young.clear()
            await asyncio.sleep(0.01)


def _elections(dispatcher: ActorProcess) -> int:
    return dispatcher.log().count("releaser.elected")


async def _kill_them(fleet: Fleet) -> None:
    """Kill whoever releases, with another dispatcher standing by each time."""
    leader = fleet.dispatcher()
    await wait_until(lambda: _elections(leader), "the first releaser is elected")
    for _ in range(KILLS):
        standby = fleet.dispatcher()
        await asyncio.sleep(0.5)  # not for a condition: a term should have done some work
        leader.kill()
        await wait_until(lambda: _elections(standby), "a successor is elected", timeout=60)  # noqa: B023
        leader = standby


async def test_every_task_ends_once_whoever_dies(make_fleet: Callable[..., Fleet]) -> None:
    """Exactly one terminal event for every key; nothing is left in HELD, in WORK, or among the timers."""
    fleet = make_fleet(CONFIG)
    fleet.dispatcher().kill()  # declares the topology
    fleet.governor()
    fleet.worker(10)
    async with fleet.client() as client, fleet.broker() as broker:
        load = Load(client)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            await _kill_them(fleet)
            load.enough.set()

        async def nothing_held() -> bool:
            return await messages(broker, fleet.names.held_stream) == 0

        async def all_ended() -> bool:
            outcomes = await fleet.outcomes(broker)
            return len(outcomes) == len(load.task_ids) and all(outcomes.values())

        await wait_until(all_ended, f"{len(load.task_ids)} tasks have an outcome", timeout=120)
        await wait_until(nothing_held, "an empty HELD", timeout=60)
        await drained(fleet, broker)
        outcomes = await fleet.outcomes(broker)
        assert set(outcomes) == set(load.task_ids)
        assert {task_id: kinds for task_id, kinds in outcomes.items() if kinds.total() != 1} == {}
        ends = Counter(kind for kinds in outcomes.values() for kind in kinds)
        assert set(ends) == {"completed", "failed", "cancelled", "expired"}, ends
        assert await messages(broker, fleet.names.dlq_stream) == ends["failed"]
