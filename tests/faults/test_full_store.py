"""The store fills up: no task is admitted whose outcome would not fit, and the governor outlives a refused write."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.server import LocalServer, ServerLimits
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until, wait_until_sync

STORE_BYTES = 32 * 1024**2
TASKS = 120
PAYLOAD = "x" * 120_000


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[LocalServer]:
    """A server with a small store."""
    with LocalServer(tmp_path / "nats", limits=ServerLimits(max_file_store_bytes=STORE_BYTES)) as server:
        yield server


async def test_intake_pauses_before_outcomes_would_not_fit(fleet: Fleet) -> None:
    """Without a worker the backlog grows to 60 % of the store and no further; as it is worked off, the rest follows."""
    dispatcher, governor = fleet.dispatcher(), fleet.governor()
    accepted: list[str] = []
    async with fleet.plain() as client, fleet.broker() as broker:
        for number in range(TASKS * 3):
            task: dict[str, Any] = {"task_id": f"task-{number}", "task_type": "echo", "payload": {"number": number}}
            try:
                await fleet.submit(client, {**task, "context": PAYLOAD})
            except Exception:  # noqa: BLE001 - INBOX is full, which is what producers are to see
                break
            accepted.append(f"task-{number}")
            await asyncio.sleep(0.01)
        assert len(accepted) < TASKS * 3, "INBOX refuses"
        wait_until_sync(lambda: "intake.paused" in dispatcher.log(), "the dispatcher pauses")
        inbox, work = [
            await broker.stream_info(stream) for stream in (fleet.names.inbox_stream, fleet.names.work_stream)
        ]
        assert inbox is not None
        assert work is not None
        assert inbox.messages > 0
        assert work.bytes < 0.75 * STORE_BYTES
        worker = fleet.worker()

        async def all_done() -> bool:
            return await fleet.outcomes(broker) == {task_id: Counter(completed=1) for task_id in accepted}

        await wait_until(all_done, "every accepted task is done", timeout=60)
    assert "intake.resumed" in dispatcher.log()
    assert all(actor.running for actor in (dispatcher, governor, worker))
