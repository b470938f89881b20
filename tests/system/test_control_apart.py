"""CONTROL in an account of its own: commands reach the dispatcher there, and the main account has no such stream."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millstream.server import LocalServer
from tests.support.fleet import Fleet
from tests.support.processes import Processes


async def test_cancel_travels_by_the_control_connection_alone(
    nats_server: LocalServer, processes: Processes, tmp_path: Path
) -> None:
    """A second server stands for the account: a cancel over HTTP works, and nothing of it is declared on the first."""
    with LocalServer(tmp_path / "control") as apart:
        fleet = Fleet(nats_server, processes, tmp_path, config=f'[nats]\ncontrol_url = "{apart.url}"\n')
        fleet.dispatcher()
        fleet.tracker()
        async with fleet.plain() as client, asyncio.timeout(60):
            later = {"task_id": "later", "task_type": "echo", "payload": 1, "delay_seconds": 600}
            await fleet.submit(client, later)
            await fleet.wait_for("later", "scheduled")
            answer = await fleet.post("/v1/tasks/later/cancel")
            assert answer.status_code == 202
            await fleet.wait_for("later", "cancelled")
        async with fleet.broker() as broker:
            assert await broker.stream_info(fleet.names.control_stream) is None
