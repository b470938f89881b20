"""The promises about limits, small: judged by what arrived at the provider, never by the governor's own counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import pytest

from millstream.server import LocalServer
from tests.support.calling import Provider
from tests.support.enforcing import How, Rule
from tests.support.fleet import Fleet
from tests.support.leaders import finished, gate, start_load
from tests.support.many import limit, submit_all
from tests.support.permit_load import Slots
from tests.support.processes import Processes
from tests.support.provider import KeyConfig
from tests.support.waiting import wait_until
from tests.support.windows import fullest, most_at_once, utilisation

WINDOW_S = 10.0
PROCESSES = 3


async def test_no_window_holds_more_calls_or_tokens_than_the_limit(
    make_fleet: Callable[..., Fleet], processes: Processes
) -> None:
    """Three processes ask for all they can get, of a small limit and of one of requests and tokens."""
    fleet = make_fleet(f"""
[limits.small]
requests = "40/{WINDOW_S:g}s"
[limits.large]
requests = "1000/{WINDOW_S:g}s"
tokens = "200000/{WINDOW_S:g}s"
""")
    provider = Provider.start(processes)
    fleet.governor()
    slots = (Slots(("small",), "small", 5), Slots(("large",), "large", 10, 100, 500))
    seconds, began = 2.2 * WINDOW_S, gate()
    loads = [start_load(fleet, provider, slots, seconds, gate=began, number=n) for n in range(PROCESSES)]
    counts = await finished(loads, seconds)
    small, large = await provider.log("small"), await provider.log("large")
    assert fullest([call.at for call in small], WINDOW_S) <= 40
    assert fullest([call.at for call in large], WINDOW_S) <= 1000
    tokens = [float(call.tokens) for call in large]
    assert fullest([call.at for call in large], WINDOW_S, tokens) <= 200_000
    used = utilisation([call.at for call in large], 200_000, WINDOW_S, began + 2, began + seconds, tokens)
    print(f"used of the tokens: {used:.3f}; of the small limit: {len(small) / (40 * seconds / WINDOW_S):.3f}")
    assert sum(one.calls for one in counts) == len(small) + len(large), "every call had a permit of its own"
    assert len(small) >= 40
    assert len(large) >= 500


@pytest.mark.parametrize("how", ["sliding_log", "token_bucket", "fixed_window", "slices"])
async def test_a_provider_never_refuses_where_the_configured_limit_is_the_true_one(
    make_fleet: Callable[..., Fleet], processes: Processes, how: How | Literal["slices"]
) -> None:
    """Whichever way it enforces its limit; one that counts by the second is told so by `enforce_window`."""
    sliced = 'enforce_window = "1s"' if how == "slices" else ""
    fleet = make_fleet(f'[limits.llm]\nrequests = "600/{WINDOW_S:g}s"\n{sliced}\n')
    rule = Rule(
        "requests", 600, WINDOW_S, how="sliding_log" if how == "slices" else how, slice_s=1.0 if sliced else None
    )
    provider = Provider.start(processes, {"llm": KeyConfig(rules=(rule,))})
    fleet.governor()
    slots, seconds, began = (Slots(("llm",), "llm", 10),), 1.4 * WINDOW_S, gate()
    loads = [start_load(fleet, provider, slots, seconds, gate=began, number=n) for n in range(PROCESSES)]
    await finished(loads, seconds)
    calls = await provider.log("llm")
    assert [call for call in calls if call.status != 200] == []
    assert len(calls) >= 300


async def test_no_more_calls_run_at_once_than_there_are_places(
    make_fleet: Callable[..., Fleet], processes: Processes
) -> None:
    """Places are counted over all processes; all of them are used, and all are free again at the end."""
    fleet = make_fleet("[limits.places]\nconcurrency = 5\n")
    provider = Provider.start(processes, {"places": KeyConfig(latency_s=0.1)})
    fleet.governor()
    began = gate()
    slots = [Slots(("places",), "places", 10)]
    loads = [start_load(fleet, provider, slots, 5, gate=began, number=n) for n in range(PROCESSES)]
    await finished(loads, 5)
    calls = await provider.log("places")
    assert most_at_once([(call.at, call.ended) for call in calls]) == 5
    async with fleet.broker() as broker:

        async def free() -> bool:
            state = await limit(broker, fleet, "places")
            return state is not None and state.in_use == 0

        await wait_until(free, "all places are free again")


async def test_idle_time_saves_nothing_up(make_fleet: Callable[..., Fleet], processes: Processes) -> None:
    """After a rest the limit is spread over its window as before: no burst makes good for what was not used."""
    fleet = make_fleet(f'[limits.llm]\nrequests = "200/{WINDOW_S:g}s"\n')
    provider = Provider.start(processes)
    fleet.governor()
    slots = [Slots(("llm",), "llm", 10)]
    await finished([start_load(fleet, provider, slots, 2, gate=gate())], 2)
    await asyncio.sleep(4.0)  # the rest itself
    rested = time.monotonic()
    await finished([start_load(fleet, provider, slots, 3, gate=gate())], 3)
    times = [call.at for call in await provider.log("llm") if call.at > rested]
    assert fullest(times, 1.0) <= 200 / WINDOW_S + 1


async def test_limits_hold_for_real_workers_whose_handlers_ask_by_themselves(
    make_fleet: Callable[..., Fleet], processes: Processes, nats_server: LocalServer
) -> None:
    """`ctx.limit` inside handlers, on three workers: one limit over all of them."""
    fleet = make_fleet(f'[limits.llm]\nrequests = "300/{WINDOW_S:g}s"\nconcurrency = 6\n')
    provider = Provider.start(processes)
    fleet.dispatcher()
    fleet.governor()
    for _ in range(PROCESSES):
        fleet.worker(5, env={"MILLSTREAM_PROVIDER": str(provider.port)}, app="tests.support.calls:app")
    async with fleet.plain() as client:
        tasks = ({"task_id": f"spin-{n}", "task_type": "spin", "payload": {"seconds": 13}} for n in range(15))
        await submit_all(fleet, client, tasks)

    async def all_ran() -> bool:
        calls = await provider.log("llm")
        return len(calls) > 300 and len({call.tag for call in calls}) == 15

    await wait_until(all_ran, "every task has made calls", timeout=60)
    calls = await provider.log("llm")
    assert fullest([call.at for call in calls], WINDOW_S) <= 300
    assert most_at_once([(call.at, call.ended) for call in calls if call.ended > call.at]) <= 6
