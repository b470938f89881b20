"""The diagram in the docs is generated from the table."""

from __future__ import annotations

from typing import get_args

import pytest

from millstream_schemas.events import Alias, Event
from millstream_schemas.lifecycle import TRANSITIONS, IllegalTransition, mermaid, next_state
from tests.support.source import REPOSITORY


def test_the_document_holds_the_diagram_of_the_table() -> None:
    """A changed table needs a new diagram in docs/lifecycle.md."""
    document = (REPOSITORY / "docs" / "lifecycle.md").read_text(encoding="utf-8")
    assert f"```mermaid\n{mermaid()}\n```" in document


def test_the_diagram_shows_every_pair_of_the_table() -> None:
    """Nothing is left out for the sake of beauty."""
    lines = mermaid().splitlines()[1:]
    shown: set[tuple[str, str, str]] = set()
    for line in lines:
        way, _, events = line.strip().partition(": ")
        source, _, target = way.partition(" --> ")
        shown |= {(source, event, target) for event in events.split(", ")}
    table = {(state or "[*]", event, target) for state, row in TRANSITIONS.items() for event, target in row.items()}
    assert shown == table


def test_every_event_but_the_alias_moves_a_task_somewhere_and_all_else_is_an_error() -> None:
    """An alias lies on a subject of its own; a pair that no row lists is refused."""
    kinds = {str(kind.__struct_config__.tag) for kind in get_args(Event) if kind is not Alias}
    assert {event for row in TRANSITIONS.values() for event in row} == kinds
    for state, row in TRANSITIONS.items():
        for kind in (kinds | {"alias", "unheard_of"}) - set(row):
            with pytest.raises(IllegalTransition):
                next_state(state, kind)
