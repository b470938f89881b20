"""How much of each limit released tasks may take, and what a task costs in fair order."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from millstream_schemas.envelope import UsageEstimate
from millstream_schemas.permits import MAX_CALLS, Gate, GatePart

Pool = tuple[str, ...]
"""The limit keys that a task needs; empty for one that is held for fairness alone."""

AHEAD_S = 0.25
"""For so long a key is supplied ahead: what waits for its permit at workers may be overtaken there."""
SLOW_S = 5.0
"""A key that one task takes up for so long may keep the next one waiting until its worker sends it back."""
LEAST_COST = 1e-3
"""Of one task, so that a tenant's turn moves on whatever it takes."""
_EXACT = 1e-9
"""Sums of seconds are no more exact than this."""


class Need(NamedTuple):
    """What one task takes of a limit, in the order of a limit's rates."""

    requests: float = 1
    tokens: float = 0
    tokens_in: float = 0
    tokens_out: float = 0


ONE = Need()
"""What a task takes of which nothing is known."""


def need_of(estimate: UsageEstimate | None) -> Need:
    """What an attempt is likely to take: as a worker will reserve it."""
    if estimate is None:
        return ONE
    tokens_in, tokens_out = estimate.tokens_in or 0, estimate.tokens_out or 0
    requests = min(max(estimate.requests or 1, 1), MAX_CALLS)
    return Need(requests, tokens_in + tokens_out, tokens_in, tokens_out)


@dataclass(frozen=True, slots=True)
class Bound:
    """What one key lets through: amounts a second in the order of a `Need`, and places; None without limit.

    `typical_s` is what an average task takes of it, in seconds.
    """

    rates: tuple[float | None, ...] = ()
    places: int | None = None
    typical_s: float = 0.0

    def seconds(self, need: Need) -> float:
        """For how long the key's scarcest rate is taken up by one task; 0 where nothing limits it."""
        return max((amount / rate for amount, rate in zip(need, self.rates, strict=False) if rate), default=0.0)

    @property
    def request_s(self) -> float:
        """For how long one request takes up the key; 0 where requests are not limited."""
        return 1.0 / self.rates[0] if self.rates and self.rates[0] else 0.0


UNBOUND = Bound()


def parts(gate: Gate) -> Iterable[tuple[str, GatePart]]:
    """What each key of a gate lets through; as much as the gate where that does not say, and is open."""
    if len(gate.parts) == len(gate.keys):
        return zip(gate.keys, gate.parts, strict=True)
    if not gate.open:
        return ()
    whole = GatePart(requests=gate.rate_per_s, places=gate.places)
    return ((key, whole) for key in gate.keys)


def bounds(gates: Iterable[Gate], typical: Mapping[Pool, Need]) -> dict[str, Bound]:
    """What each key lets through, of the gates of all pools; `typical` is what a task of a pool takes on average."""
    said: dict[str, GatePart] = {}
    sums: dict[str, tuple[int, Need]] = {}
    for gate in gates:
        for key, part in parts(gate):
            said[key] = part
            need = typical.get(gate.keys)
            if need is not None and part.requests is None:
                count, total = sums.get(key, (0, _NOTHING))
                sums[key] = (count + 1, Need(*map(sum, zip(total, need, strict=True))))
    found = {key: bound(part) for key, part in said.items()}
    for key, (count, total) in sums.items():
        found[key] = replace(found[key], typical_s=found[key].seconds(total) / count)
    return found


_NOTHING = Need(0)


def bound(part: GatePart) -> Bound:
    """What a part says."""
    return Bound((part.requests, part.tokens, part.tokens_in, part.tokens_out), part.places)


# --- supply -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Used:
    """What released tasks that have not begun take of a key: altogether, and the least of them; in seconds."""

    seconds: float = 0.0
    least_s: float = 0.0
    count: int = 0

    def more(self, seconds: float, count: int = 1) -> "Used":
        """With so many more tasks that take `seconds` each."""
        least_s = min(self.least_s, seconds) if self.count else seconds
        return Used(self.seconds + count * seconds, least_s, self.count + count)

    def fills(self, bound: Bound) -> bool:
        """Whether nothing more may be released on this key, whatever it takes.

        One task more is supplied than a quarter of a second of the key's rate holds, so that there always is a next one.
        """
        if bound.places is not None and self.count >= max(bound.places, 1):
            return True
        return self.count > 0 and self.seconds - self.least_s >= AHEAD_S - _EXACT


@dataclass(frozen=True, slots=True)
class Room:
    """How much may be released now: so many of a queue (none where it is not named), nothing of the pools in `shut`.

    Of other pools as much as each of their keys has left: `used` is what waits on it already.
    """

    queues: Mapping[str, int]
    shut: Collection[Pool] = frozenset()
    bound: Callable[[str], Bound] = field(default=lambda _key: UNBOUND)
    used: Mapping[str, Used] = field(default_factory=dict[str, Used])

    def full(self) -> set[str]:
        """The keys that have nothing left."""
        return {key for key, used in self.used.items() if used.fills(self.bound(key))}


Waiting = Mapping[tuple[Pool, Need], int]
"""How many tasks of each pool and need are released and have not begun."""


def used(waiting: Waiting, bound: Callable[[str], Bound]) -> dict[str, Used]:
    """What these tasks take of each key."""
    found: dict[str, Used] = {}
    for (pool, need), count in waiting.items():
        for key in pool:
            found[key] = found.get(key, _UNUSED).more(bound(key).seconds(need), count)
    return found


_UNUSED = Used()


# --- cost -------------------------------------------------------------------------------------------


def cost(need: Need, keys: Sequence[Bound]) -> float:
    """What one task takes of the scarcest of these keys (its dominant share), in requests.

    Where requests are not limited, in average tasks. One of which nothing is known counts as one.
    """
    took = max((key.seconds(need) for key in keys), default=0.0)
    unit = max((key.request_s for key in keys), default=0.0) or max((key.typical_s for key in keys), default=0.0)
    return max(took / unit, LEAST_COST) if took and unit else 1.0


def contended(pool: Pool, private: Collection[str]) -> Pool:
    """The keys of a pool that tenants share: only those are shared out. All of them where there is none such."""
    return tuple(key for key in pool if key not in private) or pool


def to_blame(pool: Pool, need: Need, bound: Callable[[str], Bound]) -> Pool:
    """The key, as a pool, for which a task that was sent back most likely waited; its whole pool where none is so slow.

    A key that a task takes up for seconds keeps the next one waiting whoever sends it. A faster one does not: then it
    was something that concerns this pool alone, and others that share the key go on.
    """
    slowest = max(pool, key=lambda key: bound(key).seconds(need), default=None)
    return pool if slowest is None or bound(slowest).seconds(need) < SLOW_S else (slowest,)
