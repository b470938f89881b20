"""What the README shows is true: its blocks run as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from millstream.settings import load
from tests.support.foreign_node import node_modules
from tests.support.processes import REPOSITORY, ActorProcess, Processes
from tests.support.waiting import wait_until_sync

README = (REPOSITORY / "README.md").read_text("utf-8")
BLOCK = re.compile(r"<!-- runs in tests/docs: (?P<name>\w+) -->\n```\w*\n(?P<text>.*?)```", re.DOTALL)
FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
MAKE = re.compile(r"^make (?P<target>[\w-]+)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")


def blocks() -> dict[str, str]:
    """The marked blocks of the README by name."""
    return {found["name"]: found["text"] for found in BLOCK.finditer(README)}


@pytest.fixture
def up(processes: Processes, tmp_path: Path) -> ActorProcess:
    """`millstream up` in a folder that holds the README's hello.py and millstream.toml, on free ports."""
    (tmp_path / "hello.py").write_text(blocks()["worker"], "utf-8")
    (tmp_path / "millstream.toml").write_text(blocks()["config"], "utf-8")
    command = shlex.split(blocks()["up"].splitlines()[1], comments=True)
    assert command[:2] == ["millstream", "up"]
    argv = [sys.executable, "-m", "millstream", *command[1:], "--http-port", "0"]
    actor = processes.start_command(argv, "up", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    actor.wait_for_log('actor.started", "actor": "worker')
    actor.wait_for_log('"http"')
    return actor


def addresses(up: ActorProcess) -> dict[str, str]:
    """What `up` printed: where NATS and HTTP are."""
    line = next(line for line in up.log().splitlines() if line.startswith("{"))
    found: dict[str, str] = json.loads(line)
    return found


def test_the_commands_for_a_worker_of_your_own_work(up: ActorProcess, tmp_path: Path) -> None:
    """The task sent from the README completes and is listed."""
    at = addresses(up)
    env = {**os.environ, "MILLSTREAM_NATS_URL": at["nats"], "MILLSTREAM_HTTP_URL": at["http"]}
    outputs: list[str] = []
    for line in blocks()["send"].splitlines():
        argv = [sys.executable, "-m", "millstream", *shlex.split(line)[1:]]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        outputs.append(done.stdout)
    assert "Ada may order for 12.50" in outputs[0]
    assert "completed" in outputs[1]
    assert "order.check" in outputs[1]


def test_the_producer_in_another_language_works(up: ActorProcess, tmp_path: Path) -> None:
    """It prints the sequence of its PubAck, by which its completed task is found."""
    at = addresses(up)
    (tmp_path / "producer.mjs").write_text(blocks()["node"], "utf-8")
    (tmp_path / "node_modules").symlink_to(node_modules())
    env = {**os.environ, "NATS_URL": at["nats"]}
    done = subprocess.run(
        ["node", "producer.mjs"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    query = {"inbox_seq": json.loads(done.stdout)["inbox_seq"]}

    def completed() -> bool:
        items = httpx.get(f"{at['http']}/v1/tasks", params=query).json()["items"]
        return [item["state"] for item in items] == ["completed"]

    wait_until_sync(completed, "the task is found by its PubAck, and completed")


def test_every_block_runs_but_the_diagram_and_the_make_commands() -> None:
    """A block without its mark would be a promise that nobody checks."""
    fenced = [found["text"] for found in FENCED.finditer(README)]
    assert len(fenced) * 2 == len(re.findall(r"^```", README, re.MULTILINE)), "a fence is not closed"
    marked = [found["text"] for found in BLOCK.finditer(README)]
    assert len(blocks()) == len(marked), "two blocks have one name"
    diagram, make = (text for text in fenced if text not in marked)
    assert "──▶" in diagram
    commands = make.splitlines()
    assert commands
    assert [line for line in commands if not MAKE.match(line)] == []


def test_every_make_command_of_the_readme_is_a_target() -> None:
    """Those of its block, and those of its text."""
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set(MAKE.findall(README)) | set(re.findall(r"`make ([\w-]+)", README))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_every_block_that_is_said_to_run_does() -> None:
    """The tests of this module use each of them."""
    source = Path(__file__).read_text("utf-8")
    assert [name for name in blocks() if f'blocks()["{name}"]' not in source] == []


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    """The README's millstream.toml has no error."""
    path = tmp_path / "millstream.toml"
    path.write_text(blocks()["config"], "utf-8")
    settings = load(path, {})
    assert settings.limits["llm"].requests == "600/min"
    assert settings.tenant("anybody").limits == ("tenant/{tenant_id}",)
    assert settings.queue("agent-run").max_attempts == 5


def test_links_lead_somewhere() -> None:
    """Every relative link of the README and of docs/ names a file or folder of the repository."""
    broken: list[str] = []
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")):
        for target in LINK.findall(page.read_text("utf-8")):
            path = target.split("#")[0]
            if path and not (page.parent / path).exists():
                broken.append(f"{page.relative_to(REPOSITORY)} -> {target}")
    assert not broken


def test_an_unfit_payload_is_dead_lettered(up: ActorProcess) -> None:
    """The README says that a payload that does not fit is not retried."""
    at = addresses(up)
    body = {"task_type": "order.check", "queue": "agent-run", "payload": {"customer": 1}, "task_id": "unfit"}
    assert httpx.post(f"{at['http']}/v1/tasks", json=body).status_code == 202

    def failed() -> bool:
        found = httpx.get(f"{at['http']}/v1/tasks/unfit").json()
        return bool(found["state"] == "failed" and len(found["attempts"]) == 1)

    wait_until_sync(failed, "the task has failed at its first attempt")
