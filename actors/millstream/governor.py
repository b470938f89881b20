"""The rate-governor: one leads, the others stand by; the core decides, and what must outlive it is kept on the server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from millstream.configuration import Configuration
from millstream.errors import BrokerClosed, BrokerError
from millstream.governor_desk import Desk
from millstream.governor_effects import Effects
from millstream.governor_state import Saved, StateKeeper
from millstream.leadership import Leadership
from millstream.policy.limit_state import Rules
from millstream.policy.limits import Compiled, compiled, named
from millstream.policy.permits import Governor
from millstream.ports import Broker, Clock, Ids, Subscription
from millstream.settings import Settings
from millstream.spending import SpentSums, periods
from millstream.telemetry.events import Telemetry
from millstream_schemas.permits import TOLD, VERBS, LimitsListing
from millstream_schemas.topology import LEADER_TTL_S

SAVE_EVERY_S = 0.5
SAVE_IDLE_EVERY_S = 10.0
"""How often the state is stored while nothing happens: a successor takes its age for the gap in which anything may have."""
AGAIN_S = 0.25
DRAIN_S = 5.0


@dataclass(slots=True, eq=False)
class _Term:
    """One time in office. `core` is None until the predecessor's state is taken up."""

    epoch: int
    core: Governor | None = None
    desk: Desk | None = None
    settings: Settings | None = None
    """Those that the core has taken."""
    saved_at: float = 0.0
    """When the state was stored last, monotonic seconds."""
    known_periods: frozenset[str] = frozenset()


class RateGovernor:
    """Answers permit requests while it leads, and is silent as soon as another may lead."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        clock: Clock,
        ids: Ids,
        telemetry: Telemetry,
        *,
        rules: Rules | None = None,
    ) -> None:
        self._broker = broker
        self._names = names = settings.names
        self._event_ttl_s = settings.lifetimes.event_ttl_s
        self._rules = rules if rules is not None else Rules()
        self._clock = clock
        self._telemetry = telemetry
        self._configuration = Configuration(broker, settings, telemetry, self._configured)
        self._lock = Leadership(broker, names.leaders_bucket, names.governor_lock, clock, LEADER_TTL_S, ids.new())
        self._sums = SpentSums(broker, names, telemetry, self._summed)
        self._state = StateKeeper(broker, names, telemetry)
        self._saving = asyncio.Lock()
        self._term: _Term | None = None
        self._reconfigure = asyncio.Event()
        self._last: Saved | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Lead or stand by until `stop` is set; a lapse of the connection ends a term. Raises BrokerClosed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._configuration.run(stop))
            while not stop.is_set():
                epoch = await self._lock.win(stop, lambda: self._telemetry.emit("leader.waiting"))
                if epoch is not None:
                    await self._lead(_Term(epoch), stop)

    # --- a term ----------------------------------------------------------------------------------

    async def _lead(self, term: _Term, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            holding = group.create_task(self._lock.hold())
            ends = [group.create_task(stop.wait()), holding]
            work = group.create_task(self._work(term, group))
            await asyncio.wait([*ends, work], return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                self._telemetry.emit("broker.trouble", error="the governor's lock is lost, or may be")
            for task in (*ends, work):
                task.cancel()
        if term.core is not None:
            await self._sums.drain(DRAIN_S)
            self._last = self._snapshot(term.core, clean=True)
            if self._lock.held():
                await self._state.write(self._last)
        await self._lock.release()
        self._telemetry.emit("actor.stopped", epoch=term.epoch)

    async def _work(self, term: _Term, group: asyncio.TaskGroup) -> None:
        """Take over, then answer until cancelled."""
        core = await self._take_over(term)
        effects = Effects(
            self._broker,
            self._names,
            self._event_ttl_s,
            self._sums,
            self._telemetry,
            term.epoch,
            group,
            save=self._save_now,
        )
        desk = term.desk = Desk(
            core,
            effects,
            self._clock,
            self._telemetry,
            may_answer=self._lock.held,
            save=self._save_now,
            listed=self._listed,
        )
        served: list[Subscription] = []
        try:
            await self._open(desk, served)
            self._term = term
            self._configured(self._configuration.settings)  # it may have changed on the way
            effects.begin()
            self._telemetry.emit("actor.started", epoch=term.epoch, limits=len(self._configuration.settings.limits))
            while True:
                await asyncio.sleep(SAVE_EVERY_S)
                await self._look_after(core, desk, term)
        finally:
            self._term = None
            desk.close()
            effects.close()
            for subscription in served:
                await subscription.close()

    async def _open(self, desk: Desk, served: list[Subscription]) -> None:
        served += [await self._broker.serve(self._names.governor(verb), desk.handle) for verb in VERBS]
        served.append(await self._broker.listen(self._names.governor(TOLD), desk.told))

    async def _look_after(self, core: Governor, desk: Desk, term: _Term) -> None:
        """The chores beside answering: the wall clock, a new configuration, the snapshot."""
        core.set_wall(self._wall_offset())
        if self._reconfigure.is_set():
            self._reconfigure.clear()
            await self._load_spent(core, term)
            desk.dirty = True
        if desk.dirty or self._clock.monotonic() - term.saved_at >= SAVE_IDLE_EVERY_S:
            await self._save_now()

    # --- configuration ---------------------------------------------------------------------------

    def _configured(self, settings: Settings) -> None:
        """One revision at once, in the middle of a term too."""
        term = self._term
        if term is not None and term.core is not None and term.desk is not None and term.settings is not settings:
            term.settings = settings
            term.core.configure(_limits(settings), settings.prices, self._clock.monotonic())
            term.desk.perform(term.core.due(self._clock.monotonic()))
            self._reconfigure.set()

    def _listed(self, listing: LimitsListing) -> LimitsListing:
        configuration = self._configuration
        return msgspec.structs.replace(listing, revision=configuration.revision, fault=configuration.fault)

    def _wall_offset(self) -> float:
        return self._clock.now() - self._clock.monotonic()

    # --- what a successor must know ----------------------------------------------------------------

    async def _take_over(self, term: _Term) -> Governor:
        """A core that knows what the predecessor left; tried until the broker answers. Raises BrokerClosed."""
        while True:
            try:
                if await self._configuration.look():
                    term.core = await self._restored(term)
                    await self._save_now(term.core)  # before the first grant: a successor must know of this term
                    return term.core
            except BrokerClosed:
                raise
            except BrokerError as error:
                self._telemetry.emit("broker.trouble", error=str(error))
            await asyncio.sleep(AGAIN_S)

    async def _restored(self, term: _Term) -> Governor:
        """Take up the state of the last term, be it another's or one of this process's own. Raises BrokerError."""
        term.settings = settings = self._configuration.settings
        core = Governor(
            _limits(settings),
            epoch=term.epoch,
            now=self._clock.monotonic(),
            rules=self._rules,
            prices=settings.prices,
            wall_offset_s=self._wall_offset(),
        )
        saved = await self._state.read()
        await self._store_left(saved)
        await self._load_spent(core, term)
        if self._last is not None and (saved is None or saved.snapshot.epoch <= self._last.snapshot.epoch):
            saved = self._last  # nobody else led in between
        if saved is not None:
            core.restore(saved.snapshot, max(0.0, self._clock.now() - saved.at), self._clock.monotonic())
        elif self._state.found_unreadable:
            core.distrust()
        return core

    async def _store_left(self, saved: Saved | None) -> None:
        """Store what the predecessor had not stored yet; what it had counts once."""
        if saved is not None and saved.unstored:
            self._sums.keep(saved.unstored)
        await self._sums.store(self._sums.pending)

    async def _load_spent(self, core: Governor, term: _Term) -> None:
        """What the present periods of all budgets have cost so far."""
        wanted = periods(_limits(self._configuration.settings), self._clock.now())
        if wanted - term.known_periods:
            core.load_spent(await self._sums.read(sorted(wanted)))
            term.known_periods |= wanted

    def _summed(self, key: str, period: str, micro_usd: int) -> None:
        """The server has added: what it says counts each permit once, also those that two governors settled."""
        if self._term is not None and self._term.core is not None:
            self._term.core.correct_spent(key, period, micro_usd)

    def _snapshot(self, core: Governor, *, clean: bool = False) -> Saved:
        snapshot = core.snapshot(self._clock.monotonic(), clean=clean)
        return Saved(at=self._clock.now(), snapshot=snapshot, unstored=self._sums.pending)

    async def _save_now(self, core: Governor | None = None) -> None:
        term = self._term
        core = core or (term.core if term is not None else None)
        if core is None:
            return
        async with self._saving:
            if not self._lock.held():
                return
            desk = term.desk if term is not None else None
            if desk is not None:
                desk.dirty = False
            if await self._state.write(self._snapshot(core)):
                if term is not None:
                    term.saved_at = self._clock.monotonic()
            elif desk is not None:
                desk.dirty = True


def _limits(settings: Settings) -> Sequence[Compiled]:
    return [compiled(limit) for limit in named(settings.limits)]
