"""What a provider's answer does to the shared limits: pauses, factors, breaker, caps."""

import msgspec

from millstream.policy import causes
from millstream.policy.bounds import Bound
from millstream.policy.breaker import Breaker
from millstream.policy.limit_state import KeyState, spread
from millstream.policy.limits import BreakerRules
from millstream_schemas.permits import Observed, Operation, OutcomeClass

NEARLY_GONE = 0.1
"""Once less than this part of a provider's allowance is left, the next start waits until this part is refilled."""
PER_S = 60.0
"""What headers say of limits is per minute."""
LOOKED_AT_EVERY_S = 0.25
"""How often a key's use is measured at the most: each time costs a walk over its windows."""


class Heard(msgspec.Struct, frozen=True, gc=False):
    """What came back from a call that began at `started_at` on the governor's clock."""

    outcome: OutcomeClass
    started_at: float
    retry_after_s: float | None = None
    observed: tuple[Observed, ...] = ()


def hear(state: KeyState, heard: Heard, now: float) -> None:
    """Feed one answer into one limit."""
    match heard.outcome:
        case "ok":
            state.throttles_in_a_row = 0
            _grow(state, heard, now)
        case "throttled":
            _blame(state, heard, now)
            pause(state, heard, now)
        case "ramp":
            _ramp(state, heard, now)
            pause(state, heard, now)
        case "quota":
            state.throttled_total += 1
            exhaust(state, heard.retry_after_s, now)
        case "overloaded":
            _relieve(state, heard, now)
        case "fault" | "client" | "too_large" | "error" | "unknown":
            pass
    for one in heard.observed:
        _observe(state, one)
    if state.breaker is not None:
        note(state, heard.outcome, now, None)


def note(state: KeyState, outcome: OutcomeClass, now: float, probe: int | None) -> None:
    """Tell a key's breaker how a call ended, or a probe of its own."""
    breaker = state.breaker
    assert breaker is not None
    changed = breaker.note(outcome, now, probe=probe, jitter=spread(state.granted_total))
    if changed is None:
        return
    state.barred = True
    if changed == "closed":
        recover(state, now)


def recover(state: KeyState, now: float) -> None:
    """Begin low after a fault, so that the provider is not buried again."""
    rules = state.compiled.limit.breaker
    at = 0.25 if isinstance(rules, bool) else rules.recover_at
    for bound in state.bounds:
        bound.factor.recover(now, at)
        bound.apply()


def pause(state: KeyState, heard: Heard, now: float) -> None:
    """Pause for as long as a refusal says, or else twice as long each time; a pause never gets shorter."""
    retry_after_s = heard.retry_after_s
    state.throttled_total += heard.outcome != "overloaded"
    if retry_after_s is None:
        if state.paused_until > now:
            return  # another call of the same flight: what it says is known
        doublings = min(state.throttles_in_a_row, 16)
        retry_after_s = min(state.rules.throttle_cap_s, state.rules.throttle_base_s * 2.0**doublings)
        state.throttles_in_a_row += 1
    if now + retry_after_s > state.paused_until:
        state.paused_until = now + retry_after_s
        state.causes.pause = causes.refused(heard.outcome, heard.retry_after_s, state.throttles_in_a_row)
    state.barred = True


def exhaust(state: KeyState, retry_after_s: float | None, now: float) -> None:
    """Close a key whose allowance is used up, until the hint or an operator says otherwise."""
    seconds = state.rules.exhausted_s if retry_after_s is None else retry_after_s
    if now + seconds > state.exhausted_until:
        state.exhausted_until = now + seconds
        state.causes.quota = causes.used_up(retry_after_s, seconds)
    state.barred = True


def operate(state: KeyState, operation: Operation, now: float, by: str = "") -> None:
    """Do what the operator `by` says: end pauses and exhaustion, or force the breaker, even where none is configured."""
    if operation == "resume":
        state.paused_until = state.exhausted_until = 0.0
        state.throttles_in_a_row = 0
        return
    rules = state.compiled.limit.breaker
    if state.breaker is None:
        state.breaker = Breaker(BreakerRules())
    state.breaker.force(operation, now)
    state.causes.forced = causes.forced(by) if operation == "open" else ""
    state.barred = True
    if rules is False and operation != "open":
        state.breaker = None


# --- what is in effect of a rate ---------------------------------------------------------------------


def _blame(state: KeyState, heard: Heard, now: float) -> None:
    """Lower the rate that was refused: what the headers say is used up, else what is used most."""
    bounds = [bound for bound in state.bounds if bound.adaptive]
    if len(bounds) > 1:
        gone = {one.dimension for one in heard.observed if one.remaining == 0 and one.limit}
        named = [bound for bound in bounds if bound.name in gone]
        used = {bound: bound.meter.used(now) / bound.effective for bound in bounds}
        bounds = named or [bound for bound in bounds if used[bound] >= 0.9 * max(used.values())]
    for bound in bounds:
        level = bound.meter.level(heard.started_at, now)
        part = None if level is None else level / bound.rate.amount
        if bound.factor.refused(now, heard.started_at, level=part, retry_after_s=heard.retry_after_s):
            bound.apply()


def _ramp(state: KeyState, heard: Heard, now: float) -> None:
    for bound in state.bounds:
        if bound.adaptive and bound.factor.ramp(now, heard.started_at):
            bound.apply()


def _relieve(state: KeyState, heard: Heard, now: float) -> None:
    """Let fewer run at once where a provider is overloaded, and none for as long as it says."""
    factor = state.places_factor
    if factor is not None and factor.refused(now, heard.started_at, retry_after_s=heard.retry_after_s):
        state.apply_places()
    if heard.retry_after_s is not None:
        pause(state, heard, now)


def _grow(state: KeyState, heard: Heard, now: float) -> None:
    """Let what was lowered grow back, while it is used."""
    factor = state.places_factor
    if factor is not None and factor.value < 1 and state.compiled.concurrency is not None:
        used = state.in_use / max(1.0, state.compiled.concurrency * factor.value)
        if factor.grow(now, used, heard.started_at):
            state.apply_places()
    if all(bound.factor.value >= 1 for bound in state.bounds):
        return
    looked_at, used_parts = state.recent
    if now - looked_at >= LOOKED_AT_EVERY_S or len(used_parts) != len(state.bounds):
        used_parts = tuple(bound.meter.used_fraction(now, state.rules.recent_s) for bound in state.bounds)
        state.recent = (now, used_parts)
    for bound, used in zip(state.bounds, used_parts, strict=True):
        if bound.factor.value < 1 and bound.factor.grow(now, used, heard.started_at):
            bound.apply()


def _observe(state: KeyState, seen: Observed) -> None:
    """Take in what the provider says of its own limit: it can only tighten ours; what makes no sense is passed over."""
    bound = next((bound for bound in state.bounds if bound.name == seen.dimension), None)
    if bound is None or not seen.limit:
        return
    per_s = seen.limit / PER_S
    part = per_s * bound.rate.window_s / bound.rate.amount
    cap = part if part < 1 else None
    if cap != bound.cap:
        bound.cap = cap
        bound.apply()
    if seen.remaining is not None and seen.remaining < NEARLY_GONE * seen.limit:
        _hold_back(bound, seen.limit, seen.remaining, seen.reset_s)


def _hold_back(bound: Bound, limit: int, remaining: int, reset_s: float | None) -> None:
    """Wait for the refill of what is nearly gone, unless it lasts until the provider begins anew."""
    delay_s = (NEARLY_GONE * limit - remaining) / (limit / PER_S)
    if reset_s is not None:
        delay_s = min(delay_s, reset_s - remaining / bound.meter.pace.rate)
    if delay_s > 0:
        bound.meter.pace.restore(delay_s)
