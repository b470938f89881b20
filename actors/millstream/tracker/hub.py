"""The hub: hands every folded change to those who follow live, and wakes those who wait for a task."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from millstream.tracker.model import Change, Entry, TaskRow

CLIENT_QUEUE: Final = 1024
"""Frames that wait for one client; one that falls further behind is closed, and resumes from its last id."""
MAX_CLIENTS: Final = 512
MAX_WAITERS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interest:
    """Which changes a client wants: all that is set must hold."""

    states: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    queue: str | None = None
    tenant: str | None = None
    task_type: str | None = None
    run_id: str | None = None
    task: str | None = None
    """Task id or key."""

    def covers(self, row: TaskRow, entry: Entry) -> bool:
        return (
            (not self.states or entry.state in self.states)
            and (not self.kinds or entry.kind in self.kinds)
            and self.queue in (None, row.queue)
            and self.tenant in (None, row.tenant_id)
            and self.task_type in (None, row.task_type)
            and self.run_id in (None, row.run_id)
            and self.task in (None, row.task_id, row.key)
        )


class Client:
    """One live stream: a bounded queue of encoded frames."""

    def __init__(self, interest: Interest, position: int) -> None:
        self.interest = interest
        self.position = position
        """The sequence after which frames come through the queue; all up to it must be read from the store."""
        self.overflowed = False
        self._frames: deque[tuple[int, bytes]] = deque()
        self._ready = asyncio.Event()

    def offer(self, seq: int, encoded: bytes) -> bool:
        """Queue a frame; False when the client is too far behind."""
        if len(self._frames) >= CLIENT_QUEUE:
            self.overflowed = True
            self._frames.clear()
        else:
            self._frames.append((seq, encoded))
        self._ready.set()
        return not self.overflowed

    def wake(self) -> None:
        self._ready.set()

    async def take(self, wait_s: float) -> list[tuple[int, bytes]]:
        """All frames that wait, after at most `wait_s`; maybe none."""
        try:
            async with asyncio.timeout(wait_s):
                await self._ready.wait()
        except TimeoutError:
            return []
        self._ready.clear()
        frames = list(self._frames)
        self._frames.clear()
        return frames


class Hub:
    """Belongs to one event loop. `position` is the sequence up to which all changes were published.

    `encode` makes the frame of a change, once for all clients.
    """

    def __init__(self, position: int, encode: Callable[[Change], bytes]) -> None:
        self._encode = encode
        self.position = position
        self.dropped = 0
        self.closing = asyncio.Event()
        self._clients: set[Client] = set()
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._waiting = 0
        self._streams = 0

    @property
    def streams(self) -> int:
        """Open streams of both kinds."""
        return self._streams

    def publish(self, changes: Sequence[Change], position: int) -> None:
        """Tell all clients and waiters; never waits for any of them."""
        if self._clients:
            for change in changes:
                self._tell_clients(change)
        if self._waiters:
            for change in changes:
                self._wake_waiters(change.row)
        self.position = position

    def _wake_waiters(self, row: TaskRow) -> None:
        for name in (row.key, row.task_id):
            for waiter in self._waiters.get(name, ()):
                waiter.set()

    def _tell_clients(self, change: Change) -> None:
        encoded: bytes | None = None
        for client in [each for each in self._clients if each.interest.covers(change.row, change.entry)]:
            encoded = encoded or self._encode(change)
            if not client.offer(change.entry.seq, encoded):
                self._clients.discard(client)
                self.dropped += 1

    def admit(self) -> bool:
        """Count one more open stream; False where there are too many, or the hub is closing."""
        if self._streams >= MAX_CLIENTS or self.closing.is_set():
            return False
        self._streams += 1
        return True

    def leave(self) -> None:
        """The counterpart of `admit`."""
        self._streams -= 1

    def subscribe(self, interest: Interest) -> Client:
        """Frames of all changes after the present position."""
        client = Client(interest, self.position)
        self._clients.add(client)
        return client

    def unsubscribe(self, client: Client) -> None:
        self._clients.discard(client)

    def watch(self, name: str) -> "Watch":
        """Remember changes of the task of this key or id from now on."""
        return Watch(self, name)

    def add_waiter(self, name: str, waiter: asyncio.Event) -> bool:
        if self._waiting >= MAX_WAITERS:
            return False
        self._waiting += 1
        self._waiters.setdefault(name, set()).add(waiter)
        return True

    def remove_waiter(self, name: str, waiter: asyncio.Event) -> None:
        self._waiting -= 1
        waiters = self._waiters[name]
        waiters.discard(waiter)
        if not waiters:
            del self._waiters[name]

    def close(self) -> None:
        """Wake every stream and every waiter: they end."""
        self.closing.set()
        for client in self._clients:
            client.wake()
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.set()


class Watch:
    """Notices changes of one task between two reads of it: begin it before the first read."""

    def __init__(self, hub: Hub, name: str) -> None:
        self._hub = hub
        self._name = name
        self._event = asyncio.Event()
        self._counted = False

    def __enter__(self) -> Self:
        self._counted = self._hub.add_waiter(self._name, self._event)
        return self

    def __exit__(self, *_: object) -> None:
        if self._counted:
            self._hub.remove_waiter(self._name, self._event)

    async def changed(self, wait_s: float) -> bool:
        """Wait for a change since the last call; False when none came in time, or nobody can wait any more."""
        if not self._counted or self._hub.closing.is_set():
            return False
        try:
            async with asyncio.timeout(wait_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return not self._hub.closing.is_set()
