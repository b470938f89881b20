"""The releaser dies twenty times under load, at every one of its steps: nothing is lost, nothing runs twice."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice
from typing import TYPE_CHECKING

from millstream.faults import EXIT_STATUS
from millstream_schemas.topology import LEADER_TTL_S
from tests.support.draining import drained, messages
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from millstream.client import Client
    from millstream.ports import Broker
    from tests.support.processes import ActorProcess

CONFIG = """
dedupe_s = 1

[queues.agent-run]
fair = true
"""
KILLS = 20
DEATHS = (
    "publish_all[.released]:before:2:exit",
    "publish_all[.released]:after:3:exit",
    "publish_all[.work.]:before:2:exit",
    "publish_all[.work.]:after:3:exit",
    "delete:before:9:exit",
    "delete:after:17:exit",
    "page:after:4:exit",
)
"""Between any two steps: before and after the event, the work message, the removal, and while reading."""


class Load:
    """Keeps sending tasks of several tenants until told to stop, and remembers their ids."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.task_ids: list[str] = []
        self.enough = asyncio.Event()

    async def run(self) -> None:
        """A few tasks every few milliseconds; each is acknowledged before it counts."""
        number = 0
        while not self.enough.is_set():
            task_id = f"task-{number:05d}"
            tenant = f"t{number % 3}"
            await self._client.send("echo", number, task_id=task_id, tenant=tenant, queue="agent-run")
            self.task_ids.append(task_id)
            number += 1
            await asyncio.sleep(0.02)


def _elected(dispatcher: ActorProcess) -> bool:
    return "releaser.elected" in dispatcher.log()


async def _takeover(leader: ActorProcess, standby: ActorProcess) -> float:
    """Wait until the leader has died and the other one was elected; returns the seconds between."""
    await wait_until(lambda: not leader.running, "the releaser dies", timeout=60)
    died_at = time.monotonic()
    assert leader.returncode == EXIT_STATUS, leader.log()
    await wait_until(lambda: _elected(standby), "a successor is elected", timeout=60)
    return time.monotonic() - died_at


async def _takeovers(fleet: Fleet) -> list[float]:
    """Let one releaser after another die, always with a dispatcher standing by; returns how long each takeover took."""
    plans = islice(cycle(DEATHS), KILLS)
    leader = fleet.dispatcher({"MILLSTREAM_FAULTS": next(plans)})
    await wait_until(lambda: _elected(leader), "the first releaser is elected")
    took: list[float] = []
    for _ in range(KILLS):
        plan = next(plans, None)
        standby = fleet.dispatcher({"MILLSTREAM_FAULTS": plan} if plan is not None else {})
        took.append(await _takeover(leader, standby))
        leader = standby
    return took


async def test_releaser_that_dies_twenty_times_loses_and_doubles_nothing(make_fleet: Callable[..., Fleet]) -> None:
    """Every task has exactly one outcome and ran once; the next releaser takes over within a lease and a second."""
    fleet = make_fleet(CONFIG)
    fleet.dispatcher({"MILLSTREAM_FAULTS": "publish_all[.released]:before:1:exit"}).kill()  # declares the topology
    fleet.worker(20)
    async with fleet.client() as client, fleet.broker() as broker:
        load = Load(client)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            took = await _takeovers(fleet)
            load.enough.set()
        sent = load.task_ids

        async def all_ended() -> bool:
            return await _completed(fleet, broker) >= len(sent)

        await wait_until(all_ended, f"{len(sent)} tasks have an outcome", timeout=120)

        async def nothing_held() -> bool:
            return await messages(broker, fleet.names.held_stream) == 0

        await wait_until(nothing_held, "an empty HELD", timeout=60)
        await drained(fleet, broker)
        outcomes = await fleet.outcomes(broker)
        assert set(outcomes) == set(sent)
        assert {task_id: kinds for task_id, kinds in outcomes.items() if kinds != Counter(completed=1)} == {}
        assert await messages(broker, fleet.names.dlq_stream) == 0
    runs = Counter(entry["task_id"] for entry in fleet.starts())
    assert {task_id: runs[task_id] for task_id in sent if runs[task_id] != 1} == {}
    assert statistics.median(took) <= LEADER_TTL_S + 1.0, took
    assert max(took) <= LEADER_TTL_S + 5.0, took  # a busy machine may be slow to start a process


async def _completed(fleet: Fleet, broker: Broker) -> int:
    found = await broker.subjects(fleet.names.events_stream, fleet.names.events_of_kind("completed"))
    return sum(found.values())
