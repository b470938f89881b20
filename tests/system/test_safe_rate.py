"""While no governor answers nothing with a limit starts, unless its owner has said how fast each worker may go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.calling import Provider
from tests.support.fleet import Fleet
from tests.support.many import submit_all
from tests.support.processes import Processes
from tests.support.waiting import wait_until
from tests.support.windows import fullest

LIMIT = '[limits.llm]\nrequests = "6000/min"\n'
PER_S = 5
SAFE = f'on_governor_down = "safe_rate"\nsafe_rate = "{PER_S}/s"\n'
CALLS = 15
CLOSED_FOR_S = 8.0


@pytest.mark.parametrize("safe", [True, False], ids=["safe_rate", "fail_closed"])
async def test_calls_of_a_handler_without_a_governor(
    make_fleet: Callable[..., Fleet], processes: Processes, safe: bool
) -> None:
    """`ctx.limit` goes on at the safe rate once the governor was silent for too long; without one it never does."""
    fleet = make_fleet(LIMIT + (SAFE if safe else ""))
    provider = Provider.start(processes)
    fleet.dispatcher()
    fleet.worker(4, env={"MILLSTREAM_PROVIDER": str(provider.port)}, app="tests.support.calls:app")
    async with fleet.plain() as client:
        await submit_all(fleet, client, [{"task_id": "spin", "task_type": "spin", "payload": {"seconds": 20}}])

    async def called() -> bool:
        return len(await provider.log("llm")) >= CALLS

    if safe:
        await wait_until(called, f"{CALLS} calls at the safe rate", timeout=60)
        assert fullest([call.at for call in await provider.log("llm")], 1.0) <= PER_S + 1
    else:
        await asyncio.sleep(CLOSED_FOR_S)  # twice as long as the silence after which a safe rate would begin
        assert await provider.log("llm") == []
