"""How a permit ends: what it really took, what that cost, and what is free again."""

from collections.abc import Callable, Collection, Mapping

from millstream.policy.budgets import SoftPassed, Spend, micro, priced
from millstream.policy.feedback import note
from millstream.policy.leases import Permit
from millstream.policy.limit_state import KeyState
from millstream.policy.limits import Price
from millstream_schemas.permits import OutcomeClass, Settle

Emit = Callable[[Spend | SoftPassed], None]


def settle(permit: Permit, request: Settle, prices: Mapping[str, Price], emit: Emit) -> None:
    """Replace what a permit reserved by what its call took; None keeps the reservation.

    Where the provider may have billed a call that nobody saw the end of, the estimate stays charged.
    """
    unsure = request.outcome == "unknown"
    if permit.charges and not unsure:
        _settle_rates(permit, request)
    if not permit.accounts:
        return
    amount, version = permit.need.micro_usd, _estimated_by(permit)
    if request.cost_usd is not None:
        told = micro(request.cost_usd)
        amount, version = (amount, version) if unsure and amount >= told else (told, "")
    elif not unsure:
        price = prices.get(request.model, permit.price) if request.model else permit.price
        if price is not None and (request.tokens_in is not None or request.tokens_out is not None):
            _, _, tokens_in, tokens_out = _taken(permit, request)
            amount, version = priced(price, tokens_in, tokens_out), price.version
    _pay(permit, amount, version, emit)


def run_out(permit: Permit, now: float, emit: Emit) -> None:
    """Charge all that was reserved, because nobody said how the call ended and the provider may have billed it."""
    if permit.accounts:
        _pay(permit, permit.need.micro_usd, _estimated_by(permit), emit)
    for state, probe in permit.probes:
        if state.breaker is not None:
            note(state, "unknown", now, probe)


def give_back(permit: Permit) -> None:
    """Free all that a permit reserved, because no call was begun under it."""
    for meter, charge in zip(permit.pool.meters, permit.charges, strict=False):
        meter.correct(charge, 0)
    for budget, account in zip(permit.pool.budgets, permit.accounts, strict=False):
        budget.release(account, permit.need.micro_usd)
    for state, probe in permit.probes:
        if state.breaker is not None:
            state.breaker.probe_returned(probe)


def end_probes(permit: Permit, outcome: OutcomeClass, states: Collection[KeyState], now: float) -> None:
    """Tell breakers how their probes ended: by `outcome` where it is about their key, else as if not used."""
    for state, probe in permit.probes:
        if state.breaker is None:
            continue
        if state in states:
            note(state, outcome, now, probe)
        else:
            state.breaker.probe_returned(probe)


def _taken(permit: Permit, request: Settle) -> tuple[int, int, int, int]:
    requests, _, tokens_in, tokens_out = permit.need.amounts
    if request.requests is not None:
        requests = request.requests
    if request.tokens_in is not None:
        tokens_in = request.tokens_in
    if request.tokens_out is not None:
        tokens_out = request.tokens_out
    return requests, tokens_in + tokens_out, tokens_in, tokens_out


def _settle_rates(permit: Permit, request: Settle) -> None:
    taken = _taken(permit, request)
    told = request.tokens_in is not None or request.tokens_out is not None
    for meter, charge in zip(permit.pool.meters, permit.charges, strict=True):
        if meter.index == 0:
            if taken[0] != charge.amount:
                meter.correct(charge, taken[0])
        elif told:
            meter.settle(charge, taken[meter.index])


def _estimated_by(permit: Permit) -> str:
    """The version of the price that makes a permit's estimate of its tokens; empty where the estimate was told."""
    _, _, tokens_in, tokens_out = permit.need.amounts
    price = permit.price
    return price.version if price is not None and permit.need.micro_usd == priced(price, tokens_in, tokens_out) else ""


def _pay(permit: Permit, amount: int, price_version: str, emit: Emit) -> None:
    for budget, account in zip(permit.pool.budgets, permit.accounts, strict=True):
        passed = budget.settle(account, permit.need.micro_usd, amount, permit.task, price_version)
        if amount:
            emit(Spend(account.key, account.period, amount, permit.id))
        if passed is not None:
            emit(passed)
