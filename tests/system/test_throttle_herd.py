"""A provider that refuses for a while: nobody calls meanwhile, nobody storms in afterwards, no attempt is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.calling import Provider
from tests.support.fleet import Fleet
from tests.support.many import endings, submit_all
from tests.support.processes import Processes
from tests.support.waiting import wait_until
from tests.support.windows import bins

PER_S = 20
TASKS = 60
REFUSED_S = 4.0
UNDER_WAY_S = 0.6
"""What was granted before the first refusal may still arrive: booked ahead, used late, and on its way."""


@pytest.mark.parametrize("form", ["seconds", "date", "0", "-1", "abc", "99999999"])
async def test_refused_herd_waits_and_comes_back_in_order(
    make_fleet: Callable[..., Fleet], processes: Processes, form: str
) -> None:
    """Sixty tasks on two workers; Retry-After in both forms is kept to, and junk holds nothing up for long."""
    fleet = make_fleet(f'[limits.llm]\nrequests = "{PER_S * 60}/min"\n')
    provider = Provider.start(processes)
    fleet.dispatcher()
    fleet.governor()
    for _ in range(2):
        fleet.worker(10, env={"MILLSTREAM_PROVIDER": str(provider.port)}, app="tests.support.calls:app")
    async with fleet.plain() as client, fleet.broker() as broker:
        await submit_all(
            fleet, client, ({"task_id": f"t{n}", "task_type": "asked", "payload": {}} for n in range(TASKS))
        )

        async def some() -> bool:
            return len(await provider.log("llm")) >= 10

        await wait_until(some, "ten calls")
        until = await provider.refuse("llm", REFUSED_S, form)
        ended = await endings(fleet, broker, TASKS, timeout=120)
        await asyncio.sleep(0.5)  # a second arrival of one that has ended would come now
    calls = await provider.log("llm")
    assert {task_id: [(one.kind, one.attempt) for one in found] for task_id, found in ended.items()} == {
        f"t{n}": [("completed", 1)] for n in range(TASKS)
    }
    refused = [call.at for call in calls if call.status == 429]
    assert refused, "the outage was met"
    if form in ("seconds", "date"):
        assert [at - refused[0] for at in refused if at > refused[0] + UNDER_WAY_S] == []
    after = [call.at for call in calls if call.at >= until]
    assert max(bins(after, until, after[-1] + 0.1)) <= 2 * PER_S * 0.1
