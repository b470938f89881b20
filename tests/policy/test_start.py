"""Whether a delivered task may start, and for how long; whether there is room for new ones."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.limits import Price
from millstream.policy.room import FULL, ROOM_AGAIN, may_take_in
from millstream.policy.start import estimate_of, refusal, time_limit_s, with_lost
from millstream_schemas.envelope import Budget, UsageEstimate
from millstream_schemas.events import Usage, WorkItem
from tests.support.samples import CARD, ENVELOPE

NOW = 1_778_320_000.0
PLAIN = msgspec.structs.replace(ENVELOPE, deadline_at=None, budget=Budget())


def _item(usage: Usage | None = None, deadline: float | None = None, **budget: Any) -> WorkItem:
    at = None if deadline is None else datetime.fromtimestamp(deadline, UTC)
    envelope = msgspec.structs.replace(PLAIN, deadline_at=at, budget=Budget(**budget))
    return WorkItem(fence=1, card=CARD, envelope=envelope, usage=usage or Usage())


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (_item(), None),
        (_item(deadline=NOW + 1), None),
        (_item(deadline=NOW), "expired"),
        (_item(deadline=NOW - 1), "expired"),
        (_item(Usage(tokens_in=60, tokens_out=40), max_tokens=100), None),
        (_item(Usage(tokens_in=60, tokens_out=41), max_tokens=100), "budget_exhausted"),
        (_item(Usage(cost_usd=0.5), max_cost_usd=0.5), None),
        (_item(Usage(cost_usd=0.51), max_cost_usd=0.5), "budget_exhausted"),
        (_item(Usage(runtime_s=1.0), max_runtime_seconds=10), None),
        (_item(Usage(runtime_s=10.0), max_runtime_seconds=10), "budget_exhausted"),
        (_item(Usage(runtime_s=1e9, tokens_in=10**9, cost_usd=1e9)), None),
        (_item(Usage(tokens_in=2), deadline=NOW, max_tokens=1), "expired"),
    ],
)
def test_a_task_starts_within_its_deadline_and_budget_alone(item: WorkItem, reason: str | None) -> None:
    """A deadline is over at its instant; a budget may be used up to the last of it; the deadline is told first."""
    refused = refusal(item, NOW)
    assert (refused.reason if refused else None) == reason


@pytest.mark.parametrize(
    ("estimate", "budget", "reason"),
    [
        ({"cost_usd": 0.4}, {"max_cost_usd": 0.5}, None),
        ({"cost_usd": 0.41}, {"max_cost_usd": 0.5}, "budget_exhausted"),
        ({"tokens_in": 30, "tokens_out": 20}, {"max_tokens": 100}, None),
        ({"tokens_in": 31, "tokens_out": 20}, {"max_tokens": 100}, "budget_exhausted"),
        ({"tokens_in": 200_000}, {"max_cost_usd": 0.5}, None),
        ({"tokens_in": 200_001}, {"max_cost_usd": 0.5}, "budget_exhausted"),
        ({"tokens_out": 50_001}, {"max_cost_usd": 0.5}, "budget_exhausted"),
        ({"tokens_in": 10**9, "cost_usd": 0.1}, {"max_cost_usd": 0.5}, None),
        (None, {"max_cost_usd": 0.5, "max_tokens": 100}, None),
    ],
)
def test_one_more_attempt_must_fit_into_the_budget_as_estimated(
    estimate: dict[str, Any] | None, budget: dict[str, Any], reason: str | None
) -> None:
    """On top of what was used; where only tokens are estimated, their price counts; a cost that is given stands above it."""
    item = _item(Usage(tokens_in=50, cost_usd=0.1), **budget)
    given = None if estimate is None else UsageEstimate(**estimate)
    item = msgspec.structs.replace(item, envelope=msgspec.structs.replace(item.envelope, usage_estimate=given))
    model = (item.envelope.pins or {})["model"]
    refused = refusal(item, NOW, estimate_of(item, {model: Price(tokens_in=2.0, tokens_out=8.0)}))
    assert (refused.reason if refused else None) == reason


@pytest.mark.parametrize(("crashes", "lost"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_each_attempt_that_was_lost_since_the_release_counts_with_its_estimate(crashes: int, lost: int) -> None:
    """On top of what was used; crashes before the release are in there already. Without an estimate nothing is known."""
    item = _item(Usage(tokens_in=50, cost_usd=0.1, runtime_s=2.0), max_tokens=100)
    item = msgspec.structs.replace(item, card=msgspec.structs.replace(item.card, crashes=1))
    bare = msgspec.structs.replace(item, envelope=msgspec.structs.replace(item.envelope, usage_estimate=None))
    assert with_lost(bare, crashes, {}) is bare
    estimate = UsageEstimate(tokens_in=20, tokens_out=10)
    item = msgspec.structs.replace(item, envelope=msgspec.structs.replace(item.envelope, usage_estimate=estimate))
    model = (item.envelope.pins or {})["model"]
    found = with_lost(item, crashes, {model: Price(tokens_in=1000.0, tokens_out=8000.0)})
    used = found.usage
    assert (used.tokens_in, used.tokens_out, used.runtime_s) == (50 + 20 * lost, 10 * lost, 2.0)
    assert used.cost_usd == pytest.approx(0.1 + 0.1 * lost)
    assert (refusal(found, NOW, estimate_of(found, {})) is None) is (lost < 1)


@pytest.mark.parametrize(
    ("handler_s", "budget_s", "used_s", "limit_s"),
    [
        (None, None, 5.0, None),
        (30.0, None, 5.0, 30.0),
        (None, 60.0, 5.0, 55.0),
        (30.0, 60.0, 5.0, 30.0),
        (30.0, 20.0, 5.0, 15.0),
        (30.0, 20.0, 25.0, 0.001),
    ],
)
def test_an_execution_gets_the_lesser_of_its_limits(
    handler_s: float | None, budget_s: float | None, used_s: float, limit_s: float | None
) -> None:
    """None where there is no limit at all."""
    item = _item(Usage(runtime_s=used_s), max_runtime_seconds=budget_s)
    assert time_limit_s(item, handler_s) == limit_s


seconds = st.floats(0.01, 1e6)


@given(handler_s=st.none() | seconds, budget_s=st.none() | seconds, used_s=st.floats(0, 1e6))
def test_a_time_limit_is_positive_and_exceeds_neither(
    handler_s: float | None, budget_s: float | None, used_s: float
) -> None:
    """A limit of zero or less would fail before the handler ran."""
    limit = time_limit_s(_item(Usage(runtime_s=used_s), max_runtime_seconds=budget_s), handler_s)
    assert (limit is None) is (handler_s is None and budget_s is None)
    if limit is not None:
        assert limit > 0
        assert handler_s is None or limit <= handler_s
        assert budget_s is None or limit <= max(budget_s - used_s, 0.001)


STORE = 1_000_000


@pytest.mark.parametrize(
    ("others", "taking", "room"),
    [
        (0.0, True, True),
        (0.0, False, True),
        (ROOM_AGAIN - 0.001, False, True),
        (ROOM_AGAIN + 0.001, False, False),
        (ROOM_AGAIN + 0.001, True, True),
        (FULL - 0.001, True, True),
        (FULL, True, False),
        (1.0, True, False),
        (1.0, False, False),
    ],
)
@pytest.mark.parametrize("inbox", [0, 300_000])
def test_intake_ends_at_one_mark_and_begins_again_below_another(
    others: float, taking: bool, room: bool, inbox: int
) -> None:
    """INBOX itself does not count: it refuses on its own."""
    assert may_take_in(round(others * STORE) + inbox, inbox, STORE, taking) is room


@given(used=st.integers(0, 2**40), inbox=st.integers(0, 2**40), taking=st.booleans())
def test_a_store_of_unknown_size_has_room(used: int, inbox: int, taking: bool) -> None:
    """A server that tells no size must not stop everything."""
    assert may_take_in(used, inbox, 0, taking)


@given(used=st.integers(0, 2**40), more=st.integers(0, 2**40), inbox=st.integers(0, 2**40), store=st.integers(1, 2**40))
def test_fuller_is_never_roomier(used: int, more: int, inbox: int, store: int) -> None:
    """And an intake that is open stays open wherever a closed one would open."""
    for taking in (True, False):
        assert may_take_in(used, inbox, store, taking) >= may_take_in(used + more, inbox, store, taking)
    assert may_take_in(used, inbox, store, True) >= may_take_in(used, inbox, store, False)
