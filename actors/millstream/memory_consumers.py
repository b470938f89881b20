"""The durable consumers of the in-memory broker: leases, redeliveries and their limits, with `now` as argument."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from millstream.memory_subjects import matches
from millstream.ports import ConsumerInfo
from millstream_schemas.topology import ConsumerSpec

Exhausted = Callable[[str, str, int, int], None]
"""Called with stream, consumer, sequence and deliveries when a message has used up its deliveries."""


@dataclass(slots=True)
class _Lease:
    deliveries: int
    until: float | None
    """When the message is due again; None while it waits in the queue of redeliveries."""


class MemoryConsumer:
    """One durable pull consumer with explicit acks. No fencing: the ack of a lease that ran out counts."""

    def __init__(self, spec: ConsumerSpec, exhausted: Exhausted) -> None:
        self.spec = spec
        self._exhausted = exhausted
        self._fresh: OrderedDict[int, None] = OrderedDict()
        self._leases: dict[int, _Lease] = {}
        self._due: list[tuple[float, int]] = []
        self._again: deque[int] = deque()
        self._beating: dict[int, int] = {}

    def wants(self, subject: str) -> bool:
        return not self.spec.filters or any(matches(each, subject) for each in self.spec.filters)

    def offer(self, seq: int) -> None:
        """A new message for this consumer."""
        self._fresh[seq] = None

    def forget(self, seq: int) -> None:
        """The message is acked, or gone from the stream."""
        self._fresh.pop(seq, None)
        self._leases.pop(seq, None)

    def settle(self, now: float) -> None:
        """Take back the leases that ran out, save those that a heart renews."""
        while self._due and self._due[0][0] <= now:
            until, seq = heapq.heappop(self._due)
            lease = self._leases.get(seq)
            if lease is None or lease.until != until:
                continue
            if seq in self._beating:
                self._lend(seq, lease, now + self.spec.ack_wait_s)
            else:
                self._take_back(seq, lease)

    def next_due(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def take(self, limit: int, now: float) -> Iterator[tuple[int, int]]:
        """Lend up to `limit` messages: their sequences and how often each has been delivered."""
        lent = 0
        while lent < limit and self._again:
            seq = self._again.popleft()
            lease = self._leases.get(seq)
            if lease is None or lease.until is not None:
                continue
            lease.deliveries += 1
            self._lend(seq, lease, now + self.spec.ack_wait_s)
            lent += 1
            yield seq, lease.deliveries
        while lent < limit and self._fresh and self._has_room():
            seq, _ = self._fresh.popitem(last=False)
            self._leases[seq] = lease = _Lease(1, None)
            self._lend(seq, lease, now + self.spec.ack_wait_s)
            lent += 1
            yield seq, 1

    def nak(self, seq: int, delay_s: float, now: float) -> None:
        """Redeliver, whoever holds the message now; a delayed one goes on counting as unacked."""
        lease = self._leases.get(seq)
        if lease is None:
            return
        if delay_s > 0:
            self._lend(seq, lease, now + delay_s)
        elif lease.until is not None:
            self._take_back(seq, lease)

    def beat(self, seq: int) -> None:
        """A heart renews the lease from now on; hearts of several deliveries may."""
        self._beating[seq] = self._beating.get(seq, 0) + 1

    def rest(self, seq: int, now: float) -> None:
        """One heart renews no more; the lease runs on from its last beat, which is now."""
        left = self._beating.pop(seq, 1) - 1
        if left:
            self._beating[seq] = left
            return
        lease = self._leases.get(seq)
        if lease is not None and lease.until is not None:
            self._lend(seq, lease, now + self.spec.ack_wait_s)

    def delivered(self, seq: int) -> bool:
        return seq not in self._fresh

    @property
    def pending(self) -> int:
        return len(self._fresh)

    def info(self) -> ConsumerInfo:
        again = sum(lease.deliveries > 1 for lease in self._leases.values())
        return ConsumerInfo(self.spec.durable, len(self._fresh), len(self._leases), again, self.spec.max_ack_pending)

    def _has_room(self) -> bool:
        return self.spec.max_ack_pending < 0 or len(self._leases) < self.spec.max_ack_pending

    def _lend(self, seq: int, lease: _Lease, until: float) -> None:
        lease.until = until
        heapq.heappush(self._due, (until, seq))

    def _take_back(self, seq: int, lease: _Lease) -> None:
        if 0 < self.spec.max_deliver <= lease.deliveries:
            del self._leases[seq]  # the message stays in the stream, and nobody gets it
            self._exhausted(self.spec.stream, self.spec.durable, seq, lease.deliveries)
        else:
            lease.until = None
            self._again.append(seq)
