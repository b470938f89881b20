"""The releaser: one of the dispatchers lets held tasks go, in fair order, as fast as workers and limits take them."""

import asyncio
import os
import socket
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
from millstream.policy.fairness import Order, Pool, Room, Shares, plan
from millstream.policy.release import Entry
from millstream_schemas.topology import LEADER_TTL_S

MOST_AT_ONCE = 512
LOOK_EVERY_S = 1.0
IDLE_LOOK_EVERY_S = 2.0
"""Bells tell of what comes into an empty HELD; a lost one costs this."""
PAUSE_S = 0.5
MOST_OVERDUE = 256


class Releaser:
    """Stands by until it is elected, and then releases until it may have lost the lock. Holds nothing that must last."""

    def __init__(self, context: Context) -> None:
        names = context.names
        holder = f"{socket.gethostname()}/{os.getpid()}"
        self._context = context
        self._lock = Leadership(
            context.broker,
            names.leaders_bucket,
            names.releaser_lock,
            context.clock,
            LEADER_TTL_S,
            holder,
            context.ids.new(),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Release until `stop` is set, whenever elected; a batch under way is finished. Raises BrokerClosed."""
        while not stop.is_set():
            epoch = await self._lock.win(stop)
            if epoch is not None:
                await self._lead(epoch, stop)

    async def _lead(self, epoch: int, stop: asyncio.Event) -> None:
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
    """One term of office: all that a releaser knows, and its turns."""

    def __init__(self, context: Context, lock: Leadership) -> None:
        self._context = context
        self._lock = lock
        self._wake = asyncio.Event()
        self._ended = False
        self._lanes = Lanes(context)
        self._gates = Gates(context, self._lanes.pools, self._gates_changed)
        self._depth = Depth(context, self._wake)
        self._releasing = Releasing(context, self._depth, self._lanes.removed)
        self._order: Order = {}
        self._look_at = 0.0

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
        """Until there is something to do, or to look after."""
        limit_s = PAUSE_S if self._lanes else IDLE_LOOK_EVERY_S
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._wake.wait()

    async def _turn_or_fault(self) -> bool:
        """The one boundary of a turn; True where the next one should follow at once."""
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
        """Look, choose, release; True where there may be more to release at once."""
        self._wake.clear()
        now = self._context.clock.monotonic()
        looks = now >= self._look_at
        if looks:
            await self._lanes.look()
            await self._depth.doubt()
            await self._depth.watch(self._lanes.queues())
            self._look_at = now + (LOOK_EVERY_S if self._lanes else IDLE_LOOK_EVERY_S)
        if not self._lanes:
            return False
        await self._depth.look()
        unread = await self._lanes.read_ahead(self._pool_rooms())
        await self._depth.watch(self._lanes.queues())
        steps = await self._choose()
        if looks:
            steps += self._overdue()
        released = await self._release(steps)
        self._lanes.shed()
        # What led nowhere, as a cancelled task does, has left its room to others.
        return unread or len(steps) >= MOST_AT_ONCE or released < len(steps)

    async def _choose(self) -> list[Step]:
        """The entries whose turn it is, as far as there is room, in their order."""
        settings, gates = self._context.settings, self._gates
        shares = Shares(lambda tenant: settings.tenant(tenant).weight, lambda pool: policy.cost(gates.of(pool)))
        queues = {queue: self._depth.room(queue) for queue in self._lanes.queues()}
        pools = self._pool_rooms()
        chosen: list[Entry] = []
        while len(chosen) < MOST_AT_ONCE:
            made = plan(self._order, self._lanes.views(), Room(queues, pools), shares, MOST_AT_ONCE - len(chosen))
            self._order = made.order
            for entry in self._lanes.take(made.takes):
                chosen.append(entry)
                queues[entry.item.card.queue] -= 1
                pool = tuple(entry.item.limits)
                if pool in pools:
                    pools[pool] -= 1
            if made.dry is None:
                break
            if not await self._read(made.dry, chosen):
                break
        now = self._context.clock.now()
        return [Step(entry, policy.chosen(entry, now)) for entry in chosen]

    async def _read(self, lane: str, chosen: Sequence[Entry]) -> bool:
        """Read a lane further; False where that failed, and what was chosen before is to go on without it."""
        try:
            await self._lanes.read(lane)
        except BrokerError as error:
            if isinstance(error, BrokerClosed) or not chosen:
                raise
            self._context.telemetry.emit("broker.trouble", error=str(error))
            return False
        return True

    def _pool_rooms(self) -> dict[Pool, int]:
        """How many of each pool with limits may be released; those without a bound are left out."""
        rooms: dict[Pool, int] = {}
        for lane in self._lanes.views():
            if lane.pool and lane.pool not in rooms:
                gate = self._gates.of(lane.pool)
                if gate is None:
                    self._gates.ask_soon()
                room = policy.pool_room(gate, self._depth.waiting(lane.pool))
                if self._depth.pauses(lane.pool):
                    room = 0
                if room is not None:
                    rooms[lane.pool] = room
        return rooms

    def _overdue(self) -> list[Step]:
        """The heads that have waited for too long, taken out of their lanes."""
        now, most_s = self._context.clock.now(), self._context.settings.max_throttle_s
        steps: list[Step] = []
        heads = self._lanes.heads()
        while heads and len(steps) < MOST_OVERDUE:
            late = [Step(head, event) for head in heads if (event := policy.overdue(head, now, most_s)) is not None]
            if not late:
                break
            for step in late:
                self._lanes.take_head(step.entry)
            steps += late
            lanes = {step.entry.lane for step in late}
            heads = [head for head in self._lanes.heads() if head.lane in lanes]
        return steps

    async def _release(self, steps: Sequence[Step]) -> int:
        """Release a batch; after a fault one by one, to spare the innocent. Returns how many went to WORK."""
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
            # One that can never be released stays where it is.
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
