"""What follows from a decision of the governor beside its reply: sums to store, gates to tell of, warnings to record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, assert_never

from millstream.errors import BrokerClosed, BrokerError
from millstream.journal import Journal
from millstream.policy.budgets import SoftPassed, Spend
from millstream.policy.permits import Effect, GateChanged
from millstream.ports import Broker
from millstream.spending import SpentSums
from millstream.telemetry.events import Telemetry
from millstream_schemas.codec import encode
from millstream_schemas.infos import BudgetWarning
from millstream_schemas.keys import is_key
from millstream_schemas.names import Names
from millstream_schemas.permits import Said

TOGETHER_S = 0.010
"""Gates that change within this time are told of at once."""


class Effects:
    """Performs the effects of one term; what takes its time runs in `group`."""

    def __init__(
        self,
        broker: Broker,
        names: Names,
        event_ttl_s: float,
        sums: SpentSums,
        telemetry: Telemetry,
        epoch: int,
        group: asyncio.TaskGroup,
        save: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._broker = broker
        self._names = names
        self._journal = Journal(broker, names, event_ttl_s)
        self._sums = sums
        self._telemetry = telemetry
        self._epoch = epoch
        self._group = group
        self._save = save
        self._gates: dict[str, bool] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._over = False
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Tell everybody who leads now, so that workers say at once what they hold."""
        self._tell(Said(epoch=self._epoch, began=True))

    def perform(self, effects: Iterable[Effect]) -> list[Spend]:
        """Do what can be done at once; what was spent is noted and returned, to be stored."""
        spends: list[Spend] = []
        closed = False
        for effect in effects:
            match effect:
                case Spend():
                    spends.append(effect)
                case GateChanged(key, is_closed):
                    self._gates[key] = is_closed
                    closed = closed or is_closed
                    if self._telling is None:
                        self._telling = asyncio.get_running_loop().call_later(TOGETHER_S, self._tell_gates)
                case SoftPassed():
                    self._run(self._warn(effect))
                case _:
                    assert_never(effect)
        if closed:  # at once: what was granted there and has not begun must not begin
            self._tell_gates()
            self._run(self._save())  # a successor must know of it too
        self._sums.keep(spends)
        return spends

    async def store(self, spends: list[Spend]) -> None:
        """Return once all of it is stored."""
        await self._sums.store(spends)

    def store_later(self, spends: list[Spend]) -> None:
        """Store where nobody waits for it."""
        self._run(self._sums.store(spends))

    def close(self) -> None:
        """Begin nothing more; what is not stored yet is the successor's."""
        self._over = True
        if self._telling is not None:
            self._telling.cancel()
        for task in self._tasks:
            task.cancel()

    def _run(self, deed: Coroutine[Any, Any, None]) -> None:
        if self._over:
            deed.close()
            return
        task = self._group.create_task(deed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell_gates(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        gates, self._gates = self._gates, {}
        closed = tuple(key for key, is_closed in gates.items() if is_closed)
        self._tell(Said(epoch=self._epoch, keys=tuple(gates), closed=closed))

    def _tell(self, said: Said) -> None:
        try:
            self._broker.tell(self._names.governor_said, encode(said))
        except BrokerError as error:  # more keys than a message takes: those who ask again learn of it
            self._telemetry.emit("broker.trouble", error=str(error))

    async def _warn(self, passed: SoftPassed) -> None:
        """Record the warning in the life of the task that was being paid for."""
        self._telemetry.emit(
            "budget.warning",
            budget=passed.key,
            period=passed.period,
            spent=passed.spent,
            hard=passed.hard,
            task=passed.task,
            price_version=passed.price_version,
        )
        if not is_key(passed.task):
            return
        try:
            last = await self._broker.last(self._names.events_stream, self._names.any_life(passed.task))
        except BrokerClosed:
            return
        except BrokerError as error:
            self._telemetry.emit("broker.trouble", error=str(error))
            return
        if last is None:
            return
        at = self._names.parse_event(last.subject)
        warning = BudgetWarning(
            key=at.key,
            budget=passed.key,
            period=passed.period,
            spent=passed.spent,
            hard=passed.hard,
            price_version=passed.price_version,
        )
        self._journal.inform(warning, at.tenant, at.queue)
