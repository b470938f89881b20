"""Work at its delivery limit: ended once, and only where the task still waits for it."""

from __future__ import annotations

import msgspec

from millstream.policy.sweep import Bury, End, Nothing, dead_letter, end_of_work, is_overtaken
from millstream_schemas.events import Cause, Completed, Event, Failed, Queued, Released, Started, WorkItem
from tests.support.samples import CARD, ENVELOPE

FENCE, CAUSE = 40, Cause(stream="MILL_WORK", seq=7)
WAITING = msgspec.structs.replace(CARD, release=0)
RUNNING = msgspec.structs.replace(CARD, release=FENCE, delivery=50)
ITEM = WorkItem(fence=FENCE, card=WAITING, envelope=ENVELOPE)


def test_a_task_that_still_waits_fails_as_crashed_with_everything_to_run_it_again() -> None:
    """Whether its last execution began or not."""
    running = Started(card=RUNNING, worker_id="w")
    for last, seq in ((Queued(card=WAITING), FENCE), (Released(card=WAITING), FENCE), (running, FENCE + 1)):
        verdict = end_of_work(ITEM, CAUSE, last, seq)
        assert isinstance(verdict, End)
        assert (verdict.expect_seq, verdict.event.reason, verdict.event.card.cause) == (seq, "worker_crashed", CAUSE)
        letter = dead_letter(verdict.event, ITEM, 5.0)
        assert (letter.envelope, letter.failed_at, letter.reason) == (ENVELOPE, 5.0, "worker_crashed")


def test_an_end_that_stands_is_buried_again_after_a_crash() -> None:
    """The dead letter may be missing yet."""
    verdict = end_of_work(ITEM, CAUSE, Started(card=RUNNING, worker_id="w"), FENCE + 1)
    assert isinstance(verdict, End)
    assert end_of_work(ITEM, CAUSE, verdict.event, FENCE + 2) == Bury(verdict.event)


def test_an_end_whose_task_was_submitted_again_is_buried_all_the_same() -> None:
    """A crash between the end and its dead letter; a replay has proven that the letter was there."""
    verdict = end_of_work(ITEM, CAUSE, Started(card=RUNNING, worker_id="w"), FENCE + 1)
    assert isinstance(verdict, End)
    submitted = msgspec.structs.replace(
        WAITING, generation=WAITING.generation + 1, origin=Cause(stream="MILL_INBOX", seq=99)
    )
    replayed = msgspec.structs.replace(WAITING, generation=WAITING.generation + 1)
    for card, expected in ((submitted, Bury(verdict.event)), (replayed, Nothing())):
        last = Queued(card=card)
        assert is_overtaken(ITEM, last)
        past: list[tuple[int, Event]] = [(FENCE, Queued(card=WAITING)), (FENCE + 2, verdict.event), (FENCE + 5, last)]
        assert end_of_work(ITEM, CAUSE, last, FENCE + 5, past) == expected
    assert not is_overtaken(ITEM, verdict.event)
    assert not is_overtaken(ITEM, None)


def test_a_task_that_moved_on_is_left_alone() -> None:
    """It is over, it was released anew, or its history is gone."""
    others = msgspec.structs.replace(RUNNING, cause=Cause(stream="X", seq=1))
    verdict = end_of_work(ITEM, CAUSE, Queued(card=WAITING), FENCE)
    assert isinstance(verdict, End)
    ended = Failed(card=others, reason="fatal", failure=verdict.event.failure)
    for last in (None, Queued(card=WAITING), Completed(card=RUNNING), ended):
        assert end_of_work(ITEM, CAUSE, last, FENCE + 9) == Nothing()
