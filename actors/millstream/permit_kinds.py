"""What workers ask for, hold, and say at the end of a permit, within the bounds of what a request may state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_schemas.envelope import MAX_COST_USD
from millstream_schemas.permits import (
    MAX_AMOUNT,
    MAX_CALLS,
    MAX_MS,
    MAX_OBSERVED,
    MAX_RETRY_AFTER_S,
    Observed,
    OutcomeClass,
    Report,
    Settle,
)


@dataclass(frozen=True, slots=True)
class Need:
    """What one permit takes of each of its keys; cost in US dollars. Where it is 0, the prices of `model` give it."""

    requests: int = 1
    tokens_in: int = 0
    tokens_out: int = 0
    cost_usd: float = 0.0
    model: str = ""


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to begin now, until `use_by` on the monotonic clock; to be settled or given back, once.

    A `local` one was taken at a safe rate, without a governor, which learns nothing of it.
    """

    id: str
    keys: tuple[str, ...]
    need: Need
    use_by: float
    epoch: int
    local: bool = False


@dataclass(frozen=True, slots=True)
class WaitFor:
    """No permit yet: ask again in `seconds`."""

    seconds: float
    limiting_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeniedPermit:
    """No permit for what was asked; asking again may help once `until_s` seconds have passed, None: never."""

    reason: str
    key: str = ""
    until_s: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Settlement:
    """How the call of a permit ended and what it really took; None keeps the estimate.

    The outcome is about the limits named by `keys`, without them about all keys of the permit. `reported`: a report has
    told it before, and only the amounts count.
    """

    outcome: OutcomeClass
    requests: int | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    cost_usd: float | None = None
    model: str = ""
    retry_after_s: float | None = None
    observed: Sequence[Observed] = ()
    keys: Sequence[str] = ()
    reported: bool = False


def in_bounds(need: Need) -> Need:
    """The need cut to what a request may state, because a request that states more is refused as a whole."""
    return Need(
        min(max(1, need.requests), MAX_CALLS),
        min(max(0, need.tokens_in), MAX_AMOUNT),
        min(max(0, need.tokens_out), MAX_AMOUNT),
        _money(need.cost_usd),
        need.model[:128],
    )


def settle_request(permit: Permit, settlement: Settlement) -> Settle:
    """The message that ends a used permit. It names keys and cost again, for a governor that does not know the permit."""
    priced = settlement.tokens_in is not None or settlement.tokens_out is not None
    cost_usd = settlement.cost_usd
    if cost_usd is None and permit.need.cost_usd and not (priced and (settlement.model or permit.need.model)):
        cost_usd = permit.need.cost_usd
    return Settle(
        permit=permit.id,
        outcome=settlement.outcome,
        requests=_amount(settlement.requests),
        tokens_in=_amount(settlement.tokens_in),
        tokens_out=_amount(settlement.tokens_out),
        cost_usd=None if cost_usd is None else _money(cost_usd),
        model=(settlement.model or permit.need.model)[:128],
        retry_after_s=_retry_after(settlement.retry_after_s),
        observed=tuple(settlement.observed)[:MAX_OBSERVED],
        keys=tuple(settlement.keys) or permit.keys,
        reported=settlement.reported,
    )


def report_request(
    keys: Sequence[str],
    outcome: OutcomeClass,
    retry_after_s: float | None,
    observed: Sequence[Observed],
    started_ago_s: float,
) -> Report:
    """The message that tells what a provider answered."""
    return Report(
        keys=tuple(keys),
        outcome=outcome,
        retry_after_s=_retry_after(retry_after_s),
        observed=tuple(observed)[:MAX_OBSERVED],
        started_ms_ago=min(max(0, round(started_ago_s * 1000)), MAX_MS),
    )


def _amount(used: int | None) -> int | None:
    return None if used is None else min(max(0, used), MAX_AMOUNT)


def _money(usd: float) -> float:
    return min(max(0.0, float(usd)), MAX_COST_USD)  # NaN becomes 0


def _retry_after(seconds: float | None) -> float | None:
    return None if seconds is None else min(max(0.0, float(seconds)), MAX_RETRY_AFTER_S)
