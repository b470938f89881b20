"""Claim, commit and hand-back as tables: what the last event means for the delivery in a worker's hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millstream.policy import claim as policy
from millstream.policy.claim import Append, Claim, Claimed, Committed, Hold, Silence, Superseded
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import (
    AttemptFailed,
    Cancelled,
    Card,
    Cause,
    Completed,
    Event,
    Expired,
    Failed,
    Failure,
    Held,
    Interrupted,
    Parked,
    Queued,
    Released,
    Retrying,
    Scheduled,
    Started,
    WorkItem,
)

FENCE, SEQ = 10, 77
INBOX = Cause(stream="INBOX", seq=1)
CARD = Card(
    key="k", tenant_id="acme", task_id="t", queue="q", task_type="a", payload_hash="h", origin=INBOX, cause=INBOX, errors=1,
    crashes=2, interruptions=3, throttles=4, waiting_since=5.0,
)  # fmt: skip
ITEM = WorkItem(fence=FENCE, card=CARD, envelope=Envelope(task_type="a"))
HOLD = Hold(ITEM, "mine", "w1", "WORK", SEQ, 2)
BY_MY_DELIVERY = Cause(stream="WORK", seq=SEQ)
FAILURE = Failure(reason="error")


def card(execution: str = "other", **changes: Any) -> Card:
    """The card of an event that an execution of this release wrote."""
    written = {"release": FENCE, "execution_id": execution, "work_seq": SEQ, "delivery": 1, "cause": BY_MY_DELIVERY}
    return msgspec.structs.replace(CARD, **{**written, **changes})


def started(execution: str = "other", **changes: Any) -> Started:
    """A claim."""
    return Started(card=card(execution, **changes), worker_id="w0")


def ending(kind: str, on: Card) -> Event:
    """An event of `kind`."""
    match kind:
        case "completed":
            return Completed(card=on)
        case "attempt_failed":
            return AttemptFailed(card=on, failure=FAILURE)
        case "parked":
            return Parked(card=on, until=1.0, reason="throttled", item=ITEM)
        case "interrupted":
            return Interrupted(card=on, item=ITEM)
        case "failed":
            return Failed(card=on, reason="fatal", failure=FAILURE)
        case "expired":
            return Expired(card=on)
        case _:
            return Cancelled(card=on)


OUTCOMES = ("completed", "attempt_failed", "parked", "interrupted", "cancelled")
ENDS = (*OUTCOMES, "failed", "expired")


def test_the_first_claim_is_appended_on_the_releasing_event_that_the_message_names() -> None:
    """Nothing has to be read for it."""
    first = policy.first_claim(HOLD)
    assert first.expect_seq == FENCE
    found = first.event.card
    assert (found.release, found.execution_id, found.work_seq, found.delivery) == (FENCE, "mine", SEQ, 2)
    assert (found.crashes, found.errors, found.waiting_since, found.cause) == (2, 1, 0.0, BY_MY_DELIVERY)


@pytest.mark.parametrize(
    "release",
    [
        Queued(card=CARD),
        Released(card=CARD),
        Scheduled(card=CARD, due_at=1.0),
        Retrying(card=CARD, due_at=1.0),
    ],
)
def test_a_claim_that_was_not_stored_is_appended_again(release: Event) -> None:
    """The release is still the last event."""
    assert policy.claim(HOLD, release, FENCE) == policy.first_claim(HOLD)


def test_a_task_that_is_held_cannot_be_claimed() -> None:
    """Only what the releaser let go may run."""
    held = Held(card=CARD, reason="limits", lane="lane")
    assert policy.claim(HOLD, held, FENCE) == Superseded()
    assert policy.hand_back(HOLD, held, FENCE) == Superseded()


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        pytest.param(started("mine"), Claimed, id="my claim stands, its answer was lost"),
        pytest.param(started(delivery=1), Claim, id="an older delivery of the message: take over"),
        pytest.param(started(delivery=2), Silence, id="the same number: the count was lost"),
        pytest.param(started(delivery=3), Silence, id="a newer delivery holds it"),
        pytest.param(started(work_seq=78), Superseded, id="a copy of the message holds it"),
        pytest.param(started(release=4), Superseded, id="another release"),
        pytest.param(Queued(card=CARD), Superseded, id="released anew"),
        *(pytest.param(ending(kind, card()), Superseded, id=f"another made it {kind}") for kind in ENDS),
    ],
)
def test_the_last_event_says_what_a_refused_claim_means(last: Event, verdict: type) -> None:
    """Four answers; the table has every kind of event."""
    assert type(policy.claim(HOLD, last, 12)) is verdict


def test_a_takeover_is_appended_on_the_claim_that_it_ends_and_counts_a_crash() -> None:
    """Crashes are counted apart from errors."""
    verdict = policy.claim(HOLD, started(crashes=6), 12)
    assert isinstance(verdict, Claim)
    assert (verdict.expect_seq, verdict.event.card.crashes, verdict.event.card.errors) == (12, 7, 1)


def test_a_task_without_history_is_never_run() -> None:
    """Nobody can say how often it has run."""
    verdict = policy.claim(HOLD, None, 0)
    assert isinstance(verdict, policy.HistoryLost)
    assert (verdict.event.failure.reason, verdict.event.item) == ("history_lost", ITEM)


@pytest.mark.parametrize("judge", [policy.commit, policy.hand_back])
@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        pytest.param(None, Append(0, 2), id="the history is gone, the outcome is kept"),
        pytest.param(started("mine", crashes=5), Append(12, 5), id="my claim stands: append on it"),
        *(pytest.param(ending(kind, card("mine")), Committed(), id=f"mine: {kind}") for kind in OUTCOMES),
        *(
            pytest.param(
                ending(kind, card("mine", cause=Cause(stream="EVENTS", seq=11))), Committed(), id=f"decided: {kind}"
            )
            for kind in ("failed", "expired")
        ),
        pytest.param(
            ending("cancelled", card("mine", cause=Cause(stream="CONTROL", seq=9))),
            Superseded(),
            id="cancelled by command",
        ),
        pytest.param(ending("failed", card("mine")), Superseded(), id="ended at the delivery limit"),
        pytest.param(started(release=4), Superseded(), id="another release runs"),
        *(pytest.param(ending(kind, card()), Superseded(), id=f"another's: {kind}") for kind in ENDS),
        pytest.param(Retrying(card=CARD, due_at=1.0), Superseded(), id="the next attempt waits"),
    ],
)
def test_the_last_event_says_whose_outcome_counts(judge: Any, last: Event | None, verdict: object) -> None:
    """Committed is said of an outcome that stands, and of no other."""
    assert judge(HOLD, last, 12) == verdict


def test_a_fenced_execution_is_silent() -> None:
    """An ack would remove the message that its successor holds."""
    assert policy.commit(HOLD, started(delivery=3), 12) == Silence()
    assert policy.commit(HOLD, started(delivery=1), 12) == Silence()


def test_a_hand_back_without_claim_takes_over_as_a_claim_would() -> None:
    """On the release, or on the claim of a lost execution, which is a crash."""
    assert policy.hand_back(HOLD, Queued(card=CARD), FENCE) == Append(FENCE, 2)
    assert policy.hand_back(HOLD, started(delivery=1, crashes=2), 12) == Append(12, 3)
    assert policy.hand_back(HOLD, started(delivery=2), 12) == Silence()
    assert policy.hand_back(HOLD, started(work_seq=78), 12) == Superseded()


@pytest.mark.parametrize(
    ("reason", "errors"),
    [("error", 2), ("timeout", 2), ("fatal", 2), ("payload_mismatch", 2), ("expired", 1), ("budget_exhausted", 1), ("history_lost", 1)],
)  # fmt: skip
def test_only_what_the_handler_did_wrong_counts_as_an_error(reason: Any, errors: int) -> None:
    """Everything else has its own counter or none."""
    event = policy.failed(HOLD, 3, Failure(reason=reason))
    assert (event.card.errors, event.card.crashes, event.item) == (errors, 3, ITEM)


def test_crashes_on_an_outcome_are_those_of_the_claim_that_it_stands_on() -> None:
    """A copy with another count, or the very same event."""
    outcome = Completed(card=policy.card_of(HOLD, 2))
    assert policy.with_crashes(outcome, 2) is outcome
    assert policy.with_crashes(outcome, 4).card.crashes == 4


@pytest.mark.parametrize(("crashes", "ends"), [(0, False), (2, False), (3, True), (40, True)])
def test_task_that_crashed_too_often_is_given_up(crashes: int, ends: bool) -> None:
    """The end stands where the next claim would, and counts the crashes but no error."""
    event = started("mine", crashes=crashes)
    given_up = policy.given_up(HOLD, Claim(event, 12))
    assert (given_up is not None) is ends
    if given_up is not None:
        assert (given_up.failure.reason, given_up.card.crashes, given_up.card.errors) == ("worker_crashed", crashes, 1)
        assert given_up.item == ITEM


def test_only_the_third_delivery_makes_a_suspect() -> None:
    """One lost worker says nothing about the tasks it had."""
    held = [msgspec.structs.replace(HOLD, delivery=number) for number in (1, 2, 3, 9)]
    assert [policy.is_suspect(hold) for hold in held] == [False, False, True, True]
