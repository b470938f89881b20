"""Every actor may be stopped before it starts, while it starts, and twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from millstream.app import App
from millstream.clock import SystemClock, SystemIds
from millstream.dispatcher import Dispatcher
from millstream.governor import RateGovernor
from millstream.tracker import Tracker
from tests.support.millrace import Mill, millrace

Run = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
TIMES = 20
LIMIT_S = 30.0


def _dispatcher(mill: Mill) -> Run:
    return Dispatcher(mill.broker, mill.settings, SystemClock(), SystemIds(), mill.telemetry).run


def _governor(mill: Mill) -> Run:
    return RateGovernor(mill.broker, mill.settings, SystemClock(), SystemIds(), mill.telemetry).run


def _worker(mill: Mill) -> Run:
    app = App("a")
    app.task("t")(lambda: None)
    return mill.worker(app).run


def _tracker(mill: Mill) -> Run:
    return Tracker(mill.broker, mill.settings, SystemClock()).run


ACTORS = {"dispatcher": _dispatcher, "governor": _governor, "worker": _worker, "tracker": _tracker}


@pytest.mark.parametrize("name", ACTORS)
async def test_a_stop_at_any_moment_of_the_start_ends_an_actor_and_leaves_nothing_behind(
    name: str, tmp_path: Path
) -> None:
    """The event is set after 0, 1, 2… turns of the loop, and set again; no task outlives its actor."""
    for turns in range(TIMES):
        mill = await millrace(data_dir=str(tmp_path / str(turns)), tracker={"port": 0})
        stop = asyncio.Event()
        before = asyncio.all_tasks()
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(ACTORS[name](mill)(stop))
            for _ in range(turns):
                await asyncio.sleep(0)
            stop.set()
            stop.set()
        left = [task for task in asyncio.all_tasks() - before if not task.done()]
        assert not left, left
