"""Permits in use, the leases that end them, and what is remembered of requests that were answered."""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import Generic, TypeVar

from millstream.policy.budgets import Account
from millstream.policy.key_table import Pool
from millstream.policy.limit_state import KeyState, Need, Rules
from millstream.policy.limits import Price
from millstream.policy.window_log import Charge
from millstream_schemas.permits import Granted, Lease

T = TypeVar("T")

GENERATIONS = 4
MAX_REMEMBERED = 100_000
"""Per generation: a flood shortens the memory rather than filling it."""


class Permit:
    """A permit in use; `charges` go with the meters and `accounts` with the budgets of its pool.

    One that was taken over from a predecessor has no charges: what it took from the rates is in their logs.
    """

    __slots__ = (
        "accounts", "charges", "id", "lease_until", "need", "pool", "price", "probes", "start", "task", "worker",
    )  # fmt: skip

    def __init__(self, name: str, worker: str, pool: Pool, need: Need, start: float, lease_until: float) -> None:
        self.id = name
        self.worker = worker
        self.pool = pool
        self.need = need
        self.start = start
        self.lease_until = lease_until
        self.charges: list[Charge] = []
        self.accounts: tuple[Account, ...] = ()
        self.probes: tuple[tuple[KeyState, int], ...] = ()
        self.price: Price | None = None
        self.task = ""


def granted(permits: Sequence[Permit], rules: Rules, epoch: int, now: float, held_s: float = 0.0) -> Granted:
    """The reply that hands permits out, or says again which of them are still open.

    Starts are rounded up to whole milliseconds, and one millisecond is taken off `use_by_ms` for that: the window bound
    rests on their sum.
    """
    begun_s = max(0.0, now - min([permit.start for permit in permits]))
    return Granted(
        leases=tuple([Lease(permit.id, max(0, ceil((permit.start - now) * 1000))) for permit in permits]),
        use_by_ms=max(0, int((rules.use_by_s - begun_s) * 1000 + 1e-6) - 1),
        lease_ms=round(rules.lease_s * 1000),
        epoch=epoch,
        held_ms=int(max(0.0, held_s) * 1000),
    )


class Leases:
    """Permits by name, with the next lease to run out."""

    def __init__(self) -> None:
        self._permits: dict[str, Permit] = {}
        self._heap: list[tuple[float, str]] = []  # an entry may be older than its permit's lease, or outlive it

    def __len__(self) -> int:
        return len(self._permits)

    def __iter__(self) -> Iterator[Permit]:
        return iter(self._permits.values())

    def get(self, name: str) -> Permit | None:
        """A permit in use."""
        return self._permits.get(name)

    def add(self, permit: Permit) -> None:
        """Keep a permit and watch its lease."""
        self._permits[permit.id] = permit
        heappush(self._heap, (permit.lease_until, permit.id))
        if len(self._heap) > 2 * len(self._permits) + 1024:
            self._heap = [(one.lease_until, one.id) for one in self._permits.values()]
            heapify(self._heap)

    def remove(self, permit: Permit) -> None:
        """Forget a permit that has ended."""
        del self._permits[permit.id]

    def next_end(self) -> float:
        """When the next lease runs out; infinite where none does."""
        heap = self._heap
        while heap:
            until, name = heap[0]
            permit = self._permits.get(name)
            if permit is None:
                heappop(heap)
            elif permit.lease_until > until:
                heappop(heap)
                heappush(heap, (permit.lease_until, name))
            else:
                return until
        return inf

    def run_out(self, now: float) -> list[Permit]:
        """Those whose lease is over; the caller ends them."""
        over: list[Permit] = []
        while self.next_end() <= now:
            permit = self._permits.get(heappop(self._heap)[1])
            if permit is not None:
                over.append(permit)
        return over


class Memory(Generic[T]):
    """Remembers entries for at least `span_s`, unless flooded; forgets a whole generation at once, which is cheap."""

    def __init__(self, span_s: float, now: float) -> None:
        self._each_s = span_s / (GENERATIONS - 1)
        self._begun = now
        self._generations: list[dict[str, T]] = [{} for _ in range(GENERATIONS)]

    def age(self, now: float) -> None:
        """Begin a new generation where it is time."""
        if now - self._begun < self._each_s and len(self._generations[0]) < MAX_REMEMBERED:
            return
        self._begun = now
        self._generations.pop()
        self._generations.insert(0, {})

    def put(self, name: str, value: T) -> None:
        """Remember."""
        self._generations[0][name] = value

    def get(self, name: str) -> T | None:
        """What is remembered, the newest first."""
        for generation in self._generations:
            if name in generation:
                return generation[name]
        return None

    def __contains__(self, name: str) -> bool:
        return any(name in generation for generation in self._generations)
