"""Every state has its sentence."""

from __future__ import annotations

from typing import get_args

import pytest

from millstream.policy.why import Known, duration, explain
from millstream_schemas.lifecycle import State
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


def test_the_table_in_the_docs_names_every_state_and_source() -> None:
    """A state or a source that the function gives stands in docs/why.md."""
    table = (REPOSITORY / "docs" / "why.md").read_text(encoding="utf-8")
    for state in get_args(State):
        for due_at in (None, 160.0):
            for workers, served in ((0, False), (1, False), (1, True)):
                known = Known(
                    state=state, now=100.0, task_type="t", queue="q", due_at=due_at, workers=workers, served=served
                )
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
