"""Whether a delivered task may start at all."""

from collections.abc import Mapping

import msgspec

from millstream.policy.admit import instant
from millstream.policy.decide import add_usage, over_budget
from millstream.policy.limits import Price
from millstream_schemas.events import Failure, Usage, WorkItem

MODEL = "model"
"""The pin that names the model, whose prices apply."""


def refusal(item: WorkItem, now: float, estimate: Usage | None = None) -> Failure | None:
    """Why the task must not start now: its deadline is over, or its budget used up; None where it may.

    With `estimate`, what one more attempt is likely to use must fit into the budget, too.
    """
    deadline = instant(item.envelope.deadline_at, "$.deadline_at")
    if deadline is not None and now >= deadline:
        return Failure(reason="expired", message="the deadline passed before a start")
    spent = over_budget(item, item.usage)
    if spent is None and estimate is not None:
        spent = beyond_budget(item, item.usage, estimate)
    return None if spent is None else exhausted(spent)


def beyond_budget(item: WorkItem, used: Usage, estimate: Usage) -> str | None:
    """Which limit of the task's budget would be passed by `estimate` on top of `used`, or None."""
    spent = over_budget(item, add_usage(used, estimate))
    return None if spent is None else f"{spent} with what is still to come, as estimated"


def exhausted(message: str) -> Failure:
    """The failure of a task whose own budget is used up."""
    return Failure(reason="budget_exhausted", error_type="BudgetExhausted", message=message)


def estimate_of(item: WorkItem, prices: Mapping[str, Price]) -> Usage | None:
    """What one attempt is likely to use, as its producer says; the cost by price where only tokens are given."""
    estimate = item.envelope.usage_estimate
    if estimate is None:
        return None
    tokens_in, tokens_out = estimate.tokens_in or 0, estimate.tokens_out or 0
    cost_usd = estimate.cost_usd
    if cost_usd is None:
        cost_usd = cost_of(prices.get(model_of(item)), tokens_in, tokens_out)
    return Usage(tokens_in=tokens_in, tokens_out=tokens_out, cost_usd=cost_usd)


def with_lost(item: WorkItem, crashes: int, prices: Mapping[str, Price]) -> WorkItem:
    """The item with the estimate of each attempt that was lost since its release, of `crashes` in all, counted as used.

    Nobody knows what such an attempt used; its provider may have billed all of it, as the governor assumes, too.
    """
    lost = crashes - item.card.crashes
    estimate = estimate_of(item, prices)
    if lost <= 0 or estimate is None:
        return item
    usage = item.usage
    for _ in range(lost):
        usage = add_usage(usage, estimate)
    return msgspec.structs.replace(item, usage=usage)


def model_of(item: WorkItem) -> str:
    """The model whose prices apply; empty where the task names none."""
    return (item.envelope.pins or {}).get(MODEL, "")[:128]


def cost_of(price: Price | None, tokens_in: int, tokens_out: int) -> float:
    """US dollars for tokens; 0 without a price."""
    if price is None:
        return 0.0
    return (tokens_in * price.tokens_in + tokens_out * price.tokens_out) / 1e6


def time_limit_s(item: WorkItem, handler_timeout_s: float | None) -> float | None:
    """Seconds that one execution may take: the handler's limit or what is left of the budget, whichever is less."""
    limit = handler_timeout_s
    budget = item.envelope.budget.max_runtime_seconds
    if budget is not None:
        left = max(budget - item.usage.runtime_s, 0.001)
        limit = left if limit is None else min(limit, left)
    return limit
