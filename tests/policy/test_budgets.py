"""Budgets: reserved before, settled after, in periods of a named zone; what is spent is said once and never lost."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.budgets import MICRO, Budget, Ledger, SoftPassed, Spend, micro, period_at, priced
from millstream.policy.limit_state import Rules
from millstream.policy.limits import Limit, Price, Spending
from millstream_schemas.keys import derive_key
from millstream_schemas.permits import (
    Denied,
    HeldPermit,
    Limits,
    LimitsListing,
    OutcomeClass,
    Renew,
    Return,
    Settle,
    Wait,
)
from tests.support.permit_desk import Desk, read

NOON = datetime(2026, 11, 30, 12, 0, tzinfo=UTC).timestamp()


def usd(key: str, cost: str, **more: object) -> Limit:
    """A limit of money."""
    return Limit(key=key, cost=cost, **more)  # type: ignore[arg-type]


def spends(desk: Desk) -> list[Spend]:
    """What was said to be spent."""
    return [effect for effect in desk.effects if isinstance(effect, Spend)]


def money(desk: Desk, key: str) -> tuple[float, float]:
    """Spent and reserved."""
    state = next(one for one in desk.limit(key).dimensions if one.dimension == "cost")
    return state.used, state.reserved or 0.0


# --- periods -----------------------------------------------------------------------------------------


def at(text: str) -> float:
    """Unix seconds of a time with its offset."""
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("spending", "now", "name", "until"),
    [
        (Spending(1, "day"), "2026-11-30T23:59:59+00:00", "2026-11-30", "2026-12-01T00:00:00+00:00"),
        (Spending(1, "day", "Asia/Tokyo"), "2026-11-30T15:00:00+00:00", "2026-12-01", "2026-12-02T00:00:00+09:00"),
        (Spending(1, "month"), "2026-12-31T10:00:00+00:00", "2026-12", "2027-01-01T00:00:00+00:00"),
        (
            Spending(1, "month", "America/Los_Angeles"),
            "2026-12-01T07:59:00+00:00",
            "2026-11",
            "2026-12-01T00:00:00-08:00",
        ),
        # A day of 23 hours and one of 25.
        (Spending(1, "day", "Europe/Zurich"), "2026-03-29T00:30:00+01:00", "2026-03-29", "2026-03-30T00:00:00+02:00"),
        (Spending(1, "day", "Europe/Zurich"), "2026-10-25T00:30:00+02:00", "2026-10-25", "2026-10-26T00:00:00+01:00"),
    ],
)
def test_a_period_begins_and_ends_at_midnight_of_its_zone(spending: Spending, now: str, name: str, until: str) -> None:
    """Months of any length, days of 23 and 25 hours."""
    assert period_at(spending, ZoneInfo(spending.zone), at(now)) == (name, at(until))


def test_a_budget_for_life_has_one_period() -> None:
    """It never ends."""
    assert period_at(Spending(1, "total"), UTC, NOON) == ("total", float("inf"))


@given(st.integers(0, 4_000_000_000), st.sampled_from(["UTC", "Europe/Zurich", "America/Santiago", "Asia/Kathmandu"]))
def test_every_moment_lies_in_the_period_that_is_named_for_it(wall: int, zone: str) -> None:
    """The end of a period lies ahead, and is the beginning of the next one."""
    for spending in (Spending(1, "day", zone), Spending(1, "month", zone)):
        name, until = period_at(spending, ZoneInfo(zone), wall)
        assert until > wall
        assert period_at(spending, ZoneInfo(zone), until)[0] > name
        assert period_at(spending, ZoneInfo(zone), until - 1)[0] == name


# --- reserve and settle ------------------------------------------------------------------------------


def test_an_estimate_is_reserved_and_the_cost_is_spent() -> None:
    """While a call runs its estimate is kept from others; then only what it cost is gone."""
    desk = Desk(usd("tenant", "10 USD/day"), wall=NOON)
    name = desk.acquire("tenant", cost_usd=4.0)
    assert money(desk, "tenant") == (0.0, 4.0)
    desk.settle(name, cost_usd=1.5)
    assert money(desk, "tenant") == (1.5, 0.0)
    assert spends(desk) == [Spend("tenant", "2026-11-30", 1_500_000, "1-1")]


def test_no_call_begins_that_could_pass_the_budget() -> None:
    """What is spent, reserved and estimated together stays within it; the denial says when there is more."""
    desk = Desk(usd("tenant", "10 USD/day"), wall=NOON)
    desk.settle(desk.acquire("tenant", cost_usd=6.0))
    denied = Denied(reason="budget_exhausted", key="tenant", epoch=1, until_s=12 * 3600.0)
    assert desk.answers[desk.acquire("tenant", cost_usd=4.1)] == denied
    desk.settle(desk.acquire("tenant", cost_usd=4.0))
    assert desk.answers[desk.acquire("tenant", cost_usd=0.1)] == denied


def test_what_is_only_set_aside_may_come_back_and_is_waited_for() -> None:
    """Estimates three times too high must not end tasks while most of the money is there."""
    desk = Desk(usd("tenant", "10 USD/day"), wall=NOON)
    first = desk.acquire("tenant", cost_usd=9.0)
    assert waits_for_money(desk.answers[desk.acquire("tenant", cost_usd=2.0)])
    desk.settle(first, cost_usd=3.0)
    desk.granted(desk.acquire("tenant", cost_usd=2.0))
    assert isinstance(desk.answers[desk.acquire("tenant", cost_usd=7.1)], Denied)


def waits_for_money(reply: object) -> bool:
    return isinstance(reply, Wait) and (reply.reason, reply.limiting_key) == ("cost", "tenant")


def test_a_budget_for_life_is_denied_without_end() -> None:
    """Nothing says that waiting helps."""
    desk = Desk(usd("run/{run_id}", "1 USD"))
    desk.settle(desk.acquire("run/7", cost_usd=1.0))
    denied = desk.answers[desk.acquire("run/7")]
    assert denied == Denied(reason="budget_exhausted", key="run/7", epoch=1, until_s=None)
    desk.granted(desk.acquire("run/8", cost_usd=1.0))


def test_once_all_is_spent_even_a_call_without_an_estimate_is_denied() -> None:
    """Calls that cost more than estimated may pass the budget; nothing begins after that."""
    desk = Desk(usd("tenant", "1 USD/day"), wall=NOON)
    desk.settle(desk.acquire("tenant"), cost_usd=3.0)
    assert money(desk, "tenant") == (3.0, 0.0)
    assert isinstance(desk.answers[desk.acquire("tenant")], Denied)


def test_money_is_all_or_nothing_over_the_hierarchy() -> None:
    """Task, run and tenant pay together; where one of them cannot, none is charged."""
    desk = Desk(usd("run/{run_id}", "2 USD"), usd("tenant", "10 USD/day"), Limit(key="llm", requests="600/min"))
    desk.settle(desk.acquire("llm", "run/1", "tenant", cost_usd=2.0))
    denied = desk.answers[desk.acquire("llm", "run/1", "tenant", cost_usd=1.0)]
    assert isinstance(denied, Denied)
    assert denied.key == "run/1"
    assert money(desk, "tenant") == (2.0, 0.0)
    assert {(spend.key, spend.micro_usd) for spend in spends(desk)} == {("run/1", 2 * MICRO), ("tenant", 2 * MICRO)}


def test_prices_make_estimates_and_costs() -> None:
    """Dollars per million tokens; what a settle does not say is what was reserved."""
    prices = {"large": Price(tokens_in=3.0, tokens_out=15.0)}
    desk = Desk(usd("tenant", "1 USD/day"), prices=prices)
    name = desk.acquire("tenant", model="large", tokens=100_000, tokens_out=10_000)
    assert money(desk, "tenant") == (0.0, 0.45)
    desk.settle(name, tokens_out=2_000)
    assert money(desk, "tenant") == (0.33, 0.0)
    other = desk.acquire("tenant", model="large", tokens=1000)
    desk.send(Settle(permit=desk.permit(other), outcome="ok", cost_usd=0.1))
    assert money(desk, "tenant")[0] == pytest.approx(0.43)


def test_a_model_without_a_price_costs_what_is_said() -> None:
    """Nothing where nothing is said."""
    desk = Desk(usd("tenant", "1 USD/day"), prices={})
    desk.settle(desk.acquire("tenant", model="new", tokens=1000), tokens_in=1000)
    assert (money(desk, "tenant"), spends(desk)) == ((0.0, 0.0), [])
    assert priced(Price(tokens_in=0.3), 1, 0) == 1


def test_a_returned_permit_costs_nothing() -> None:
    """No call was begun."""
    desk = Desk(usd("tenant", "1 USD/day"))
    desk.send(Return(permits=(desk.permit(desk.acquire("tenant", cost_usd=1.0)),)))
    assert (money(desk, "tenant"), spends(desk)) == ((0.0, 0.0), [])


def test_a_lost_call_costs_its_estimate_at_least() -> None:
    """The provider may have billed it, whether the worker says so or was killed."""
    desk = Desk(usd("tenant", "10 USD/day"), rules=Rules(lease_s=10))
    desk.settle(desk.acquire("tenant", cost_usd=1.0), "unknown", cost_usd=0.1)
    assert money(desk, "tenant") == (1.0, 0.0)
    desk.acquire("tenant", cost_usd=2.0)
    desk.advance(11)
    assert money(desk, "tenant") == (3.0, 0.0)
    assert [spend.micro_usd for spend in spends(desk)] == [1_000_000, 2_000_000]


def test_of_several_permits_as_many_are_granted_as_can_be_paid() -> None:
    """Each of them reserves its own estimate."""
    desk = Desk(usd("tenant", "1 USD/day"))
    assert len(desk.permits(desk.acquire("tenant", n=8, cost_usd=0.3))) == 3
    assert money(desk, "tenant") == pytest.approx((0.0, 0.9))


def test_who_waits_for_another_limit_is_told_when_the_money_is_gone() -> None:
    """The budget was there when it came, and is not when its turn comes."""
    desk = Desk(usd("tenant", "1 USD/day"), Limit(key="tool", concurrency=1))
    first = desk.acquire("tool")
    waiting = desk.acquire("tool", "tenant", cost_usd=0.6, wait_s=30)
    desk.settle(desk.acquire("tenant", cost_usd=0.6))
    desk.settle(first)
    denied = desk.answers[waiting]
    assert isinstance(denied, Denied)
    assert denied.reason == "budget_exhausted"


def test_twenty_tasks_with_wrong_estimates_overrun_by_the_running_calls_only() -> None:
    """Each costs three times its estimate: what is passed is what ran when the money was gone."""
    desk = Desk(usd("tenant", "10 USD/day"))
    waiting = [desk.acquire("tenant", cost_usd=1.0) for _ in range(20)]
    granted = [name for name in waiting if not waits_for_money(desk.answers[name])]
    assert len(granted) == 10
    for name in granted:
        desk.settle(name, cost_usd=3.0)
    assert money(desk, "tenant") == (30.0, 0.0)
    assert isinstance(desk.answers[desk.acquire("tenant", cost_usd=0.01)], Denied)


# --- periods in the governor -------------------------------------------------------------------------


def test_a_new_day_brings_new_money_and_pays_no_old_calls() -> None:
    """A call is paid from the day on which it was granted, however late it is settled."""
    desk = Desk(usd("tenant", "10 USD/day"), wall=NOON, rules=Rules(lease_s=100_000))
    late = desk.acquire("tenant", cost_usd=10.0)
    assert waits_for_money(desk.answers[desk.acquire("tenant", cost_usd=1.0)])
    desk.advance(12 * 3600 + 1)
    desk.granted(desk.acquire("tenant", cost_usd=9.0))
    desk.settle(late, cost_usd=7.0)
    assert money(desk, "tenant") == (0.0, 9.0)
    assert [(spend.period, spend.micro_usd) for spend in spends(desk)] == [("2026-11-30", 7_000_000)]


def test_wall_time_is_told_and_moves_the_period() -> None:
    """Budgets read the wall clock; nothing else does."""
    desk = Desk(usd("tenant", "1 USD/day"), wall=NOON)
    desk.settle(desk.acquire("tenant", cost_usd=1.0))
    desk.governor.set_wall(NOON + 86_400 - desk.now)
    desk.granted(desk.acquire("tenant", cost_usd=1.0))


def test_what_was_spent_before_counts() -> None:
    """Read by key, or by the hash that a subject carries; also for keys that come later, and for other periods."""
    desk = Desk(usd("tenant/{tenant_id}", "10 USD/day"), usd("team", "10 USD/month"), wall=NOON)
    hashed = derive_key("limit", "", "tenant/a")
    desk.governor.load_spent({(hashed, "2026-11-30"): 9.5, ("team", "2026-11"): 3.0, ("team", "2026-10"): 10.0})
    assert money(desk, "team") == (3.0, 0.0)
    assert isinstance(desk.answers[desk.acquire("tenant/a", cost_usd=1.0)], Denied)
    desk.granted(desk.acquire("tenant/a", cost_usd=0.5))
    desk.granted(desk.acquire("tenant/b", cost_usd=10.0))


def test_a_swept_key_keeps_what_it_spent() -> None:
    """Forgetting an idle tenant must not give it its money back."""
    desk = Desk(usd("tenant/{tenant_id}", "1 USD/day"), wall=NOON)
    desk.settle(desk.acquire("tenant/a", cost_usd=0.7))
    for _ in range(5):
        desk.advance(2)
        desk.wake()
    assert not list(desk.governor._holdings.table.all())
    assert isinstance(desk.answers[desk.acquire("tenant/a", cost_usd=0.5)], Denied)
    assert money(desk, "tenant/a") == (0.7, 0.0)


def test_reservations_outlive_a_governor() -> None:
    """By the snapshot for what it shows, by the workers' renewals for the rest; spent comes from the sums."""
    limits = (usd("tenant", "10 USD/day"),)
    desk = Desk(*limits, wall=NOON)
    shown = desk.acquire("tenant", cost_usd=4.0)
    saved = desk.governor.snapshot(desk.now)
    unseen = desk.acquire("tenant", cost_usd=3.0)
    heir = Desk(*limits, epoch=2, now=5.0, wall=NOON + 3)
    heir.governor.load_spent({("tenant", "2026-11-30"): 1.0})
    heir.governor.restore(saved, 3.0, heir.now)
    held = (
        HeldPermit(permit=desk.permit(shown), keys=("tenant",), cost_usd=4.0),
        HeldPermit(permit=desk.permit(unseen), keys=("tenant",), cost_usd=3.0),
    )
    heir.send(Renew(worker="w", permits=held))
    assert money(heir, "tenant") == (1.0, 7.0)
    assert waits_for_money(heir.answers[heir.acquire("tenant", cost_usd=2.1)])
    heir.send(Settle(permit=desk.permit(unseen), outcome="ok", cost_usd=2.0))
    assert money(heir, "tenant") == (3.0, 4.0)
    assert spends(heir) == [Spend("tenant", "2026-11-30", 2_000_000, desk.permit(unseen))]


# --- thresholds --------------------------------------------------------------------------------------


def test_the_soft_threshold_is_said_once_with_the_task_that_passed_it() -> None:
    """Once a period, and again in the next one."""
    desk = Desk(usd("tenant", "10 USD/day", soft=0.5), wall=NOON, rules=Rules(lease_s=10))
    for task in ("one", "two", "three"):
        desk.settle(desk.acquire("tenant", task=task), cost_usd=2.0)
    desk.settle(desk.acquire("tenant", task="four"), cost_usd=2.0)
    passed = [effect for effect in desk.effects if isinstance(effect, SoftPassed)]
    assert passed == [SoftPassed("tenant", "2026-11-30", 6.0, 10.0, "three")]
    desk.advance(12 * 3600 + 1)
    desk.settle(desk.acquire("tenant", task="five"), cost_usd=9.0)
    assert [effect.task for effect in desk.effects if isinstance(effect, SoftPassed)] == ["three", "five"]


def test_a_governor_that_finds_the_threshold_passed_does_not_say_it_again() -> None:
    """Its predecessor did."""
    desk = Desk(usd("tenant", "10 USD/day", soft=0.5), wall=NOON)
    desk.governor.load_spent({("tenant", "2026-11-30"): 6.0})
    desk.settle(desk.acquire("tenant"), cost_usd=1.0)
    assert not [effect for effect in desk.effects if isinstance(effect, SoftPassed)]


def test_a_budget_can_be_changed_while_it_is_in_use() -> None:
    """What is spent and reserved stays; the new amount holds at once."""
    desk = Desk(usd("tenant", "1 USD/day"))
    desk.settle(desk.acquire("tenant", cost_usd=0.5))
    running = desk.acquire("tenant", cost_usd=0.5)
    desk.governor.configure(read([usd("tenant", "2 USD/day")]), {}, desk.now)
    desk.granted(desk.acquire("tenant", cost_usd=1.0))
    desk.settle(running, cost_usd=0.4)
    assert money(desk, "tenant") == pytest.approx((0.9, 1.0))


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 900), st.sampled_from(["settle", "return", "keep", "wait"])),
        max_size=60,
    )
)
def test_sums_are_exact_whatever_happens(calls: list[tuple[int, int, str]]) -> None:
    """Spent is the sum of all settled, reserved of all open ones, and nothing was admitted over the budget."""
    ledger = Ledger()
    budget = Budget("k", Spending(0.001, "day"), 0.8, ledger)
    wall, spent, open_ = NOON, 0, list[int]()
    for estimate, cost, what in calls:
        if what == "wait":
            wall, spent, open_ = wall + 86_400, 0, []
            continue
        admitted = budget.admits(estimate, wall)
        assert admitted == (spent + sum(open_) + estimate <= 1000 and spent < 1000)
        if not admitted:
            continue
        account = budget.reserve(estimate, wall)
        if what == "settle":
            budget.settle(account, estimate, cost, "")
            spent += cost
        elif what == "return":
            budget.release(account, estimate)
        else:
            open_.append(estimate)
        assert (budget.account(wall).spent, budget.account(wall).reserved) == (spent, sum(open_))


def test_money_is_whole_micro_dollars() -> None:
    """A tenth of a dollar ten times is a dollar."""
    assert sum(micro(0.1) for _ in range(10)) == MICRO


@pytest.mark.parametrize(
    ("estimated", "settled", "outcome", "version"),
    [
        ({}, {"tokens_in": 900_000}, "ok", "2026-05"),
        ({}, {}, "ok", "2026-05"),
        ({}, {}, "unknown", "2026-05"),
        ({}, {"cost_usd": 9.0}, "ok", ""),
        ({"cost_usd": 8.5}, {}, "ok", ""),
        ({"cost_usd": 8.5}, {"tokens_in": 900_000}, "ok", "2026-05"),
    ],
)
def test_a_warning_names_the_price_list_that_the_cost_was_reckoned_by(
    estimated: dict[str, float], settled: dict[str, float], outcome: OutcomeClass, version: str
) -> None:
    """At the settlement or, where that says nothing, at the estimate; none where somebody told the cost."""
    price = Price(tokens_in=10.0, version="2026-05")
    desk = Desk(usd("tenant", "10 USD/day"), wall=NOON, prices={"m": price})
    name = desk.acquire("tenant", tokens=900_000, model="m", task="t", **estimated)  # type: ignore[arg-type]
    desk.settle(name, outcome, **settled)  # type: ignore[arg-type]
    assert [effect.price_version for effect in desk.effects if isinstance(effect, SoftPassed)] == [version]


def test_the_prices_that_costs_are_reckoned_by_are_listed() -> None:
    """With all limits, by model; not with a single one."""
    desk = Desk(
        usd("tenant", "10 USD/day"), prices={"b": Price(tokens_in=2.0), "a": Price(tokens_out=3.0, version="v")}
    )
    listing = desk.send(Limits())
    assert isinstance(listing, LimitsListing)
    assert [(price.model, price.tokens_in, price.tokens_out, price.version) for price in listing.prices] == [
        ("a", 0.0, 3.0, "v"),
        ("b", 2.0, 0.0, ""),
    ]
    alone = desk.send(Limits(key="tenant"))
    assert isinstance(alone, LimitsListing)
    assert alone.prices == ()
