"""The row about money: tasks that race for a budget with wrong estimates, one worker killed in the middle."""

from __future__ import annotations

import asyncio

from bench.permits.common import Outcome, Sizes, Stage, at_most, stage, told
from millstream.errors import BrokerError
from millstream.ports import Broker
from tests.support.many import endings, limit, submit_all
from tests.support.waiting import wait_until

RACERS = 20
TASKS = 60
BUDGET_USD = 5.0
CALL_S = 1.0
WRONG_BY = 3.0


async def race(sizes: Sizes) -> Outcome:
    """20 at once, each costs three times (and then a third of) its estimate; one of two workers dies after reserving."""
    outcome = Outcome()
    for estimate, cost in ((0.1, 0.1 * WRONG_BY), (0.3, 0.3 / WRONG_BY)):
        outcome.lines += (await _race(estimate, cost)).lines
    return outcome


async def _race(estimate: float, cost: float) -> Outcome:
    row = f"budget {estimate:g}→{cost:.2g} USD"
    with stage(f'[limits.money]\ncost = "{BUDGET_USD:g} USD"\n', lease_s=3.0) as on:
        fleet = on.fleet
        fleet.dispatcher()
        fleet.governor()
        victim = on.worker(RACERS // 2)
        on.worker(RACERS // 2)
        payload = {"cost": cost, "seconds": CALL_S}
        tasks = [
            {"task_id": f"t{n}", "task_type": "billed", "payload": payload, "usage_estimate": {"cost_usd": estimate}}
            for n in range(TASKS)
        ]
        async with fleet.plain() as client, fleet.broker() as broker:
            await submit_all(fleet, client, tasks)
            await wait_until(lambda: _calls(on, RACERS // 2), "calls run", timeout=60)
            victim.kill()
            ended = await endings(fleet, broker, TASKS, timeout=120)
            await asyncio.sleep(1.0)
            spent = await _spent(on, broker)
        calls = await on.provider.log("money")
    billed = sum(call.cost for call in calls)
    kinds = sorted({one.error or one.kind for found in ended.values() for one in found})
    completed = sum(found[0].kind == "completed" for found in ended.values())
    overrun = RACERS * max(0.0, cost - estimate)
    lines = [
        at_most(
            row,
            "billed by the provider: budget + overrun of running calls",
            billed,
            BUDGET_USD + overrun + 1e-9,
            " USD",
        ),
        told(row, "spent by the governor's account", spent, " USD"),
        told(row, "tasks ended, completed; how", f"{len(ended)}, {completed}; {', '.join(kinds)}"),
    ]
    return Outcome(lines)


async def _calls(on: Stage, count: int) -> bool:
    return len(await on.provider.log("money")) >= count


async def _spent(on: Stage, broker: Broker) -> float | str:
    try:
        state = await limit(broker, on.fleet, "money")
    except BrokerError as error:
        return str(error)
    return sum(one.used for one in state.dimensions if one.dimension == "cost") if state else "unknown"
