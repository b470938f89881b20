"""Decisions: each reason has its end or its next attempt; deadlines, budgets and limits of waiting hold."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.decide import (
    MAX_HISTORY,
    MIN_PARK_S,
    Decide,
    DecideSettings,
    Decision,
    Done,
    GoOn,
    Nothing,
    Seen,
    ToDlq,
    Undecided,
    add_usage,
    decide,
    decided,
    follow_up,
    is_overtaken,
    over_budget,
)
from millstream.policy.holding import ToHeld, ToWork
from millstream.policy.metering import Metering
from millstream_schemas.envelope import Budget, Envelope, RetryPolicy
from millstream_schemas.events import (
    AttemptFailed,
    Cancelled,
    Card,
    Cause,
    Expired,
    Failed,
    Failure,
    FailureReason,
    Held,
    Interrupted,
    Parked,
    ParkReason,
    Queued,
    Retrying,
    Scheduled,
    Usage,
    WorkItem,
)

NOW = 1_778_320_000.0
SETTINGS = DecideSettings()
INBOX = Cause(stream="INBOX", seq=1)
CARD = Card(
    key="k", tenant_id="acme", task_id="t", queue="q", task_type="a", payload_hash="h", origin=INBOX,
    cause=Cause(stream="WORK", seq=7), release=10, execution_id="e", work_seq=7, delivery=1,
)  # fmt: skip
STEADY = RetryPolicy(strategy="fixed", base_seconds=5, jitter=False)


def item(budget: Budget | None = None, policy: RetryPolicy | None = STEADY, deadline: float | None = None) -> WorkItem:
    """A released task of three attempts."""
    envelope = Envelope(
        task_type="a",
        budget=budget or Budget(max_attempts=3),
        retry_policy=policy,
        deadline_at=None if deadline is None else datetime.fromtimestamp(deadline, UTC),
    )
    return WorkItem(fence=10, card=CARD, envelope=envelope)


def failure(reason: Any = "error", work: WorkItem | None = None, *, attempt: int = 1, **fields: Any) -> Seen:
    """A failed attempt as the stream holds it."""
    used = fields.pop("usage", Usage())
    event = AttemptFailed(
        card=msgspec.structs.replace(CARD, attempt=attempt),
        failure=Failure(reason=reason, message="it broke", **fields),
        item=work or item(),
        usage=used,
        worker_id="w",
    )
    return Seen(event, "EVENTS", 20, NOW)


def parked(
    reason: ParkReason, until: float, since: float = 0.0, work: WorkItem | None = None, served: bool = True
) -> Seen:
    """A parked task as the stream holds it."""
    card = msgspec.structs.replace(CARD, waiting_since=since, waiting_for=reason if since else "")
    return Seen(Parked(card=card, until=until, reason=reason, item=work or item()), "EVENTS", 20, NOW, served)


def decision(seen: Seen) -> Decision:
    """The decision, without jitter."""
    return decide(seen, 0.0, SETTINGS)


def reason_of(seen: Seen) -> str:
    """Why it failed, or the kind of the decision."""
    made = decision(seen)
    return made.reason if isinstance(made, Failed) else str(made.__struct_config__.tag)


EXPECTED = {
    "error": "retrying",
    "timeout": "retrying",
    "fatal": "fatal",
    "expired": "expired",
    "budget_exhausted": "budget_exhausted",
    "history_lost": "history_lost",
    "unknown_task_type": "unknown_task_type",
    "payload_mismatch": "fatal",
    "result_not_encodable": "fatal",
    "result_too_large": "fatal",
    "worker_crashed": "worker_crashed",
}


def test_every_reason_of_a_failed_attempt_has_its_answer() -> None:
    """The table is complete."""
    assert {reason: reason_of(failure(reason)) for reason in get_args(FailureReason)} == EXPECTED


def test_an_error_is_retried_until_the_attempts_are_used_up() -> None:
    """The due time counts from the stream's own time stamp of the failure."""
    made = decision(failure(attempt=2))
    assert isinstance(made, Retrying)
    assert (made.due_at, made.card.attempt) == (NOW + 5, 3)
    assert reason_of(failure(attempt=3)) == "max_attempts"
    assert reason_of(failure(attempt=1, work=item(Budget()))) == "max_attempts"


def test_an_error_that_the_policy_calls_fatal_ends_at_once() -> None:
    """And so does one without any policy, or whose envelope is gone."""
    fatal = item(policy=RetryPolicy(fatal_on=["ValueError"]))
    assert reason_of(failure(work=fatal, classes=["ValueError"])) == "fatal"
    assert reason_of(failure(work=fatal, classes=["KeyError"])) == "retrying"
    assert reason_of(failure(work=item(policy=None))) == "fatal"
    bare = AttemptFailed(card=CARD, failure=Failure(reason="error"))
    assert reason_of(Seen(bare, "EVENTS", 20, NOW)) == "history_lost"


def test_no_attempt_is_scheduled_that_would_start_at_the_deadline_or_later() -> None:
    """It expires now instead of waiting for that, without a dead letter."""
    assert isinstance(decision(failure(work=item(deadline=NOW + 6))), Retrying)
    late = decision(failure(work=item(deadline=NOW + 5)))
    assert isinstance(late, Expired)
    assert "it broke" in late.detail
    assert isinstance(decision(parked("throttled", NOW + 30, work=item(deadline=NOW + 30))), Expired)


def test_what_earlier_attempts_used_counts_against_the_budget() -> None:
    """Runtime ends it when it is used up, cost and tokens when they are passed."""
    budget = Budget(max_attempts=9, max_runtime_seconds=10, max_cost_usd=1, max_tokens=100)
    work = msgspec.structs.replace(item(budget), usage=Usage(tokens_in=60, cost_usd=0.5, runtime_s=6))
    assert reason_of(failure(work=work, usage=Usage(runtime_s=3.9, cost_usd=0.5, tokens_out=40))) == "retrying"
    assert reason_of(failure(work=work, usage=Usage(runtime_s=4))) == "budget_exhausted"
    assert reason_of(failure(work=work, usage=Usage(cost_usd=0.51))) == "budget_exhausted"
    assert reason_of(failure(work=work, usage=Usage(tokens_out=41))) == "budget_exhausted"
    assert over_budget(item(), Usage(tokens_in=10**9, cost_usd=1e6, runtime_s=1e6)) is None


def test_a_throttled_task_comes_back_until_throttling_has_lasted_too_long() -> None:
    """Throttling uses up no attempt; its beginning is remembered."""
    first = decision(parked("throttled", NOW + 60))
    assert isinstance(first, Scheduled)
    assert (first.due_at, first.card.throttles, first.card.waiting_since, first.card.attempt) == (NOW + 60, 1, NOW, 1)
    lasting = NOW - SETTINGS.max_throttle_s
    again = decision(parked("throttled", NOW + 60, since=lasting))
    assert isinstance(again, Scheduled)
    assert again.card.waiting_since == lasting
    assert reason_of(parked("throttled", NOW + 60, since=lasting - 1)) == "throttled_out"


def test_another_kind_of_wait_begins_anew() -> None:
    """A long throttling says nothing of how long a handler has been missing, nor the other way round."""
    throttled = msgspec.structs.replace(CARD, waiting_since=NOW - 7200, waiting_for="throttled")
    missing = Parked(card=throttled, until=NOW + 5, reason="no_handler", item=item())
    found = decision(Seen(missing, "EVENTS", 20, NOW, served=False))
    assert isinstance(found, Scheduled)
    assert (found.card.waiting_since, found.card.waiting_for) == (NOW, "no_handler")


def test_a_task_type_that_no_worker_has_announced_waits_and_then_fails() -> None:
    """A worker that serves it, if only just started, keeps it waiting."""
    since = NOW - SETTINGS.unserved_s
    assert reason_of(parked("no_handler", NOW + 5, served=False)) == "scheduled"
    assert reason_of(parked("no_handler", NOW + 5, since=since + 1, served=False)) == "scheduled"
    assert reason_of(parked("no_handler", NOW + 5, since=since, served=False)) == "unknown_task_type"
    assert reason_of(parked("no_handler", NOW + 5, since=since, served=True)) == "scheduled"


def test_a_snooze_waits_as_asked_and_counts_as_nothing() -> None:
    """Never into the past, never beyond the longest wait."""
    made = [decision(parked("snoozed", until)) for until in (NOW + 50, NOW - 50, NOW + 1e12)]
    due = [one.due_at for one in made if isinstance(one, Scheduled)]
    assert due == [NOW + 50, NOW + MIN_PARK_S, NOW + SETTINGS.max_wait_s]
    assert made[0].card.throttles == 0


def test_an_interrupted_task_is_released_at_once() -> None:
    """As nobody's execution, at no cost in attempts."""
    made = decision(Seen(Interrupted(card=CARD, item=item()), "EVENTS", 20, NOW))
    assert isinstance(made, Queued)
    assert (made.card.attempt, made.card.release, made.card.execution_id, made.card.work_seq) == (1, 0, "", 0)
    assert made.card.cause == Cause(stream="EVENTS", seq=20)


@given(
    st.sampled_from(get_args(FailureReason)),
    st.integers(1, 2000),
    st.floats(0, 1, exclude_max=True),
    st.none() | st.floats(allow_nan=True, allow_infinity=True),
)
def test_every_decision_is_made_for_good_and_waits_no_longer_than_it_may(
    reason: str, attempt: int, uniform: float, retry_after: float | None
) -> None:
    """Whatever a worker reports, and always with the event it answers as its cause."""
    seen = failure(reason, item(Budget(max_attempts=1000)), attempt=attempt, retry_after_s=retry_after)
    made = decide(seen, uniform, SETTINGS)
    assert made == decide(seen, uniform, SETTINGS)
    assert made.card.cause == Cause(stream="EVENTS", seq=20)
    if isinstance(made, Retrying):
        assert NOW <= made.due_at <= NOW + SETTINGS.max_wait_s


# --- metered ----------------------------------------------------------------------------------------

LANED = msgspec.structs.replace(item(), lane="lane", limits=["x"])


def test_interrupted_work_with_a_lane_is_held_again_at_once() -> None:
    """Before those of its lane that have not run."""
    seen = Seen(Interrupted(card=CARD, item=LANED), "EVENTS", 20, NOW)
    made = decision(seen)
    assert isinstance(made, Held)
    assert (made.lane, made.limits, made.reason, made.again) == ("lane", ["x"], "limits", True)
    assert (made.card.release, made.card.execution_id, made.card.cause) == (0, "", Cause(stream="EVENTS", seq=20))
    message = follow_up(made, 21, seen)
    assert isinstance(message, ToHeld)
    assert (message.item.fence, message.item.lane, message.item.limits, message.again) == (21, "lane", ["x"], True)


def test_a_retry_with_a_lane_keeps_it_and_always_waits_for_its_tick() -> None:
    """Also one that is due at once: only a tick makes it held."""
    steady = msgspec.structs.replace(
        LANED, envelope=item(policy=RetryPolicy(strategy="fixed", base_seconds=0)).envelope
    )
    seen = failure(work=steady)
    made = decision(seen)
    assert isinstance(made, Retrying)
    message = follow_up(made, 21, seen)
    assert isinstance(message, ToWork)
    assert (message.due_at, message.item.lane, message.item.limits, len(message.item.history)) == (
        NOW,
        "lane",
        ["x"],
        1,
    )


def test_a_parked_task_with_a_lane_says_where_it_will_be_held() -> None:
    """Its wait goes on counting where throttling is what it waits for."""
    for reason in get_args(ParkReason):
        seen = parked(reason, NOW + 60, work=LANED)
        made = decision(seen)
        assert isinstance(made, Scheduled)
        assert (made.lane, made.limits) == ("lane", ["x"])
        message = follow_up(made, 21, seen)
        assert isinstance(message, ToWork)
        assert (message.due_at, message.item.lane, message.item.limits) == (NOW + 60, "lane", ["x"])


def test_a_throttled_task_that_was_plain_is_metered_as_it_is_told() -> None:
    """The event holds what was decided; the item follows the event."""
    anew = Metering(("y",), "other", "limits")
    seen = replace(parked("throttled", NOW + 60), metered=anew)
    made = decision(seen)
    assert isinstance(made, Scheduled)
    assert (made.lane, made.limits) == ("other", ["y"])
    message = follow_up(made, 21, replace(seen, metered=None))
    assert isinstance(message, ToWork)
    assert (message.item.lane, message.item.limits) == ("other", ["y"])


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (None, ("lane", ["x"])),
        (Metering((), "fair", "fairness"), ("lane", ["x"])),
        (Metering(("x",), "lane", "limits"), ("lane", ["x"])),
        (Metering(("x", "y"), "both", "limits"), ("both", ["x", "y"])),
        (Metering(("y",), "other", "limits"), ("other", ["y"])),
    ],
)
def test_a_throttled_task_moves_to_another_lane_by_limits_that_its_own_knows_nothing_of(
    known: Metering | None, expected: tuple[str, list[str]]
) -> None:
    """Such as one of a fair queue, held before a worker announced a limit; one that lost limits stays."""
    made = decision(replace(parked("throttled", NOW + 60, work=LANED), metered=known))
    assert isinstance(made, Scheduled)
    assert (made.lane, made.limits) == expected
    fair = msgspec.structs.replace(LANED, limits=[])
    made = decision(replace(parked("throttled", NOW + 60, work=fair), metered=Metering(("y",), "other", "limits")))
    assert isinstance(made, Scheduled)
    assert (made.lane, made.limits) == ("other", ["y"])


# --- redelivered ------------------------------------------------------------------------------------


def test_a_redelivered_event_is_never_decided_twice() -> None:
    """Nothing follows: decide. The decision follows: go on with it as it stands. Anything beyond: only ack."""
    seen = failure()
    made = decision(seen)
    beyond = Cancelled(card=msgspec.structs.replace(CARD, cause=Cause(stream="CONTROL", seq=1)))
    assert decided(seen, seen.event, 20) == Decide()
    assert decided(seen, made, 21) == GoOn(made, 21)
    assert decided(seen, beyond, 22) == Done()
    assert decided(seen, None, 0) == Done()
    assert decided(seen, made, 19) == Done()


def test_a_failed_task_that_was_submitted_again_is_still_owed_its_dead_letter() -> None:
    """Only the history shows it; a replay has proven that the letter was there."""
    seen = failure("fatal")
    end = decision(seen)
    submitted = Queued(card=msgspec.structs.replace(CARD, generation=2, origin=Cause(stream="INBOX", seq=9)))
    replayed = Queued(card=msgspec.structs.replace(CARD, generation=2))
    assert not is_overtaken(seen, end)
    assert is_overtaken(seen, submitted)
    past: list[tuple[int, Any]] = [(20, seen.event), (21, end), (30, submitted)]
    assert decided(seen, submitted, 30, past) == GoOn(end, 21)
    assert decided(seen, replayed, 30, [*past[:2], (30, replayed)]) == Done()
    retried = failure(attempt=1)
    later = [(20, retried.event), (21, decision(retried)), (25, Cancelled(card=CARD)), (30, submitted)]
    assert decided(retried, submitted, 30, later) == Done()


# --- what follows -----------------------------------------------------------------------------------


def test_a_retry_is_followed_by_its_work_message_with_history_and_usage() -> None:
    """The envelope is carried whole; the fence is the sequence of the decision."""
    seen = failure(usage=Usage(tokens_in=3, runtime_s=1.5))
    made = decision(seen)
    message = follow_up(made, 21, seen)
    assert isinstance(message, ToWork)
    assert (message.item.fence, message.due_at, message.item.card) == (21, NOW + 5, made.card)
    assert message.item.envelope == item().envelope
    assert [record.message for record in message.item.history] == ["it broke"]
    assert message.item.usage == Usage(tokens_in=3, runtime_s=1.5)


def test_history_is_bounded_and_keeps_the_latest() -> None:
    """A thousand attempts do not fill a message."""
    seen = failure()
    for fence in range(MAX_HISTORY + 5):
        message = follow_up(decision(seen), fence, seen)
        assert isinstance(message, ToWork)
        seen = replace(seen, event=msgspec.structs.replace(seen.event, item=message.item))
    history = seen.event.item.history if seen.event.item else []
    assert len(history) == MAX_HISTORY


def test_a_failure_is_followed_by_a_dead_letter_and_an_expiry_by_nothing() -> None:
    """The letter has all that a replay needs."""
    seen = failure("fatal", usage=Usage(cost_usd=0.25))
    message = follow_up(decision(seen), 21, seen)
    assert isinstance(message, ToDlq)
    letter = message.letter
    assert (letter.reason, letter.envelope, letter.usage.cost_usd, letter.failed_at) == (
        "fatal",
        item().envelope,
        0.25,
        NOW,
    )
    assert [record.reason for record in letter.history] == ["fatal"]
    late = failure("expired")
    assert follow_up(decision(late), 21, late) == Nothing()


def test_work_handed_back_is_released_without_a_due_time() -> None:
    """At once, with the history as it was."""
    event: Undecided = Interrupted(card=CARD, item=item(), usage=Usage(runtime_s=2))
    seen = Seen(event, "EVENTS", 20, NOW)
    message = follow_up(decision(seen), 21, seen)
    assert isinstance(message, ToWork)
    assert (message.due_at, message.item.history, message.item.usage.runtime_s) == (None, [], 2)


def test_usages_add_up() -> None:
    """Field by field."""
    one, other = Usage(tokens_in=1, tokens_out=2, cost_usd=0.5, runtime_s=3), Usage(tokens_in=10, cost_usd=0.25)
    assert add_usage(one, other) == Usage(tokens_in=11, tokens_out=2, cost_usd=0.75, runtime_s=3)
