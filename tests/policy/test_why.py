"""Every state has its sentence."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from millstream.policy.durations import duration
from millstream.policy.why import Known, explain
from millstream.policy.why_held import Lane, Pool, per_time
from millstream_schemas.lifecycle import State
from millstream_schemas.limit_states import DimensionState, LimitState
from millstream_schemas.permits import Gate
from tests.support.source import REPOSITORY


@pytest.mark.parametrize("state", get_args(State))
def test_every_state_is_explained_with_a_source(state: State) -> None:
    """A sentence that ends, and where it was read."""
    why = explain(Known(state=state, now=100.0, task_type="t", queue="q", since=90.0))
    assert why.sentence.endswith(".")
    assert why.source


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"state": "queued", "workers": 0}, "no worker is alive"),
        ({"state": "queued", "workers": 2, "served": False}, "none of 2 live workers serves its type `t`"),
        (
            {"state": "queued", "workers": 1, "limits": ("llm",), "ahead": 4},
            "a permit of llm; 4 tasks ready in queue `q`",
        ),
        (
            {"state": "scheduled", "due_at": 160.0, "waits_for": "throttled: 429"},
            "made it wait (429); it is due in 1 min 0 s",
        ),
        ({"state": "scheduled", "due_at": 99.0}, "it is due now (since 1.0 s)"),
        (
            {"state": "retrying", "due_at": 105.0, "attempt": 2, "max_attempts": 3, "error": "boom"},
            "attempt 2 of 3, due in 5.0 s",
        ),
        ({"state": "retrying"}, "has not decided yet"),
        ({"state": "processing", "worker_id": "w1", "progress": 0.4}, "on worker `w1` for 10.0 s, attempt 1, 40% done"),
        ({"state": "failed", "reason": "max_attempts", "error": "boom"}, "for good (max_attempts), 10.0 s ago: boom"),
    ],
)
def test_the_sentence_says_what_is_known(known: dict[str, object], expected: str) -> None:
    """The reason, the next time and who is meant stand in it."""
    values: dict[str, object] = {"now": 100.0, "task_type": "t", "queue": "q", "since": 90.0} | known
    assert expected in explain(Known(**values)).sentence  # type: ignore[arg-type]


def gate(**more: Any) -> Pool:
    """What a governor says of `llm`."""
    state = LimitState(
        key="llm", dimensions=(DimensionState(dimension="requests", configured=60, effective=48, used=1, window_s=60),),
        in_use=0, waiting=0, granted_total=0, throttled_total=0, paused_why="the provider said so",
    )  # fmt: skip
    values: dict[str, Any] = {"keys": ("llm",), "open": True, "limiting_key": "llm"}
    return Pool(Gate(**(values | more)), state)


@pytest.mark.parametrize(
    ("lane", "pool", "expected", "wait_s"),
    [
        (Lane(3, 120), gate(rate_per_s=0.5), "place 3 of 120 in its lane; `llm` lets 30 a minute start", 6.0),
        (Lane(3, 120), gate(rate_per_s=0.5), "(slowed to 80% of what is configured)", 6.0),
        (Lane(3, 120, 4, 500), gate(rate_per_s=0.5), "4 lanes take turns: about 24.0 s to go", 24.0),
        (Lane(3, 120, 4, 5), gate(rate_per_s=0.5), "about 10.0 s to go", 10.0),
        (Lane(1, 1), gate(places=4), "no other lane waits for it, 4 at once", None),
        (Lane(1, 1), gate(open=False, reason="paused", wait_s=9.0), "is paused for 9.0 s (the provider said so)", 9.0),
        (
            Lane(1, 1),
            gate(open=False, reason="exhausted", wait_s=61.0),
            "used up, for 1 min 1 s (the provider said so)",
            61.0,
        ),
        (Lane(1, 1), gate(open=False, reason="unknown_limit", wait_s=5.0), "`millstream config apply FILE`", None),
        (Lane(1, 1), gate(open=False, reason="dreamt"), "lets nothing start (dreamt)", None),
        (Lane(1, 1), Pool(), "the governor does not answer", None),
        (Lane(1, 1), None, "the governor does not answer", None),
    ],
)
def test_a_held_task_says_where_it_stands_and_what_is_in_the_way(
    lane: Lane, pool: Pool | None, expected: str, wait_s: float | None
) -> None:
    """Its place, its limits' rate or what stops them, and how long that may take."""
    known = Known(state="held", now=0.0, task_type="t", queue="q", workers=1, limits=("llm",), lane=lane, pool=pool)
    found = explain(known)
    assert expected in found.sentence
    assert found.waiting is not None
    assert found.waiting.expected_s == wait_s


def test_a_fair_queue_without_limits_asks_nobody() -> None:
    """What is held for its turn alone needs no governor."""
    known = Known(state="held", now=0.0, task_type="t", queue="q", workers=1, lane=Lane(2, 2, 3, 9))
    assert "for its turn: place 2 of 2 in its lane; 3 lanes take turns" in explain(known).sentence


@pytest.mark.parametrize(("rate", "words"), [(12.0, "12 a second"), (0.5, "30 a minute"), (0.001, "3.6 an hour")])
def test_rates_are_said_in_the_unit_that_fits(rate: float, words: str) -> None:
    """One number of one to three digits."""
    assert per_time(rate) == words


def test_the_table_in_the_docs_names_every_state_and_source() -> None:
    """A state or a source that the function gives stands in docs/why.md."""
    table = (REPOSITORY / "docs" / "why.md").read_text(encoding="utf-8")
    for state in get_args(State):
        for due_at in (None, 160.0):
            for workers, served, pool in ((0, False, None), (1, False, None), (1, True, Pool()), (1, True, gate())):
                known = Known(
                    state=state, now=100.0, task_type="t", queue="q", due_at=due_at, workers=workers, served=served,
                    limits=("llm",), pool=pool, metered=pool is not None,
                )  # fmt: skip
                rows = [line for line in table.splitlines() if line.startswith(f"| `{state}` |")]
                assert any(line.endswith(f"| {explain(known).source} |") for line in rows), (state, explain(known))


def test_lengths_of_time_are_readable() -> None:
    """The unit grows with the length; a negative one is none."""
    assert [duration(each) for each in (-1.0, 0.25, 61.0, 3660.0, 180_000.0)] == [
        "0.0 s",
        "0.2 s",
        "1 min 1 s",
        "1 h 1 min",
        "2 d 2 h",
    ]
