"""Whether a run of the demo has shown what it is there to show: each way to fall short is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millstream.demo.report import Figures, TaskShown, problems

GOOD = Figures(
    submitted=40,
    completed=39,
    failed=1,
    retried=4,
    throttled=20,
    provider_calls=43,
    provider_429=0,
    limit_per_minute=23,
    max_calls_in_any_minute=23,
    elapsed_s=110.0,
    notes=[],
)


def _said(*, paced: bool = True, flaky: bool = True, **changes: Any) -> list[str]:
    return problems(msgspec.structs.replace(GOOD, **changes), [], whole=True, paced=paced, flaky=flaky)


def test_a_good_run_has_no_problem() -> None:
    """At the default limit and at another."""
    assert _said() == []
    assert _said(paced=False) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"completed": 38}, "1 of 40 tasks have no outcome"),
        ({"completed": 40, "failed": 0}, "no task failed"),
        ({"max_calls_in_any_minute": 24}, "24 calls in one minute"),
        ({"provider_429": 1}, "1 of 43 calls with 429"),
    ],
)
@pytest.mark.parametrize("paced", [True, False])
def test_what_may_never_be_is_named_at_any_limit(changes: dict[str, Any], said: str, paced: bool) -> None:
    """Lost tasks, no dead letter, a broken limit, refusals."""
    found = _said(paced=paced, **changes)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(("refused", "calls", "wrong"), [(1, 100, False), (2, 100, True), (1, 99, True), (0, 0, False)])
def test_one_refusal_in_a_hundred_calls_of_another_endpoint_is_borne(refused: int, calls: int, wrong: bool) -> None:
    """More are not; the local model's limit is the configured one, so that it refuses none."""
    assert bool(_said(paced=False, flaky=False, provider_429=refused, provider_calls=calls)) is wrong
    assert bool(_said(paced=False, provider_429=refused, provider_calls=calls)) is (refused > 0)


@pytest.mark.parametrize(("held_s", "throttles", "waits"), [(0.0, 0, 0), (0.4, 0, 0), (12.0, 0, 1), (12.0, 2, 3)])
def test_a_task_waited_for_the_limit_where_it_was_held_for_a_while_or_given_back(
    held_s: float, throttles: int, waits: int
) -> None:
    """A release takes a moment too: that is no wait."""
    task = TaskShown(key="k", task_type="t", state="completed", held_s=held_s, throttles=throttles)
    assert task.waits == waits


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"elapsed_s": 64.9}, "64.9 s"),
        ({"provider_calls": 23}, "only 23 calls"),
        ({"retried": 0}, "no task was retried"),
        ({"throttled": 0}, "no task waited"),
    ],
)
def test_a_run_at_the_default_limit_must_show_it_at_work(changes: dict[str, Any], said: str) -> None:
    """A run at another limit may be as short as it likes."""
    found = _said(**changes)
    assert len(found) == 1
    assert said in found[0]
    assert _said(paced=False, **changes) == []


def test_the_bounds_themselves_are_good() -> None:
    """65 s, one call over the limit, one retry and one wait are enough."""
    assert _said(elapsed_s=65.0, provider_calls=24, retried=1, throttled=1) == []


def test_an_endpoint_that_never_fails_need_not_cause_a_retry() -> None:
    """Only the local model server answers 500 on purpose."""
    assert _said(flaky=False, retried=0) == []


def test_an_end_before_time_and_a_missing_letter_are_named() -> None:
    """Neither shows in the figures."""
    said = problems(GOOD, ["broken.md"], whole=False, paced=True, flaky=True)
    assert [line for line in said if "time limit" in line]
    assert [line for line in said if "broken.md" in line]
    assert len(said) == 2
