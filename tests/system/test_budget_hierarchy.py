"""Budgets of a run, a tenant and everybody are one hierarchy: a call is paid by all of them, or begins nowhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.support.calling import Provider
from tests.support.fleet import Fleet
from tests.support.many import Ending, endings, limit, submit_all
from tests.support.processes import Processes

RUN, TENANT = "run/{tenant_id}/{run_id}", "tenant/{tenant_id}"
CONFIG = f"""
[limits."{RUN}"]
cost = "1 USD"
[limits."{TENANT}"]
cost = "1.6 USD"
[limits.money]
cost = "2 USD"
[queues.calls]
limits = ["{RUN}", "{TENANT}"]
"""
PRICE_USD = 0.2


async def test_each_level_of_the_hierarchy_ends_what_would_pass_it(
    make_fleet: Callable[..., Fleet], processes: Processes
) -> None:
    """A run ends after five calls, its tenant after eight, everybody after ten; each level has paid what went through it."""
    fleet = make_fleet(CONFIG)
    provider = Provider.start(processes)
    fleet.dispatcher()
    fleet.governor()
    fleet.worker(4, env={"MILLSTREAM_PROVIDER": str(provider.port)}, app="tests.support.calls:app")
    sent = 0
    passed: list[int] = []
    ended: dict[str, list[Ending]] = {}
    async with fleet.plain() as client, fleet.broker() as broker:
        for tenant, run, tasks in (("acme", "r1", 7), ("acme", "r2", 7), ("globex", "r1", 5)):
            more = {"task_type": "billed", "run_id": run, "usage_estimate": {"cost_usd": PRICE_USD}}
            payload = {"cost": PRICE_USD}
            sent += await submit_all(
                fleet,
                client,
                ({"task_id": f"{tenant}-{run}-{n}", **more, "payload": payload} for n in range(tasks)),
                tenant=tenant,
            )
            ended = await endings(fleet, broker, sent, timeout=60)
            passed.append(sum(one.kind == "completed" for found in ended.values() for one in found))
        spent = {}
        for key in ("run/acme/r1", "run/acme/r2", "run/globex/r1", "tenant/acme", "tenant/globex", "money"):
            state = await limit(broker, fleet, key)
            spent[key] = None if state is None else round(sum(one.used for one in state.dimensions), 6)
    assert passed == [5, 8, 10]
    assert len(await provider.log("money")) == 10, "what was refused called nobody"
    assert spent == {
        "run/acme/r1": 1.0,
        "run/acme/r2": 0.6,
        "run/globex/r1": 0.4,
        "tenant/acme": 1.6,
        "tenant/globex": 0.4,
        "money": 2.0,
    }
    refused = Counter(one.error for found in ended.values() for one in found if one.kind == "failed")
    assert refused == {"budget_exhausted": 9}
