"""What follows an attempt that gave no result: another one, a wait, or the end; and what each event has to be followed by."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import assert_never

import msgspec

from millstream.policy import retry
from millstream.policy.admit import instant
from millstream.policy.holding import Onward, held, onward
from millstream.policy.metering import Metering
from millstream.policy.waiting import throttled_out
from millstream_schemas.events import (
    AttemptFailed,
    AttemptRecord,
    Card,
    Cause,
    DeadLetter,
    Event,
    Expired,
    Failed,
    Failure,
    FinalReason,
    Held,
    Interrupted,
    Parked,
    Queued,
    Retrying,
    Scheduled,
    Usage,
    WorkItem,
)

Undecided = AttemptFailed | Parked | Interrupted
Decision = Queued | Held | Scheduled | Retrying | Failed | Expired

MAX_HISTORY = 100
MIN_PARK_S = 0.25
"""A handler that snoozes into the past must not spin; the server fires no schedule sooner either."""
TIMER_S = 0.002
"""An event loop's timer may fire a millisecond early; such a remainder is no budget for another attempt."""


class DecideSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long a task may be put off. Seconds."""

    max_wait_s: float = 90 * 86400.0
    max_throttle_s: float = 86400.0
    unserved_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Seen:
    """An event that asks for a decision, as the stream holds it.

    `served` says whether a live worker serves its task type; `metered`, of a throttled task, how it would be metered
    by what is known now.
    """

    event: Undecided
    stream: str
    seq: int
    at: float
    served: bool = True
    metered: Metering | None = None


def decide(seen: Seen, uniform: float, settings: DecideSettings) -> Decision:
    """The event that answers `seen`; times count from the stream's own time stamp of it."""
    event = seen.event
    match event:
        case Interrupted():
            return _after_interruption(seen, event)
        case Parked():
            return _after_park(seen, event, settings)
        case AttemptFailed():
            return _after_failure(seen, event, uniform, settings)
        case _:
            assert_never(event)


def _after_interruption(seen: Seen, event: Interrupted) -> Decision:
    card, item = _released(seen, event.card), event.item
    return held(card, item.lane, item.limits, again=True) if item.lane else Queued(card=card)


def _after_park(seen: Seen, parked: Parked, settings: DecideSettings) -> Decision:
    waits_on = parked.card.waiting_for == parked.reason and parked.card.waiting_since > 0
    since = parked.card.waiting_since if waits_on else seen.at
    if parked.reason == "throttled" and seen.at - since > settings.max_throttle_s:
        message = throttled_out(seen.at - since, parked.detail or "throttled")
        failure = Failure(reason="error", error_type="Throttled", message=message)
        return _failed(seen, "throttled_out", failure)
    if parked.reason == "no_handler" and seen.at - since >= settings.unserved_s and not seen.served:
        failure = Failure(reason="unknown_task_type", message=parked.detail)
        return _failed(seen, "unknown_task_type", failure)
    due_at = min(max(parked.until, seen.at + MIN_PARK_S), seen.at + settings.max_wait_s)
    deadline = _deadline(parked.item)
    if deadline is not None and due_at >= deadline:
        return _expired(seen, f"{parked.reason} beyond the deadline")
    card = _released(seen, parked.card)
    if parked.reason == "throttled":
        card = msgspec.structs.replace(card, throttles=card.throttles + 1)
    if parked.reason != "snoozed":
        card = msgspec.structs.replace(card, waiting_since=since, waiting_for=parked.reason)
    lane, limits = _lane(parked.item, seen.metered)
    why = f"{parked.reason}: {parked.detail}" if parked.detail else parked.reason
    return Scheduled(card=card, due_at=due_at, why=why, lane=lane, limits=limits)


def _lane(item: WorkItem, known: Metering | None) -> tuple[str, list[str]]:
    """Where a throttled task waits from now on: it is metered anew by limits that its lane knows nothing of."""
    if known is None or (item.lane and set(known.limits) <= set(item.limits)):
        return item.lane, item.limits
    return known.lane, list(known.limits)


_FINAL: dict[str, FinalReason] = {
    "fatal": "fatal",
    "payload_mismatch": "fatal",
    "result_not_encodable": "fatal",
    "result_too_large": "fatal",
    "history_lost": "history_lost",
    "unknown_task_type": "unknown_task_type",
    "worker_crashed": "worker_crashed",
    "budget_exhausted": "budget_exhausted",
}


def _after_failure(seen: Seen, event: AttemptFailed, uniform: float, settings: DecideSettings) -> Decision:
    failure, item = event.failure, event.item
    if failure.reason == "expired":
        return _expired(seen, failure.message)
    final = _FINAL.get(failure.reason)
    if final is not None or item is None:
        return _failed(seen, final or "history_lost", failure)
    policy = item.envelope.retry_policy
    if policy is None or not retry.is_retryable(policy, failure.classes):
        return _failed(seen, "fatal", failure)
    if event.card.attempt >= (item.envelope.budget.max_attempts or 1):
        return _failed(seen, "max_attempts", failure)
    if over_budget(item, add_usage(item.usage, event.usage)) is not None:
        return _failed(seen, "budget_exhausted", failure)
    delay = retry.delay_s(policy, event.card.attempt, uniform, failure.retry_after_s)
    due_at = seen.at + min(delay, settings.max_wait_s)
    deadline = _deadline(item)
    if deadline is not None and due_at >= deadline:
        return _expired(seen, f"the next attempt would start after the deadline; last error: {failure.message}"[:512])
    card = msgspec.structs.replace(_released(seen, event.card), attempt=event.card.attempt + 1)
    return Retrying(card=card, due_at=due_at)


def over_budget(item: WorkItem, used: Usage) -> str | None:
    """Which limit of the task's budget `used` has reached, or None."""
    budget = item.envelope.budget
    runtime_s = budget.max_runtime_seconds
    if runtime_s is not None and used.runtime_s >= max(runtime_s - TIMER_S, runtime_s / 2):
        return f"max_runtime_seconds: {used.runtime_s:.3f} of {runtime_s:g} used"
    if budget.max_cost_usd is not None and used.cost_usd > budget.max_cost_usd:
        return f"max_cost_usd: {used.cost_usd:g} of {budget.max_cost_usd:g} used"
    if budget.max_tokens is not None and used.tokens_in + used.tokens_out > budget.max_tokens:
        return f"max_tokens: {used.tokens_in + used.tokens_out} of {budget.max_tokens} used"
    return None


def add_usage(one: Usage, other: Usage) -> Usage:
    """Both usages together."""
    return Usage(
        tokens_in=one.tokens_in + other.tokens_in,
        tokens_out=one.tokens_out + other.tokens_out,
        cost_usd=one.cost_usd + other.cost_usd,
        runtime_s=one.runtime_s + other.runtime_s,
    )


def _deadline(item: WorkItem) -> float | None:
    return instant(item.envelope.deadline_at, "$.deadline_at")


def _released(seen: Seen, card: Card) -> Card:
    """The card of an event that releases the task anew: nobody's execution, caused by what was seen."""
    return msgspec.structs.replace(
        card,
        cause=Cause(stream=seen.stream, seq=seen.seq),
        release=0,
        execution_id="",
        work_seq=0,
        delivery=0,
        waiting_since=0.0,
        waiting_for="",
    )


def _ended(seen: Seen) -> Card:
    return msgspec.structs.replace(seen.event.card, cause=Cause(stream=seen.stream, seq=seen.seq))


def _failed(seen: Seen, reason: FinalReason, failure: Failure) -> Failed:
    return Failed(card=_ended(seen), reason=reason, failure=failure)


def _expired(seen: Seen, detail: str) -> Expired:
    return Expired(card=_ended(seen), detail=detail)


# --- the decision was made already ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decide:
    """Nothing follows the event yet: append the decision on it."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """The decision stands as `event` at `fence`: publish what follows from it."""

    event: Event
    fence: int


@dataclass(frozen=True, slots=True)
class Done:
    """The task has moved beyond the decision: only the ack is missing."""


def is_overtaken(seen: Seen, last: Event | None) -> bool:
    """True when a later generation has begun: whether a dead letter is still owed, only the history says."""
    return last is not None and last.card.generation > seen.event.card.generation


def decided(
    seen: Seen, last: Event | None, last_seq: int, past: Sequence[tuple[int, Event]] = ()
) -> Decide | GoOn | Done:
    """What the last event means for a decision that was refused, not answered, or made before a crash.

    `past` is the life of the task with sequences, asked for by `is_overtaken`.
    """
    if last is None or last_seq < seen.seq:
        return Done()
    if last_seq == seen.seq:
        return Decide()
    if last.card.cause == Cause(stream=seen.stream, seq=seen.seq):
        return GoOn(last, last_seq)
    return owed(Cause(stream=seen.stream, seq=seen.seq), past)


def owed(cause: Cause, past: Sequence[tuple[int, Event]]) -> GoOn | Done:
    """A task that failed by `cause` and was submitted again is still owed its dead letter.

    A replay has proven that the letter was there.
    """
    for (seq, event), (_, successor) in pairwise(past):
        if isinstance(event, Failed) and event.card.cause == cause:
            replayed = successor.card.origin == event.card.origin
            return Done() if replayed else GoOn(event, seq)
    return Done()


# --- what follows an event --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToDlq:
    """Publish the dead letter, once per generation."""

    letter: DeadLetter


@dataclass(frozen=True, slots=True)
class Nothing:
    """The event needs no message."""


FollowUp = Onward | ToDlq | Nothing


def follow_up(decision: Event, fence: int, seen: Seen) -> FollowUp:
    """The message that `decision`, stored at `fence`, has to be followed by."""
    match decision:
        case Queued() | Held() | Scheduled() | Retrying():
            item = seen.event.item
            if item is None:
                return Nothing()
            return onward(
                decision,
                fence,
                seen.at,
                envelope=item.envelope,
                history=_history(item, seen),
                usage=add_usage(item.usage, seen.event.usage),
                limits=item.limits,
                lane=item.lane,
            )
        case Failed():
            return ToDlq(dead_letter(decision, seen))
        case _:
            return Nothing()


def _history(item: WorkItem, seen: Seen) -> list[AttemptRecord]:
    event = seen.event
    if not isinstance(event, AttemptFailed):
        return item.history
    failure = event.failure
    record = AttemptRecord(
        attempt=event.card.attempt,
        reason=failure.reason,
        error_type=failure.error_type,
        message=failure.message[:1024],
        fingerprint=failure.fingerprint,
        worker_id=event.worker_id,
        ended_at=seen.at,
    )
    return [*item.history, record][-MAX_HISTORY:]


def dead_letter(decision: Failed, seen: Seen) -> DeadLetter:
    """The whole of a failed task, for inspection and replay."""
    item = seen.event.item
    return DeadLetter(
        card=decision.card,
        reason=decision.reason,
        failure=decision.failure,
        envelope=item.envelope if item is not None else None,
        history=_history(item, seen) if item is not None else [],
        usage=add_usage(item.usage, seen.event.usage) if item is not None else seen.event.usage,
        failed_at=seen.at,
    )
