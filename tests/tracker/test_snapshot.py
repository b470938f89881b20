"""The active batch of a queue."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from millstream.tracker.model import TaskRow
from millstream.tracker.snapshot import Batch, moved, shown
from millstream_schemas.lifecycle import TERMINAL, State

QUIET_S = 5.0


def row(name: str, state: State, at: float) -> TaskRow:
    """A task that came into its state at `at`."""
    ended = at if state in TERMINAL else None
    return TaskRow(n=1, seq=1, key=name, tenant_id="t", task_id=name, queue="q", state=state, since=at, ended_at=ended)


def sums(batch: Batch) -> tuple[int, int, int, int, int]:
    """Total, queued, processing, completed, failed."""
    return batch.total, batch.queued, batch.processing, batch.completed, batch.failed


def test_the_sums_follow_the_tasks() -> None:
    """All that waits is queued; cancelled and expired count as failed."""
    batch: Batch | None = None
    states: dict[str, State] = {"a": "queued", "b": "scheduled", "c": "retrying", "d": "processing", "e": "cancelled"}
    states["f"] = "held"
    for name, state in states.items():
        batch = moved(batch, None, row(name, state, 10.0), QUIET_S)
    assert batch is not None
    assert sums(batch) == (6, 4, 1, 0, 1)
    batch = moved(batch, row("a", "queued", 10.0), row("a", "processing", 11.0), QUIET_S)
    batch = moved(batch, row("a", "processing", 11.0), row("a", "completed", 12.0), QUIET_S)
    assert sums(batch) == (6, 3, 1, 1, 1)


def test_it_begins_anew_five_seconds_after_the_last_active_task_ended() -> None:
    """Until then a new task joins it; afterwards the view is empty."""
    ended = moved(
        moved(None, None, row("a", "queued", 1.0), QUIET_S), row("a", "queued", 1.0), row("a", "failed", 2.0), QUIET_S
    )
    assert sums(shown(ended, 6.9, QUIET_S)) == (1, 0, 0, 0, 1)
    assert sums(shown(ended, 7.0, QUIET_S)) == (0, 0, 0, 0, 0)
    assert sums(moved(ended, None, row("b", "queued", 6.9), QUIET_S)) == (2, 1, 0, 0, 1)
    assert sums(moved(ended, None, row("b", "queued", 7.1), QUIET_S)) == (1, 1, 0, 0, 0)


def test_a_task_that_runs_again_is_counted_once() -> None:
    """A replay within the batch takes the failure back; one of an earlier batch was not in it."""
    failed = row("a", "failed", 2.0)
    batch = moved(moved(None, None, row("a", "queued", 1.0), QUIET_S), row("a", "queued", 1.0), failed, QUIET_S)
    assert sums(moved(batch, failed, row("a", "queued", 3.0), QUIET_S)) == (1, 1, 0, 0, 0)
    assert sums(moved(batch, failed, row("a", "queued", 30.0), QUIET_S)) == (1, 1, 0, 0, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["queued", "processing", "completed", "failed"])), max_size=40
    )
)
def test_active_sums_are_those_of_the_tasks(steps: list[tuple[int, State]]) -> None:
    """However tasks move, what is active is what was left active, and nothing is below zero."""
    tasks: dict[int, TaskRow] = {}
    batch: Batch | None = None
    for at, (name, state) in enumerate(steps, 1):
        after = row(str(name), state, float(at))
        batch = moved(batch, tasks.get(name), after, QUIET_S)
        tasks[name] = after
        states = [each.state for each in tasks.values()]
        assert (batch.queued, batch.processing) == (states.count("queued"), states.count("processing"))
        assert min(msgspec.structs.astuple(batch)) >= 0
