"""Which event a worker writes for a delivery: for how its execution ended, or for why it could not begin. Pure."""

from collections.abc import Mapping
from typing import Any, assert_never

import msgspec

from millstream.app import AnyTask
from millstream.errors import MessageTooLarge
from millstream.permits_client import Settlement
from millstream.policy import claim
from millstream.policy.claim import Hold, Outcome
from millstream.policy.decide import add_usage, over_budget
from millstream.policy.limits import Price
from millstream.policy.start import estimate_of, exhausted, refusal, with_lost
from millstream.policy.waiting import throttled_again_s
from millstream.worker.executor import Bad, CancelledByHandler, Ending, Good, Later, Stopped
from millstream_schemas.events import AttemptFailed, Cancelled, Completed, Failure, Interrupted, Parked, Usage

NO_HANDLER_AGAIN_S = 5.0


def before_start(hold: Hold, task: AnyTask | None, now: float, prices: Mapping[str, Price]) -> Outcome | None:
    """The outcome of a task that must not or cannot start here; None where it may."""
    item = hold.item
    refused = refusal(item, now, estimate_of(item, prices))
    if refused is not None:
        return claim.failed(hold, item.card.crashes, refused)
    if task is None:
        detail = f"worker {hold.worker_id} has no handler for {item.card.task_type}"
        return _parked(hold, item.card.crashes, now + NO_HANDLER_AGAIN_S, "no_handler", detail)
    return None


def taken_over(hold: Hold, crashes: int, now: float, prices: Mapping[str, Price]) -> tuple[Hold, Outcome | None]:
    """A delivery once its claim has told how many attempts were lost: their estimates count for the task's own budget.

    With the outcome where they have left too little of it for one more attempt, None where it may start.
    """
    item = with_lost(hold.item, crashes, prices)
    if item is hold.item:
        return hold, None
    hold = msgspec.structs.replace(hold, item=item)
    refused = refusal(item, now, estimate_of(item, prices))
    return hold, None if refused is None else claim.failed(hold, crashes, refused)


def recounted(outcome: Outcome, crashes: int, prices: Mapping[str, Price]) -> Outcome:
    """The same outcome where the last event counts other crashes: on its card, and in what the task has used."""
    item = None if isinstance(outcome, Completed | Cancelled) else outcome.item
    if item is not None:
        ahead = msgspec.structs.replace(item, card=outcome.card)  # what it counts already is in its usage
        usage = with_lost(ahead, crashes, prices).usage
        outcome = msgspec.structs.replace(outcome, item=msgspec.structs.replace(item, usage=usage))
    return claim.with_crashes(outcome, crashes)


def expired(hold: Hold) -> Outcome:
    """The outcome of a task whose deadline came while it waited for its permit."""
    failure = Failure(reason="expired", message="the deadline passed while the task waited for a permit")
    return claim.failed(hold, hold.item.card.crashes, failure)


def parked(hold: Hold, after_s: float, detail: str, now: float) -> Outcome:
    """The outcome of a task that would have to wait for its permit longer than a worker keeps it in hand."""
    return _parked(hold, hold.item.card.crashes, now + after_s, "throttled", detail)


def too_late(hold: Hold, crashes: int, now: float) -> Outcome:
    """The outcome of a task whose permit could no longer be used once its claim was stored: it waits for a new one."""
    return _parked(hold, crashes, now, "throttled", "the permit ran out before the start")


def outcome_of(hold: Hold, crashes: int, ending: Ending, usage: Usage, now: float) -> Outcome:
    """The event that commits how an execution ended."""
    card = claim.card_of(hold, crashes)
    match ending:
        case Good(result):
            spent = over_budget(hold.item, add_usage(hold.item.usage, usage))
            if spent is not None and not spent.startswith("max_runtime_seconds"):
                return msgspec.structs.replace(claim.failed(hold, crashes, exhausted(spent)), usage=usage)
            return Completed(card=card, result=msgspec.Raw(result), usage=usage)
        case Bad(failure):
            return msgspec.structs.replace(claim.failed(hold, crashes, failure), usage=usage)
        case Later():
            reason = "throttled" if ending.throttled else "snoozed"
            return msgspec.structs.replace(
                _parked(hold, crashes, _until(hold, ending, now), reason, ending.detail), usage=usage
            )
        case CancelledByHandler(note):
            return Cancelled(card=card, by="handler", note=note)
        case Stopped():
            interrupted = msgspec.structs.replace(card, interruptions=card.interruptions + 1)
            return Interrupted(card=interrupted, item=hold.item, usage=usage)
        case _:
            assert_never(ending)


def _until(hold: Hold, later: Later, now: float) -> float:
    if later.until is not None:
        return later.until
    return now + (later.after_s or throttled_again_s(later.said.outcome, hold.item.card.throttles))


def settlement(ending: Ending, usage: Usage) -> Settlement:
    """What to tell the governor of a used permit: how the execution ended, and what it used, if the handler said so."""
    used = bool(usage.tokens_in or usage.tokens_out)
    said = ending.said
    return Settlement(
        outcome=said.outcome,
        tokens_in=usage.tokens_in if used else None,
        tokens_out=usage.tokens_out if used else None,
        cost_usd=usage.cost_usd or None,
        retry_after_s=said.retry_after_s,
        observed=said.observed,
        reported=said.reported,
    )


def too_large(hold: Hold, outcome: Outcome, error: MessageTooLarge) -> Outcome:
    """The outcome to commit instead of one that is too large for the server; smaller with every call."""
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
