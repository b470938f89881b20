"""Durations as people write them."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.durations import Duration, seconds


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (30, 30.0),
        (0, 0.0),
        (1.5, 1.5),
        ("30", 30.0),
        ("30s", 30.0),
        (" 5M ", 300.0),
        ("1h30m", 5400.0),
        ("500ms", 0.5),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("1w", 604800.0),
        ("1m1ms", 60.001),
        (timedelta(minutes=2), 120.0),
    ],
)
def test_numbers_texts_and_timedeltas_are_seconds(written: Duration, expected: float) -> None:
    """`m` is a minute, `ms` a thousandth of a second."""
    assert seconds(written) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["", "s", "5x", "5 m 3", "1h-5m", "-5s", "nan", "inf", "1e999", "5,5s", "h1", "1h 30m"]
)
def test_other_texts_are_refused_with_examples(text: str) -> None:
    """Never guessed."""
    with pytest.raises(ValueError, match="Expected a duration"):
        seconds(text)


@pytest.mark.parametrize(
    "number", [-1, -0.1, float("nan"), float("inf"), 10**400, timedelta(seconds=-5), "9" * 400 + "s", "1" * 400]
)
def test_other_numbers_are_refused(number: Duration) -> None:
    """A duration is finite and not negative."""
    with pytest.raises(ValueError, match="from 0 to"):
        seconds(number)


@given(st.text(max_size=12))
def test_no_text_raises_anything_but_value_error(text: str) -> None:
    """Whatever someone types."""
    with suppress(ValueError):
        assert seconds(text) >= 0


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_parts_add_up(hours: int, minutes: int, rest: int) -> None:
    """As on a clock."""
    assert seconds(f"{hours}h{minutes}m{rest}s") == hours * 3600 + minutes * 60 + rest
