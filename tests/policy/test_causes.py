"""What is said of a limit that is closed: what the provider asked for, what is used up, who forced it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from millstream.policy.causes import ordinal
from millstream.policy.limits import Limit
from millstream_schemas.permits import Operate, OutcomeClass
from tests.support.permit_desk import Desk, rpm

NOON = datetime(2026, 11, 30, 12, 0, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("outcome", "hint_s", "reason", "why"),
    [
        ("throttled", 9.0, "paused", "the provider asked for 9 s"),
        ("throttled", None, "paused", "refused without a hint"),
        ("ramp", None, "paused", "use grew too fast for the provider; refused without a hint"),
        ("ramp", 90.0, "paused", "use grew too fast for the provider, which asked for 1 min 30 s"),
        ("overloaded", 4.5, "paused", "too much for an overloaded provider, which asked for 4.5 s"),
        ("quota", 7200.0, "exhausted", "its quota is used up; the provider asked for 2 h 0 min"),
        (
            "quota",
            None,
            "exhausted",
            "its quota is used up; the provider does not say until when, 1 h 0 min are assumed",
        ),
    ],
)
def test_a_refusal_is_the_cause_as_the_provider_put_it(
    outcome: OutcomeClass, hint_s: float | None, reason: str, why: str
) -> None:
    """With its hint, or that there was none."""
    desk = Desk(rpm("llm", 600))
    desk.settle(desk.acquire("llm"), outcome, retry_after_s=hint_s)
    state = desk.limit("llm")
    assert (state.paused_reason, state.paused_why) == (reason, why)
    assert state.paused_for_s
    desk.advance(8000)
    state = desk.limit("llm")
    assert (state.paused_reason, state.paused_why, state.paused_for_s) == ("", "", None)


def test_refusals_without_a_hint_are_counted_and_the_longest_pause_keeps_its_cause() -> None:
    """Each in a row is longer; a shorter hint changes neither the pause nor what is said of it."""
    desk = Desk(rpm("llm", 600))
    for _ in range(3):
        desk.settle(desk.acquire("llm", wait_s=9), "throttled")
        desk.advance(10)
    names = [desk.acquire("llm", wait_s=1) for _ in range(2)]
    desk.advance(1)
    desk.settle(names[0], "throttled")
    assert desk.limit("llm").paused_why == "refused without a hint, 4th time in a row"
    desk.settle(names[1], "throttled", retry_after_s=2.0)
    assert desk.limit("llm").paused_why == "refused without a hint, 4th time in a row"


def test_a_breaker_says_by_what_it_is_open() -> None:
    """Faults; or an operator, by name, for as long as it takes."""
    desk = Desk(rpm("llm", 6000))
    for _ in range(5):
        desk.settle(desk.acquire("llm", wait_s=1), "fault")
        desk.advance(0.1)
    state = desk.limit("llm")
    assert (state.breaker, state.paused_reason, state.paused_why) == ("open", "broken", "faults of the provider")
    desk.settle(desk.acquire("llm"), "throttled", retry_after_s=50.0) if desk.gate("llm").open else None
    desk.send(Operate(key="llm", operation="open", by="cli:ops\x1b"))
    state = desk.limit("llm")
    assert state.paused_why.startswith("forced open by operator cli:ops")
    assert "\x1b" not in state.paused_why
    assert (state.paused_reason, state.paused_for_s) == ("broken", None)
    desk.operate("llm", "auto")
    assert desk.limit("llm").paused_why == ""


def test_a_budget_that_is_used_up_shows_as_paused_until_its_period_ends() -> None:
    """One for the life of the key has no end; in shadow mode nothing is paused."""
    limits = (("day", "1 USD/day"), ("life", "1 USD"))
    desk = Desk(*(Limit(key=key, cost=cost) for key, cost in limits), wall=NOON)
    desk.settle(desk.acquire("day", "life", cost_usd=0.5), cost_usd=0.5)
    assert desk.limit("day").paused_why == ""
    desk.settle(desk.acquire("day", "life", cost_usd=0.5), cost_usd=0.5)
    day, life = desk.limit("day"), desk.limit("life")
    assert (day.paused_for_s, day.paused_reason) == (12 * 3600.0, "budget_exhausted")
    assert day.paused_why == "all of the 1.00 USD of 2026-11-30 are spent"
    assert (life.paused_for_s, life.paused_reason) == (None, "budget_exhausted")
    assert life.paused_why == "all of the 1.00 USD for the life of the key are spent"
    trial = Desk(Limit(key="day", cost="1 USD/day", shadow=True), wall=NOON)
    trial.settle(trial.acquire("day", cost_usd=5.0))
    assert trial.limit("day").paused_why == ""


def test_ordinals_read_well() -> None:
    """The teens are no exception to their own rule."""
    shown = [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)]
    assert shown == ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]
