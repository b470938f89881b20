"""One limit for the whole fleet: its permits are counted, its pause holds for all, and one governor keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

CONFIG = """
[limits.llm]
requests_per_minute = 600
concurrency = 4
"""
PAUSE_S = 20.0


async def _llm(fleet: Fleet) -> dict[str, Any]:
    """The limit as HTTP shows it."""
    answer = await fleet.get("/v1/limits")
    answer.raise_for_status()
    (found,) = answer.json()["items"]
    assert found["key"] == "llm"
    limit: dict[str, Any] = found
    return limit


async def test_throttled_handler_pauses_its_limit_for_all_tasks(make_fleet: Callable[..., Fleet]) -> None:
    """The pause is shown with its end; whoever asks for a permit is parked instead of started, and told why."""
    fleet = make_fleet(CONFIG)
    fleet.all_at_once()
    assert (await _llm(fleet))["paused_until"] is None
    async with fleet.plain() as client:
        first = {"task_id": "first", "task_type": "limited.throttled", "payload": {"after": PAUSE_S}}
        await fleet.submit(client, first)

        async def paused() -> dict[str, Any] | None:
            limit = await _llm(fleet)
            return limit if limit["throttled_total"] else None

        limit = await wait_until(paused, "the limit is paused")
        left = datetime.fromisoformat(limit["paused_until"]) - datetime.now(UTC)
        assert timedelta() < left <= timedelta(seconds=PAUSE_S + 0.5)
        assert (limit["throttled_total"], limit["granted_total"], limit["effective_per_minute"]) == (1, 1, 0)
        await fleet.submit(client, {"task_id": "second", "task_type": "limited", "payload": 1})
        found = await fleet.wait_for("second", "scheduled", "completed", "failed", timeout=PAUSE_S)
    assert found["state"] == "scheduled"
    kinds = [line["kind"] for line in found["timeline"] if not line["info"]]
    assert kinds in (["queued", "parked"], ["queued", "parked", "scheduled"])  # the dispatcher may not have seen it yet
    assert fleet.starts("second") == []
    why = (await fleet.get("/v1/tasks/second/why")).json()
    assert why["state"] == "scheduled"
    assert why["why"].startswith("A limit or the called service made it wait (limit llm); it is due in ")
    limit = await _llm(fleet)
    assert (limit["throttled_total"], limit["granted_total"], limit["in_use"]) == (1, 1, 0)


async def test_each_limited_execution_takes_one_permit_and_gives_it_back(make_fleet: Callable[..., Fleet]) -> None:
    """`granted_total` grows by one with each limited task and by none with any other."""
    fleet = make_fleet(CONFIG)
    fleet.all_at_once()
    async with fleet.plain() as client:
        for count, task_type in enumerate(("limited", "limited", "echo"), start=1):
            task_id = f"task-{count}"
            await fleet.submit(client, {"task_id": task_id, "task_type": task_type, "payload": count})
            assert (await fleet.wait_for(task_id, "completed", "failed"))["state"] == "completed"
            assert (await _llm(fleet))["granted_total"] == min(count, 2)

    async def free() -> bool:
        return bool((await _llm(fleet))["in_use"] == 0)

    await wait_until(free, "both permits are given back")


async def test_second_governor_refuses_to_start(make_fleet: Callable[..., Fleet]) -> None:
    """It exits with 1 and says that one is already running; the first goes on."""
    fleet = make_fleet(CONFIG)
    fleet.dispatcher()
    first = fleet.governor()
    second = fleet.start("governor", name="second")
    assert await asyncio.to_thread(second.wait) == 1
    assert "a governor is already running" in second.log()
    assert "actor.started" not in second.log()
    assert first.running
