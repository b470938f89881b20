"""Whether a delivered task may start at all."""

from millstream.policy.admit import instant
from millstream.policy.decide import over_budget
from millstream_schemas.events import Failure, WorkItem


def refusal(item: WorkItem, now: float) -> Failure | None:
    """Why the task must not start now: its deadline is over, or its budget used up; None where it may."""
    deadline = instant(item.envelope.deadline_at, "$.deadline_at")
    if deadline is not None and now >= deadline:
        return Failure(reason="expired", message="the deadline passed before a start")
    spent = over_budget(item, item.usage)
    if spent is not None:
        return Failure(reason="budget_exhausted", error_type="BudgetExhausted", message=spent)
    return None


def time_limit_s(item: WorkItem, handler_timeout_s: float | None) -> float | None:
    """Seconds that one execution may take: the handler's limit or what is left of the budget, whichever is less."""
    limit = handler_timeout_s
    budget = item.envelope.budget.max_runtime_seconds
    if budget is not None:
        left = max(budget - item.usage.runtime_s, 0.001)
        limit = left if limit is None else min(limit, left)
    return limit
