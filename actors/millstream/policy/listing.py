"""What the governor shows: each limit with all numbers that limit it, and the gates of pools."""

from collections.abc import Mapping

from millstream.policy import causes
from millstream.policy.bounds import RATES
from millstream.policy.budgets import MICRO
from millstream.policy.key_table import KeyTable
from millstream.policy.limit_state import FOREVER_S, KeyState
from millstream.policy.limits import Compiled, Price
from millstream_schemas.limit_states import DimensionState, LimitState, PriceState
from millstream_schemas.permits import Gate, GatePart
from millstream_schemas.permits import Pool as PoolAsked

MAX_LISTED = 1000
"""Of keys made from templates: a reply must fit into one message."""
NO_LIMIT = GatePart()
UNKNOWN_AGAIN_S = 5.0
"""When to ask again for the gate of a key that is not configured: it may be by then."""


def listed(table: KeyTable, key: str | None, now: float, wall: float) -> tuple[LimitState, ...]:
    """One limit by its key, or all that are configured and as many made from templates as a reply holds, by key."""
    if key is not None:
        state = table.state(key)
        if state is not None:
            return (shown(state, now, wall),)
        return tuple(_template(one) for one in table.templates() if one.key == key)
    states = [state for state in table.all() if table.knows(state)]
    exact = [state for state in states if not state.template]
    made = sorted((state for state in states if state.template), key=lambda state: (-state.waiting, -state.in_use))
    items = [shown(state, now, wall) for state in (*exact, *made[:MAX_LISTED])]
    items += [_template(one) for one in table.templates()]
    return tuple(sorted(items, key=lambda item: item.key))


def shown(state: KeyState, now: float, wall: float) -> LimitState:
    """The state of one limit, as listings show it."""
    paused_s, reason, why = _stopped(state, now, wall)
    return LimitState(
        key=state.key,
        dimensions=_dimensions(state, now, wall),
        in_use=state.in_use,
        waiting=state.waiting,
        granted_total=state.granted_total,
        throttled_total=state.throttled_total,
        paused_for_s=None if paused_s is None or paused_s == FOREVER_S else round(paused_s, 3),
        paused_reason=reason,
        paused_why=why,
        breaker="disabled" if state.breaker is None else state.breaker.state(now),
        shadow=state.shadow,
        would_have_waited=state.would_have_waited,
        template=state.template,
    )


def _stopped(state: KeyState, now: float, wall: float) -> tuple[float | None, str, str]:
    """For how long nothing may start (None: nobody knows, or something may), the kind of what stops it, and its cause."""
    if state.forced_open:
        return None, "broken", state.cause("broken", now)
    closed = closed_by(state, now, wall)
    budget = state.budget
    if closed is not None and closed[1] != "budget_exhausted":
        return closed[0], closed[1], state.cause(closed[1], now)
    if budget is None or state.shadow or not budget.used_up(wall):
        return None, "", ""
    return budget.left_s(wall), "budget_exhausted", causes.spent(budget.hard / MICRO, budget.account(wall).period)


def price_list(prices: Mapping[str, Price]) -> tuple[PriceState, ...]:
    """The prices that costs are reckoned by, by model."""
    return tuple(
        PriceState(model=model, tokens_in=price.tokens_in, tokens_out=price.tokens_out, version=price.version)
        for model, price in sorted(prices.items())
    )


def _dimensions(state: KeyState, now: float, wall: float) -> tuple[DimensionState, ...]:
    shown_rates = [
        DimensionState(
            dimension=bound.name,
            configured=bound.rate.amount,
            effective=bound.effective,
            used=bound.meter.used(now),
            window_s=bound.rate.window_s,
            estimate_error=bound.meter.estimate_error,
        )
        for bound in state.bounds
    ]
    if state.places is not None and state.compiled.concurrency is not None:
        shown_rates.append(
            DimensionState(
                dimension="concurrency",
                configured=state.compiled.concurrency,
                effective=state.places,
                used=state.in_use,
                reserved=state.assumed or None,
            )
        )
    if state.budget is not None:
        account = state.budget.account(wall)
        hard = state.budget.hard / MICRO
        shown_rates.append(
            DimensionState(
                dimension="cost",
                configured=hard,
                effective=hard,
                used=account.spent / MICRO,
                reserved=account.reserved / MICRO,
                period=account.period,
            )
        )
    return tuple(shown_rates)


def _template(compiled: Compiled) -> LimitState:
    """The entry of a template itself: what each key that is made from it starts with."""
    dimensions = [
        DimensionState(dimension=name, configured=rate.amount, effective=rate.amount, used=0, window_s=rate.window_s)  # type: ignore[arg-type]
        for name, rate in compiled.rates.items()
    ]
    for name, amount in (("concurrency", compiled.concurrency), ("cost", compiled.cost and compiled.cost.usd)):
        if amount is not None:
            dimensions.append(DimensionState(dimension=name, configured=amount, effective=amount, used=0))  # type: ignore[arg-type]
    return LimitState(
        key=compiled.key,
        dimensions=tuple(dimensions),
        in_use=0,
        waiting=0,
        granted_total=0,
        throttled_total=0,
        shadow=compiled.limit.shadow,
        template=compiled.key,
    )


def closed_by(state: KeyState, now: float, wall: float) -> tuple[float, str] | None:
    """For how long and why a key's gate is closed; None while it is open.

    A budget for life that is used up closes no gate: its tasks would wait for ever, and are to be told instead.
    """
    if state.lets_all_through:
        return None
    closed = state.closed(now)
    if closed is not None:
        return closed
    budget = state.budget
    if budget is not None and budget.used_up(wall):
        left_s = budget.left_s(wall)
        return None if left_s is None else (left_s, "budget_exhausted")
    return None


def gate(table: KeyTable, asked: PoolAsked, now: float, wall: float) -> Gate:
    """How fast tasks of one pool may start now."""
    pool = table.pool(asked.keys)
    if isinstance(pool, str):
        return Gate(
            keys=asked.keys,
            open=False,
            reason="unknown_limit",
            limiting_key=pool,
            wait_s=UNKNOWN_AGAIN_S,
            rate_per_s=0.0,
        )
    amounts = (1, asked.tokens_in + asked.tokens_out, asked.tokens_in, asked.tokens_out)
    longest_s, reason, limiting = 0.0, "", ""
    rates: list[float] = []
    parts: dict[str, GatePart] = {}
    for state in pool.states:
        if state.lets_all_through:
            continue
        parts[state.key] = _part(state)
        closed = closed_by(state, now, wall)
        if closed is not None and closed[0] > longest_s:
            longest_s, reason, limiting = closed[0], closed[1], state.key
        rates += [meter.pace.rate / amounts[meter.index] for meter in state.meters if amounts[meter.index]]
    return Gate(
        keys=asked.keys,
        open=longest_s <= 0,
        reason=reason,
        limiting_key=limiting,
        wait_s=pool.states[0].rules.place_retry_s if longest_s == FOREVER_S else longest_s,
        rate_per_s=min(rates, default=None),
        places=min((part.places for part in parts.values() if part.places is not None), default=None),
        parts=tuple(parts.get(key, NO_LIMIT) for key in asked.keys),
    )


def _part(state: KeyState) -> GatePart:
    """What one key lets through at its present pace."""
    rates: list[float | None] = [None] * len(RATES)
    for meter in state.meters:
        rates[meter.index] = meter.pace.rate
    requests, tokens, tokens_in, tokens_out = rates
    return GatePart(requests=requests, tokens=tokens, tokens_in=tokens_in, tokens_out=tokens_out, places=state.places)
