"""The lock of whoever leads, on a server that refuses to write."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from millstream.errors import BrokerError
from millstream.leadership import Leadership
from millstream.ports import Broker, KeyValue
from tests.support.clock import VirtualClock

VALUE = b"governor token"


class Full:
    """Holds our own lock; its store is full for two writes."""

    refusals = 2

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int | None:
        return None

    async def kv_get(self, bucket: str, key: str) -> KeyValue | None:
        return KeyValue(VALUE, 3)

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int | None:
        if self.refusals:
            self.refusals -= 1
            raise BrokerError("insufficient resources (10023)")
        return 7


async def test_refused_renewal_of_our_own_lock_is_tried_again() -> None:
    """After a lapse the lock may still be ours: a refused write is no reason to give up the process."""
    broker = cast(Broker, cast(Any, Full()))
    lock = Leadership(broker, "leaders", "governor", VirtualClock(), 3.0, "governor", "token")
    async with asyncio.timeout(20):
        assert await lock.win(asyncio.Event()) == 7
    assert lock.held()
