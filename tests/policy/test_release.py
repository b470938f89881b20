"""How much may be released, and what each last event means for an entry of HELD."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy import release
from millstream.policy.release import (
    Append,
    Entry,
    GoOn,
    Pause,
    Remove,
    chosen,
    overdue,
    paused,
    queue_room,
    standing,
)
from millstream.policy.stops import Stop
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import (
    Cancelled,
    Card,
    Cause,
    Event,
    Expired,
    Failed,
    Failure,
    Held,
    Queued,
    Released,
    Started,
    WorkItem,
)
from millstream_schemas.lifecycle import RELEASING_KINDS, TRANSITIONS
from millstream_schemas.permits import Gate, GatePart

NOW = 1_800_000_000.0
FENCE = 40
CARD = Card(
    key="k" * 26,
    tenant_id="acme",
    task_id="t",
    queue="q",
    task_type="x",
    payload_hash="h",
    origin=Cause(stream="MILL_INBOX", seq=3),
    cause=Cause(stream="MILL_INBOX", seq=3),
)


def entry(*, seq: int = 7, at: float = NOW, limits: tuple[str, ...] = ("llm",), **changes: object) -> Entry:
    """An entry of HELD whose task is held by the event at `FENCE`."""
    card = msgspec.structs.replace(CARD, **changes) if changes else CARD
    item = WorkItem(fence=FENCE, card=card, envelope=Envelope(task_type="x"), limits=list(limits), lane="lane")
    return Entry("mill.held.q.normal.lane", "MILL_HELD", seq, at, item)


def with_deadline(one: Entry, at: float) -> Entry:
    """The same entry with a deadline."""
    envelope = Envelope(task_type="x", deadline_at=datetime.fromtimestamp(at, UTC))
    return Entry(one.lane, one.stream, one.seq, one.at, msgspec.structs.replace(one.item, envelope=envelope))


def gate(**changes: object) -> Gate:
    """An open gate without bounds, unless said otherwise."""
    return msgspec.structs.replace(Gate(keys=("llm",), open=True), **changes)


# --- how many -----------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(0, 2000), st.integers(0, 500))
def test_a_queue_is_filled_to_its_depth_and_never_beyond(slots: int, starts: int, waiting: int) -> None:
    """Two for each slot and what will start within half a second, at most 256; nothing where nobody works."""
    room = queue_room(slots, starts, waiting)
    assert room >= 0
    if slots == 0:
        assert room == 0
    else:
        assert room + waiting <= max(256, waiting)
        assert room == 0 or room + waiting == min(256, 2 * slots + starts)


def test_a_pool_pauses_for_longer_each_time_its_tasks_come_back() -> None:
    """Those that come back together count once, and there is a longest pause."""
    first = paused(None, 100.0)
    assert paused(first, 100.1) is first
    assert paused(first, 100.5) == Pause(101.5, 1.0)
    pause, now = first, 100.0
    for _ in range(30):
        now = pause.until
        pause = paused(pause, now)
    assert pause.until - now == release.LONGEST_PAUSE_S


@pytest.mark.parametrize(
    ("before", "after", "news"),
    [
        (None, gate(), True),
        (gate(), None, True),
        (None, None, False),
        (gate(), gate(open=False), True),
        (gate(open=False, wait_s=3.0), gate(open=False, wait_s=2.0), False),
        (gate(rate_per_s=10.0), gate(rate_per_s=10.5), False),
        (gate(rate_per_s=10.0), gate(rate_per_s=12.0), True),
        (gate(rate_per_s=10.0), gate(), True),
        (gate(places=3), gate(places=4), True),
    ],
)
def test_news_of_a_gate_is_what_changes_how_much_may_start(before: Gate | None, after: Gate | None, news: bool) -> None:
    """A wait that grows shorter is none."""
    assert release.is_news(before, after) is news


def test_news_of_a_key_is_what_only_it_lets_through() -> None:
    """Others of the pool are none, nor is a pool that was not known; the one that closed a gate is when that opens."""
    slow, fast = GatePart(requests=1.0), GatePart(requests=10.0, tokens=500.0)
    before = Gate(keys=("llm", "tenant/a"), open=True, parts=(slow, fast))
    assert release.changed_keys(None, before) == []
    assert release.changed_keys(before, before) == []
    for part in (GatePart(requests=5.0, tokens=500.0), GatePart(requests=10.0), GatePart(requests=10.0, places=1)):
        after = msgspec.structs.replace(before, parts=(slow, part))
        assert release.changed_keys(before, after) == ["tenant/a"]
        assert release.is_news(before, after)
    little = msgspec.structs.replace(before, parts=(GatePart(requests=1.05), fast))
    assert not release.is_news(before, little)
    closed = msgspec.structs.replace(before, open=False, reason="paused", limiting_key="llm")
    assert release.changed_keys(closed, before) == ["llm"]
    assert release.changed_keys(before, closed) == []


# --- what is appended ---------------------------------------------------------------------------------


def test_a_chosen_entry_is_released_with_itself_as_cause() -> None:
    """What the wait for permits has counted so far stays on the card."""
    one = entry(waiting_since=NOW - 60, waiting_for="throttled", throttles=3, release=11, execution_id="e", work_seq=5)
    event = chosen(one, NOW)
    assert isinstance(event, Released)
    card = event.card
    assert card.cause == Cause(stream="MILL_HELD", seq=7)
    assert (card.release, card.execution_id, card.work_seq) == (0, "", 0)
    assert (card.waiting_since, card.waiting_for, card.throttles) == (NOW - 60, "throttled", 3)
    item = release.work_item(one, event, 50)
    assert (item.fence, item.card, item.limits, item.lane) == (50, card, ["llm"], "lane")


def test_an_entry_whose_deadline_has_passed_expires_instead() -> None:
    """Chosen or not."""
    late = with_deadline(entry(), NOW - 1)
    assert isinstance(chosen(late, NOW), Expired)
    assert isinstance(overdue(late, NOW, 100.0, None), Expired)
    in_time = with_deadline(entry(), NOW + 1)
    assert isinstance(chosen(in_time, NOW), Released)
    assert overdue(in_time, NOW, 100.0, None) is None


def test_an_entry_that_limits_hold_up_for_too_long_ends_with_its_dead_letter() -> None:
    """What counts as held up is tested with `Stop`."""
    shut = Stop(NOW - 101, NOW, "limit llm: paused")
    assert overdue(entry(at=NOW - 100), NOW, 100.0, shut) is None
    one = entry(at=NOW - 101)
    event = overdue(one, NOW, 100.0, shut)
    assert isinstance(event, Failed)
    assert (event.reason, event.card.cause) == ("throttled_out", one.cause)
    letter = release.dead_letter(one, event, NOW)
    assert (letter.reason, letter.envelope, letter.failed_at) == ("throttled_out", one.item.envelope, NOW)


def test_a_fair_queue_throttles_nobody() -> None:
    """A task without limits waits behind others, not for a provider."""
    assert overdue(entry(at=NOW - 1000, limits=()), NOW, 100.0, Stop(0.0, NOW, "")) is None


# --- what the last event means ------------------------------------------------------------------------


def test_an_append_that_was_not_stored_is_made_again() -> None:
    """The held event is still the last."""
    one = entry()
    wanted = chosen(one, NOW)
    last = Held(card=CARD, reason="limits", lane="lane")
    assert standing(one, wanted, last, FENCE) == Append(wanted, FENCE)


OWN = msgspec.structs.replace(CARD, cause=entry().cause)


@pytest.mark.parametrize(
    "last",
    [Released(card=OWN), Expired(card=OWN), Failed(card=OWN, reason="throttled_out", failure=Failure(reason="error"))],
)
def test_an_event_of_this_very_entry_is_followed_up(last: release.Written) -> None:
    """An answer that was lost, or a releaser that died between the event and what follows."""
    one = entry()
    assert standing(one, chosen(one, NOW), last, 44) == GoOn(last, 44)


@pytest.mark.parametrize(
    "last",
    [
        Released(card=msgspec.structs.replace(CARD, cause=Cause(stream="MILL_HELD", seq=6))),
        Started(card=msgspec.structs.replace(CARD, cause=Cause(stream="MILL_WORK", seq=7)), worker_id="w"),
        Cancelled(card=msgspec.structs.replace(CARD, cause=Cause(stream="MILL_CONTROL", seq=7))),
        Held(card=msgspec.structs.replace(CARD, cause=Cause(stream="MILL_EVENTS", seq=43)), reason="limits", lane="l"),
        Queued(card=CARD),
    ],
)
def test_an_entry_that_the_task_has_left_behind_is_only_removed(last: Event) -> None:
    """Cancelled, superseded, or released by a second entry of the same event."""
    one = entry()
    assert standing(one, chosen(one, NOW), last, 44) == Remove()


@pytest.mark.parametrize(
    ("origin", "is_owed"), [(Cause(stream="MILL_INBOX", seq=99), True), (CARD.origin, False)], ids=["submit", "replay"]
)
def test_a_dead_letter_is_owed_although_the_next_generation_has_begun(origin: Cause, is_owed: bool) -> None:
    """By a submit; a replay has proven that the letter was there. Any other end owes none."""
    one = entry()
    failed = Failed(card=OWN, reason="throttled_out", failure=Failure(reason="error"))
    last = Held(card=msgspec.structs.replace(CARD, generation=2, origin=origin), reason="limits", lane="l")
    assert release.is_overtaken(one, last)
    assert not release.is_overtaken(one, failed)
    assert not release.is_overtaken(one, None)
    held = Held(card=CARD, reason="limits", lane="lane")
    past: list[tuple[int, Event]] = [(FENCE, held), (44, failed), (45, last)]
    assert standing(one, chosen(one, NOW), last, 45, past) == (GoOn(failed, 44) if is_owed else Remove())
    expired: list[tuple[int, Event]] = [(FENCE, held), (44, Expired(card=OWN)), (45, last)]
    assert standing(one, chosen(one, NOW), last, 45, expired) == Remove()


def test_a_task_without_events_ends_as_lost() -> None:
    """It is never run: nobody can say whether it was before."""
    verdict = standing(entry(), chosen(entry(), NOW), None, 0)
    assert isinstance(verdict, Append)
    assert verdict.expect_seq == 0
    assert isinstance(verdict.event, Failed)
    assert verdict.event.reason == "history_lost"


def test_every_event_that_may_follow_a_release_counts_as_a_begin() -> None:
    """Else a task would hold a place in the depth of its queue for ever."""
    waiting = {"queued", "held", "scheduled", "retrying", "released"}
    follows = set(TRANSITIONS["queued"]) | set(TRANSITIONS["processing"])
    assert set(release.BEGUN_KINDS) == follows - waiting
    assert "released" in RELEASING_KINDS
