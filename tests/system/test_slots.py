"""Slots: a worker takes what it can run now, over all its consumers, and no priority waits for the end of another."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.fleet import Fleet

SLOTS = 2
TASKS = 20
SECONDS = 0.2
SHARES = {"high": 12, "normal": 5, "low": 3}


def _tasks() -> list[dict[str, Any]]:
    priorities = [priority for priority, count in SHARES.items() for _ in range(count)]
    return [
        {
            "task_id": f"{priority}-{number:02d}",
            "task_type": "sleep" if number % 2 else "sleep.sync",
            "priority": priority,
            "payload": {"seconds": SECONDS},
        }
        for number, priority in enumerate(priorities)
    ]


async def test_worker_never_holds_more_deliveries_than_it_has_slots(fleet: Fleet) -> None:
    """Sampled at the server over the whole run: at most two unacked over the three consumers, and all three progress."""
    fleet.dispatcher()
    fleet.tracker()
    tasks = _tasks()
    samples: list[int] = []
    done = asyncio.Event()
    async with fleet.plain() as client, fleet.broker() as broker:

        async def sample() -> None:
            while not done.is_set():
                consumers = await broker.consumers(fleet.names.work_stream)
                samples.append(sum(one.ack_pending for one in consumers))
                await asyncio.sleep(0.002)

        async with asyncio.TaskGroup() as group:
            group.create_task(sample())
            for task in tasks:
                await fleet.submit(client, task)
            fleet.worker(concurrency=SLOTS)  # all of it waits already, in every priority
            for task in tasks:
                await fleet.wait_for(task["task_id"], "completed", timeout=60)
            done.set()
    assert max(_lasting(samples)) <= SLOTS, samples
    assert samples.count(SLOTS) > 10, "the samples saw the worker at work"
    assert _most_at_once(fleet.effects()) == SLOTS
    order = [start["task_id"].partition("-")[0] for start in fleet.starts()]
    assert len(order) == TASKS
    last_high = len(order) - 1 - order[::-1].index("high")
    assert order.index("normal") < last_high, order  # both get a turn while the highest still has work
    assert order.index("low") < last_high, order


def _lasting(samples: list[int]) -> list[int]:
    """The least of every three samples in a row: the server counts a delivery until it has read its ack, which may lie
    unread beside the next pull, and its consumers are not counted at one instant."""
    return [min(three) for three in zip(samples, samples[1:], samples[2:], strict=False)]


def _most_at_once(effects: list[dict[str, Any]]) -> int:
    running = most = 0
    for entry in effects:  # in the order in which they were appended
        running += 1 if entry["what"] == "start" else -1
        most = max(most, running)
    return most
