"""A standby follows a leader that was killed, frozen or stopped: soon, without a burst, and without losing a cent."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from millstream_schemas.keys import derive_key
from millstream_schemas.topology import LEADER_TTL_S
from tests.support.calling import Provider
from tests.support.fleet import Fleet
from tests.support.leaders import finished, gate, leader, start_load
from tests.support.permit_load import Slots
from tests.support.processes import ActorProcess, Processes
from tests.support.waiting import wait_until
from tests.support.windows import fullest, longest_gap

if TYPE_CHECKING:
    from millstream.ports import Broker

SLACK_S = 4.0
"""Generous: one second is what it takes in a quiet system; the figure is printed."""
WINDOW_S = 5.0
AMOUNT = 200
SECONDS = 20.0
FAULT_AT_S = 4.0
CONFIG = f"""
[limits.rate]
requests = "{AMOUNT}/{WINDOW_S:g}s"
[limits.paid]
requests = "{AMOUNT}/{WINDOW_S:g}s"
cost = "1000 USD"
"""
PRICE_USD = 0.25


class Governors:
    """A leader and its standby."""

    def __init__(self, fleet: Fleet, broker: Broker) -> None:
        self.fleet = fleet
        self.broker = broker
        self.running: list[ActorProcess] = []

    async def start(self, count: int = 2) -> None:
        """Start one after the other, so that the first one leads."""
        for _ in range(count):
            self.running.append(self.fleet.start("governor"))
            await self.leader()
        for standby in self.running[1:]:
            await asyncio.to_thread(standby.wait_for_log, "leader.waiting")

    async def leader(self) -> ActorProcess:
        """The one that leads now."""
        return await leader(self.fleet, self.broker, self.fleet.names.governor_lock, self.running)

    async def hit(self, fault: str) -> float:
        """Do something to the leader; returns when it was, monotonic."""
        victim = await self.leader()
        at = time.monotonic()
        if fault == "freeze":
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(LEADER_TTL_S + 2.0)
            victim.send_signal(signal.SIGCONT)  # it wakes up as a former leader, with all that came meanwhile
            return at
        self.running.remove(victim)
        if fault == "kill":
            victim.kill()
        else:
            victim.terminate()
            assert await asyncio.to_thread(victim.wait) == 0
        return at


@pytest.mark.parametrize(("fault", "within_s"), [("kill", LEADER_TTL_S), ("freeze", LEADER_TTL_S), ("stop", 0.0)])
async def test_permits_flow_again_soon_and_no_window_is_overfull(
    make_fleet: Callable[..., Fleet], processes: Processes, fault: str, within_s: float
) -> None:
    """The provider's own log of arrivals is the judge, over windows that reach across the takeover."""
    fleet = make_fleet(CONFIG)
    provider = Provider.start(processes)
    async with fleet.broker() as broker:
        governors = Governors(fleet, broker)
        await governors.start()
        began = gate()
        slots = [Slots(("rate",), "rate", 6)]
        loads = [start_load(fleet, provider, slots, SECONDS, gate=began, number=number) for number in range(2)]
        await asyncio.sleep(began + FAULT_AT_S - time.monotonic())
        hit_at = await governors.hit(fault)
        await finished(loads, SECONDS)
        assert (await governors.leader()).running
        assert all(governor.running for governor in governors.running)
    arrivals = [call.at for call in await provider.log("rate")]
    took_s = longest_gap(arrivals, hit_at, hit_at + within_s + SLACK_S + 2)
    most = fullest(arrivals, WINDOW_S)
    print(f"{fault}: no permit for {took_s:.2f} s; at most {most:g} of {AMOUNT} in any {WINDOW_S:g} s")
    assert most <= AMOUNT
    assert took_s <= within_s + SLACK_S


async def test_each_call_is_paid_once_through_two_kills(make_fleet: Callable[..., Fleet], processes: Processes) -> None:
    """The durable sum is what the calls cost, although messages come twice and late, and leaders die."""
    fleet = make_fleet(CONFIG)
    provider = Provider.start(processes)
    async with fleet.broker() as broker:
        governors = Governors(fleet, broker)
        await governors.start(3)
        doubler = [sys.executable, "-m", "tests.support.doubler", fleet.server.url, fleet.names.prefix, f"{SECONDS:g}"]
        processes.start_command(doubler, "doubler").wait_for_log("ready")
        began = gate()
        slots = [Slots(("paid",), "paid", 4, cost_usd=PRICE_USD)]
        loads = [start_load(fleet, provider, slots, SECONDS, gate=began, number=number) for number in range(2)]
        for number in range(2):
            await asyncio.sleep(began + FAULT_AT_S * (1 + 2 * number) - time.monotonic())
            await governors.hit("kill")
        await finished(loads, SECONDS)
        calls = await provider.log("paid")
        cost = round(sum(call.cost for call in calls) * 1_000_000)

        async def all_paid() -> bool:
            return await _spent(fleet, broker) >= cost

        await wait_until(all_paid, f"{len(calls)} calls to be paid")
        assert await _spent(fleet, broker) == cost


async def _spent(fleet: Fleet, broker: Broker) -> int:
    """The durable sum in micro-dollars."""
    subject = fleet.names.spent(derive_key("limit", "", "paid"), "total")
    record = await broker.last(fleet.names.spent_stream, subject)
    return 0 if record is None else int(json.loads(record.body)["val"])


async def test_a_second_governor_stands_by_and_ends_well(make_fleet: Callable[..., Fleet]) -> None:
    """It neither leads nor fails; stopped, it exits with 0."""
    fleet = make_fleet(CONFIG)
    async with fleet.broker() as broker:
        governors = Governors(fleet, broker)
        await governors.start()
        first, second = governors.running
        assert "actor.started" not in second.log()
        second.terminate()
        assert await asyncio.to_thread(second.wait) == 0
        assert first.running
