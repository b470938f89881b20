"""Why a metered task waits: its place in its lane, what its limits let through now, and how long that may take."""

from dataclasses import dataclass

from millstream.policy.durations import duration
from millstream.policy.waiting import unknown_limit
from millstream_schemas.limit_states import DimensionState, LimitState
from millstream_schemas.permits import Gate

SLOWED = 0.99
"""An effective rate below this part of the configured one is told."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Where a held task stands: from 1 among `of` in its lane; `lanes` share its limits, with `waiting` tasks in all."""

    place: int
    of: int
    lanes: int = 1
    waiting: int = 1


@dataclass(frozen=True, slots=True)
class Pool:
    """What the governor says of a task's limits; `gate` is None where it did not answer.

    An open gate has as its limiting key the one with the lowest rate, or with the fewest places where none has a rate.
    """

    gate: Gate | None = None
    limiting: LimitState | None = None
    """The state of the gate's limiting key, where the governor listed it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait for a turn: in words, by which limit (empty: none in particular), and how long it may take, if known."""

    text: str
    limiting_key: str = ""
    reason: str = ""
    expected_s: float | None = None


def waiting(lane: Lane, pool: Pool | None) -> Waiting:
    """What a held task waits for that workers serve; `pool` is None for one without limits."""
    stands = f"place {lane.place} of {lane.of} in its lane"
    if pool is None:
        return Waiting(f"{stands}; {_turns(lane)}, as slots of workers become free", reason="fairness")
    stop = stopped(pool)
    if stop is not None:
        return Waiting(f"{stands}; {stop.text}", stop.limiting_key, stop.reason, stop.expected_s)
    gate = pool.gate
    if gate is None or gate.rate_per_s is None:
        places = f", {gate.places} at once" if gate is not None and gate.places is not None else ""
        key = gate.limiting_key if gate is not None else ""
        return Waiting(f"{stands}; {_turns(lane)}{places}", key, "concurrency" if places else "")
    expected_s = _expected_s(lane, gate)
    slowed = _slowed(pool.limiting)
    limit = f"`{gate.limiting_key}`" if gate.limiting_key else "its limits"
    rate = per_time(gate.rate_per_s)
    text = f"{stands}; {limit} lets {rate} start{slowed} and {_turns(lane)}: about {duration(expected_s)} to go"
    return Waiting(text, gate.limiting_key, gate.reason or "rate", expected_s)


def stopped(pool: Pool) -> Waiting | None:
    """Why nothing under these limits may start now; None while something may."""
    gate, state = pool.gate, pool.limiting
    if gate is None:
        return Waiting(
            "the governor does not answer, and until it does nothing is released", reason="governor_unreachable"
        )
    if gate.open:
        return None
    key = f"`{gate.limiting_key}`" if gate.limiting_key else "one of its limits"
    said = f" ({state.paused_why})" if state is not None and state.paused_why else ""
    match gate.reason:
        case "unknown_limit":
            text = f"{unknown_limit(gate.limiting_key)}; until then nothing is granted"
            return Waiting(text, gate.limiting_key, gate.reason)
        case "broken" if state is not None and state.breaker == "forced_open":
            text = f"the breaker of {key} is open until an operator says otherwise{said}"
            return Waiting(text, gate.limiting_key, gate.reason)
        case "paused":
            text = f"{key} is paused"
        case "broken":
            text = f"the breaker of {key} is open"
            said = said or " (faults of the provider)"
        case "exhausted":
            text = f"the provider's allowance for {key} is used up"
        case "budget_exhausted":
            text = f"the budget {key} is used up"
        case _:
            text = f"{key} lets nothing start"
            said = f" ({gate.reason.replace('_', ' ')})"
    comma = "" if gate.reason == "paused" else ","
    for_s = f"{comma} for {duration(gate.wait_s)}" if gate.wait_s > 0 else ""
    return Waiting(f"{text}{for_s}{said}", gate.limiting_key, gate.reason, gate.wait_s or None)


def _expected_s(lane: Lane, gate: Gate) -> float:
    """Lanes take turns, so that each of this one's tasks waits for one of every other lane, as long as those have any."""
    assert gate.rate_per_s is not None
    before = min(lane.place * lane.lanes, lane.waiting)
    return gate.wait_s + max(before, lane.place) / max(gate.rate_per_s, 1e-9)


def _turns(lane: Lane) -> str:
    return f"{lane.lanes} lanes take turns" if lane.lanes > 1 else "no other lane waits for it"


def _slowed(state: LimitState | None) -> str:
    """What adaptation has taken from the limit, in words."""
    dimensions = () if state is None else state.dimensions
    rates = [each for each in dimensions if each.window_s is not None and each.configured > 0]
    worst = min(rates, key=_part, default=None)
    if worst is None or _part(worst) >= SLOWED:
        return ""
    return f" (slowed to {_part(worst):.0%} of what is configured)"


def _part(dimension: DimensionState) -> float:
    return dimension.effective / dimension.configured


def per_time(rate_per_s: float) -> str:
    """A rate for people: `12 a second`, `9.5 a minute`, `3 an hour`."""
    for scale, unit in ((1.0, "a second"), (60.0, "a minute"), (3600.0, "an hour")):
        if rate_per_s * scale >= 1 or unit == "an hour":
            return f"{rate_per_s * scale:.3g} {unit}"
    raise AssertionError("the last unit takes all that is left")
