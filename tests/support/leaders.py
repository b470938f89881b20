"""Finding out who leads, and processes that take permits beside the fleet's own workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from millstream.errors import BrokerError
from tests.support.permit_load import Counts, Load, Slots
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from millstream.ports import Broker
    from tests.support.calling import Provider
    from tests.support.fleet import Fleet
    from tests.support.processes import ActorProcess

GATE_S = 3.0
"""How long processes may take to start before they begin together."""


async def holder(fleet: Fleet, broker: Broker, lock: str) -> int | None:
    """The process id of who holds a lock, None while nobody does or the server cannot say."""
    try:
        found = await broker.kv_get(fleet.names.leaders_bucket, lock)
    except BrokerError:
        return None
    if found is None or not found.value:
        return None
    return int(found.value.decode().split(" ")[0].rpartition("/")[2])


async def leader(
    fleet: Fleet, broker: Broker, lock: str, among: Sequence[ActorProcess], timeout: float = 30.0
) -> ActorProcess:
    """The living process of `among` that holds a lock; waits until one does."""

    async def found() -> ActorProcess | None:
        pid = await holder(fleet, broker, lock)
        return next((one for one in among if one.pid == pid and one.running), None)

    return await wait_until(found, f"one of {len(among)} processes holds the lock {lock}", timeout)


def start_load(
    fleet: Fleet,
    provider: Provider,
    slots: Sequence[Slots],
    seconds: float,
    *,
    gate: float,
    number: int = 0,
    url: str | None = None,
) -> ActorProcess:
    """One process of load on some slots for `seconds` from `gate` on (monotonic)."""
    load = Load(
        url=url or fleet.server.url,
        provider_port=provider.port,
        seconds=seconds,
        slots=tuple(slots),
        worker=f"load-{number}-{gate:.0f}",
        prefix=fleet.names.prefix,
        seed=number,
        gate=gate,
    )
    argv = [sys.executable, "-m", "tests.support.permit_load", msgspec.json.encode(load).decode()]
    return fleet.processes.start_command(argv, f"load-{number}")


async def finished(loads: Sequence[ActorProcess], seconds: float) -> list[Counts]:
    """What each process of load counted, once all have ended; fails where one has failed."""
    counts: list[Counts] = []
    for load in loads:
        status = await asyncio.to_thread(load.wait, seconds + 60)
        assert status == 0, f"{load.name} ended with {status}:\n{load.log()[-2000:]}"
        counts.append(msgspec.json.decode(load.log().splitlines()[-1], type=Counts))
    return counts


def gate() -> float:
    """The moment, monotonic, at which processes that are started now may begin together."""
    return time.monotonic() + GATE_S
