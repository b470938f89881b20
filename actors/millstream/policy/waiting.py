"""What a delivery does with an answer of the governor that is no permit: ask again, park, or fail."""

from dataclasses import dataclass
from math import floor, inf

from millstream.policy.durations import duration
from millstream_schemas.events import Failure
from millstream_schemas.permits import GATE_REASONS, OutcomeClass

HOLD_S = 2.0
"""How long one request may be held by the governor; a longer wait is several requests, so that a new leader is found."""

STEP_S = 0.05
"""How long a request may be held is a multiple of this, so that like requests can be sent as one."""

PATIENCE = 1 / 3
"""The part of its lease for which a delivery may wait in a worker's hand."""

LEAST_PAUSE_S = 0.05
"""Before asking again, however soon the governor says that it makes sense."""

# How long a task is parked, by reason, where nobody says how long.
UNKNOWN_LIMIT_AGAIN_S = 10.0
DENIED_AGAIN_S = 10.0
QUOTA_AGAIN_S = 60.0
LONGEST_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Waited:
    """How long a delivery has waited for its permit, and what bounds that. Seconds."""

    waited_s: float
    lease_s: float
    left_s: float = inf
    """Until its deadline."""
    crowded: bool = False
    """The worker can pull nothing more until one of those that wait for a permit has gone."""

    @property
    def patience_s(self) -> float:
        """How much longer it may wait here; 0 or less where it may not."""
        patience_s = self.lease_s * PATIENCE
        return min(HOLD_S, patience_s) - self.waited_s if self.crowded else patience_s - self.waited_s


@dataclass(frozen=True, slots=True)
class Again:
    """Ask once more after `pause_s`."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class Park:
    """Give the task back for `after_s` seconds, at no cost in attempts; `detail` tells people what it waits for."""

    after_s: float
    detail: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The attempt ends: waiting does not help."""

    failure: Failure


def hold_s(waited: Waited) -> float:
    """How long the next request may be held: what patience and deadline leave, at most `HOLD_S`."""
    return even_hold_s(min(waited.patience_s, waited.left_s))


def even_hold_s(limit_s: float) -> float:
    """The longest hold within a limit, in steps of `STEP_S`: requests that are held equally long are sent as one."""
    return min(HOLD_S, max(0.0, floor(min(limit_s, HOLD_S) / STEP_S) * STEP_S))


def after_wait(waited: Waited, wait_s: float, key: str, reason: str, held_s: float) -> Again | Park:
    """What to do with `Wait`, which came after `held_s` and says when asking again makes sense.

    Behind a closed gate, which holds up everybody, a delivery waits no longer than one request. For all else it waits
    while its patience lasts and the governor's estimate lies within that.
    """
    closed = reason in GATE_REASONS and wait_s > HOLD_S
    if closed or waited.patience_s <= 0 or wait_s > waited.patience_s:
        return Park(wait_s, waits_for(key, reason))
    return Again(max(LEAST_PAUSE_S, wait_s - held_s))


def after_denial(reason: str, key: str, detail: str = "") -> Park | Fail:
    """What to do with `Denied`: a budget that is used up and a request that can never fit end the attempt."""
    match reason:
        case "budget_exhausted":
            said = detail or "nothing is left of it in this period"
            failure = Failure(
                reason="budget_exhausted",
                error_type="BudgetExhausted",
                message=f"budget {key}: {said}",
                classes=["budget_exhausted", "BudgetExhausted"],
            )
            return Fail(failure)
        case "too_large":
            said = detail or "the estimate is over what the limit allows at all"
            failure = Failure(
                reason="fatal", error_type="PermitDenied", message=f"limit {key}: {said}", classes=["too_large"]
            )
            return Fail(failure)
        case "unknown_limit":
            return Park(UNKNOWN_LIMIT_AGAIN_S, unknown_limit(key))
        case _:
            said = f": {detail}" if detail else ""
            where = f"limit {key}, " if key else ""
            return Park(DENIED_AGAIN_S, f"{where}permit denied, {spelled(reason)}{said}")


def throttled_again_s(outcome: OutcomeClass, throttles: int) -> float:
    """How long a task waits that was refused without a hint, for the `throttles`-th time in a row and counting from 0."""
    return QUOTA_AGAIN_S if outcome == "quota" else min(2.0 ** min(throttles, 10), LONGEST_AGAIN_S)


def too_many_keys(count: int, most: int) -> Fail:
    """What becomes of a task that names more limits than one permit can be on."""
    message = f"the task needs a permit on {count} limits, at most {most} are possible; name fewer"
    return Fail(Failure(reason="fatal", error_type="PermitDenied", message=message, classes=["too_many_limits"]))


UNKNOWN_TODO = (
    "to millstream.toml and restart the governor, or to FILE and run `millstream config apply FILE`, which is live"
)
"""Where a limit is added: both ways, for everybody who tells of one that is missing."""


def unknown_limit(key: str) -> str:
    """What has happened and what to do where a limit is asked for that nobody configured."""
    return f'limit {key} is not configured: add [limits."{key}"] {UNKNOWN_TODO}'


def throttled_out(lasted_s: float, detail: str) -> str:
    """What is told of a task that limits have held up for too long: what happened, why, and what to do."""
    return (
        f"held up by limits for {duration(lasted_s)}, which is longer than `max_throttle_s`; at last: {detail}. "
        "Replay it once the limit lets it through; a larger `max_throttle_s`, and a deadline of its own, let it wait longer"
    )


def waits_for(key: str, reason: str) -> str:
    """What a task waits for, as `why` says it: the limiting key and what of it."""
    return f"limit {key}: {spelled(reason)}" if key else spelled(reason)


def spelled(reason: str) -> str:
    """A reason of the protocol in words."""
    return reason.replace("_", " ")
