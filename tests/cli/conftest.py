"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.fake_tracker import FakeTracker, fake_tracker


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTracker]:
    """A tracker that says what it is told to; commands run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    with fake_tracker() as served:
        yield served
