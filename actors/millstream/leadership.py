"""Who leads: a value in a bucket that expires unless its holder renews it; everybody else stands by."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from millstream.errors import BrokerClosed, BrokerError
from millstream.ports import Broker, Clock

SAFETY_S = 0.5
"""How long before the server lets the lock expire its holder stops trusting it."""

POLL_S = 0.2
RENEW_EVERY_S = 1.0


class Leadership:
    """A lock with an expiry of `ttl_s`, held by the monotonic clock: it counts as lost as soon as it may be.

    Its value names this machine and process, for people; `token` tells this attempt from every other.
    """

    def __init__(self, broker: Broker, bucket: str, key: str, clock: Clock, ttl_s: float, token: str) -> None:
        self._broker = broker
        self._bucket = bucket
        self._key = key
        self._clock = clock
        self._ttl_s = ttl_s
        self._value = f"{socket.gethostname()}/{os.getpid()} {token}".encode()
        self._revision = 0
        self._held_until = 0.0

    def held(self) -> bool:
        """True while nobody else can have the lock."""
        return self._clock.monotonic() < self._held_until

    async def win(self, stop: asyncio.Event, waiting: Callable[[], None] | None = None) -> int | None:
        """Take the lock and return its epoch, higher with every holder, or None once `stop` is set.

        Stands by for as long as another one holds it, and calls `waiting` once then; a released lock is taken at the
        next look, a dead holder's once it expires. An outage only delays. Raises BrokerClosed.
        """
        while not stop.is_set():
            try:
                epoch = await self._take()
            except BrokerClosed:
                raise
            except BrokerError:
                epoch = None
            else:
                if epoch is None and waiting is not None:
                    waiting()
                    waiting = None
            if epoch is not None:
                return epoch
            await _pause(stop)
        return None

    async def _take(self) -> int | None:
        asked_at = self._clock.monotonic()
        revision = await self._broker.kv_create(self._bucket, self._key, self._value)
        if revision is None:
            found = await self._broker.kv_get(self._bucket, self._key)
            if found is None or found.value != self._value:
                return None
            # Ours, of which the answer was lost. Renewed from here on: when it was stored is not known.
            asked_at = self._clock.monotonic()
            revision = await self._broker.kv_update(self._bucket, self._key, self._value, found.revision)
        return None if revision is None else self._won(revision, asked_at)

    def _won(self, revision: int, asked_at: float) -> int:
        self._revision = revision
        self._held_until = asked_at + self._ttl_s - SAFETY_S
        return revision

    async def hold(self) -> None:
        """Renew the lock again and again; returns once it is lost, or may be. Raises BrokerClosed."""
        while True:
            if not await self.renew():
                return
            await asyncio.sleep(min(RENEW_EVERY_S, self._ttl_s / 3))

    async def renew(self) -> bool:
        """Hold on to the lock; False once it is lost for good. Without an answer it is kept until it may be lost."""
        asked_at = self._clock.monotonic()
        try:
            revision = await self._broker.kv_update(self._bucket, self._key, self._value, self._revision)
        except BrokerClosed:
            raise
        except BrokerError:
            return await self._look_again()
        if revision is None:
            return await self._look_again()
        self._won(revision, asked_at)
        return self.held()

    async def _look_again(self) -> bool:
        """A renewal whose answer was lost has moved the revision: the value says whose it is."""
        try:
            found = await self._broker.kv_get(self._bucket, self._key)
        except BrokerClosed:
            raise
        except BrokerError:
            return self.held()
        if found is None or found.value != self._value:
            self._held_until = 0.0
            return False
        self._revision = found.revision
        return self.held()

    async def release(self) -> None:
        """Let the next one take over at once; does nothing where the lock may be another's by now."""
        if not self.held():
            return
        self._held_until = 0.0
        with suppress(BrokerError):  # it expires by itself
            await self._broker.kv_delete(self._bucket, self._key)


async def _pause(stop: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(POLL_S):
            await stop.wait()
