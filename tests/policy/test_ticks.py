"""Ticks: what a timer that fired means beside the last event of its task."""

from __future__ import annotations

import msgspec
import pytest

from millstream.policy import ticks as policy
from millstream.policy.holding import FURTHEST, ToHeld, ToWork, held, onward
from millstream.policy.ticks import Append, Done, GoOn
from millstream_schemas.codec import decode_envelope
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import (
    AttemptFailed,
    Cancelled,
    Card,
    Cause,
    Deadline,
    Event,
    Expired,
    Held,
    Queued,
    Released,
    Retrying,
    Scheduled,
    Started,
    Usage,
    WorkItem,
)

INBOX, SEEN, TICK = Cause(stream="INBOX", seq=1), Cause(stream="EVENTS", seq=9), Cause(stream="WORK", seq=70)
CARD = Card(
    key="k", tenant_id="acme", task_id="t", queue="q", task_type="a", payload_hash="h", origin=INBOX, cause=SEEN, attempt=2,
    throttles=1, waiting_since=5.0, waiting_for="throttled",
)  # fmt: skip
FIRST = msgspec.structs.replace(CARD, cause=INBOX)
ENVELOPE = Envelope(task_type="a")
USAGE = Usage(tokens_in=3)
ITEM = WorkItem(fence=10, card=CARD, envelope=ENVELOPE, lane="lane", limits=["x", "y"], due_at=50.0, usage=USAGE)
HELD = held(CARD, "lane", ["x", "y"], again=True)
SCHEDULED = Scheduled(card=CARD, due_at=50.0, lane="lane", limits=["x", "y"])


# --- due ------------------------------------------------------------------------------------------


def test_a_task_that_is_due_is_held_on_the_event_that_set_its_timer() -> None:
    """In its own lane, with the tick as its cause, and its counters as they were."""
    append = policy.first_hold(ITEM, TICK)
    assert (append.expect_seq, append.event.card) == (10, msgspec.structs.replace(CARD, cause=TICK))
    assert isinstance(append.event, Held)
    assert (append.event.lane, append.event.limits, append.event.reason) == ("lane", ["x", "y"], "limits")
    for last in (SCHEDULED, Retrying(card=CARD, due_at=50.0)):
        assert policy.hold(ITEM, TICK, last, 10) == append


def test_only_what_ran_or_waited_before_goes_before_its_lane() -> None:
    """A delayed submit comes to its lane for the first time."""
    again = policy.first_hold(ITEM, TICK).event
    first = policy.first_hold(msgspec.structs.replace(ITEM, card=FIRST), TICK).event
    assert isinstance(again, Held)
    assert isinstance(first, Held)
    assert (again.again, first.again) == (True, False)


def test_a_redelivered_tick_goes_on_with_its_own_event() -> None:
    """Its entry may be missing yet."""
    mine = policy.first_hold(ITEM, TICK).event
    assert isinstance(mine, Held)
    assert policy.hold(ITEM, TICK, mine, 11) == GoOn(mine, 11)
    follow_up = policy.follow_up(mine, 11, ITEM)
    assert isinstance(follow_up, ToHeld)
    assert (follow_up.item.fence, follow_up.item.card, follow_up.item.usage) == (11, mine.card, USAGE)
    assert (follow_up.item.lane, follow_up.item.limits, follow_up.again) == ("lane", ["x", "y"], True)


@pytest.mark.parametrize(
    "last",
    [
        msgspec.structs.replace(HELD, card=msgspec.structs.replace(CARD, cause=Cause(stream="WORK", seq=69))),
        Released(card=CARD),
        Started(card=CARD, worker_id="w"),
        Cancelled(card=CARD),
        Scheduled(card=CARD, due_at=90.0, lane="lane"),
    ],
)
def test_a_tick_of_a_task_that_has_moved_on_does_nothing(last: Event) -> None:
    """A second copy of the tick, a cancel, a later wait."""
    assert policy.hold(ITEM, TICK, last, 12) == Done()


def test_a_task_whose_events_are_gone_takes_the_way_of_a_lost_execution() -> None:
    """Which is decided as such, and keeps its envelope in a dead letter."""
    verdict = policy.hold(ITEM, TICK, None, 0)
    assert isinstance(verdict, Append)
    event = verdict.event
    assert isinstance(event, AttemptFailed)
    assert (verdict.expect_seq, event.failure.reason, event.item, event.card.cause) == (0, "history_lost", ITEM, TICK)
    assert policy.hold(ITEM, TICK, event, 1) == Done()


# --- deadlines ------------------------------------------------------------------------------------

AT_DEADLINE = Deadline(tenant_id="acme", key="k", fence=20)


def test_a_task_that_is_still_held_at_its_deadline_expires() -> None:
    """On the very event that set the timer."""
    verdict = policy.expire(AT_DEADLINE, TICK, HELD, 20)
    assert isinstance(verdict, Append)
    assert isinstance(verdict.event, Expired)
    assert (verdict.expect_seq, verdict.event.card) == (20, msgspec.structs.replace(CARD, cause=TICK))
    assert policy.expire(AT_DEADLINE, TICK, verdict.event, 21) == Done()


@pytest.mark.parametrize(
    ("last", "seq"),
    [(HELD, 25), (Released(card=CARD), 21), (Started(card=CARD, worker_id="w"), 22), (None, 0), (SCHEDULED, 20)],
)
def test_a_deadline_that_finds_the_task_elsewhere_leaves_it_alone(last: Event | None, seq: int) -> None:
    """Held anew it has a timer of its own; released, its worker looks at the deadline."""
    assert policy.expire(AT_DEADLINE, TICK, last, seq) == Done()


def test_an_entry_asks_for_a_timer_where_the_task_has_a_deadline_that_a_server_can_count() -> None:
    """Nanoseconds in 64 bits end in 2262."""
    soon, _ = decode_envelope(b'{"task_type":"a","deadline_at":"2030-01-01T00:00:00Z"}')
    far, _ = decode_envelope(b'{"task_type":"a","deadline_at":"2261-01-01T00:00:00Z"}')
    timers = [onward(HELD, 11, 0.0, envelope=envelope) for envelope in (soon, far, ENVELOPE)]
    assert [one.deadline_at for one in timers if isinstance(one, ToHeld)] == [1_893_456_000.0, None, None]
    assert FURTHEST < 2**63 / 1e9


# --- what follows an event ------------------------------------------------------------------------


def test_an_event_says_by_itself_where_its_task_goes() -> None:
    """Lane and limits are those of the event, whatever is handed in; only a retry keeps what it came with."""
    came = {"limits": ("old",), "lane": "before"}
    queued = onward(Queued(card=CARD), 11, 40.0, envelope=ENVELOPE, limits=("old",), lane="before")
    assert isinstance(queued, ToWork)
    assert (queued.due_at, queued.item.lane, queued.item.limits) == (None, "", [])
    scheduled = onward(SCHEDULED, 11, 40.0, envelope=ENVELOPE, limits=("old",), lane="before")
    assert isinstance(scheduled, ToWork)
    assert (scheduled.due_at, scheduled.item.lane, scheduled.item.limits) == (50.0, "lane", ["x", "y"])
    retrying = onward(Retrying(card=CARD, due_at=50.0), 11, 40.0, envelope=ENVELOPE, limits=("old",), lane="before")
    assert isinstance(retrying, ToWork)
    assert (retrying.item.lane, retrying.item.limits) == (came["lane"], list(came["limits"]))


def test_what_is_due_at_once_goes_to_work_unless_it_has_a_lane() -> None:
    """With a lane it has to be held, which the tick does."""
    at_once = Retrying(card=CARD, due_at=40.0)
    plain, laned = (onward(at_once, 11, 40.0, envelope=ENVELOPE, lane=lane) for lane in ("", "lane"))
    assert isinstance(plain, ToWork)
    assert isinstance(laned, ToWork)
    assert (plain.due_at, laned.due_at, laned.item.due_at) == (None, 40.0, 40.0)


def test_a_lane_without_limits_is_held_for_fairness() -> None:
    """The reason is what people read."""
    assert held(CARD, "lane", (), again=False).reason == "fairness"
    assert held(CARD, "lane", ("x",), again=False).reason == "limits"
