"""No limit is passed while the governor dies, freezes and is cut off: small versions of what the bench measures at length."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tests.support import partition
from tests.support.calling import Provider
from tests.support.fleet import Fleet
from tests.support.leaders import finished, gate, leader, start_load
from tests.support.permit_load import Slots
from tests.support.processes import ActorProcess, Processes
from tests.support.provider import Call, KeyConfig
from tests.support.waiting import wait_until
from tests.support.windows import fullest, most_at_once

WINDOW_S = 5.0
AMOUNT = 150
PLACES = 6
SECONDS = 26.0
FAULT_AT_S = 5.0
PAST_LEASE_S = 5.0
BACK_S = 16.0
"""Generous: a lease of the lock, one renewal of every worker, and what a slow machine adds."""
CONFIG = f"""
[limits.rate]
requests = "{AMOUNT}/{WINDOW_S:g}s"
[limits.places]
concurrency = {PLACES}
"""
SLOTS = (Slots(("rate",), "rate", 5), Slots(("places",), "places", 5))


class Governors:
    """Two governors, each behind a proxy that can be stopped."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.running: list[ActorProcess] = []
        self.proxies: dict[int, ActorProcess] = {}

    def start(self) -> None:
        port = int(self.fleet.server.url.rpartition(":")[2])
        proxy, url = partition.start(self.fleet.processes, port)
        governor = self.fleet.start("governor", env={"MILLSTREAM_NATS_URL": url})
        self.running.append(governor)
        self.proxies[governor.pid] = proxy

    async def leader(self) -> ActorProcess:
        async with self.fleet.broker() as broker:
            return await leader(self.fleet, broker, self.fleet.names.governor_lock, self.running)

    async def hit(self, fault: str) -> None:
        """Do to the leader what the fault says."""
        victim = await self.leader()
        match fault:
            case "kill":
                victim.kill()
            case "freeze":
                victim.send_signal(signal.SIGSTOP)
                await asyncio.sleep(PAST_LEASE_S)
                victim.send_signal(signal.SIGCONT)
            case "cut":
                self.proxies[victim.pid].send_signal(signal.SIGSTOP)
                await asyncio.sleep(PAST_LEASE_S)
                self.proxies[victim.pid].send_signal(signal.SIGCONT)
            case "restart":
                for governor in self.running:
                    governor.terminate()
                for governor in self.running:
                    await asyncio.to_thread(governor.wait)
                self.running.clear()
                self.start()
            case "server":
                await asyncio.to_thread(self.fleet.server.kill)
                await asyncio.to_thread(self.fleet.server.restart)
            case _:
                raise AssertionError(fault)


async def _through(fleet: Fleet, provider: Provider, fault: str, *, doubled: bool) -> tuple[list[Call], float]:
    """Hit the leader under load; what arrived at the provider, and when it was hit."""
    governors = Governors(fleet)
    governors.start()
    await governors.leader()
    governors.start()
    if doubled:
        argv = [sys.executable, "-m", "tests.support.doubler", fleet.server.url, fleet.names.prefix, f"{SECONDS:g}"]
        fleet.processes.start_command(argv, "doubler").wait_for_log("ready")
    began = gate()
    loads = [start_load(fleet, provider, SLOTS, SECONDS, gate=began, number=n) for n in range(3)]
    await asyncio.sleep(began + FAULT_AT_S - time.monotonic())
    hit_at = time.monotonic()
    await governors.hit(fault)
    await finished(loads, SECONDS)
    return await provider.log(), hit_at


@pytest.mark.parametrize("fault", ["kill", "freeze", "cut", "restart", "server"])
async def test_no_limit_is_passed_through(make_fleet: Callable[..., Fleet], processes: Processes, fault: str) -> None:
    """Rate and places hold over all windows, and permits flow again; requests come twice and late all the time."""
    provider = Provider.start(processes, {"places": KeyConfig(latency_s=0.1)})
    calls, hit_at = await _through(make_fleet(CONFIG), provider, fault, doubled=True)
    rate = [call.at for call in calls if call.key == "rate"]
    places = [(call.at, call.ended) for call in calls if call.key == "places" and call.ended]
    assert fullest(rate, WINDOW_S) <= AMOUNT
    assert most_at_once(places) <= PLACES
    assert [at for at in rate if at > hit_at + BACK_S], "no permit after the fault"


async def test_no_place_is_lost_with_a_leader(make_fleet: Callable[..., Fleet], processes: Processes) -> None:
    """After a kill the successor learns what is in use: no more than all places, and soon all of them again."""
    provider = Provider.start(processes, {"places": KeyConfig(latency_s=0.1)})
    calls, hit_at = await _through(make_fleet(CONFIG), provider, "kill", doubled=False)
    places = [(call.at, call.ended) for call in calls if call.key == "places" and call.ended]
    assert most_at_once(places) <= PLACES
    assert most_at_once([span for span in places if span[0] > hit_at + BACK_S]) == PLACES


async def test_place_of_a_killed_worker_is_free_again(make_fleet: Callable[..., Fleet], processes: Processes) -> None:
    """It held all places: another process gets them once their leases have run out, and not before."""
    fleet = make_fleet("[limits.places]\nconcurrency = 3\n")
    provider = Provider.start(processes, {"places": KeyConfig(latency_s=1.0)})
    fleet.governor()
    slots = [Slots(("places",), "places", 3)]
    first = start_load(fleet, provider, slots, 60, gate=time.monotonic(), number=1)
    first.wait_for_log("ready")

    async def holds_all() -> bool:
        return len(await provider.log("places")) >= 3

    await wait_until(holds_all, "it holds all places")
    killed = time.monotonic()
    first.kill()
    seconds = 45.0
    second = start_load(fleet, provider, slots, seconds, gate=time.monotonic(), number=2)
    await finished([second], seconds)
    later = [call for call in await provider.log("places") if call.tag.startswith("load-2")]
    assert later, "the places of a dead process were never free again"
    assert most_at_once([(call.at, call.ended) for call in later]) == 3
    print(f"free again {later[0].at - killed:.1f} s after the kill")
