"""The command line against real actors: what a person would type, in the order in which it would be typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.server import LocalServer
from tests.cli.fake_tracker import run
from tests.support.processes import ActorProcess, Processes
from tests.support.waiting import wait_until_sync

HANDLERS = "tests.support.handlers:app"
LIMIT = '[limits.llm]\nrequests_per_minute = 600\n[task_types.limited]\nlimits = ["llm"]\n'  # held from the first one on, whoever announces it


@pytest.fixture
def env(processes: Processes, tmp_path: Path) -> dict[str, str]:
    """All actors in one process, and where they are."""
    config = tmp_path / "millstream.toml"
    config.write_text(LIMIT)
    data_dir = str(tmp_path / "data")
    up = processes.start(
        "--config", str(config), "up", "--app", HANDLERS, "--http-port", "0", "--data-dir", data_dir, name="up"
    )
    up.wait_for_log('"http"')
    up.wait_for_log('"worker_id"')
    told = _ready(up)
    return {"MILLSTREAM_NATS_URL": told["nats"], "MILLSTREAM_HTTP_URL": told["http"]}


def _ready(up: ActorProcess) -> dict[str, str]:
    line = next(line for line in up.log().splitlines() if line.startswith('{"nats"'))
    told: dict[str, str] = json.loads(line)
    return told


def _json(env: dict[str, str], *args: str, status: int = 0, stdin: str | None = None) -> Any:
    result = run(*args, "--json", env=env, stdin=stdin)
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_a_task_is_sent_watched_shown_and_explained(env: dict[str, str], tmp_path: Path) -> None:
    """From `send` to the timeline, with every way to give the input."""
    sent = _json(
        env, "send", "echo", '{"n": 1}', "--queue", "agent-run", "--title", "first", "--tag", "a", "--run", "r1"
    )
    task = _json(env, "watch", sent["task_id"])
    assert (task["state"], task["result"], task["title"], task["tags"]) == ("completed", {"n": 1}, "first", ["a"])
    waited = _json(
        env, "send", "echo", "-", "--queue", "agent-run", "--run", "r1", "--wait", "--timeout", "30s", stdin="[2]"
    )
    assert (waited["state"], waited["result"]) == ("completed", [2])
    file = tmp_path / "input.json"
    file.write_text('"three"')
    plain = run("send", "echo", f"@{file}", "--queue", "agent-run", "--run", "r1", "--wait", env=env)
    assert (plain.exit_code, plain.stdout.splitlines()[1:]) == (0, ['"three"'])
    assert _json(env, "watch", "--run", "r1")["states"] == {"completed": 3}
    shown = run("show", sent["task_id"], env=env).stdout
    assert "completed" in shown
    assert shown.count("started") >= 2
    assert "completed" in run("why", sent["task_id"], env=env).stdout
    assert {each["task_id"] for each in _json(env, "tasks", "--run", "r1")["items"]} >= {sent["task_id"]}
    assert _json(env, "queues")["items"][0]["queue"] == "agent-run"
    assert [each["key"] for each in _json(env, "limits")["items"]] == ["llm"]


def test_a_failed_task_is_found_in_the_dlq_and_replayed(env: dict[str, str]) -> None:
    """Exit status 1 says that it failed; a replay is a new generation of the same task."""
    options = ("--queue", "agent-run", "--key", "only-once")
    failed = _json(env, "send", "signal", '{"raise": "fatal"}', *options, "--wait", status=1)
    assert failed["state"] == "failed"
    assert _json(env, "watch", failed["task_id"], status=1)["error"]["reason"] == "fatal"
    assert [each["task_id"] for each in _json(env, "dlq", "list")["items"]] == [failed["task_id"]]
    assert _json(env, "dlq", "show", failed["task_id"])["envelope"]["payload"] == {"raise": "fatal"}
    assert _json(env, "dlq", "replay", "--all", "--dry-run")["ids"] == [failed["task_id"]]
    assert _json(env, "dlq", "replay", failed["task_id"])["replayed"] == 1
    again = _json(env, "send", "signal", '{"raise": "fatal"}', *options)
    assert again["key"] == failed["key"]


def test_what_waits_can_be_cancelled(env: dict[str, str]) -> None:
    """One by its id, the rest by their queue."""
    first = _json(env, "send", "echo", "1", "--queue", "agent-run", "--delay", "1h")
    second = _json(env, "send", "echo", "2", "--queue", "agent-run", "--delay", "1h")
    assert _json(env, "show", first["task_id"])["state"] == "scheduled"
    assert run("cancel", first["task_id"], env=env).exit_code == 0
    assert _json(env, "watch", first["task_id"], status=1)["state"] == "cancelled"
    assert _json(env, "show", second["task_id"])["state"] == "scheduled"
    assert _json(env, "cancel", "--queue", "agent-run", "--yes")["cancelled"] == 1
    assert _json(env, "watch", second["task_id"], status=1)["state"] == "cancelled"


def test_a_limit_is_forced_shut_explained_and_opened_again(env: dict[str, str]) -> None:
    """What is held by it says so, and runs once the breaker is left to itself."""
    assert _json(env, "limits", "llm", "--breaker", "open")["breaker"] == "forced_open"
    sent = _json(env, "send", "limited", "1", "--queue", "agent-run")

    def held() -> bool:
        return bool(_json(env, "show", sent["task_id"])["state"] == "held")

    wait_until_sync(held, "the task is held")
    told = _json(env, "why", sent["task_id"])
    assert (told["place"], told["of"], told["limiting_key"], told["reason"]) == (1, 1, "llm", "broken")
    assert "the breaker of `llm` is open until an operator says otherwise (forced open by operator cli:" in told["why"]
    assert _json(env, "tasks", "--state", "held")["total"] == 1
    assert _json(env, "limits", "llm", "--breaker", "auto")["breaker"] == "closed"
    assert _json(env, "watch", sent["task_id"])["state"] == "completed"
    assert run("limits", "nothing", "--resume", env=env).exit_code == 2


def test_a_limit_is_changed_while_everything_runs(env: dict[str, str], tmp_path: Path) -> None:
    """A stored configuration is taken by the governor; one with a fault never gets there."""
    file = tmp_path / "new.toml"
    file.write_text('[limits.llm]\nrequests_per_minute = 1200\n[limits."tenant/{tenant_id}"]\ncost = "5 USD/day"\n')
    revision = _json(env, "config", "apply", str(file))["revision"]

    def taken() -> bool:
        listing = _json(env, "limits")
        configured = {each["key"]: each["dimensions"][0]["configured"] for each in listing["items"]}
        return listing["revision"] == revision and configured == {"llm": 1200, "tenant/{tenant_id}": 5}

    wait_until_sync(taken, "the governor works by the new configuration")
    file.write_text('[limits.llm]\nrequests = "lots"\n')
    assert not _json(env, "config", "apply", str(file), status=1)["ok"]
    assert _json(env, "config", "show")["revision"] == revision
    assert _json(env, "limits")["fault"] == ""
    assert _json(env, "doctor")["ok"]


def test_doctor_finds_a_whole_installation_healthy(env: dict[str, str], tmp_path: Path) -> None:
    """Every check is there, and none fails."""
    told = _json(env, "doctor")
    assert told["ok"]
    names = {check["name"] for check in told["checks"]}
    parts = {
        "server",
        "payload",
        "topology",
        "room",
        "dispatcher",
        "workers",
        "governor",
        "limits",
        "clocks",
        "tracker",
    }
    assert names == {"settings"} | parts


def test_doctor_misses_what_was_never_started(nats_server: LocalServer) -> None:
    """A server without streams: the topology is missing and there is no tracker."""
    result = run("doctor", "--json", "--nats-url", nats_server.url, "--http-url", "http://127.0.0.1:9")
    failed = {check["name"] for check in json.loads(result.stdout)["checks"] if check["status"] == "fail"}
    assert result.exit_code == 1
    assert failed == {"topology", "tracker"}
