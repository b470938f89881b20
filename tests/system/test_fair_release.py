"""Fair release with real processes: who starts when, in the order that the stream holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from millstream_schemas.codec import decode_event
from tests.support.draining import messages
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from millstream.client import Client
    from millstream.ports import Broker

FAIR = "[queues.agent-run]\nfair = true\n"
LARGE, SMALL, TENANTS = 15_000, 50, 20
SLOTS = 10


async def send(client: Client, tenant: str, count: int, task_type: str = "quiet", payload: object = None) -> list[str]:
    """Send many tasks of one tenant; returns their keys."""
    keys: list[str] = []
    for start in range(0, count, 1000):
        payloads = [payload] * min(1000, count - start)
        handles = await client.send_many(task_type, payloads, tenant=tenant, queue="agent-run")
        keys += [handle.key for handle in handles]
    return keys


async def tenants_of(fleet: Fleet, broker: Broker, kind: str) -> list[str]:
    """The tenants of all events of one kind, in the order of the stream."""
    found: list[str] = []
    feed = await broker.feed(fleet.names.events_stream, [fleet.names.events_of_kind(kind)], 0, bodies=False)
    try:
        while records := await feed.take(1000, 1.0):
            found += [fleet.names.parse_event(record.subject).tenant for record in records]
    finally:
        await feed.close()
    return found


def jain(shares: Sequence[float]) -> float:
    """1 where all shares are equal, 1/n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


async def count(fleet: Fleet, broker: Broker, kind: str) -> int:
    """How many events of a kind the stream holds."""
    found = await broker.subjects(fleet.names.events_stream, fleet.names.events_of_kind(kind))
    return sum(found.values())


async def test_a_flood_of_one_tenant_leaves_twenty_others_their_share(make_fleet: Callable[..., Fleet]) -> None:
    """Over the interval in which all 21 wait: Jain's index, and nobody's longest gap beyond twice its fair one."""
    fleet = make_fleet(FAIR)
    fleet.dispatcher()
    tenants = [f"t{number:02}" for number in range(TENANTS)]
    async with fleet.client() as client, fleet.broker() as broker:
        await send(client, "flood", LARGE)
        for tenant in tenants:
            await send(client, tenant, SMALL)

        async def all_held() -> bool:
            return await messages(broker, fleet.names.held_stream) == LARGE + TENANTS * SMALL

        await wait_until(all_held, "everything is held", timeout=120)
        fleet.worker(SLOTS)

        async def small_ones_ran() -> bool:
            found = Counter(await tenants_of(fleet, broker, "started"))
            return all(found[tenant] == SMALL for tenant in tenants)

        await wait_until(small_ones_ran, "the small tenants' tasks ran", timeout=120)
        for kind, slack in (("released", 0), ("started", SLOTS)):
            order = await tenants_of(fleet, broker, kind)
            last = {tenant: max(at for at, one in enumerate(order) if one == tenant) for tenant in tenants}
            together = order[: min(last.values()) + 1]
            shares = Counter(together)
            assert len(shares) == TENANTS + 1
            assert jain([*shares.values()]) >= 0.99, shares
            for tenant in tenants:
                places = [at for at, one in enumerate(together) if one == tenant]
                gap = max(after - before for before, after in pairwise(places))
                # side by side in ten slots, two starts may change places
                assert gap <= 2 * (TENANTS + 1) + slack, f"{tenant} {kind}: {gap}"


async def test_tenants_share_three_to_one_by_their_weights(make_fleet: Callable[..., Fleet]) -> None:
    """While both wait."""
    fleet = make_fleet(FAIR + "[tenants.gold]\nweight = 3\n")
    fleet.dispatcher()
    async with fleet.client() as client, fleet.broker() as broker:
        for tenant in ("gold", "basic"):
            await send(client, tenant, 400)

        async def all_held() -> bool:
            return await messages(broker, fleet.names.held_stream) == 800

        await wait_until(all_held, "everything is held")
        fleet.worker(SLOTS)

        async def enough() -> bool:
            return await count(fleet, broker, "started") >= 450

        await wait_until(enough, "450 tasks started")
        found = Counter((await tenants_of(fleet, broker, "released"))[:400])
        assert abs(found["gold"] - 300) <= 2, found


async def test_one_task_of_a_quiet_tenant_does_not_wait_behind_a_flood(make_fleet: Callable[..., Fleet]) -> None:
    """Before it go only those that were released already: at most two for each slot and half a second's pace."""
    fleet = make_fleet(FAIR)
    fleet.dispatcher()
    fleet.worker(SLOTS)
    async with fleet.client() as client, fleet.broker() as broker:
        await send(client, "flood", 3000, "sleep", {"seconds": 0.1})

        async def in_full_flow() -> bool:
            return await count(fleet, broker, "started") >= 5 * SLOTS

        await wait_until(in_full_flow, "the flood is in full flow")
        (key,) = await send(client, "still", 1, "sleep", {"seconds": 0.1})
        life = fleet.names.life("still", key)

        async def started() -> bool:
            records = await broker.history(fleet.names.events_stream, life)
            return any(record.subject.endswith(".started") for record in records)

        await wait_until(started, "the quiet tenant's task started")
        held, released, began = (await broker.history(fleet.names.events_stream, life))[:3]
        assert [type(decode_event(one.body)).__name__ for one in (held, released, began)] == [
            "Held",
            "Released",
            "Started",
        ]
        feed = await broker.feed(
            fleet.names.events_stream, [fleet.names.events_of_kind("started")], held.seq, bodies=False
        )
        before = [record for record in await feed.take(4000, 5.0) if record.seq < began.seq]
        await feed.close()
        pace = 5 * SLOTS  # what ten slots start in half a second, with 100 ms each
        assert len(before) <= 2 * SLOTS + pace + SLOTS, len(before)


async def test_free_tasks_flow_beside_a_pool_whose_gate_is_closed(make_fleet: Callable[..., Fleet]) -> None:
    """In the same queue, of the same tenant; the others wait in HELD and hold no slot."""
    fleet = make_fleet(FAIR + '[limits.llm]\nrequests = "1/h"\n')
    fleet.dispatcher()
    fleet.governor()
    fleet.worker(2)
    async with fleet.client() as client, fleet.broker() as broker:
        await client.send_many("limited", [None] * 50, tenant="acme", queue="agent-run", limits=["llm"])

        async def held_up() -> bool:
            return await count(fleet, broker, "completed") >= 1

        await wait_until(held_up, "the first of the limited tasks ran")
        handles = await client.send_many("echo", list(range(100)), tenant="acme", queue="agent-run")
        for handle in handles[-1:]:
            await handle.result(timeout=60)
        assert await messages(broker, fleet.names.held_stream) >= 40
