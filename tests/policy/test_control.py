"""Commands: a cancel ends what has no outcome, a replay revives what failed, and each acts once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millstream.policy.control import Append, GoOn, TooLate, cancel, is_later_generation, keys_of, replay
from millstream.policy.metering import Metering
from millstream_schemas.commands import Cancel
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import (
    Cancelled,
    Card,
    Cause,
    Completed,
    DeadLetter,
    Event,
    Expired,
    Failed,
    Failure,
    Held,
    Queued,
    Released,
    Retrying,
    Scheduled,
    Started,
)
from millstream_schemas.keys import derive_key

COMMAND, CAUSE = Cancel(tenant_id="acme", task_id="t", by="ada", note="why not"), Cause(stream="CONTROL", seq=5)
INBOX = Cause(stream="INBOX", seq=1)
FAILURE = Failure(reason="fatal")
CARD = Card(
    key="k", tenant_id="acme", task_id="t", queue="q", task_type="a", payload_hash="h", origin=INBOX, cause=INBOX, attempt=3,
    errors=2, crashes=1, interruptions=1, throttles=1, release=9, execution_id="e", work_seq=8, delivery=2, waiting_since=1.0,
)  # fmt: skip
FAILED = Failed(card=CARD, reason="fatal", failure=FAILURE)
LETTER = DeadLetter(card=CARD, reason="fatal", failure=FAILURE, envelope=Envelope(task_type="a"))


def of_command(generation: int = 1) -> Card:
    """The card of an event that the command wrote."""
    return msgspec.structs.replace(CARD, cause=CAUSE, generation=generation)


@pytest.mark.parametrize(
    "last",
    [
        Queued(card=CARD),
        Held(card=CARD, reason="limits", lane="lane"),
        Released(card=CARD),
        Scheduled(card=CARD, due_at=1.0),
        Retrying(card=CARD, due_at=1.0),
        Started(card=CARD, worker_id="w"),
    ],
)
def test_a_task_without_outcome_is_cancelled_where_it_stands(last: Event) -> None:
    """Its counters are kept; the event says who asked."""
    verdict = cancel(COMMAND, CAUSE, last, 12)
    assert isinstance(verdict, Append)
    assert verdict.expect_seq == 12
    assert verdict.event == Cancelled(card=of_command(), by="ada", note="why not")


@pytest.mark.parametrize("last", [Completed(card=CARD), FAILED, Expired(card=CARD), Cancelled(card=CARD)])
def test_a_task_that_is_over_stays_as_it_is(last: Event) -> None:
    """Also when another command cancelled it."""
    assert isinstance(cancel(COMMAND, CAUSE, last, 12), TooLate)


def test_a_redelivered_cancel_goes_on_with_its_own_event() -> None:
    """A crash between the event and what follows loses nothing."""
    mine = Cancelled(card=of_command())
    assert cancel(COMMAND, CAUSE, mine, 13) == GoOn(mine, 13)


def test_a_cancel_that_overtook_its_submit_stands_at_zero() -> None:
    """Under the key that the id will have."""
    verdict = cancel(COMMAND, CAUSE, None, 0)
    assert isinstance(verdict, Append)
    assert (verdict.expect_seq, verdict.event.card.key) == (0, derive_key("id", "acme", "t"))
    assert verdict.event.card.origin == CAUSE


def test_a_redelivered_command_leaves_later_generations_alone() -> None:
    """Its first carrying out is in the history, which is asked for only then."""
    second = Queued(card=msgspec.structs.replace(CARD, generation=2))
    past: list[Any] = [Queued(card=CARD), Cancelled(card=of_command()), second]
    assert is_later_generation(second)
    assert not is_later_generation(Queued(card=CARD))
    assert not is_later_generation(None)
    assert isinstance(cancel(COMMAND, CAUSE, second, 14, past), TooLate)
    assert isinstance(cancel(COMMAND, Cause(stream="CONTROL", seq=6), second, 14, past), Append)
    failed_again = msgspec.structs.replace(FAILED, card=msgspec.structs.replace(CARD, generation=2))
    replayed: list[Any] = [FAILED, Queued(card=of_command(2)), failed_again]
    assert isinstance(replay(CAUSE, failed_again, 14, LETTER, replayed), TooLate)
    assert isinstance(replay(Cause(stream="CONTROL", seq=6), failed_again, 14, LETTER, replayed), Append)


def test_a_replay_is_the_next_generation_with_fresh_counters() -> None:
    """Of the same task: key, origin and payload stay."""
    verdict = replay(CAUSE, FAILED, 12, LETTER)
    assert isinstance(verdict, Append)
    card = verdict.event.card
    assert (verdict.expect_seq, card.generation, card.attempt, card.cause) == (12, 2, 1, CAUSE)
    assert (card.errors, card.crashes, card.interruptions, card.throttles, card.waiting_since) == (0, 0, 0, 0, 0.0)
    assert (card.release, card.execution_id, card.work_seq, card.delivery) == (0, "", 0, 0)
    assert (card.key, card.origin, card.payload_hash) == (CARD.key, CARD.origin, CARD.payload_hash)
    assert replay(CAUSE, verdict.event, 13, None) == GoOn(verdict.event, 13)


def test_a_replay_of_a_metered_task_is_held_as_it_is_metered_by_now() -> None:
    """Behind those of its lane: a flood of replays must not push aside what is new."""
    metered = Metering(("x",), "lane", "limits")
    verdict = replay(CAUSE, FAILED, 12, LETTER, (), metered)
    assert isinstance(verdict, Append)
    event = verdict.event
    assert isinstance(event, Held)
    assert (event.lane, event.limits, event.reason, event.again) == ("lane", ["x"], "limits", False)
    assert (event.card.generation, event.card.attempt, event.card.cause) == (2, 1, CAUSE)
    assert replay(CAUSE, event, 13, None, (), None) == GoOn(event, 13)


@pytest.mark.parametrize("last", [None, Queued(card=CARD), Completed(card=CARD), Cancelled(card=CARD)])
def test_only_a_failed_task_with_its_envelope_is_replayed(last: Event | None) -> None:
    """There is nothing else to run again."""
    assert isinstance(replay(CAUSE, last, 12, LETTER), TooLate)
    assert isinstance(replay(CAUSE, FAILED, 12, None), TooLate)
    raw = msgspec.structs.replace(LETTER, envelope=None)
    assert isinstance(replay(CAUSE, FAILED, 12, raw), TooLate)


def test_a_task_is_looked_for_under_its_key_else_its_id_else_as_a_key() -> None:
    """A derived key is also the task id of tasks without one."""
    key, by_id = "a" * 26, derive_key("id", "acme", "t")
    assert keys_of("acme", "t", key) == (key,)
    assert keys_of("acme", "t", None) == (by_id,)
    assert keys_of("acme", key, None) == (derive_key("id", "acme", key), key)
