"""The table of the life cycle is complete: every event has a place, and nothing but a replay follows an end."""

from __future__ import annotations

from typing import get_args

import pytest

from millstream_schemas import events
from millstream_schemas.lifecycle import (
    DECISION_KINDS,
    RELEASING_KINDS,
    TERMINAL,
    TERMINAL_KINDS,
    TRANSITIONS,
    WAITING,
    IllegalTransition,
    State,
    next_state,
    state_after,
)

KINDS = {kind.__struct_config__.tag for kind in get_args(events.Event)}
STATES = set(get_args(State))


def test_every_event_has_a_place_in_the_table() -> None:
    """An alias points to a task and is no part of its life; all others are."""
    listed = {event for row in TRANSITIONS.values() for event in row}
    assert listed == KINDS - {"alias"}


def test_every_state_has_a_row_and_every_row_leads_to_states() -> None:
    """There is no state from which nothing is said."""
    assert set(TRANSITIONS) == STATES | {None}
    assert {state for row in TRANSITIONS.values() for state in row.values()} <= STATES


def test_an_event_leads_to_the_same_state_from_everywhere() -> None:
    """Whoever reads the last event alone knows the state shown."""
    for row in TRANSITIONS.values():
        for event, state in row.items():
            assert state_after(event) == state


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_after_an_end_only_a_new_generation_begins(state: State) -> None:
    """At most one outcome: no outcome, start or decision follows another."""
    assert set(TRANSITIONS[state]) == {"queued", "held", "scheduled", "expired"}
    with pytest.raises(IllegalTransition) as caught:
        next_state(state, "completed")
    assert (caught.value.state, caught.value.event) == (state, "completed")


def test_the_groups_of_kinds_are_kinds_that_exist() -> None:
    """They are matched as text against subjects, where a misspelt one would never match."""
    assert set(DECISION_KINDS) | RELEASING_KINDS | TERMINAL_KINDS <= KINDS
    assert WAITING | TERMINAL | {"processing"} == STATES
    assert not WAITING & TERMINAL


def test_a_task_that_waits_or_runs_can_end() -> None:
    """Nothing is shown as waiting for ever because its end was not listed."""
    for state, row in TRANSITIONS.items():
        if state is not None and state not in TERMINAL:
            assert {"failed", "cancelled"} <= set(row)
