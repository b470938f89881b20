"""From how an execution ended to the event that says so. Pure."""

from typing import Any, assert_never

import msgspec

from millstream.app import AnyTask
from millstream.errors import MessageTooLarge
from millstream.permits_client import DeniedPermit, WaitFor
from millstream.policy import claim
from millstream.policy.claim import Hold, Outcome
from millstream.policy.decide import add_usage, over_budget
from millstream.policy.start import refusal
from millstream.worker.executor import Bad, CancelledByHandler, Ending, Good, Later, Stopped
from millstream_schemas.events import AttemptFailed, Cancelled, Completed, Failure, Interrupted, Parked, Usage

NO_HANDLER_AGAIN_S = 5.0
UNKNOWN_LIMIT_AGAIN_S = 10.0
THROTTLED_AGAIN_S = 1.0


def before_start(hold: Hold, task: AnyTask | None, now: float) -> Outcome | None:
    """The outcome of a task that must not or cannot start here; None where it may."""
    item = hold.item
    refused = refusal(item, now)
    if refused is not None:
        return claim.failed(hold, item.card.crashes, refused)
    if task is None:
        detail = f"worker {hold.worker_id} has no handler for {item.card.task_type}"
        return _parked(hold, item.card.crashes, now + NO_HANDLER_AGAIN_S, "no_handler", detail)
    return None


def tokens_of(hold: Hold) -> int:
    """The tokens to reserve: the producer's estimate, or 0."""
    estimate = hold.item.envelope.usage_estimate
    return 0 if estimate is None else (estimate.tokens_in or 0) + (estimate.tokens_out or 0)


def without_permit(hold: Hold, answer: WaitFor | DeniedPermit, now: float) -> Outcome:
    """The outcome of a task whose permit has to wait, or is denied."""
    crashes = hold.item.card.crashes
    if isinstance(answer, WaitFor):
        detail = f"limit {answer.limiting_key}" if answer.limiting_key else answer.reason.replace("_", " ")
        return _parked(hold, crashes, now + answer.seconds, "throttled", detail)
    if answer.reason == "too_large":
        message = f"the estimate of {tokens_of(hold)} tokens is over what the limit allows at all"
        failure = Failure(reason="fatal", error_type="PermitDenied", message=message, classes=["too_large"])
        return claim.failed(hold, crashes, failure)
    detail = f"permit denied: {answer.reason}"
    if answer.reason == "unknown_limit":
        detail = (
            f"limit {answer.key} is not configured: add [limits.{answer.key}] to millstream.toml, restart the governor"
        )
    return _parked(hold, crashes, now + UNKNOWN_LIMIT_AGAIN_S, "throttled", detail)


def too_late(hold: Hold, crashes: int, now: float) -> Outcome:
    """The outcome of a task whose permit ran out while its claim was being stored: once more, with a new permit."""
    return _parked(hold, crashes, now, "throttled", "the permit ran out before the start")


def outcome_of(hold: Hold, crashes: int, ending: Ending, usage: Usage, now: float) -> Outcome:
    """The event that commits how an execution ended."""
    card = claim.card_of(hold, crashes)
    match ending:
        case Good(result):
            spent = over_budget(hold.item, add_usage(hold.item.usage, usage))
            if spent is not None and not spent.startswith("max_runtime_seconds"):
                failure = Failure(reason="budget_exhausted", error_type="BudgetExhausted", message=spent)
                return msgspec.structs.replace(claim.failed(hold, crashes, failure), usage=usage)
            return Completed(card=card, result=msgspec.Raw(result), usage=usage)
        case Bad(failure):
            return msgspec.structs.replace(claim.failed(hold, crashes, failure), usage=usage)
        case Later():
            until = ending.until if ending.until is not None else now + (ending.after_s or THROTTLED_AGAIN_S)
            reason = "throttled" if ending.throttled else "snoozed"
            return msgspec.structs.replace(_parked(hold, crashes, until, reason, ending.detail), usage=usage)
        case CancelledByHandler(note):
            return Cancelled(card=card, by="handler", note=note)
        case Stopped():
            interrupted = msgspec.structs.replace(card, interruptions=card.interruptions + 1)
            return Interrupted(card=interrupted, item=hold.item, usage=usage)
        case _:
            assert_never(ending)


def settlement(ending: Ending, usage: Usage) -> dict[str, Any]:
    """What to tell the governor of a used permit."""
    tokens = usage.tokens_in + usage.tokens_out
    if isinstance(ending, Later) and ending.throttled:
        return {"outcome": "throttled", "tokens": tokens or None, "retry_after_s": ending.after_s}
    outcome = "ok" if isinstance(ending, Good) else "error"
    return {"outcome": outcome, "tokens": tokens or None, "retry_after_s": None}


def too_large(hold: Hold, outcome: Outcome, error: MessageTooLarge) -> Outcome:
    """The outcome in the place of one that the server would not take; smaller with every call."""
    failure = Failure(reason="result_too_large", error_type="ResultTooLarge", message=str(error))
    if not isinstance(outcome, AttemptFailed):
        return claim.failed(hold, outcome.card.crashes, failure)
    if outcome.failure.traceback:
        return msgspec.structs.replace(outcome, failure=msgspec.structs.replace(outcome.failure, traceback=""))
    if outcome.item is not None and outcome.item.history:
        return msgspec.structs.replace(outcome, item=msgspec.structs.replace(outcome.item, history=[]))
    if outcome.item is not None:
        return msgspec.structs.replace(outcome, item=None)
    raise error


def _parked(hold: Hold, crashes: int, until: float, reason: Any, detail: str) -> Parked:
    card = claim.card_of(hold, crashes)
    return Parked(card=card, until=until, reason=reason, item=hold.item, detail=detail)
