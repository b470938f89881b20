"""The gates of pools, asked of the governor: four times a second while something waits, and at once when it tells of news."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from millstream.dispatcher.context import Context
from millstream.errors import BrokerClosed, BrokerError, NoAnswer
from millstream.policy.release import SILENT_S, changed_keys, is_news
from millstream.policy.supply import UNBOUND, Bound, Need, Pool, bound, bounds
from millstream.safe_rates import SAFE_AFTER_S, UNREACHABLE, SafeRates
from millstream_schemas import permits
from millstream_schemas.permits import Gate, GatePart, GatesListing, PermitReply

POLL_S = 0.25
LEAST_BETWEEN_S = 0.05
ANSWER_S = 0.5
BATCH_BYTES = 256 * 1024
"""A question and its answer may be as large by estimate: a quarter of what a server lets through by default."""
POOL_BYTES = 400
KEY_BYTES = 150
"""What a pool, and each of its keys, takes at most in an answer, beside the names of the keys."""

_decode = msgspec.json.Decoder(PermitReply).decode
_encode = msgspec.json.Encoder().encode


class Gates:
    """What the governor said last of each pool.

    While it is silent its gates count as closed, but for pools that may go on without it at a safe rate.

    `pools` lists the pools in which something waits; while there are none, the governor is not asked. `changed` is
    called with the pools, and with the keys as pools of their own, that let through noticeably more or less than before.
    """

    def __init__(
        self, context: Context, pools: Callable[[], Sequence[permits.Pool]], changed: Callable[[Sequence[Pool]], None]
    ) -> None:
        self._context = context
        self._pools = pools
        self._changed = changed
        self._gates: dict[Pool, Gate] = {}
        self._told_at: dict[Pool, float] = {}
        self._bounds: dict[str, Bound] = {}
        self._safe = SafeRates(lambda: context.settings)
        self._answered_at = context.clock.monotonic()
        self._asked_at = -LEAST_BETWEEN_S
        self._now = asyncio.Event()

    def of(self, pool: Pool) -> Gate | None:
        """The gate of a pool; None where the governor has not told it, or has been silent for too long."""
        now = self._context.clock.monotonic()
        told_at = self._told_at.get(pool)
        if told_at is not None and now - told_at <= SILENT_S:
            return self._gates.get(pool)
        return self._safe_gate(pool) if self._is_safe(now) else None

    def bound(self, key: str) -> Bound:
        """What a key lets through; without limit where the governor has not told it."""
        if self._is_safe(self._context.clock.monotonic()):
            return bound(GatePart(requests=self._safe.rate_of((key,))))
        return self._bounds.get(key, UNBOUND)

    def _is_safe(self, now: float) -> bool:
        """Whether the governor has been silent for so long that safe rates apply."""
        return now - self._answered_at > SAFE_AFTER_S

    def _safe_gate(self, pool: Pool) -> Gate | None:
        """How fast one worker would go on by itself: so much is supplied, whatever the number of workers."""
        rate = self._safe.rate_of(pool)
        return None if rate is None else Gate(keys=pool, open=True, reason=UNREACHABLE, rate_per_s=rate)

    def ask(self) -> None:
        """Ask at once."""
        self._now.set()

    def ask_soon(self) -> None:
        """Ask at once, unless that was done just now, so that an absent governor is not asked without a pause."""
        if self._context.clock.monotonic() - self._asked_at >= LEAST_BETWEEN_S:
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
        """Ask for all pools, forget those that wait no more, and pass on the news."""
        before = {pool.keys: self.of(pool.keys) for pool in pools}
        troubles = [trouble for batch in batches(pools) if (trouble := await self._ask(batch))]
        if troubles:  # told once for all: the next look, and its troubles, follow soon
            self._context.telemetry.emit("broker.trouble", error=troubles[0])
        wanted = set(before)
        for gone in [pool for pool in self._told_at if pool not in wanted]:
            if self.of(gone) is None:
                del self._told_at[gone], self._gates[gone]
        takes = {
            pool.keys: Need(1, pool.tokens_in + pool.tokens_out, pool.tokens_in, pool.tokens_out) for pool in pools
        }
        self._bounds = bounds(self._gates.values(), takes)
        after = [(pool, gate, self.of(pool)) for pool, gate in before.items()]
        news = [pool for pool, gate, now in after if is_news(gate, now)]
        keys = {key for _, gate, now in after for key in changed_keys(gate, now)}
        if news:
            self._changed([*news, *((key,) for key in keys)])

    async def _ask(self, pools: Sequence[permits.Pool]) -> str:
        """Ask for some pools; returns what went wrong, empty where nothing did or the governor is silent."""
        asked_at = self._asked_at = self._context.clock.monotonic()
        try:
            body = _encode(permits.Gates(pools=tuple(pools)))
            reply = _decode(await self._context.broker.request(self._context.names.governor("gates"), body, ANSWER_S))
        except BrokerClosed:
            raise
        except NoAnswer:
            return ""  # nothing to do: once it has been silent for long enough, the gates are closed
        except (BrokerError, msgspec.MsgspecError) as error:
            return f"The gates of {len(pools)} pools could not be asked for, they stay closed until they are: {error}"
        if not isinstance(reply, GatesListing):
            return f"The governor did not tell the gates of {len(pools)} pools, they stay closed until it does: {reply}"
        self._answered_at = asked_at
        for pool, gate in zip(pools, reply.items, strict=False):
            self._gates[pool.keys] = gate
            self._told_at[pool.keys] = asked_at
        return ""


def batches(pools: Sequence[permits.Pool]) -> Iterator[Sequence[permits.Pool]]:
    """Pools in their order, cut so that neither a question nor its answer is too large for the broker."""
    start, size = 0, 0
    for at, pool in enumerate(pools):
        takes = POOL_BYTES + sum(len(key.encode()) + KEY_BYTES for key in pool.keys)
        if at > start and size + takes > BATCH_BYTES:
            yield pools[start:at]
            start, size = at, 0
        size += takes
    if start < len(pools):
        yield pools[start:]
