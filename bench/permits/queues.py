"""Rows about metered queues: pools side by side, a releaser that keeps dying, and the throughput of an open gate."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable

import httpx

from bench.permits.common import SLOTS, Outcome, Sizes, Stage, at_least, at_most, served, stage, told
from millstream.ports import Broker
from millstream_schemas.topology import LEADER_TTL_S
from tests.support.leaders import holder, leader
from tests.support.many import Ending, endings, submit_all
from tests.support.processes import ActorProcess
from tests.support.waiting import wait_until
from tests.support.windows import between, longest_gap

OPEN = '[limits.open]\nrequests = "1_000_000_000/min"\n'
CALL_S = 0.1
FREE_WORKERS = 2
MANY, EACH = 40, 10
"""Tenants with limits of their own over one that they share, and how many tasks each of them sends."""


# --- pools side by side ---------------------------------------------------------------------------


def _calls(task_type: str, count: int, seconds: float, start: int = 0) -> Iterable[dict[str, object]]:
    for number in range(start, start + count):
        name = f"{task_type}-{number}"
        yield {"task_id": name, "task_type": task_type, "payload": {"seconds": seconds, "tag": name}}


async def side_by_side(sizes: Sizes) -> Outcome:
    """A paid pool is throttled for a minute; the free one beside it in the same queue goes on as if alone."""
    row, seconds = "pools", sizes.pick(10, 60)
    config = f'[limits.llm]\nrequests = "600/min"\n{OPEN}[task_types.free]\nlimits = ["open"]\n'
    need = int((2 * seconds + 30) * FREE_WORKERS * SLOTS / CALL_S)
    with stage(config) as on:
        fleet = on.fleet
        fleet.dispatcher()
        fleet.governor()
        for _ in range(FREE_WORKERS):
            on.worker(SLOTS)
        async with fleet.plain() as client:
            await submit_all(fleet, client, _calls("free", need, CALL_S))
            await asyncio.sleep(3.0)
            alone = time.monotonic()
            await asyncio.sleep(seconds)
            alone_ends = time.monotonic()
            await submit_all(fleet, client, _calls("asked", 500, 0.0), tenant="payer")
            await on.provider.refuse("llm", seconds + 15)
            await wait_until(lambda: _refused(on), "the paid pool was refused", timeout=60)
            beside = time.monotonic()
            await asyncio.sleep(seconds)
            beside_ends = time.monotonic()
        free = served(await on.provider.log("free"))
        paid = between(served(await on.provider.log("llm")), beside, beside_ends)
    rate_alone = len(between(free, alone, alone_ends)) / (alone_ends - alone)
    rate_beside = len(between(free, beside, beside_ends)) / (beside_ends - beside)
    return Outcome(
        [
            at_least(row, "free pool's throughput over that alone", rate_beside / rate_alone, 0.95),
            told(row, "free tasks/s alone, beside", f"{rate_alone:.1f}, {rate_beside:.1f}"),
            told(row, "longest gap of the free pool", longest_gap(free, beside, beside_ends), " s"),
            told(row, "paid calls in that time", float(len(paid))),
        ]
    )


async def _refused(on: Stage) -> bool:
    return any(call.status == 429 for call in await on.provider.log("llm"))


async def many_pools(sizes: Sizes) -> Outcome:
    """40 tenants, each with a limit of its own, over one slow limit: one pool each, supplied as one is altogether."""
    row, seconds = "hierarchy", sizes.pick(16, 32)
    config = f"""[limits.llm]
requests = "60/min"
[limits."tenant/{{tenant_id}}"]
requests = "600/min"
[task_types.call]
limits = ["tenant/{{tenant_id}}"]
{OPEN}[task_types.free]
limits = ["open"]
"""
    with stage(config) as on:
        fleet = on.fleet
        fleet.dispatcher()
        fleet.governor()
        on.worker(SLOTS)
        async with fleet.plain() as client:
            await submit_all(fleet, client, _calls("free", int((seconds + 20) * SLOTS / CALL_S), CALL_S))
            await asyncio.sleep(3.0)
            alone = time.monotonic()
            await asyncio.sleep(8.0)
            alone_ends = time.monotonic()
            for number in range(MANY):
                tasks = [{"task_id": f"{number}-{n}", "task_type": "call", "payload": {}} for n in range(EACH)]
                await submit_all(fleet, client, tasks, tenant=f"t{number}")
            beside = time.monotonic()
            await asyncio.sleep(seconds)
            beside_ends = time.monotonic()
        free = served(await on.provider.log("free"))
        paid = [call.tag for call in await on.provider.log("llm")]
    rate_alone = len(between(free, alone, alone_ends)) / (alone_ends - alone)
    rate_beside = len(between(free, beside, beside_ends)) / (beside_ends - beside)
    return Outcome(
        [
            at_least(row, "free pool's throughput over that alone", rate_beside / rate_alone, 0.95),
            at_least(row, "different tenants among the first paid calls", len({*paid[:MANY]}) / len(paid[:MANY]), 0.9),
            at_least(row, "paid calls over the limit's rate", len(paid) / seconds, 0.9),
            told(row, "free tasks/s alone, beside", f"{rate_alone:.1f}, {rate_beside:.1f}"),
        ]
    )


# --- a releaser that keeps dying ------------------------------------------------------------------


async def releaser_kills(sizes: Sizes) -> Outcome:
    """The replica that releases is killed 20 times under load: nothing is lost, nothing runs twice."""
    kills = int(sizes.pick(2, 20))
    with stage(f"{OPEN}[queues.calls]\nfair = true\n[task_types.free]\nlimits = ['open']\n") as on:
        fleet = on.fleet
        fleet.governor()
        dispatchers = [fleet.dispatcher(), fleet.dispatcher()]
        on.worker(SLOTS)
        sent = 0
        took: list[float] = []
        ended_load = asyncio.Event()
        async with fleet.plain() as client, fleet.broker() as broker:

            async def load() -> None:
                nonlocal sent
                while not ended_load.is_set():
                    sent += await submit_all(fleet, client, _calls("free", 20, 0.05, sent))
                    await asyncio.sleep(0.2)

            async with asyncio.TaskGroup() as group:
                group.create_task(load())
                try:
                    for _ in range(kills):
                        victim = await leader(fleet, broker, fleet.names.releaser_lock, dispatchers)
                        await asyncio.sleep(1.0)  # it releases for a while
                        took.append(await _takeover(on, broker, dispatchers, victim))
                        dispatchers = [one for one in dispatchers if one is not victim]
                        dispatchers.append(await asyncio.to_thread(fleet.dispatcher))
                finally:
                    ended_load.set()
            ended = await endings(fleet, broker, sent, timeout=120)
            await asyncio.sleep(2.0)
            ended = await endings(fleet, broker, sent, timeout=5)
        starts = Counter(call.tag for call in await on.provider.log("free"))
    return judge_kills(kills, sent, ended, starts, took)


async def _takeover(on: Stage, broker: Broker, dispatchers: list[ActorProcess], victim: ActorProcess) -> float:
    """Kill, and the seconds until another one holds the lock."""
    victim.send_signal(signal.SIGKILL)
    began = time.monotonic()
    fleet = on.fleet

    async def another() -> bool:
        pid = await holder(fleet, broker, fleet.names.releaser_lock)
        return pid not in (None, victim.pid) and any(one.pid == pid for one in dispatchers)

    await wait_until(another, "another dispatcher releases", timeout=30)
    return time.monotonic() - began


def judge_kills(
    kills: int, sent: int, ended: dict[str, list[Ending]], starts: Counter[str], took: list[float]
) -> Outcome:
    """0 lost, 0 doubled, takeover in time."""
    row = "releaser"
    lost = sent - sum(any(one.kind == "completed" for one in found) for found in ended.values())
    doubled = sum(len(found) > 1 for found in ended.values()) + sum(times > 1 for times in starts.values())
    return Outcome(
        [
            at_most(row, f"tasks lost of {sent} over {kills} kills", lost, 0),
            at_most(row, "tasks that ended or ran twice", doubled, 0),
            at_most(row, "slowest takeover", max(took), LEADER_TTL_S + 1, " s"),
        ]
    )


# --- an open gate --------------------------------------------------------------------------------


async def throughput(sizes: Sizes) -> Outcome:
    """Tasks/s of a metered queue whose gate is open, from the first submit to the last one visible."""
    row, count = "throughput", int(sizes.pick(2000, 15_000))
    outcome = Outcome()
    for kind, queue in (("limit", 'limits = ["open"]'), ("fair", "fair = true")):
        with stage(f"{OPEN}[queues.bench]\n{queue}\n") as on:
            per_s = await _flood(on, count)
        outcome.lines.append(at_least(row, f"tasks/s end to end, metered by a {kind}", per_s, 1000))
    return outcome


async def _flood(on: Stage, count: int) -> float:
    fleet = on.fleet
    quiet = {"MILLSTREAM_LOG_LEVEL": "ERROR", "MILLSTREAM_CONCURRENCY": "256"}
    fleet.tracker()
    for args in (("dispatcher",), ("governor",), ("worker", "bench.app:app")):
        fleet.start(*args, env=quiet)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as client:

        async def total(path: str, **params: str | int) -> int:
            answer = (await client.get(path, params=params)).raise_for_status().json()
            return int(answer["total"]) if "total" in answer else len(answer["items"])

        async def workers() -> bool:
            return await total("/v1/workers") == 1

        await wait_until(workers, "the worker is registered", timeout=60)
        await asyncio.sleep(1.0)  # its limits are announced with it
        argv = [sys.executable, "-m", "bench.producer", "flood", "run", str(count)]
        env = {**os.environ, **fleet.env}
        producer = on.processes.start_command(argv, "producer", env=env)

        async def visible() -> bool:
            return await total("/v1/tasks", state="completed", limit=1) >= count

        await wait_until(visible, f"{count} tasks are visible", timeout=180)
        ended = time.time()
    producer.wait()
    return count / (ended - float(json.loads(producer.log().splitlines()[-1])["began"]))
