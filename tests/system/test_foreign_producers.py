"""Producers with none of our code: a NATS client, the wire document and HTTP are enough."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import Fleet
from tests.support.foreign_node import FOREIGN, node_modules
from tests.support.processes import REPOSITORY
from tests.support.waiting import wait_until

SAMPLES = REPOSITORY / "schemas" / "wire-samples" / "v1"
LANGUAGES = ("python", "node")
Answer = dict[str, Any]


def _command(language: str, folder: Path) -> list[str]:
    """The producer's command; Node finds its packages beside the script, so both lie in `folder`."""
    if language == "python":
        return [sys.executable, "-I", str(FOREIGN / "producer.py")]
    script = folder / "producer.mjs"
    script.write_bytes((FOREIGN / script.name).read_bytes())
    (folder / "node_modules").symlink_to(node_modules())
    return ["node", str(script)]


def _produce(fleet: Fleet, folder: Path, language: str, subject: str, envelope: bytes, task_id: str) -> Answer:
    """Run a producer to its end; returns what HTTP told it of the task."""
    command = [*_command(language, folder), fleet.server.url, subject, fleet.url, task_id]
    done = subprocess.run(command, input=envelope, cwd=folder, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    answer: Answer = json.loads(done.stdout)
    assert answer["seq"] >= 1
    task: Answer = answer["task"]
    return task


@pytest.mark.parametrize("language", LANGUAGES)
def test_producer_in_any_language_sees_its_task_completed(shared_fleet: Fleet, tmp_path: Path, language: str) -> None:
    """It publishes to `mill.submit.acme.<queue>` and reads `completed` from `GET /v1/tasks/{id}`."""
    task_id = f"from-{language}"
    envelope = {"task_id": task_id, "task_type": "echo", "payload": {"from": language, "text": "grüß dich 😀"}}
    body = json.dumps(envelope, ensure_ascii=False).encode()
    task = _produce(shared_fleet, tmp_path, language, "mill.submit.acme.agent-run", body, task_id)
    assert task["state"] == "completed"
    assert task["result"] == envelope["payload"]
    assert (task["tenant_id"], task["queue"], task["attempt"]) == ("acme", "agent-run", 1)
    assert len(shared_fleet.starts(task_id)) == 1


async def test_reference_resume_envelope_ends_expired(shared_fleet: Fleet) -> None:
    """The first envelope of the reference design, byte for byte: its deadline is over, so it never runs."""
    body = (SAMPLES / "origins-c-resume.json").read_bytes()
    async with shared_fleet.plain() as client:
        await shared_fleet.submit(client, body)
    task = await shared_fleet.wait_for("task_01", "expired", "completed", "failed", tenant="acme")
    assert task["state"] == "expired"
    assert (task["run_id"], task["session_id"]) == ("run_01", "sess_01")
    assert task["payload_ref"] == "object://payload/task_01.json"
    assert not shared_fleet.starts("task_01")
    letters = (await shared_fleet.get("/v1/dlq", tenant="acme")).json()
    assert "task_01" not in [letter["task_id"] for letter in letters["items"]]


@pytest.mark.parametrize("language", LANGUAGES)
async def test_reference_run_envelope_ends_completed(fleet: Fleet, tmp_path: Path, language: str) -> None:
    """The second envelope of the reference design, byte for byte, new to this system; sent again, it is the same task."""
    fleet.all_at_once()
    body = (SAMPLES / "origins-c-run.json").read_bytes()
    task = await asyncio.to_thread(_produce, fleet, tmp_path, language, "mill.submit.t_123.agent-run", body, "task_01J")
    assert task["state"] == "completed"
    assert task["result"] == {"agent": "refund_agent"}
    assert task["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert task["idempotency_key"] == "tenant:user:business_request_hash"
    assert len(fleet.starts("task_01J")) == 1
    async with fleet.plain() as client:
        await fleet.submit(client, body, tenant="t_123")

    async def told() -> bool:
        again = await fleet.task("task_01J", "t_123")
        return again is not None and again["infos"]["duplicates"] == 1

    await wait_until(told, "the second submit is told as a duplicate")
    assert len(fleet.starts("task_01J")) == 1


def test_producers_have_no_code_of_ours() -> None:
    """Neither script names our packages."""
    scripts = sorted(FOREIGN.glob("producer.*"))
    assert [script.suffix for script in scripts] == [".mjs", ".py"]
    for script in scripts:
        assert "millstream" not in script.read_text("utf-8")
