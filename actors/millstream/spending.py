"""What budgets have spent: sums in a stream of counters, to which each permit is added once, whoever leads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from millstream.errors import BrokerClosed, BrokerError
from millstream.policy.budgets import MICRO, Spend, period_at
from millstream.policy.limits import Compiled
from millstream.ports import Broker, Outgoing, Stored
from millstream.telemetry.events import Telemetry
from millstream_schemas.keys import derive_key
from millstream_schemas.names import Names

AGAIN_S = 0.25
"""Between two tries to store."""
MOST_SUMS = 1_000_000
"""Most sums that are read of one period."""


class _Sum(msgspec.Struct, frozen=True):
    val: str = "0"


_decode = msgspec.json.Decoder(_Sum).decode


def periods(limits: Iterable[Compiled], wall: float) -> frozenset[str]:
    """The names of the periods that the budgets of these limits are in; `wall` is Unix seconds."""
    budgets = {limit.cost for limit in limits if limit.cost is not None}
    return frozenset(period_at(budget, ZoneInfo(budget.zone), wall)[0] for budget in budgets)


class SpentSums:
    """Reads the sums and adds to them. `pending` is not stored yet: if this governor cannot, its successor has to.

    `on_sum` is called with key, period and the true sum in micro-dollars, what is pending included.
    """

    def __init__(
        self, broker: Broker, names: Names, telemetry: Telemetry, on_sum: Callable[[str, str, int], None]
    ) -> None:
        self._broker = broker
        self._names = names
        self._telemetry = telemetry
        self._on_sum = on_sum
        self._pending: dict[Spend, None] = {}
        self._owed: Counter[tuple[str, str]] = Counter()

    @property
    def pending(self) -> tuple[Spend, ...]:
        """What was kept and is not stored yet."""
        return tuple(self._pending)

    async def read(self, periods: Iterable[str]) -> dict[tuple[str, str], float]:
        """What was spent in these periods, US dollars by hash of the limit's key and period. Raises BrokerError."""
        sums: dict[tuple[str, str], float] = {}
        for period in periods:
            for record in await self._broker.history(self._names.spent_stream, self._names.spent_in(period), MOST_SUMS):
                sums[self._names.parse_spent(record.subject)] = int(_decode(record.body).val) / MICRO
        return sums

    def keep(self, spends: Iterable[Spend]) -> None:
        """Take note of what is to be stored."""
        for spend in spends:
            if spend not in self._pending:
                self._pending[spend] = None
                self._owed[spend.key, spend.period] += spend.micro_usd

    def _stored(self, spend: Spend, total: int | None) -> None:
        if spend in self._pending:
            del self._pending[spend]
            left = self._owed[spend.key, spend.period] - spend.micro_usd
            if left:
                self._owed[spend.key, spend.period] = left
            else:
                del self._owed[spend.key, spend.period]
        if total is not None:
            self._on_sum(spend.key, spend.period, total + self._owed[spend.key, spend.period])

    async def store(self, spends: Sequence[Spend]) -> None:
        """Add to the sums, again and again until the broker has said so for each; a repetition counts once.

        Raises BrokerClosed.
        """
        left = tuple(spends)
        while left:
            results = await self._broker.publish_all([self._outgoing(spend) for spend in left])
            refused: list[Any] = []
            for spend, result in zip(left, results, strict=True):
                if isinstance(result, Stored):
                    self._stored(spend, result.total)
                else:
                    refused.append(result)
            left = tuple(spend for spend in left if spend in self._pending)
            if left:
                self._telemetry.emit("broker.trouble", error=f"spending is not stored: {refused[0]!r}")
                await asyncio.sleep(AGAIN_S)

    async def drain(self, limit_s: float) -> None:
        """Store what is pending, for at most `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                await self.store(self.pending)
        except (TimeoutError, BrokerClosed):
            return
        except BrokerError as error:
            self._telemetry.emit("broker.trouble", error=str(error))

    def _outgoing(self, spend: Spend) -> Outgoing:
        hashed = derive_key("limit", "", spend.key)
        return Outgoing(
            self._names.spent(hashed, spend.period),
            b"",
            msg_id=f"{spend.permit}/{hashed}",
            increment=spend.micro_usd,
        )
