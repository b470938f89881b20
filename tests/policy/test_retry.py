"""Waiting before the next attempt: bounded, without overflow, and only for errors that are worth it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.retry import delay_s, is_retryable
from millstream_schemas.codec import InvalidEnvelope, decode_envelope
from millstream_schemas.envelope import MAX_WAIT_S, RetryPolicy, Strategy

seconds = st.floats(min_value=0, max_value=MAX_WAIT_S)
strategies: st.SearchStrategy[Strategy] = st.sampled_from(["exponential_backoff", "linear", "fixed", "none"])
policies = st.builds(
    RetryPolicy,
    strategy=strategies,
    base_seconds=seconds,
    factor=st.floats(min_value=0, max_value=1e6, exclude_min=True),
    max_seconds=seconds,
    jitter=st.booleans(),
)
attempts = st.integers(min_value=1, max_value=10**6)
uniforms = st.floats(min_value=0, max_value=1, exclude_max=True)


def test_the_two_thousandth_attempt_waits_for_the_cap() -> None:
    """5 * 5 ** 1999 has 1,398 digits; the cap is compared before anything of that size is computed."""
    policy = RetryPolicy(base_seconds=5, factor=5, max_seconds=120, jitter=False)
    assert [delay_s(policy, attempt, 0.0) for attempt in (2000, 10**9)] == [120, 120]


@pytest.mark.parametrize("factor", ["0", "-1", "-0.0", "NaN", "Infinity", "-Infinity", "1e999", "null", '"2"'])
def test_a_factor_that_is_no_positive_number_is_refused_by_the_contract(factor: str) -> None:
    """So no logarithm of it is ever taken."""
    body = b'{"task_type":"a","retry_policy":{"factor":%s}}' % factor.encode()
    with pytest.raises(InvalidEnvelope):
        decode_envelope(body)


@pytest.mark.parametrize("field", ["base_seconds", "max_seconds"])
@pytest.mark.parametrize("value", [-1, -1e-9, MAX_WAIT_S * 2])
def test_a_wait_that_is_negative_or_too_long_is_refused_by_the_contract(field: str, value: float) -> None:
    """With the path of the field."""
    with pytest.raises(InvalidEnvelope) as caught:
        decode_envelope(json.dumps({"task_type": "a", "retry_policy": {field: value}}).encode())
    assert caught.value.path == f"$.retry_policy.{field}"


@given(policies, attempts, uniforms)
def test_every_delay_is_finite_and_within_the_cap(policy: RetryPolicy, attempt: int, uniform: float) -> None:
    """Whatever the contract lets through."""
    delay = delay_s(policy, attempt, uniform)
    assert math.isfinite(delay)
    assert 0 <= delay <= policy.max_seconds


@given(policies, attempts, attempts)
def test_later_attempts_never_wait_less(policy: RetryPolicy, one: int, other: int) -> None:
    """Without jitter, and with a factor of at least one."""
    steady = RetryPolicy(
        strategy=policy.strategy,
        base_seconds=policy.base_seconds,
        factor=max(policy.factor, 1.0),
        max_seconds=policy.max_seconds,
        jitter=False,
    )
    earlier, later = sorted((one, other))
    assert delay_s(steady, earlier, 0.0) <= delay_s(steady, later, 0.0)


@given(policies, attempts, uniforms)
def test_jitter_lies_between_half_of_the_delay_and_the_whole(policy: RetryPolicy, attempt: int, uniform: float) -> None:
    """So a herd spreads, and nobody retries at once."""
    fields = {"strategy": policy.strategy, "factor": policy.factor, "max_seconds": policy.max_seconds}
    plain = RetryPolicy(base_seconds=policy.base_seconds, jitter=False, **fields)  # type: ignore[arg-type]
    shaken = RetryPolicy(base_seconds=policy.base_seconds, jitter=True, **fields)  # type: ignore[arg-type]
    whole = delay_s(plain, attempt, uniform)
    assert whole / 2 <= delay_s(shaken, attempt, uniform) <= whole


def test_each_strategy_grows_as_its_name_says() -> None:
    """The first four attempts of each."""
    delays = {
        strategy: [delay_s(RetryPolicy(strategy=strategy, base_seconds=3, jitter=False), n, 0.0) for n in range(1, 5)]
        for strategy in ("exponential_backoff", "linear", "fixed", "none")
    }
    assert delays["exponential_backoff"] == pytest.approx([3, 6, 12, 24])
    assert delays["linear"] == [3, 6, 9, 12]
    assert delays["fixed"] == [3, 3, 3, 3]
    assert delays["none"] == [0, 0, 0, 0]


def test_a_retry_after_of_the_provider_is_a_lower_bound_even_over_the_cap() -> None:
    """The provider knows better; nonsense from it changes nothing."""
    policy = RetryPolicy(strategy="fixed", base_seconds=5, max_seconds=10, jitter=False)
    asked = [None, 0.0, 1.0, 60.0, -5.0, math.nan]
    assert [delay_s(policy, 1, 0.0, after) for after in asked] == [5, 5, 5, 60, 5, 5]


def test_the_notes_application_retries_a_429_after_1_2_and_4_seconds_and_nothing_else() -> None:
    """Origins A, as one policy."""
    policy = RetryPolicy(base_seconds=1, factor=2, jitter=False, retry_on=["http_429"])
    assert [delay_s(policy, attempt, 0.0) for attempt in (1, 2, 3)] == pytest.approx([1, 2, 4])
    assert is_retryable(policy, ["RateLimitError", "http_429"])
    assert not any(is_retryable(policy, [name]) for name in ("http_500", "timeout", "ValueError"))
    assert not is_retryable(policy, [])


def test_fatal_on_wins_over_retry_on_and_letter_case_is_ignored() -> None:
    """A class on both lists is not retried."""
    both = RetryPolicy(retry_on=["TimeoutError", "http_500"], fatal_on=["timeouterror"])
    assert not is_retryable(both, ["TimeoutError"])
    assert is_retryable(both, ["HTTP_500"])
    assert not is_retryable(both, ["http_500", "TIMEOUTERROR"])


def test_without_lists_everything_is_retried_unless_the_strategy_is_none() -> None:
    """An empty `retry_on` retries nothing; a list brings retries back to the strategy `none`."""
    assert is_retryable(RetryPolicy(), ["Anything"])
    assert not is_retryable(RetryPolicy(strategy="none"), ["Anything"])
    assert not is_retryable(RetryPolicy(retry_on=[]), ["Anything"])
    assert is_retryable(RetryPolicy(strategy="none", retry_on=["Anything"]), ["Anything"])
