"""What examples/ and docs/wire.md show, run as their readers would run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.foreign_node import node_modules
from tests.support.processes import REPOSITORY, Processes
from tests.support.waiting import wait_until_sync

EXAMPLES = REPOSITORY / "examples"
DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
PRODUCERS = {"producer.py": "Ada", "producer.mjs": "Grace"}


@pytest.fixture
def mill(processes: Processes, tmp_path: Path) -> dict[str, str]:
    """Where NATS and HTTP of `millstream up --app hello:app` are, started in examples/ on free ports."""
    # the script and not `python -m`, which would put the folder on the path by itself
    script = str(Path(sys.executable).with_name("millstream"))
    argv = [script, "up", "--app", "hello:app", "--http-port", "0", "--data-dir", str(tmp_path / "data")]
    up = processes.start_command(argv, "up", cwd=EXAMPLES)
    up.wait_for_log('"http"')
    up.wait_for_log('"worker_id"')
    found: dict[str, str] = json.loads(next(line for line in up.log().splitlines() if line.startswith('{"nats"')))
    return found


def _run(folder: Path, script: Path, *args: str, env: dict[str, str] | None = None) -> str:
    """Run a script of either language to its end, beside the packages that it needs; returns what it printed."""
    argv = [sys.executable, str(script)]
    if script.suffix == ".mjs":
        (folder / "node_modules").symlink_to(node_modules())
        copy = folder / script.name
        copy.write_bytes(script.read_bytes())
        argv = ["node", str(copy)]
    done = subprocess.run(
        [*argv, *args],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", PRODUCERS)
def test_an_example_producer_sees_its_task_completed(mill: dict[str, str], tmp_path: Path, script: str) -> None:
    """It is told of the acceptance, and of the result; run again, it finds the same task."""
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        accepted, outcome = _run(tmp_path / run, EXAMPLES / script, mill["nats"], mill["http"]).splitlines()
        assert re.fullmatch(r"accepted as \d+ of MILL_INBOX", accepted)
        assert outcome == f'completed "Hello, {PRODUCERS[script]}!"'
    assert httpx.get(f"{mill['http']}/v1/tasks", params={"tenant": "acme"}).json()["total"] == 1


@pytest.mark.parametrize(("language", "suffix"), [("python", ".py"), ("js", ".mjs")])
def test_the_producers_of_the_wire_document_are_accepted(
    mill: dict[str, str], tmp_path: Path, language: str, suffix: str
) -> None:
    """Copied as they stand, but for the address; the tracker knows the task of the PubAck."""
    page = (REPOSITORY / "docs" / "wire.md").read_text("utf-8")
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert DEFAULT_NATS_URL in block
    script = tmp_path / f"copied{suffix}"
    script.write_text(block.replace(DEFAULT_NATS_URL, mill["nats"]), "utf-8")
    folder = tmp_path / "run"
    folder.mkdir()
    seq = int(_run(folder, script).removeprefix("accepted as "))

    def listed() -> bool:
        items = httpx.get(f"{mill['http']}/v1/tasks", params={"inbox_seq": seq}).json()["items"]
        return [(item["task_type"], item["queue"]) for item in items] == [("notes.summarize", "agent-run")]

    wait_until_sync(listed, "the task is found by the sequence of its PubAck")


def test_the_example_app_submits_one_task_for_each_note(mill: dict[str, str], tmp_path: Path) -> None:
    """Submitting again changes nothing; as an app, it serves the three kinds of the demo."""
    notes = tmp_path / "notes"
    notes.mkdir()
    for name in ("one", "two"):
        (notes / f"{name}.md").write_text(f"# Note {name}\n\nIt says something.\n", "utf-8")
    env = {"MILLSTREAM_NATS_URL": mill["nats"]}
    first = _run(tmp_path, EXAMPLES / "notes.py", str(notes), env=env)
    assert [line.split(" ", 1)[1] for line in first.splitlines()] == ["Note one", "Note two"]
    assert _run(tmp_path, EXAMPLES / "notes.py", str(notes), env=env) == first
    told = "import notes; print(*sorted(notes.app.tasks))"
    served = subprocess.run(
        [sys.executable, "-c", told], cwd=EXAMPLES, env={**os.environ, "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert served.stdout.split() == ["notes.embed", "notes.relate", "notes.summarize"]
