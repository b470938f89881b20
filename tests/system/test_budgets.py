"""Budgets: reserved before, settled after, never overspent by more than what running calls cost beyond their estimates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.calling import Provider
from tests.support.fleet import Fleet
from tests.support.many import endings, limit, submit_all
from tests.support.processes import Processes
from tests.support.waiting import wait_until

RACERS = 20
TASKS = 40


@pytest.mark.parametrize(
    ("budget", "estimate", "cost"),
    [pytest.param(3.0, 0.1, 0.3, id="too low"), pytest.param(6.0, 0.3, 0.1, id="too high")],
)
async def test_race_for_a_budget_ends_within_it(
    make_fleet: Callable[..., Fleet], processes: Processes, budget: float, estimate: float, cost: float
) -> None:
    """Twenty run at once with estimates wrong by 3x; one worker dies after reserving; the rest is refused by the budget."""
    fleet = make_fleet(f'[limits.money]\ncost = "{budget:g} USD"\n')
    provider = Provider.start(processes)
    fleet.dispatcher()
    fleet.governor()
    env = {"MILLSTREAM_PROVIDER": str(provider.port)}
    victim, _ = [fleet.worker(RACERS // 2, env=env, app="tests.support.calls:app") for _ in range(2)]
    payload = {"cost": cost, "seconds": 0.7}
    more = {"task_type": "billed", "payload": payload, "usage_estimate": {"cost_usd": estimate}}
    async with fleet.plain() as client, fleet.broker() as broker:
        await submit_all(fleet, client, ({"task_id": f"t{n}", **more} for n in range(TASKS)))

        async def running() -> bool:
            return len(await provider.log("money")) >= RACERS // 2

        await wait_until(running, "calls run")
        victim.kill()
        ended = await endings(fleet, broker, TASKS, timeout=120)
        state = await limit(broker, fleet, "money")
    billed = sum(call.cost for call in await provider.log("money"))
    assert billed <= budget + RACERS * max(0.0, cost - estimate) + 1e-9
    assert len(ended) == TASKS
    assert all(len(found) == 1 for found in ended.values())
    completed = [task_id for task_id, found in ended.items() if found[0].kind == "completed"]
    refused = [found[0] for found in ended.values() if found[0].kind == "failed"]
    assert len(completed) + len(refused) == TASKS
    assert completed
    if estimate * TASKS > budget and cost * TASKS > budget:
        assert refused, "the budget did not end"
    assert {one.error for one in refused} <= {"budget_exhausted"}
    assert state is not None
    (spent,) = [one.used for one in state.dimensions if one.dimension == "cost"]
    assert spent >= len(completed) * cost - 1e-6, "what was billed and settled is on the account"


async def test_spending_outlives_the_governor(make_fleet: Callable[..., Fleet], processes: Processes) -> None:
    """Killed right after the settlements, its successor knows what was spent and admits no more than is left."""
    fleet = make_fleet('[limits.money]\ncost = "1 USD"\n')
    provider = Provider.start(processes)
    fleet.dispatcher()
    governor = fleet.governor()
    fleet.worker(4, env={"MILLSTREAM_PROVIDER": str(provider.port)}, app="tests.support.calls:app")
    more = {"task_type": "billed", "payload": {"cost": 0.2}, "usage_estimate": {"cost_usd": 0.2}}
    async with fleet.plain() as client, fleet.broker() as broker:
        await submit_all(fleet, client, ({"task_id": f"first-{n}", **more} for n in range(3)))
        await endings(fleet, broker, 3, timeout=60)

        async def settled() -> bool:
            state = await limit(broker, fleet, "money")
            return state is not None and abs(state.dimensions[0].used - 0.6) < 1e-6

        await wait_until(settled, "three calls are on the account")
        governor.kill()
        fleet.governor()
        await wait_until(settled, "the successor knows of three calls")
        await submit_all(fleet, client, ({"task_id": f"second-{n}", **more} for n in range(5)))
        ended = await endings(fleet, broker, 8, timeout=60)
    calls = await provider.log("money")
    assert len(calls) == 5, "1 USD is five calls of 0.20"
    kinds = sorted((found[0].kind, found[0].error) for found in ended.values())
    assert kinds == [("completed", "")] * 5 + [("failed", "budget_exhausted")] * 3
