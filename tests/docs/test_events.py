"""The table of named events in docs/events.md is the one in the code."""

from __future__ import annotations

import re

from millstream.telemetry.events import EVENTS
from tests.support.source import REPOSITORY


def test_the_table_of_events_is_current() -> None:
    """Same names, same meanings."""
    page = (REPOSITORY / "docs" / "events.md").read_text("utf-8")
    assert dict(re.findall(r"^\| `([a-z_.]+)` \| (.+) \|$", page, re.MULTILINE)) == EVENTS


def test_every_emitted_event_is_in_the_table() -> None:
    """An actor emits no name that the table does not explain."""
    emitted = {
        name
        for path in (REPOSITORY / "actors" / "millstream").rglob("*.py")
        for name in re.findall(r"\.emit\(\s*\"([a-z_.]+)\"", path.read_text("utf-8"))
    }
    assert emitted <= set(EVENTS)
    assert len(emitted) > 10
