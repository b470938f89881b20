"""What becomes of a delivery that got no permit: it asks again, is parked, or ends."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.waiting import (
    DENIED_AGAIN_S,
    HOLD_S,
    LEAST_PAUSE_S,
    LONGEST_AGAIN_S,
    QUOTA_AGAIN_S,
    UNKNOWN_LIMIT_AGAIN_S,
    Again,
    Fail,
    Park,
    Waited,
    after_denial,
    after_wait,
    hold_s,
    throttled_again_s,
    too_many_keys,
)
from millstream_schemas.permits import GATE_REASONS

LEASE_S = 30.0
PATIENCE_S = LEASE_S / 3

seconds = st.floats(0, 1e5)
waits = st.builds(Waited, waited_s=st.floats(0, 100), lease_s=st.floats(1, 300), left_s=seconds | st.just(inf),
                  crowded=st.booleans())  # fmt: skip
reasons = st.sampled_from([*sorted(GATE_REASONS), "requests", "tokens", "concurrency", "learning", "queue_full"])


@pytest.mark.parametrize(
    ("waited", "held_s"),
    [
        (Waited(0, LEASE_S), HOLD_S),
        (Waited(PATIENCE_S - 0.5, LEASE_S), 0.5),
        (Waited(PATIENCE_S + 1, LEASE_S), 0.0),
        (Waited(0, 3.0), 1.0),
        (Waited(0.02, 3.0), 0.95),
        (Waited(0, LEASE_S, left_s=0.25), 0.25),
        (Waited(0, LEASE_S, left_s=-1), 0.0),
        (Waited(0.5, LEASE_S, crowded=True), HOLD_S - 0.5),
    ],
)
def test_a_request_is_held_for_as_long_as_patience_and_deadline_allow(waited: Waited, held_s: float) -> None:
    """Two seconds at the most; a third of the lease over all requests; not beyond the deadline."""
    assert hold_s(waited) == pytest.approx(held_s)


@pytest.mark.parametrize(
    ("waited", "wait_s", "reason", "step"),
    [
        (Waited(0, LEASE_S), 5.0, "requests", Again(5.0)),
        (Waited(PATIENCE_S - 4, LEASE_S), 5.0, "requests", Park(5.0, "limit llm: requests")),
        (Waited(PATIENCE_S, LEASE_S), 0.0, "tokens_in", Park(0.0, "limit llm: tokens in")),
        (Waited(0, LEASE_S), 60.0, "concurrency", Park(60.0, "limit llm: concurrency")),
        (Waited(0, LEASE_S), 2.5, "paused", Park(2.5, "limit llm: paused")),
        (Waited(0, LEASE_S), 1.5, "paused", Again(1.5)),
        (Waited(0, LEASE_S), 3.0, "broken", Park(3.0, "limit llm: broken")),
        (Waited(0, LEASE_S), 3.0, "exhausted", Park(3.0, "limit llm: exhausted")),
        (Waited(1.0, LEASE_S, crowded=True), 1.5, "requests", Park(1.5, "limit llm: requests")),
        (Waited(1.0, LEASE_S), 1.5, "requests", Again(1.5)),
    ],
)
def test_a_wait_within_patience_is_asked_again_and_a_longer_one_parked(
    waited: Waited, wait_s: float, reason: str, step: Again | Park
) -> None:
    """Behind a closed gate, and where others cannot be pulled, patience is two seconds."""
    assert after_wait(waited, wait_s, "llm", reason, 0.0) == step


def test_time_in_the_governors_hand_counts_as_waited() -> None:
    """Whoever was held for as long as the governor asks to wait has a place in its queue, and asks again at once."""
    assert after_wait(Waited(2.0, LEASE_S), 1.5, "llm", "requests", 2.0) == Again(LEAST_PAUSE_S)
    assert after_wait(Waited(2.0, LEASE_S), 3.0, "llm", "requests", 2.0) == Again(1.0)


@given(waited=waits, wait_s=seconds, reason=reasons, held_s=st.floats(0, 10))
def test_nobody_waits_beyond_patience_and_nobody_spins(
    waited: Waited, wait_s: float, reason: str, held_s: float
) -> None:
    """A pause ends within patience (or just begins to), is never none, and a park is the governor's own estimate."""
    step = after_wait(waited, wait_s, "llm", reason, held_s)
    if isinstance(step, Park):
        assert step.after_s == wait_s
        assert "llm" in step.detail
    else:
        assert LEAST_PAUSE_S <= step.pause_s <= max(LEAST_PAUSE_S, waited.patience_s)
        assert not (reason in GATE_REASONS and wait_s > HOLD_S)
    assert 0 <= hold_s(waited) <= HOLD_S


def test_no_answer_of_a_governor_is_named_without_a_key() -> None:
    """There is no limit to name."""
    assert after_wait(Waited(99, LEASE_S), 1.0, "", "governor_unreachable", 0.0) == Park(1.0, "governor unreachable")


def test_a_budget_that_is_used_up_ends_the_attempt_and_is_named() -> None:
    """No park: the period may be a month."""
    step = after_denial("budget_exhausted", "tenant/acme", "50 of 50 USD spent this day")
    assert isinstance(step, Fail)
    assert step.failure.reason == "budget_exhausted"
    assert step.failure.message == "budget tenant/acme: 50 of 50 USD spent this day"


def test_what_can_never_fit_is_fatal() -> None:
    """Another attempt would ask for the same."""
    for step in (after_denial("too_large", "llm"), too_many_keys(40, 32)):
        assert isinstance(step, Fail)
        assert step.failure.reason == "fatal"


def test_an_unknown_limit_is_waited_for_and_says_what_to_do() -> None:
    """Somebody may configure it while the task is parked."""
    step = after_denial("unknown_limit", "anthropic/opus")
    assert step == Park(
        UNKNOWN_LIMIT_AGAIN_S,
        'limit anthropic/opus is not configured: add [limits."anthropic/opus"] to millstream.toml and restart the '
        "governor, or to FILE and run `millstream config apply FILE`, which is live",
    )


@pytest.mark.parametrize("reason", ["disabled", "cancelled", "spent", "bad_request", "something new"])
def test_any_other_denial_is_parked_and_told(reason: str) -> None:
    """A newer governor may know reasons that this worker does not."""
    step = after_denial(reason, "llm", "by ops")
    assert isinstance(step, Park)
    assert step.after_s == DENIED_AGAIN_S
    assert reason.replace("_", " ") in step.detail
    assert "by ops" in step.detail


def test_refusals_without_a_hint_are_waited_out_longer_and_longer() -> None:
    """A used-up quota at once for long."""
    assert [throttled_again_s("throttled", count) for count in range(4)] == [1.0, 2.0, 4.0, 8.0]
    assert throttled_again_s("overloaded", 10**6) == LONGEST_AGAIN_S
    assert throttled_again_s("quota", 0) == QUOTA_AGAIN_S
