"""For how long limits hold up what is held: behind a closed gate, and not while it stands in line where a lane moves."""

from dataclasses import dataclass, replace

from millstream.policy.waiting import unknown_limit, waits_for
from millstream_schemas.permits import Gate

UNCOUNTED = frozenset({"budget_exhausted"})
"""What closes a gate until a time that everybody knows: the end of a budget's period is waited for."""


@dataclass(frozen=True, slots=True)
class Stop:
    """What is remembered of a pool's gate. Unix seconds.

    Closed since `since` (None: it is not, or for a reason that does not count), and seen closed last at `last_at`;
    `is_certain` is False while the governor does not say.
    """

    since: float | None
    last_at: float
    detail: str
    is_certain: bool = True


def seen(before: Stop | None, gate: Gate | None, now: float) -> Stop | None:
    """What is remembered after a look at a gate, which is None while the governor is silent; None for nothing."""
    if gate is not None and not gate.open and gate.reason not in UNCOUNTED:
        since = before.since if before is not None else None
        return Stop(now if since is None else since, now, _detail(gate))
    if before is None:
        return None
    return replace(before, is_certain=False) if gate is None else replace(before, since=None, is_certain=True)


def held_up_s(stop: Stop | None, held_at: float, waiting_since: float, now: float) -> float | None:
    """For how long limits have held up an entry that nothing lets go now; None for one that is in line, or that may be.

    `waiting_since` is when a worker sent its task back first (0: none did). That time counts up to when it was held.
    """
    if stop is None or stop.since is None or not stop.is_certain:
        return None
    before_s = max(0.0, held_at - waiting_since) if waiting_since > 0 else 0.0
    return before_s + now - max(held_at, stop.since)


def in_line_s(stop: Stop | None, held_at: float, now: float) -> float:
    """For how long an entry that is released now has stood in line since its gate opened, which does not count."""
    return max(0.0, now - max(held_at, stop.last_at if stop is not None else 0.0))


def _detail(gate: Gate) -> str:
    return (
        unknown_limit(gate.limiting_key)
        if gate.reason == "unknown_limit"
        else waits_for(gate.limiting_key, gate.reason)
    )
