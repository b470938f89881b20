"""The gates of pools as the governor tells them: asked often while something waits, and at once when it says so."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from millstream.dispatcher.context import Context
from millstream.errors import BrokerClosed, BrokerError
from millstream.policy.fairness import Pool
from millstream.policy.release import SILENT_S, is_news
from millstream_schemas import permits
from millstream_schemas.permits import Gate, GatesListing, PermitReply

POLL_S = 0.25
LEAST_S = 0.05
ANSWER_S = 0.5
POOLS_AT_ONCE = 1000

_decode = msgspec.json.Decoder(PermitReply).decode
_encode = msgspec.json.Encoder().encode


class Gates:
    """What the governor said last. Without pools that wait nobody is asked; a silent governor's gates are closed.

    `pools` says which are of interest, `changed` is called with those of which there is news.
    """

    def __init__(
        self, context: Context, pools: Callable[[], Sequence[permits.Pool]], changed: Callable[[Sequence[Pool]], None]
    ) -> None:
        self._context = context
        self._pools = pools
        self._changed = changed
        self._gates: dict[Pool, Gate] = {}
        self._told_at: dict[Pool, float] = {}
        self._asked_at = -LEAST_S
        self._now = asyncio.Event()

    def of(self, pool: Pool) -> Gate | None:
        """The gate of a pool; None where the governor has told none, or is silent."""
        told_at = self._told_at.get(pool)
        if told_at is None or self._context.clock.monotonic() - told_at > SILENT_S:
            return None
        return self._gates.get(pool)

    def ask(self) -> None:
        """Ask at once."""
        self._now.set()

    def ask_soon(self) -> None:
        """Ask at once, unless that was done just now: a governor that is not there is not asked in a circle."""
        if self._context.clock.monotonic() - self._asked_at >= LEAST_S:
            self.ask()

    async def run(self) -> None:
        """Keep asking until cancelled. Raises BrokerClosed."""
        broker, names = self._context.broker, self._context.names
        said = await broker.listen(names.governor_said, lambda _subject, _body: self.ask())
        try:
            while True:
                pools = self._pools()
                if pools:
                    await self._look(pools)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S if pools else None):
                        await self._now.wait()
                self._now.clear()
        finally:
            await said.close()

    async def _look(self, pools: Sequence[permits.Pool]) -> None:
        before = {pool.keys: self.of(pool.keys) for pool in pools}
        for start in range(0, len(pools), POOLS_AT_ONCE):
            if not await self._ask(pools[start : start + POOLS_AT_ONCE]):
                break
        wanted = set(before)
        for gone in [pool for pool in self._told_at if pool not in wanted]:
            if self.of(gone) is None:
                del self._told_at[gone], self._gates[gone]
        news = [pool for pool, gate in before.items() if is_news(gate, self.of(pool))]
        if news:
            self._changed(news)

    async def _ask(self, pools: Sequence[permits.Pool]) -> bool:
        asked_at = self._asked_at = self._context.clock.monotonic()
        try:
            body = _encode(permits.Gates(pools=tuple(pools)))
            reply = _decode(await self._context.broker.request(self._context.names.governor("gates"), body, ANSWER_S))
        except BrokerClosed:
            raise
        except (BrokerError, msgspec.MsgspecError):
            return False  # its silence closes the gates
        if not isinstance(reply, GatesListing):
            return False
        for pool, gate in zip(pools, reply.items, strict=False):
            self._gates[pool.keys] = gate
            self._told_at[pool.keys] = asked_at
        return True
