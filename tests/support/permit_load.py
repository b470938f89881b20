"""A process that takes permits as handlers do: some slots, each asks, calls the provider, settles, and asks again.

`python -m tests.support.permit_load CONFIG` prints `ready` once connected, and at the end one line of JSON that counts
what came of it. It ends by itself after `seconds`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from contextlib import suppress

import msgspec

from millstream.connecting import open_broker
from millstream.errors import BrokerError
from millstream.loop import loop_factory
from millstream.permits_client import DeniedPermit, Need, Permit, PermitClient, Settlement, WaitFor
from millstream.settings import build
from tests.support.calling import Caller

HELD_S = 2.0
AT_MOST_S = 1.0
ENDING_S = 10.0


class Slots(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some slots that do the same: the permit's keys, the provider's key, tokens from `low` to `high` a call.

    The estimate is the call's real need times `estimate`. The provider tells Retry-After in seconds, or not at all.
    """

    keys: tuple[str, ...]
    key: str
    count: int = 10
    low: int = 0
    high: int = 0
    cost_usd: float = 0.0
    estimate: float = 1.0
    at_most: int = 0
    """So many calls over all of these slots, 0 for as many as the time allows."""


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process does, and for how long."""

    url: str
    provider_port: int
    seconds: float
    slots: tuple[Slots, ...]
    worker: str = "load"
    prefix: str = "mill"
    seed: int = 0
    gate: float = 0.0
    """The monotonic time at which to begin."""


class Counts(msgspec.Struct):
    """What came of it. `waits` and `denials` by reason; `late`: granted, but too old to be used."""

    calls: int = 0
    refused: int = 0
    late: int = 0
    failed: int = 0
    waits: dict[str, int] = {}
    denials: dict[str, int] = {}


class Driver:
    """Runs the slots of one process."""

    def __init__(self, load: Load, client: PermitClient) -> None:
        self._load = load
        self._client = client
        self._caller = Caller(load.provider_port)
        self._random = random.Random(load.seed)
        self._waits: Counter[str] = Counter()
        self._denials: Counter[str] = Counter()
        self.counts = Counts()

    async def run(self, ends: float) -> Counts:
        """Run all slots until `ends`, monotonic."""
        async with asyncio.TaskGroup() as group:
            for slots in self._load.slots:
                left = [slots.at_most or 10**9]
                for _ in range(slots.count):
                    group.create_task(self._slot(slots, left, ends))
        self._caller.close()
        self.counts.waits, self.counts.denials = dict(self._waits), dict(self._denials)
        return self.counts

    async def _slot(self, slots: Slots, left: list[int], ends: float) -> None:
        while time.monotonic() < ends and left[0] > 0:
            left[0] -= 1
            tokens = self._random.randint(slots.low, slots.high)
            if not await self._one(slots, tokens):
                left[0] += 1

    async def _one(self, slots: Slots, tokens: int) -> bool:
        """Ask once; True where that led to a call."""
        need = Need(tokens_in=int(tokens * slots.estimate), cost_usd=slots.cost_usd * slots.estimate)
        match await self._client.acquire(slots.keys, need, HELD_S):
            case Permit() as permit:
                return await self._call(slots, tokens, permit)
            case WaitFor() as wait:
                self._waits[wait.reason] += 1
                await asyncio.sleep(min(AT_MOST_S, wait.seconds))
            case DeniedPermit() as denied:
                self._denials[denied.reason] += 1
                await asyncio.sleep(AT_MOST_S)
        return False

    async def _call(self, slots: Slots, tokens: int, permit: Permit) -> bool:
        if time.monotonic() > permit.use_by:
            self.counts.late += 1
            self._client.give_back(permit)
            return False
        try:
            answer = await self._caller.call(slots.key, tag=self._load.worker, tokens=tokens, cost=slots.cost_usd)
        except OSError:
            self.counts.failed += 1
            self._client.settle(permit, Settlement(outcome="unknown"))
            return True
        self.counts.calls += 1
        self.counts.refused += answer.status == 429
        used = Settlement(
            outcome="ok" if answer.status == 200 else "throttled",
            tokens_in=tokens,
            cost_usd=slots.cost_usd or None,
            retry_after_s=float(answer.retry_after) if answer.retry_after else None,
        )
        self._client.settle(permit, used)
        return True


async def main(load: Load) -> Counts:
    """Connect, wait for the gate, run, and settle what is open."""
    broker = await open_broker(build({"nats": {"url": load.url, "prefix": load.prefix}}), "load")
    names = build({"nats": {"prefix": load.prefix}}).names
    client = PermitClient(broker, names, load.worker)
    stop = asyncio.Event()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.sleep(max(0.0, load.gate - time.monotonic()))
    async with asyncio.TaskGroup() as group:
        beside = group.create_task(client.run(stop))
        counts = await Driver(load, client).run((load.gate or time.monotonic()) + load.seconds)
        stop.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await asyncio.wait([beside])
        beside.cancel()
    with suppress(BrokerError):
        await broker.close()
    return counts


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        done = runner.run(main(msgspec.json.decode(sys.argv[1], type=Load)))
    sys.stdout.write(msgspec.json.encode(done).decode() + "\n")
