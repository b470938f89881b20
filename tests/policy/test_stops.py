"""How long limits have held up a task: behind a closed gate, not in line where its lane moves."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from millstream.policy.release import Entry, chosen, overdue
from millstream.policy.stops import Stop, held_up_s, in_line_s, seen
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import Expired, Failed, Released, WorkItem
from millstream_schemas.permits import Gate
from tests.support.samples import CARD

NOW = 1_800_000_000.0
LIMIT_S = 100.0


def entry(*, at: float = NOW, deadline: float | None = None, since: float = 0.0, waiting_for: str = "") -> Entry:
    """An entry of HELD that needs `llm`."""
    card = msgspec.structs.replace(CARD, waiting_since=since, waiting_for=waiting_for)
    deadline_at = None if deadline is None else datetime.fromtimestamp(deadline, UTC)
    envelope = Envelope(task_type="x", deadline_at=deadline_at)
    item = WorkItem(fence=40, card=card, envelope=envelope, limits=["llm"], lane="lane")
    return Entry("mill.held.q.normal.lane", "MILL_HELD", 7, at, item)


def gate(reason: str = "") -> Gate:
    """A gate that is open, or closed for a reason."""
    return Gate(keys=("llm",), open=not reason, reason=reason, limiting_key="llm" if reason else "", wait_s=9.0)


def looked(*looks: tuple[float, Gate | None]) -> Stop | None:
    """What is remembered after looks at these times."""
    stop: Stop | None = None
    for at, found in looks:
        stop = seen(stop, found, at)
    return stop


def shut(for_s: float, reason: str = "paused") -> Stop | None:
    """A gate that has been closed for so long, and is."""
    return looked((NOW - for_s, gate(reason)), (NOW, gate(reason)))


def throttled(at: float, since: float) -> Entry:
    """An entry of a task that workers have sent back since then, held since `at`."""
    return entry(at=at, since=since, waiting_for="throttled")


def test_an_open_gate_leaves_nothing_to_remember() -> None:
    """Nor does one that nobody told of."""
    assert looked((1.0, gate()), (2.0, None)) is None


def test_a_closed_gate_is_remembered_from_its_first_sight() -> None:
    """With why; a governor that is silent for a while begins nothing anew, but nobody is ended on its silence."""
    stop = looked((1.0, gate("paused")), (5.0, gate("broken")))
    assert stop == Stop(1.0, 5.0, "limit llm: broken")
    silent = seen(stop, None, 6.0)
    assert held_up_s(silent, 0.0, 0.0, 6.0) is None
    assert seen(silent, gate("paused"), 9.0) == Stop(1.0, 9.0, "limit llm: paused")
    opened = seen(stop, gate(), 7.0)
    assert held_up_s(opened, 0.0, 0.0, 7.0) is None
    assert seen(opened, gate("paused"), 9.0) == Stop(9.0, 9.0, "limit llm: paused")


def test_who_stands_in_line_of_a_lane_that_moves_is_never_ended() -> None:
    """However long: one that never came back, and one that did."""
    for stop in (None, looked((NOW - 9000, gate("paused")), (NOW - 8000, gate()))):
        assert overdue(entry(at=NOW - 9000), NOW, LIMIT_S, stop) is None
        assert overdue(throttled(NOW - 9000, NOW - 9100), NOW, LIMIT_S, stop) is None


def test_the_end_of_a_budgets_period_is_waited_for() -> None:
    """A month may be long; a quota of the provider's is no such period, since it may never be raised."""
    spent = shut(20 * 86400.0, "budget_exhausted")
    assert overdue(entry(at=NOW - 20 * 86400), NOW, LIMIT_S, spent) is None
    assert isinstance(overdue(entry(at=NOW - 20 * 86400), NOW, LIMIT_S, shut(101, "exhausted")), Failed)
    then_paused = looked((NOW - 9000, gate("budget_exhausted")), (NOW - 50, gate("paused")), (NOW, gate("paused")))
    assert overdue(entry(at=NOW - 9000), NOW, LIMIT_S, then_paused) is None


@pytest.mark.parametrize(
    ("held_s", "closed_s", "throttled_s", "ended"),
    [
        (9000, 100, 0, False),
        (9000, 101, 0, True),
        (100, 9000, 0, False),
        (101, 9000, 0, True),
        (5, 9000, 100, False),
        (5, 9000, 101, True),
        (9000, 5, 9095, False),
        (9000, 5, 9096, True),
    ],
)
def test_time_behind_a_closed_gate_counts_and_time_put_off_before(
    held_s: float, closed_s: float, throttled_s: float, ended: bool
) -> None:
    """Together; neither the time before the gate closed nor the time before it was held counts twice."""
    since = NOW - throttled_s if throttled_s else 0.0
    one = entry(at=NOW - held_s, since=since, waiting_for="throttled" if throttled_s else "")
    found = overdue(one, NOW, LIMIT_S, shut(closed_s))
    assert isinstance(found, Failed) if ended else found is None


def test_who_is_ended_is_told_what_happened_why_and_what_to_do() -> None:
    """How long, by which limit, and the ways out of it."""
    found = overdue(entry(at=NOW - 90_000), NOW, 86400.0, shut(90_000))
    assert isinstance(found, Failed)
    for part in ("held up by limits for 25 h 0 min", "limit llm: paused", "deadline", "`max_throttle_s`", "Replay"):
        assert part in found.failure.message
    missing = overdue(entry(at=NOW - 90_000), NOW, 86400.0, shut(90_000, "unknown_limit"))
    assert isinstance(missing, Failed)
    assert "`millstream config apply FILE`" in missing.failure.message


def test_a_deadline_ends_it_whatever_the_gate() -> None:
    """Open, closed or unknown."""
    late = entry(deadline=NOW - 1)
    assert all(isinstance(overdue(late, NOW, LIMIT_S, stop), Expired) for stop in (None, shut(5.0)))


def test_a_released_task_takes_with_it_only_the_time_that_counts() -> None:
    """What it stood in line since its gate opened comes off the time for which it was throttled."""
    assert in_line_s(None, NOW - 40, NOW) == 40.0
    opened = looked((NOW - 30, gate("paused")), (NOW - 10, gate("paused")), (NOW - 9, gate()))
    assert in_line_s(opened, NOW - 40, NOW) == 10.0
    event = chosen(throttled(NOW - 40, NOW - 60), NOW, opened)
    assert isinstance(event, Released)
    assert (event.card.waiting_since, event.card.waiting_for) == (NOW - 50, "throttled")
    missing = entry(at=NOW - 40, since=NOW - 60, waiting_for="no_handler")
    event = chosen(missing, NOW, opened)
    assert isinstance(event, Released)
    assert event.card.waiting_since == NOW - 60
