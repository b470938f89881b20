"""One event loop for both sides of the bench: the one that Millstream's own processes run on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from millstream.loop import loop_factory


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main)
