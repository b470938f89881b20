"""The releaser: one elected dispatcher releases held tasks, in fair order, as fast as workers and limits take them."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from millstream.dispatcher.context import Context
from millstream.dispatcher.depth import Depth
from millstream.dispatcher.gates import Gates
from millstream.dispatcher.lanes import Lanes
from millstream.dispatcher.releasing import AFTER_FAULT_S, Releasing, Step
from millstream.errors import BrokerClosed, BrokerError, MessageTooLarge
from millstream.leadership import Leadership
from millstream.policy import release as policy
from millstream.policy.fairness import Order, Shares, plan
from millstream.policy.release import Entry
from millstream.policy.stops import Stop, seen
from millstream.policy.supply import Need, Pool, Room, contended, cost, to_blame, used
from millstream_schemas.topology import LEADER_TTL_S

MOST_AT_ONCE = 512
LOOK_EVERY_S = 1.0
IDLE_LOOK_EVERY_S = 2.0
"""Bells tell of what comes into an empty HELD; where one is lost, its task waits for so long at most."""
PAUSE_S = 0.5
MOST_OVERDUE = 256
"""Tasks ended in one turn for having waited for too long."""


class Releaser:
    """Stands by until elected, then releases until it stops or may have lost the lock. Keeps nothing that must last."""

    def __init__(self, context: Context) -> None:
        names = context.names
        self._context = context
        self._lock = Leadership(
            context.broker,
            names.leaders_bucket,
            names.releaser_lock,
            context.clock,
            LEADER_TTL_S,
            context.ids.new(),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Release until `stop` is set, whenever elected; a batch under way is finished. Raises BrokerClosed."""
        while not stop.is_set():
            epoch = await self._lock.win(stop)
            if epoch is not None:
                await self._lead(epoch, stop)

    async def _lead(self, epoch: int, stop: asyncio.Event) -> None:
        """Serve one term, to its end by `stop`, by the loss of the lock or by a fault."""
        telemetry = self._context.telemetry
        term = Term(self._context, self._lock)
        telemetry.emit("releaser.elected", epoch=epoch)
        async with asyncio.TaskGroup() as group:
            releasing = group.create_task(term.run())
            ends = [group.create_task(stop.wait()), group.create_task(self._lock.hold())]
            await asyncio.wait([*ends, releasing], return_when=asyncio.FIRST_COMPLETED)
            term.end()
            await asyncio.wait([releasing])
            for end in ends:
                end.cancel()
        await self._lock.release()
        telemetry.emit("releaser.retired", epoch=epoch)


class Term:
    """One term as the elected releaser: all that it knows, and the turns in which it releases."""

    def __init__(self, context: Context, lock: Leadership) -> None:
        self._context = context
        self._lock = lock
        self._wake = asyncio.Event()
        self._ended = False
        self._lanes = Lanes(context)
        self._gates = Gates(context, self._lanes.pools, self._gates_changed)
        self._depth = Depth(context, self._wake, lambda pool, need: to_blame(pool, need, self._gates.bound))
        self._releasing = Releasing(context, self._depth, self._lanes.removed)
        self._order: Order = {}
        self._stops: dict[Pool, Stop] = {}
        self._private: set[str] = set()
        self._look_next_at = 0.0

    def end(self) -> None:
        """Begin no further turn."""
        self._ended = True
        self._wake.set()

    async def run(self) -> None:
        """Turn after turn until `end`. Raises BrokerClosed."""
        names = self._context.names
        bell = await self._context.broker.listen(names.held_bell, self._heard)
        try:
            async with asyncio.TaskGroup() as group:
                chores = [group.create_task(one) for one in (self._gates.run(), self._depth.run())]
                chores.append(group.create_task(self._releasing.remove()))
                while not self._ended and self._lock.held():
                    if not await self._turn_or_fault():
                        await self._pause()
                for chore in chores:
                    chore.cancel()
        finally:
            await bell.close()

    def _heard(self, _subject: str, body: bytes) -> None:
        self._lanes.heard(body.decode("utf-8", "replace").splitlines())
        self._wake.set()

    def _gates_changed(self, pools: Sequence[Pool]) -> None:
        self._depth.resume(pools)
        self._wake.set()

    async def _pause(self) -> None:
        """Wait until something has changed, or until it is time to look again."""
        limit_s = PAUSE_S if self._lanes else IDLE_LOOK_EVERY_S
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._wake.wait()

    async def _turn_or_fault(self) -> bool:
        """One turn, and the one place that catches what goes wrong in it; True where the next should follow at once."""
        try:
            return await self._turn()
        except BrokerClosed:
            raise
        except BrokerError as error:
            self._context.telemetry.emit("broker.trouble", error=str(error))
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it was, the next turn may go well
            self._context.telemetry.emit("message.faulty", error=repr(error))
        await asyncio.sleep(AFTER_FAULT_S)
        return False

    # --- a turn ----------------------------------------------------------------------------------

    async def _turn(self) -> bool:
        """Look at what there is, choose whose turn it is, release them; True where the next turn should follow at once."""
        self._wake.clear()
        now = self._context.clock.monotonic()
        looks = now >= self._look_next_at
        if looks:
            await self._lanes.look()
            await self._depth.recheck()
            await self._depth.watch(self._lanes.queues())
            self._private = self._lanes.private()
            self._look_next_at = now + (LOOK_EVERY_S if self._lanes else IDLE_LOOK_EVERY_S)
        if not self._lanes:
            return False
        await self._depth.count_slots()
        pools: dict[Pool, bool] = {}
        unread = await self._lanes.read_ahead(self._room(pools))
        await self._depth.watch(self._lanes.queues())
        self._remember_stops()
        steps = await self._choose(self._room(pools))
        if looks:
            steps += self._overdue()
        released = await self._release(steps)
        self._lanes.shed()
        # An entry that led to no release, as that of a cancelled task, has left its room to another one.
        return unread or len(steps) >= MOST_AT_ONCE or released < len(steps)

    async def _choose(self, room: Room) -> list[Step]:
        """Choose the entries whose turn it is, in fair order, as far as queues and pools have room.

        A plan ends where a lane that is next has run dry in memory; that lane is read further and planning goes on.
        """
        settings = self._context.settings
        shares = Shares(lambda tenant: settings.tenant(tenant).weight, self._cost)
        chosen: list[Entry] = []
        while len(chosen) < MOST_AT_ONCE:
            made = plan(self._order, self._lanes.views(), room, shares, MOST_AT_ONCE - len(chosen))
            self._order, room = made.order, made.room
            chosen += self._lanes.take(made.takes)
            if made.dry is None:
                break
            if not await self._read(made.dry, chosen):
                break
        now = self._context.clock.now()
        return [Step(entry, policy.chosen(entry, now, self._stops.get(tuple(entry.item.limits)))) for entry in chosen]

    def _remember_stops(self) -> None:
        """Look at the gates of all pools in which something waits, and remember which are closed, and since when."""
        now, before = self._context.clock.now(), self._stops
        pools = {lane.pool for lane in self._lanes.views() if lane.pool}
        looked = {pool: seen(before.get(pool), self._gates.of(pool), now) for pool in pools}
        self._stops = {pool: stop for pool, stop in looked.items() if stop is not None}

    async def _read(self, lane: str, chosen: Sequence[Entry]) -> bool:
        """Read a lane further; False where that failed and what was chosen already is to be released without it."""
        try:
            await self._lanes.read(lane)
        except BrokerError as error:
            if isinstance(error, BrokerClosed) or not chosen:
                raise
            self._context.telemetry.emit("broker.trouble", error=str(error))
            return False
        return True

    def _cost(self, pool: Pool, need: Need) -> float:
        """What a task costs in fair order."""
        return cost(need, [self._gates.bound(key) for key in contended(pool, self._private)])

    def _room(self, pools: dict[Pool, bool]) -> Room:
        """How much may be released; `pools` remembers for one turn which of them are open."""
        for lane in self._lanes.views():
            if lane.pool and lane.pool not in pools:
                gate = self._gates.of(lane.pool)
                if gate is None:
                    self._gates.ask_soon()
                pools[lane.pool] = gate is not None and gate.open and not self._depth.is_paused(lane.pool)
        queues = {queue: self._depth.room(queue) for queue in self._lanes.queues()}
        shut = {pool for pool, is_open in pools.items() if not is_open}
        return Room(queues, shut, self._gates.bound, used(self._depth.waiting(), self._gates.bound))

    def _overdue(self) -> list[Step]:
        """Take out of their lanes the first entries that have waited for too long, with the events that end their tasks."""
        now, most_s = self._context.clock.now(), self._context.settings.max_throttle_s
        steps: list[Step] = []
        heads = self._lanes.heads()
        while heads and len(steps) < MOST_OVERDUE:
            ends = (
                (head, policy.overdue(head, now, most_s, self._stops.get(tuple(head.item.limits)))) for head in heads
            )
            late = [Step(head, event) for head, event in ends if event is not None]
            if not late:
                break
            for step in late:
                self._lanes.take_head(step.entry)
            steps += late
            lanes = {step.entry.lane for step in late}
            heads = [head for head in self._lanes.heads() if head.lane in lanes]
        return steps

    async def _release(self, steps: Sequence[Step]) -> int:
        """Release a batch; returns how many tasks went to WORK.

        After a fault that is not the broker's, the entries are tried one by one, so that only the faulty one stays.
        """
        if not steps:
            return 0
        try:
            performed = await self._releasing.perform(steps)
        except BrokerClosed:
            raise
        except Exception as error:
            if isinstance(error, BrokerError) and not isinstance(error, MessageTooLarge):
                self._lanes.put_back(step.entry for step in steps)
                raise
            self._context.telemetry.emit("message.faulty", error=repr(error), messages=len(steps))
            # A single entry that cannot be released stays in HELD, and is not tried again in this term.
            return await self._one_by_one(steps) if len(steps) > 1 else 0
        if performed.unfinished:
            self._lanes.put_back(performed.unfinished)
            await asyncio.sleep(AFTER_FAULT_S)
        return performed.released

    async def _one_by_one(self, steps: Sequence[Step]) -> int:
        left = deque(steps)
        released = 0
        try:
            while left:
                released += await self._release([left.popleft()])
        except BrokerError:
            self._lanes.put_back(step.entry for step in left)
            raise
        return released
