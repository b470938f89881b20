"""Waiting until a system has nothing left to do: only then can no second outcome come any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from millstream.ports import Broker
    from tests.support.fleet import Fleet


async def messages(broker: Broker, stream: str) -> int:
    """How many messages a stream holds."""
    info = await broker.stream_info(stream)
    assert info is not None
    return info.messages


async def drained(fleet: Fleet, broker: Broker, timeout: float = 60.0) -> None:
    """Wait until nothing is left that could be delivered, late redeliveries included."""
    await wait_until(lambda: _is_drained(fleet, broker), "nothing is left to deliver", timeout=timeout)


async def _is_drained(fleet: Fleet, broker: Broker) -> bool:
    """True when no submit, work message or schedule is left, and every event that asked for a decision got one."""
    names = fleet.names
    if await messages(broker, names.inbox_stream) or await messages(broker, names.work_stream):
        return False
    waiting = await broker.consumers(names.events_stream)
    return all(consumer.pending == 0 and consumer.ack_pending == 0 for consumer in waiting)
