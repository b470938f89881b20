"""Many tasks at once: submitting them, and waiting for their ends without asking for each."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from millstream_schemas.codec import decode_event
from millstream_schemas.lifecycle import TERMINAL_KINDS
from millstream_schemas.limit_states import LimitState
from millstream_schemas.permits import Limits, LimitsListing, PermitReply

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient

    from millstream.ports import Broker
    from tests.support.fleet import Fleet

IN_FLIGHT = 200


@dataclass(frozen=True, slots=True)
class Ending:
    """A terminal event of a task, as its stream holds it."""

    kind: str
    attempt: int
    error: str


async def submit_all(
    fleet: Fleet, client: NatsClient, tasks: Iterable[Mapping[str, Any]], *, tenant: str = "acme", queue: str = "calls"
) -> int:
    """Publish envelopes, 200 in flight, each acknowledged; returns how many."""
    subject = f"{fleet.names.prefix}.submit.{tenant}.{queue}"
    stream = client.jetstream()
    bodies = [json.dumps(task).encode() for task in tasks]
    for start in range(0, len(bodies), IN_FLIGHT):
        await asyncio.gather(*(stream.publish(subject, body, timeout=30) for body in bodies[start : start + IN_FLIGHT]))
    return len(bodies)


async def endings(fleet: Fleet, broker: Broker, count: int, timeout: float) -> dict[str, list[Ending]]:
    """The terminal events of each task, once `count` tasks have one; what there is when the time is over."""
    names, found = fleet.names, defaultdict[str, list[Ending]](list)
    filters = [names.events_of_kind(kind) for kind in TERMINAL_KINDS]
    feed = await broker.feed(names.events_stream, filters, 0)
    ends = time.monotonic() + timeout
    try:
        while len(found) < count and time.monotonic() < ends:
            for record in await feed.take(1000, 0.5):
                event = decode_event(record.body)
                kind = names.parse_event(record.subject).kind
                found[event.card.task_id].append(Ending(kind, event.card.attempt, str(getattr(event, "reason", ""))))
    finally:
        await feed.close()
    return dict(found)


async def held(broker: Broker, fleet: Fleet) -> int:
    """How many tasks wait in HELD."""
    info = await broker.stream_info(fleet.names.held_stream)
    return 0 if info is None else info.messages


async def limit(broker: Broker, fleet: Fleet, key: str) -> LimitState | None:
    """One limit as the governor knows it, None where it does not."""
    body = await broker.request(fleet.names.governor("limits"), msgspec.json.encode(Limits(key=key)), 5.0)
    reply = msgspec.json.decode(body, type=PermitReply)
    assert isinstance(reply, LimitsListing)
    return next((item for item in reply.items if item.key == key), None)
