"""One running tracker for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.http.harness import Running, running


@pytest.fixture
async def mill(tmp_path: Path) -> AsyncIterator[Running]:
    """A tracker over an empty in-memory broker."""
    async with running(tmp_path) as found:
        yield found
