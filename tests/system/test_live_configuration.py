"""A running dispatcher follows the configuration document: weights of tenants, limits of queues."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from millstream_schemas.codec import decode_event
from millstream_schemas.events import Held
from tests.support.draining import messages
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from millstream.client import Client
    from millstream.ports import Broker
    from tests.support.fleet import Fleet
    from tests.support.processes import ActorProcess

QUEUE = "agent-run"
SLOTS = 10


async def _configure(fleet: Fleet, broker: Broker, dispatcher: ActorProcess, document: object) -> None:
    """Put a document and wait until the dispatcher has taken it."""
    before = dispatcher.log().count('"config.changed"')
    body = msgspec.json.encode(document)
    await broker.kv_put(fleet.names.config_bucket, fleet.names.config_key, body)
    await wait_until(lambda: dispatcher.log().count('"config.changed"') > before, "the document is in effect")


async def _first_events(fleet: Fleet, broker: Broker, tenant: str, client: Client) -> list[object]:
    handle = await client.send("quiet", tenant=tenant, queue=QUEUE)

    async def admitted() -> list[object] | None:
        records = await broker.history(fleet.names.events_stream, fleet.names.life(tenant, handle.key))
        return [decode_event(record.body) for record in records] or None

    return await wait_until(admitted, "the task is admitted")


async def test_a_running_dispatcher_follows_the_document(fleet: Fleet) -> None:
    """First a plain queue, then one that is fair and has a limit, then other weights; without any restart."""
    dispatcher = fleet.dispatcher()
    async with fleet.client() as client, fleet.broker() as broker:
        (plain,) = await _first_events(fleet, broker, "acme", client)
        assert not isinstance(plain, Held)

        limits = {"llm": {"requests": "100/s"}}
        limited = {QUEUE: {"limits": ["llm"], "fair": True}}
        await _configure(fleet, broker, dispatcher, {"limits": limits, "queues": limited})
        (held,) = await _first_events(fleet, broker, "acme", client)
        assert isinstance(held, Held)
        assert held.limits == ["llm"]

        fair = {QUEUE: {"fair": True}}
        await _configure(fleet, broker, dispatcher, {"queues": fair, "tenants": {"gold": {"weight": 3.0}}})
        (again,) = await _first_events(fleet, broker, "acme", client)
        assert isinstance(again, Held)
        assert (again.limits, again.reason) == ([], "fairness")
        for tenant in ("gold", "basic"):
            await client.send_many("quiet", [None] * 400, tenant=tenant, queue=QUEUE)

        async def all_held() -> bool:
            return await messages(broker, fleet.names.held_stream) == 802

        await wait_until(all_held, "everything is held")
        fleet.worker(SLOTS)

        async def enough() -> bool:
            found = await broker.subjects(fleet.names.events_stream, fleet.names.events_of_kind("released"))
            return sum(found.values()) >= 450

        await wait_until(enough, "450 tasks are released")
        feed = await broker.feed(fleet.names.events_stream, [fleet.names.events_of_kind("released")], 0, bodies=False)
        order: list[str] = []
        while len(order) < 450:
            order += [fleet.names.parse_event(record.subject).tenant for record in await feed.take(500, 5.0)]
        await feed.close()
        shares = Counter([tenant for tenant in order if tenant != "acme"][:400])
        assert abs(shares["gold"] - 300) <= 2, shares
        assert dispatcher.running
        assert dispatcher.log().count('"actor.started"') == 1
