"""What a successor must know: debts, windows, pauses, what was learned, breakers, permits in use, workers."""

from collections.abc import Iterable

import msgspec

from millstream.policy.adapt import SavedFactor
from millstream.policy.breaker import Breaker, SavedBreaker
from millstream.policy.causes import Causes
from millstream.policy.leases import Permit
from millstream.policy.limit_state import KeyState
from millstream.policy.limits import BreakerRules
from millstream_schemas.permits import LimitKey, SomeKeys


class SavedRate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rate: its debt in seconds, what its window holds (age in seconds, amount), and what is in effect of it."""

    name: str
    debt_s: float = 0.0
    charges: tuple[tuple[float, int], ...] = ()
    largest: int = 0
    factor: SavedFactor = SavedFactor()
    cap: float | None = None


class SavedKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key; pauses in seconds left, and what has led to them."""

    key: LimitKey
    rates: tuple[SavedRate, ...] = ()
    pause_s: float = 0.0
    exhausted_s: float = 0.0
    throttles_in_a_row: int = 0
    places: SavedFactor | None = None
    breaker: SavedBreaker | None = None
    causes: Causes = msgspec.field(default_factory=Causes)


class SavedPermit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live permit, with what it reserved of the budgets."""

    permit: str
    worker: str
    keys: SomeKeys
    lease_left_s: float
    micro_usd: int = 0
    task: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a successor must know; `clean` only where the governor granted nothing after it."""

    keys: tuple[SavedKey, ...]
    permits: tuple[SavedPermit, ...]
    clean: bool
    epoch: int
    workers: tuple[str, ...] = ()
    """Who was heard of in the last minute."""
    v: int = 2


def saved_key(state: KeyState, now: float) -> SavedKey:
    """What a successor must know about a key."""
    rates = tuple(
        SavedRate(
            name=bound.name,
            debt_s=bound.meter.pace.snapshot(),
            charges=tuple(bound.meter.log.ages(now)),
            largest=bound.meter.largest,
            factor=bound.factor.snapshot(now),
            cap=bound.cap,
        )
        for bound in state.bounds
    )
    return SavedKey(
        key=state.key,
        rates=rates,
        pause_s=max(0.0, state.paused_until - now),
        exhausted_s=max(0.0, state.exhausted_until - now),
        throttles_in_a_row=state.throttles_in_a_row,
        places=None if state.places_factor is None else state.places_factor.snapshot(now),
        breaker=None if state.breaker is None else state.breaker.snapshot(now),
        causes=msgspec.structs.replace(state.causes),
    )


def saved_permits(permits: Iterable[Permit], now: float) -> tuple[SavedPermit, ...]:
    """The permits in use."""
    return tuple(
        SavedPermit(
            permit=permit.id,
            worker=permit.worker,
            keys=permit.pool.keys,
            lease_left_s=permit.lease_until - now,
            micro_usd=permit.need.micro_usd if permit.accounts else 0,
            task=permit.task if permit.accounts else "",
        )
        for permit in permits
        if permit.pool.keys
    )


def restore_key(state: KeyState, saved: SavedKey, elapsed_s: float, now: float, *, gap_s: float | None) -> None:
    """Take up a predecessor's state of `elapsed_s` ago; in the `gap_s` up to now it may have granted all it could."""
    state.paused_until = max(state.paused_until, now + saved.pause_s - elapsed_s)
    state.exhausted_until = max(state.exhausted_until, now + saved.exhausted_s - elapsed_s)
    state.throttles_in_a_row = saved.throttles_in_a_row
    state.causes = msgspec.structs.replace(saved.causes)
    if saved.breaker is not None and (state.breaker is not None or saved.breaker.state == "forced_open"):
        state.breaker = state.breaker or Breaker(BreakerRules())
        state.breaker.restore(saved.breaker, elapsed_s, now)
    if state.places_factor is not None and saved.places is not None:
        state.places_factor.restore(saved.places, elapsed_s, now)
        state.apply_places()
    state.barred = True  # the next acquire looks, and clears it where nothing stands in the way
    known = {rate.name: rate for rate in saved.rates}
    for bound in state.bounds:
        rate = known.get(bound.name)
        if rate is not None:
            if bound.adaptive:
                bound.factor.restore(rate.factor, elapsed_s, now)
            bound.cap = rate.cap
            bound.apply()
            for age_s, amount in rate.charges:
                bound.meter.log.add(now - age_s - elapsed_s, amount)
            bound.meter.log.expire(now)
            bound.meter.pace.restore(rate.debt_s - elapsed_s)
            bound.meter.largest = max(bound.meter.largest, rate.largest)
        if gap_s is not None:
            bound.meter.assume(gap_s)
