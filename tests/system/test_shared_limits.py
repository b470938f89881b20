"""One limit for the whole fleet: its permits are counted, a refusal slows everybody, and one governor at a time keeps it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

CONFIG = """
[limits.llm]
requests = "6000/min"
concurrency = 4
"""
PAUSE_S = 20.0


async def _llm(fleet: Fleet) -> dict[str, Any]:
    """The limit as HTTP shows it."""
    answer = await fleet.get("/v1/limits/llm")
    answer.raise_for_status()
    limit: dict[str, Any] = answer.json()
    assert limit["key"] == "llm"
    return limit


async def test_throttled_handler_pauses_its_limit_for_all_tasks(make_fleet: Callable[..., Fleet]) -> None:
    """The pause is shown with its end; whoever needs the limit waits instead of starting, and is told for what."""
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
        assert (limit["throttled_total"], limit["granted_total"]) == (1, 1)
        await fleet.submit(client, {"task_id": "second", "task_type": "limited", "payload": 1})
        found = await fleet.wait_for("second", "held", "scheduled", "completed", "failed", timeout=PAUSE_S)
    # The dispatcher holds it, or, where it did not know the handler's limits yet, the worker has parked it.
    assert found["state"] in ("held", "scheduled")
    assert (found["attempt"], found["errors"]) == (1, 0)
    assert fleet.starts("second") == []

    async def told() -> str | None:
        why: str = (await fleet.get("/v1/tasks/second/why")).json()["why"]
        return why if "llm" in why and "paused" in why else None

    await wait_until(told, "`why` names the limit and what of it", PAUSE_S)
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
    await _all_free(fleet)


@pytest.mark.parametrize("task_type", ["limited.calls", "limited.calls.sync"])
async def test_each_call_inside_a_handler_takes_a_permit_of_its_own(
    make_fleet: Callable[..., Fleet], task_type: str
) -> None:
    """In async and in sync handlers; what they used counts for the task."""
    fleet = make_fleet(CONFIG)
    fleet.all_at_once()
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "calls", "task_type": task_type, "payload": {"calls": 20}})
        found = await fleet.wait_for("calls", "completed", "failed")
    assert (found["state"], found["usage"]["tokens_in"]) == ("completed", 20)
    assert (await _llm(fleet))["granted_total"] >= 20  # a grant that comes too late is given back and asked for anew
    await _all_free(fleet)


async def test_refusal_of_the_called_service_costs_no_attempt_and_slows_the_limit(
    make_fleet: Callable[..., Fleet],
) -> None:
    """The handler does nothing for it: the exception carries the service's answer."""
    fleet = make_fleet(CONFIG)
    fleet.all_at_once()
    async with fleet.plain() as client:
        task = {
            "task_id": "once",
            "task_type": "limited.once",
            "payload": {"after": 1.5},
            "budget": {"max_attempts": 1},
        }
        await fleet.submit(client, task)
        found = await fleet.wait_for("once", "completed", "failed")
    assert (found["state"], found["attempt"], found["errors"], found["result"]) == ("completed", 1, 0, 1)
    first, second = fleet.starts("once")
    assert second["at"] - first["at"] >= 1.5
    assert (await _llm(fleet))["throttled_total"] == 1


async def test_second_governor_stands_by_and_takes_over(make_fleet: Callable[..., Fleet]) -> None:
    """One leads, the other waits; killed, the first is followed by it, and limited work goes on."""
    fleet = make_fleet(CONFIG)
    leader = fleet.all_at_once()["governor"]
    second = fleet.start("governor", name="second")
    second.wait_for_log("leader.waiting")
    assert "actor.started" not in second.log()
    leader.kill()
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "after", "task_type": "limited", "payload": 1})
        assert (await fleet.wait_for("after", "completed", "failed"))["state"] == "completed"
    assert "actor.started" in second.log()


async def _all_free(fleet: Fleet) -> None:
    async def free() -> bool:
        return bool((await _llm(fleet))["in_use"] == 0)

    await wait_until(free, "every permit is given back")
