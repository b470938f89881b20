"""The projection: what events make of a task's row, whatever comes."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from millstream.tracker.model import TaskRow
from millstream.tracker.projection import apply, apply_info
from millstream_schemas.events import (
    AttemptFailed,
    Cancelled,
    Completed,
    Expired,
    Failed,
    Failure,
    Held,
    Interrupted,
    LifeEvent,
    Parked,
    Queued,
    Released,
    Retrying,
    Scheduled,
    Started,
    TaskInfo,
    Usage,
)
from millstream_schemas.infos import BudgetWarning, Conflict, Duplicate, Info, Progress, UnknownFields
from millstream_schemas.lifecycle import TERMINAL, TRANSITIONS
from tests.tracker.histories import NAMES, START, card, item

FAILURE = Failure(reason="error", error_type="ValueError", message="no", fingerprint="f00d")


def event(kind: str, generation: int = 1, **more: Any) -> LifeEvent:
    """Any life-cycle event of one task."""
    of = card("t", generation=generation, **more)
    made: dict[str, LifeEvent] = {
        "queued": Queued(card=of, task=TaskInfo(title="a title")),
        "held": Held(card=of, reason="limits", lane="a" * 26, limits=["llm", "tenant/acme"]),
        "released": Released(card=of),
        "scheduled": Scheduled(card=of, due_at=START + 5, why="throttled: 429"),
        "retrying": Retrying(card=of, due_at=START + 5),
        "started": Started(card=of, worker_id="w"),
        "completed": Completed(card=of, result=msgspec.Raw(b'{"a":1}'), usage=Usage(tokens_in=3)),
        "attempt_failed": AttemptFailed(card=of, failure=FAILURE, item=item(of), usage=Usage(tokens_in=2)),
        "parked": Parked(card=of, until=START + 9, reason="throttled", item=item(of)),
        "interrupted": Interrupted(card=of, item=item(of)),
        "failed": Failed(card=of, reason="max_attempts", failure=FAILURE),
        "expired": Expired(card=of),
        "cancelled": Cancelled(card=of, by="someone"),
    }
    return made[kind]


KINDS = [each.__struct_config__.tag for each in get_args(LifeEvent)]


def fold(*events: LifeEvent) -> TaskRow:
    """The row after these events."""
    row: TaskRow | None = None
    for seq, each in enumerate(events, 1):
        row = apply(row, each, seq, START + seq, NAMES.inbox_stream).row
    assert row is not None
    return row


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 3)), min_size=1, max_size=12))
def test_every_sequence_of_events_is_folded_and_states_move_by_the_table_alone(steps: list[tuple[str, int]]) -> None:
    """No history is fatal; a state is left only where the table lists it or a new generation begins."""
    row: TaskRow | None = None
    for seq, (kind, generation) in enumerate(steps, 1):
        step = apply(row, event(kind, generation), seq, START + seq, NAMES.inbox_stream)
        if row is not None and step.verdict != "folded":
            assert msgspec.structs.replace(step.row, seq=row.seq) == row
        elif row is not None and step.row.generation == row.generation:
            assert TRANSITIONS[row.state][kind] == step.row.state
            assert row.state not in TERMINAL
        assert step.row.n == 1
        assert step.row.seq == step.entry.seq == seq
        assert step.entry.state == step.row.state
        assert (step.row.ended_at is not None) == (step.row.state in TERMINAL)
        row = step.row


def test_an_outcome_stays_whatever_follows_in_its_generation() -> None:
    """A late start or second outcome is told in the timeline and changes nothing."""
    done = fold(event("queued"), event("started"), event("completed"))
    for kind in KINDS:
        late = apply(done, event(kind), 9, START + 9, NAMES.inbox_stream)
        assert late.verdict == "illegal"
        assert late.row.state == "completed"
        assert late.entry.detail.startswith("illegal")


def test_a_new_generation_begins_afresh_and_keeps_its_attempts() -> None:
    """A replayed task has no error, result or end; what an older generation still says is stale."""
    failed = fold(event("queued"), event("started"), event("attempt_failed"), event("failed"))
    assert failed.reason == "max_attempts"
    again = apply(failed, event("queued", generation=2), 9, START + 9, NAMES.inbox_stream).row
    assert (again.state, again.generation, again.error, again.reason, again.ended_at) == ("queued", 2, None, "", None)
    assert again.usage == Usage()
    assert [each.outcome for each in again.attempts] == ["failed"]
    assert apply(again, event("completed"), 10, START + 10, NAMES.inbox_stream).verdict == "stale"


def test_a_takeover_closes_the_lost_execution() -> None:
    """The second start of a release shows the first one as lost."""
    row = fold(
        event("queued"), event("started", execution_id="a"), event("started", execution_id="b"), event("completed")
    )
    assert [(each.execution_id, each.outcome) for each in row.attempts] == [("a", "lost"), ("b", "completed")]
    assert all(each.ended_at is not None for each in row.attempts)


def test_usage_of_all_executions_is_added_up() -> None:
    """A failed attempt's tokens count as much as the good one's."""
    row = fold(
        event("queued"),
        event("started"),
        event("attempt_failed"),
        event("retrying"),
        event("started"),
        event("completed"),
    )
    assert row.usage.tokens_in == 5
    assert row.has_result
    assert row.error is None


def test_a_history_whose_beginning_is_gone_still_gives_a_row() -> None:
    """The first event seen may be any; where the table lists none, it is counted and shown."""
    step = apply(None, event("started"), 7, START, NAMES.inbox_stream)
    assert (step.verdict, step.row.state) == ("illegal", "processing")


def test_a_held_task_knows_its_lane_and_how_long_it_was_held() -> None:
    """Its pool stands for the limits that its producer named; what it waited in all its turns is added up."""
    row = fold(event("held"))
    assert (row.state, row.lane, row.limits) == ("held", "a" * 26, ["llm", "tenant/acme"])
    assert (row.held_at, row.held_seq, row.held_s) == (START + 1, 1, 0.0)
    row = fold(
        event("held"), event("released"), event("started"), event("interrupted"), event("held"), event("released")
    )
    assert (row.state, row.held_at, row.held_s, row.lane) == ("queued", None, 2.0, "a" * 26)
    assert fold(event("held"), event("expired")).held_at is None
    begun_anew = fold(event("held"), event("cancelled"), event("queued", generation=2))
    assert (begun_anew.lane, begun_anew.held_s) == ("", 0.0)


def test_infos_never_move_a_task() -> None:
    """Duplicates and conflicts are counted, unknown fields and progress are kept."""
    row = fold(event("queued"), event("started"))
    infos: list[Info] = [
        Progress(key=row.key, fraction=0.4, message="half way"),
        Duplicate(key=row.key, inbox_seq=4),
        Conflict(key=row.key, inbox_seq=5, detail="another payload"),
        UnknownFields(key=row.key, names=["colour"], clamped=["budget.max_attempts"]),
        BudgetWarning(key=row.key, budget="tenant/acme", period="2026-05-09", spent=40.25, hard=50.0),
    ]
    entries: list[str] = []
    for seq, info in enumerate(infos, 10):
        entries.append(apply_info(row, info, seq, START + seq).entry.detail)
        row = apply_info(row, info, seq, START + seq).row
    assert row.state == "processing"
    assert entries[-1] == "tenant/acme in 2026-05-09: 40.25 of 50.00 USD are spent"
    assert row.progress is not None
    assert row.progress.fraction == 0.4
    assert (row.duplicates, row.conflicts, row.unknown_fields, row.clamped) == (
        1,
        1,
        ["colour"],
        ["budget.max_attempts"],
    )
