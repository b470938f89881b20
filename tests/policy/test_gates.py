"""Gates: how fast tasks of a pool may start, and why not; said when they close and when they open again."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from millstream.policy.holdings import GateChanged
from millstream.policy.limits import Limit
from millstream_schemas.permits import Acquire, GatePart, Gates, GatesListing, Pool
from tests.support.permit_desk import Desk, read, rpm, slots

NOON = datetime(2026, 11, 30, 12, 0, tzinfo=UTC).timestamp()


def said(desk: Desk) -> list[str]:
    """The keys whose gates were said to have changed."""
    return [effect.key for effect in desk.effects if isinstance(effect, GateChanged)]


def test_an_open_gate_says_how_fast_and_how_many() -> None:
    """The slowest rate and the fewest places of all keys; None where nothing limits."""
    desk = Desk(rpm("llm", 600), rpm("slow", 60), slots("tool", 3), slots("wide", 9))
    gate = desk.gate("llm", "slow", "tool", "wide")
    assert (gate.open, gate.reason, gate.wait_s, gate.places) == (True, "", 0.0, 3)
    assert gate.rate_per_s == pytest.approx(60 / 60.41, rel=1e-3)
    assert (desk.gate("tool").rate_per_s, desk.gate("llm").places) == (None, None)


def test_a_gate_counts_what_one_task_takes_on_average() -> None:
    """Tokens may bind before requests do."""
    desk = Desk(Limit(key="llm", requests="600/min", tokens="60_000/min", tokens_out="6_000/min"))
    assert desk.gate("llm", tokens_in=10).rate_per_s == pytest.approx(600 / 60.41, rel=1e-3)
    assert desk.gate("llm", tokens_in=500, tokens_out=100).rate_per_s == pytest.approx(60 / 60.41, rel=1e-3)


def test_a_gate_says_of_each_key_what_it_lets_through_whatever_a_task_takes() -> None:
    """By dimension and in the order of the keys; a shadowed key lets everything through, an unknown one is not told."""
    desk = Desk(
        Limit(key="llm", requests="600/min", tokens="60_000/min"),
        Limit(key="tenant/{tenant_id}", tokens_in="6_000/min", tokens_out="600/min", concurrency=2),
        Limit(key="trial", requests="6/min", concurrency=1, shadow=True),
    )
    tenant, llm, trial = desk.gate("tenant/a", "llm", "trial", tokens_in=70, tokens_out=7).parts
    assert llm.requests == pytest.approx(600 / 60.41, rel=1e-3)
    assert llm.tokens == pytest.approx(60_000 / 60.41, rel=1e-3)
    assert (llm.tokens_in, llm.tokens_out, llm.places) == (None, None, None)
    assert (tenant.requests, tenant.tokens, tenant.places) == (None, None, 2)
    assert tenant.tokens_in == pytest.approx(6_000 / 60.41, rel=1e-3)
    assert tenant.tokens_out == pytest.approx(600 / 60.41, rel=1e-3)
    assert trial == GatePart()
    assert desk.gate("llm", "nope").parts == ()


def test_a_pause_closes_the_gate_and_its_end_opens_it() -> None:
    """Both are said; how long it lasts is in the gate."""
    desk = Desk(rpm("llm", 600), rpm("free", 600))
    desk.settle(desk.acquire("llm", "free"), "throttled", retry_after_s=20.0, keys=("llm",))
    assert said(desk) == ["llm"]
    gate = desk.gate("free", "llm")
    assert (gate.open, gate.reason, gate.limiting_key) == (False, "paused", "llm")
    assert gate.wait_s == pytest.approx(20.0)
    assert desk.gate("free").open
    desk.advance(21)
    assert desk.gate("llm").open
    assert said(desk) == ["llm", "llm"]


def test_a_broken_key_closes_its_gate() -> None:
    """Until its breaker tries again."""
    desk = Desk(rpm("llm", 6000))
    for _ in range(5):
        desk.settle(desk.acquire("llm", wait_s=1), "fault")
        desk.advance(0.1)
    gate = desk.gate("llm")
    assert (gate.open, gate.reason) == (False, "broken")
    assert 4.0 <= gate.wait_s <= 5.5
    assert said(desk) == ["llm"]


def test_an_operator_closes_and_opens_a_gate() -> None:
    """Forced open, the breaker holds everything back until it is left to itself."""
    desk = Desk(rpm("llm", 600))
    desk.operate("llm", "open")
    assert (desk.gate("llm").open, desk.gate("llm").reason, desk.limit("llm").breaker) == (
        False,
        "broken",
        "forced_open",
    )
    desk.operate("llm", "auto")
    assert desk.gate("llm").open
    assert said(desk) == ["llm", "llm"]


def test_a_day_whose_money_is_spent_closes_the_gate_until_tomorrow() -> None:
    """Work waits for the next period; a budget for life closes nothing, so that its tasks are told."""
    desk = Desk(Limit(key="day", cost="1 USD/day"), Limit(key="life", cost="1 USD"), wall=NOON)
    desk.settle(desk.acquire("day", "life", cost_usd=1.0))
    gate = desk.gate("day")
    assert (gate.open, gate.reason, gate.limiting_key, gate.wait_s) == (False, "budget_exhausted", "day", 12 * 3600.0)
    assert desk.gate("life").open
    desk.advance(12 * 3600 + 1)
    desk.wake()
    assert desk.gate("day").open
    assert said(desk) == ["day", "day"]


def test_an_unknown_key_is_a_closed_gate() -> None:
    """Fail closed: the key may be configured later, and then the work goes on."""
    gate = Desk(rpm("llm", 600)).gate("llm", "nope")
    assert (gate.open, gate.reason, gate.limiting_key) == (False, "unknown_limit", "nope")


def test_gates_are_answered_in_the_order_of_the_question() -> None:
    """Templates included; asking makes no difference to what is granted."""
    desk = Desk(Limit(key="tenant/{tenant_id}", requests="60/min"), rpm("llm", 600))
    pools = (Pool(keys=("tenant/b", "llm")), Pool(keys=("llm",)), Pool(keys=("tenant/a",)))
    listing = desk.send(Gates(pools=pools))
    assert isinstance(listing, GatesListing)
    assert [gate.keys for gate in listing.items] == [pool.keys for pool in pools]
    assert desk.start_in_ms(desk.acquire("tenant/a")) == 0


def test_a_shadowed_key_closes_no_gate_and_holds_nobody() -> None:
    """It counts who would have waited, and charges what is taken."""
    desk = Desk(
        Limit(key="trial", requests="6/min", concurrency=2, tokens="100/min", cost="0.01 USD/day", shadow=True),
        wall=NOON,
    )
    for _ in range(10):
        desk.granted(desk.acquire("trial", tokens=1000, cost_usd=1.0))
    state = desk.limit("trial")
    assert (state.in_use, state.granted_total, state.would_have_waited, state.shadow) == (10, 10, 9, True)
    assert {one.dimension: one.used for one in state.dimensions}["requests"] == 10
    desk.send(Acquire(id="x", worker="w", keys=("trial",)))
    desk.settle("a1", "throttled", retry_after_s=60.0)
    assert desk.gate("trial").open
    assert (desk.gate("trial").rate_per_s, desk.gate("trial").places) == (None, None)
    desk.granted(desk.acquire("trial"))


def test_an_operator_closes_a_shadowed_key_as_well() -> None:
    """Its gate, what asks for it, and what waits; a pause of the provider's it goes on ignoring."""
    desk = Desk(Limit(key="trial", requests="600/min", shadow=True), rpm("llm", 600))
    desk.settle(desk.acquire("trial"), "throttled", retry_after_s=900.0)
    desk.operate("trial", "open")
    assert said(desk) == ["trial"]
    gate = desk.gate("trial", "llm")
    assert (gate.open, gate.reason, gate.limiting_key) == (False, "broken", "trial")
    assert desk.limit("trial").breaker == "forced_open"
    assert desk.waits(desk.acquire("trial", "llm", wait_s=1)).reason == "broken"
    desk.operate("trial", "auto")
    assert desk.gate("trial").open
    desk.granted(desk.acquire("trial"))


def test_leaving_the_shadow_does_not_pay_for_it_for_hours() -> None:
    """What nobody was held up for is a debt of one window at the most."""
    desk = Desk(Limit(key="trial", requests="60/min", shadow=True))
    for _ in range(500):
        desk.acquire("trial")
    desk.governor.configure(read([rpm("trial", 60)]), {}, desk.now)
    assert desk.waits(desk.acquire("trial")).retry_after_ms <= 62_000
