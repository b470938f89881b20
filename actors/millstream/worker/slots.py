"""Which deliveries of a worker run and which wait: a waiting one holds no slot, and stands in line for the next free one."""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import Enum


class _At(Enum):
    """What a delivery in hand holds."""

    SLOT = "slot"
    """It holds a slot, and it is not decided yet whether it has to wait."""
    RUNNING = "running"
    """It holds a slot and waits for nothing any more."""
    WAITING = "waiting"
    """It waits for a permit, or for a slot, and holds none."""
    LEFT = "left"
    """The worker is done with it."""


class Slots:
    """The slots of one worker, and as many places beside them for deliveries that wait for permits.

    `freed` is called when there is more room to pull than before.
    """

    def __init__(self, total: int, freed: Callable[[], None]) -> None:
        self.total = total
        self.taken = 0
        """Slots that are held, or reserved for what is being pulled."""
        self.waiting = 0
        """Deliveries in hand that hold no slot."""
        self._undecided = 0
        """Deliveries with a slot that may yet have to wait: places are kept free for them."""
        self._line: deque[Place] = deque()
        self._places: set[Place] = set()
        self._freed = freed
        self.draining = False

    def __repr__(self) -> str:
        return f"Slots(taken={self.taken}/{self.total}, waiting={self.waiting}, in_line={len(self._line)})"

    @property
    def room(self) -> int:
        """How many deliveries may be pulled now: each may run, and each may turn out to have to wait."""
        if self._line:
            return 0
        return max(0, min(self.total - self.taken, self.total - self.waiting - self._undecided))

    @property
    def crowded(self) -> bool:
        """Whether every waiting place is taken, so that nothing can be pulled."""
        return self.waiting >= self.total

    def reserve(self, count: int) -> None:
        """Reserve slots for deliveries that are about to be pulled, at most `room`."""
        self.taken += count
        self._undecided += count

    def release(self, count: int) -> None:
        """Give back slots that were reserved and not needed, because fewer deliveries came."""
        room = self.room
        self.taken -= count
        self._undecided -= count
        self._serve(room)

    def place(self) -> "Place":
        """The place of a delivery that came: it holds the slot that was reserved for it."""
        place = Place(self)
        self._places.add(place)
        return place

    def drain(self) -> None:
        """End every wait now, and each later one as soon as it begins."""
        self.draining = True
        for place in self._places:
            place.hurry()

    # --- moves of places -----------------------------------------------------------------------

    def move(self, place: "Place", to: _At) -> None:
        """Move a place to another state. A slot that this frees goes to the first in line, else to the next pull."""
        room = self.room
        came_from, place.at = place.at, to
        self.taken += _holds(to) - _holds(came_from)
        self.waiting += (to is _At.WAITING) - (came_from is _At.WAITING)
        self._undecided += (to is _At.SLOT) - (came_from is _At.SLOT)
        if to is _At.LEFT:
            self._places.discard(place)
        self._serve(room)

    def _serve(self, room: int) -> None:
        """Give free slots to those in line; tell of it where there is more room to pull than `room`."""
        while self._line and self.taken < self.total:
            first = self._line.popleft()
            first.told()
            self.move(first, _At.SLOT)
        if self.room > room:
            self._freed()

    def is_free(self) -> bool:
        """Whether a slot is free and nobody stands in line for it."""
        return self.taken < self.total and not self._line

    def join_line(self, place: "Place") -> None:
        self._line.append(place)

    def leave_line(self, place: "Place") -> None:
        if place in self._line:
            self._line.remove(place)


def _holds(at: _At) -> bool:
    return at in (_At.SLOT, _At.RUNNING)


class Place:
    """One delivery's place in a worker: a slot, a waiting place, or none any more."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._patience: asyncio.Timeout | None = None
        self.at = _At.SLOT
        self._turn: asyncio.Event | None = None

    @property
    def crowded(self) -> bool:
        return self._slots.crowded

    @contextmanager
    def wait(self) -> Generator[asyncio.Timeout]:
        """A time limit to enter around a wait: it runs out when the worker drains, and not before."""
        self._patience = asyncio.timeout(0 if self._slots.draining else None)
        try:
            yield self._patience
        finally:
            self._patience = None

    @contextmanager
    def yielding(self, after_s: float) -> Generator[None]:
        """Give up the slot where the body takes longer than `after_s`."""
        timer = asyncio.get_running_loop().call_later(after_s, self.leave_slot)
        try:
            yield
        finally:
            timer.cancel()

    def hurry(self) -> None:
        """End the wait that is under way, if there is one."""
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time())

    def leave_slot(self) -> None:
        """Give up the slot, and wait without one from now on."""
        if self.at is _At.SLOT:
            self._slots.move(self, _At.WAITING)

    def take_slot(self) -> bool:
        """Take a slot that is free and that nobody stands in line for; True when it holds one then."""
        if self.at is _At.WAITING and self._slots.is_free():
            self._slots.move(self, _At.SLOT)
        return self.at is _At.SLOT

    async def next_slot(self, limit_s: float) -> bool:
        """Stand in line for a slot; those in line go before any pull. False where none came within `limit_s`."""
        if self.take_slot():
            return True
        self._turn = asyncio.Event()
        self._slots.join_line(self)
        try:
            async with asyncio.timeout(limit_s):
                await self._turn.wait()
        except TimeoutError:
            return self.take_slot()
        finally:
            self._slots.leave_line(self)
        return True

    def told(self) -> None:
        """Tell the one who stands in line that the slot is its own."""
        if self._turn is not None:
            self._turn.set()

    def begin(self) -> None:
        """Note that it waits for nothing any more, and runs in its slot."""
        self._slots.move(self, _At.RUNNING)

    def leave(self) -> None:
        """Note that the worker is done with it."""
        if self.at is not _At.LEFT:
            self._slots.move(self, _At.LEFT)
