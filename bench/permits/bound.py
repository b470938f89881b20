"""Rows about the limit itself: never passed in any window, close to it when saturated, no burst after a rest."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.permits.common import (
    PROCESSES,
    SETTLING_S,
    SLOTS,
    Loads,
    Outcome,
    Sizes,
    Stage,
    at_least,
    at_most,
    served,
    stage,
    told,
    total,
)
from millstream.ports import Broker
from millstream_schemas.topology import LEADER_TTL_S
from tests.support import partition
from tests.support.leaders import leader
from tests.support.permit_load import Slots
from tests.support.processes import ActorProcess
from tests.support.provider import Call, KeyConfig
from tests.support.windows import fullest, most_at_once, utilisation

CONCURRENCY = 12
PAST_LEASE_S = LEADER_TTL_S + 2.0
SMALLEST, LARGEST = 100, 500
"""Tokens of one call; the limits have 200 tokens for each request, so that tokens bind."""


# --- any window, through faults -------------------------------------------------------------------


@dataclass
class Governors:
    """Two governors, each behind a proxy of its own; the one that leads is hit."""

    on: Stage
    broker: Broker
    running: list[ActorProcess] = field(default_factory=list[ActorProcess])
    proxies: dict[int, ActorProcess] = field(default_factory=dict[int, ActorProcess])

    def start(self) -> None:
        """One more, through a new proxy."""
        port = int(self.on.fleet.server.url.rpartition(":")[2])
        proxy, url = partition.start(self.on.processes, port)
        governor = self.on.fleet.start("governor", env={"MILLSTREAM_NATS_URL": url})
        self.running.append(governor)
        self.proxies[governor.pid] = proxy

    async def leader(self) -> ActorProcess:
        fleet = self.on.fleet
        return await leader(fleet, self.broker, fleet.names.governor_lock, self.running)

    async def kill(self) -> None:
        """Kill -9 of the leader; another one is started as its standby."""
        victim = await self.leader()
        victim.kill()
        self.running.remove(victim)
        self.start()

    async def freeze(self) -> None:
        """SIGSTOP of the leader past its lease: it wakes up as a zombie."""
        victim = await self.leader()
        victim.send_signal(signal.SIGSTOP)
        await asyncio.sleep(PAST_LEASE_S)
        victim.send_signal(signal.SIGCONT)

    async def cut(self) -> None:
        """A partition: nothing passes between the leader and the server, past its lease, then all of it late."""
        proxy = self.proxies[(await self.leader()).pid]
        proxy.send_signal(signal.SIGSTOP)
        await asyncio.sleep(PAST_LEASE_S)
        proxy.send_signal(signal.SIGCONT)

    async def restart(self) -> None:
        """All governors stop and start, as in a deployment without a standby."""
        for governor in self.running:
            governor.terminate()
        for governor in self.running:
            await asyncio.to_thread(governor.wait)
        self.running.clear()
        self.start()
        self.start()


async def _faults(governors: Governors, worker_proxy: ActorProcess, loads: Loads) -> None:
    """One fault after the other, at fixed parts of the run."""

    async def at(part: float) -> None:
        await asyncio.sleep(max(0.0, loads.began + part * loads.seconds - time.monotonic()))

    server = governors.on.fleet.server
    await at(0.08)
    await governors.kill()
    await at(0.25)
    await governors.freeze()
    await at(0.42)
    worker_proxy.send_signal(signal.SIGSTOP)  # the answers of a second reach this worker late
    await asyncio.sleep(1.0)
    worker_proxy.send_signal(signal.SIGCONT)
    await at(0.5)
    await governors.restart()
    await at(0.65)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.restart)
    await at(0.8)
    await governors.cut()


async def any_window(sizes: Sizes) -> Outcome:
    """Calls in any window ≤ N while leaders die, freeze, restart and are cut off, and messages come twice and late."""
    window_s, seconds = sizes.window_s, sizes.pick(45, 150)
    one, many = int(window_s * 10), int(window_s * 100)
    config = f"""
[limits.one]
requests = "{one}/{window_s:g}s"
[limits.many]
requests = "{many}/{window_s:g}s"
tokens = "{many * 300}/{window_s:g}s"
[limits.places]
concurrency = {CONCURRENCY}
"""
    slow = KeyConfig(latency_s=0.05)
    slots = (
        Slots(("one",), "one", 3),
        Slots(("many", "places"), "many", 5, SMALLEST, LARGEST),
        Slots(("places",), "places", 2),
    )
    with stage(config, {"many": slow, "places": slow}) as on:
        port = int(on.fleet.server.url.rpartition(":")[2])
        proxy, proxied = partition.start(on.processes, port)
        doubler = [sys.executable, "-m", "tests.support.doubler", on.fleet.server.url, on.fleet.names.prefix]
        async with on.fleet.broker() as broker:
            governors = Governors(on, broker)
            governors.start()
            await governors.leader()
            governors.start()
            again = on.processes.start_command([*doubler, f"{seconds:g}"], "doubler")
            loads = on.loads(slots, seconds, urls={0: proxied})
            await _faults(governors, proxy, loads)
            counts = await loads.finished()
        again.wait()
        calls = await on.provider.log()
        notes = [total(counts), f"{again.log().split()[-1]} messages sent again"]
    return _judge(calls, one, many, window_s, loads, notes)


def _judge(calls: list[Call], one: int, many: int, window_s: float, loads: Loads, notes: Sequence[str]) -> Outcome:
    several = [call for call in calls if call.key == "many"]
    worst_one = fullest(served(calls, "one"), window_s) / one
    worst_many = fullest([call.at for call in several], window_s) / many
    worst_tokens = fullest([call.at for call in several], window_s, [call.tokens for call in several]) / (many * 300)
    spans = [(call.at, call.ended) for call in calls if call.key in ("many", "places") and call.ended]
    together = most_at_once(spans) / CONCURRENCY
    worst = max(worst_one, worst_many, worst_tokens, together)
    row = "window"
    outcome = Outcome(figures={"max_window_ratio": worst})
    outcome.lines += [
        at_most(row, f"most in any {window_s:g} s over {one}", worst_one, 1.0),
        at_most(row, f"most in any {window_s:g} s over {many}", worst_many, 1.0),
        at_most(row, "tokens in any window over the limit", worst_tokens, 1.0),
        at_most(row, f"most calls at once over {CONCURRENCY}", together, 1.0),
        told(row, "use of the first limit, outages included", _used(calls, "one", one, window_s, loads)),
        *(told(row, "counted", note) for note in notes),
    ]
    return outcome


def _used(calls: Sequence[Call], key: str, amount: float, window_s: float, loads: Loads) -> float:
    return utilisation(served(calls, key), amount, window_s, loads.began + SETTLING_S, loads.ends)


# --- close to it ---------------------------------------------------------------------------------


def _rates(sizes: Sizes) -> tuple[int, ...]:
    """Requests in a window: 600, 6,000 and 30,000 a minute; in CI 6,000 and 30,000 a minute, over ten seconds."""
    return (1000, 5000) if sizes.quick else (600, 6000, 30_000)


async def utilisation_1d(sizes: Sizes) -> Outcome:
    """How much of a limit of requests is used when saturated; nothing fails in this run."""
    return await _saturated(sizes, "utilisation", with_tokens=False)


async def utilisation_2d(sizes: Sizes) -> Outcome:
    """The same for requests and tokens, of which tokens bind."""
    return await _saturated(sizes, "utilisation_2d", with_tokens=True)


async def _saturated(sizes: Sizes, row: str, *, with_tokens: bool) -> Outcome:
    window_s, seconds = sizes.window_s, sizes.pick(22, 150)
    outcome = Outcome()
    used: list[float] = []
    ratios: list[float] = []
    for amount in _rates(sizes):
        tokens = amount * 200
        more = f'tokens = "{tokens}/{window_s:g}s"\n' if with_tokens else ""
        with stage(f'[limits.llm]\nrequests = "{amount}/{window_s:g}s"\n{more}') as on:
            on.fleet.governor()
            low, high = (SMALLEST, LARGEST) if with_tokens else (0, 0)
            loads = on.loads([Slots(("llm",), "llm", SLOTS, low, high)], seconds)
            counts = await loads.finished()
            calls = await on.provider.log("llm")
        times, sizes_of = served(calls), [float(call.tokens) for call in calls]
        start, end = loads.began + SETTLING_S, loads.ends
        share, ratio = utilisation(times, amount, window_s, start, end), fullest(times, window_s) / amount
        if with_tokens:
            share = max(share, utilisation(times, tokens, window_s, start, end, sizes_of))
            ratio = max(ratio, fullest(times, window_s, sizes_of) / tokens)
        used.append(share)
        ratios.append(ratio)
        needed = 0.95 if sizes.quick else 0.97 if with_tokens else 0.98
        outcome.lines += [
            at_least(row, f"used of {amount} in {window_s:g} s", share, needed),
            at_most(row, "most in any window over the limit", ratio, 1.0),
            told(row, "counted", total(counts)),
        ]
    outcome.figures = {row: min(used), "max_window_ratio": max(ratios)}
    return outcome


async def utilisation_workers(sizes: Sizes) -> Outcome:
    """The same through real workers: handlers that take permits with `ctx.limit`."""
    amount, window_s, seconds = int(100 * sizes.window_s), sizes.window_s, sizes.pick(25, 150)
    row = "utilisation_workers"
    with stage(f'[limits.llm]\nrequests = "{amount}/{window_s:g}s"\n') as on:
        fleet = on.fleet
        fleet.dispatcher()
        fleet.governor()
        for _ in range(PROCESSES):
            on.worker(SLOTS)
        async with fleet.plain() as client:
            for number in range(PROCESSES * SLOTS):
                task = {"task_id": f"spin-{number}", "task_type": "spin", "payload": {"seconds": seconds}}
                await fleet.submit(client, task, queue="calls")
        await asyncio.sleep(seconds + 5)
        times = served(await on.provider.log("llm"))
    start = times[0] + SETTLING_S + 2
    share = utilisation(times, amount, window_s, start, times[0] + seconds - 1)
    ratio = fullest(times, window_s) / amount
    lines = [
        at_least(row, f"used of {amount} in {window_s:g} s", share, 0.95 if sizes.quick else 0.98),
        at_most(row, "most in any window over the limit", ratio, 1.0),
    ]
    return Outcome(lines, {"utilisation": share, "max_window_ratio": ratio})


# --- after a rest --------------------------------------------------------------------------------


async def after_idle(sizes: Sizes) -> Outcome:
    """After 30 s without any call nothing has been saved up: the first second is like every other."""
    row, window_s, rest_s = "idle", sizes.window_s, sizes.pick(5, 30)
    outcome = Outcome()
    for amount in _rates(sizes):
        with stage(f'[limits.llm]\nrequests = "{amount}/{window_s:g}s"\n') as on:
            on.fleet.governor()
            slots = [Slots(("llm",), "llm", SLOTS)]
            before = on.loads(slots, 4)
            await before.finished()
            rested_from = time.monotonic()
            await asyncio.sleep(rest_s)
            await on.loads(slots, 4).finished()
            times = [at for at in served(await on.provider.log("llm")) if at > rested_from]
        first_second = sum(at < times[0] + 1.0 for at in times)
        bound = amount / window_s + 1
        outcome.lines.append(
            at_most(row, f"calls in the first second at {amount} in {window_s:g} s", first_second, bound)
        )
    return outcome
