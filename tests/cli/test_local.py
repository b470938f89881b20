"""Commands that need no server: check, schema export, version, and what `send` and `doctor` refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.fake_tracker import run

NOWHERE = {"MILLSTREAM_NATS_URL": "nats://127.0.0.1:9", "MILLSTREAM_CONNECT_TIMEOUT": "0.3"}


def test_check_prints_every_problem(tmp_path: Path) -> None:
    """One run is enough to repair a file."""
    file = tmp_path / "bad.toml"
    file.write_text(
        'lease_s = "banana"\n[nats]\nprefix = "UPPER"\n[queues.agent]\nmax_attempts = 0\ncolour = "red"\n'
        '[queues."bad name"]\nmax_attempts = 2\n[limits.llm]\nrequests_per_minute = "many"\n'
    )
    result = run("check", str(file))
    assert result.exit_code == 1
    for where in ("lease_s", "nats.prefix", "queues.agent.max_attempts", "queues.agent.colour", "queues.bad name"):
        assert f"at `{where}`" in result.stdout
    assert "at `limits.llm.requests_per_minute`" in result.stdout
    assert len(json.loads(run("check", str(file), "--json").stdout)["problems"]) == 6


def test_check_judges_values_together_only_when_each_fits(tmp_path: Path) -> None:
    """A value alone, against the defaults of others, is no problem of the file."""
    file = tmp_path / "file.toml"
    file.write_text('max_throttle_s = "100d"\nmax_wait_s = "200d"\nlease_s = "banana"\n')
    problems = json.loads(run("check", str(file), "--json").stdout)["problems"]
    assert len(problems) == 1
    assert "banana" in problems[0]


@pytest.mark.parametrize("setting", ["lease_s", "history_s", "dlq_s", "worker.grace_s", "nats.connect_timeout_s"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e30", "-1"])
def test_check_refuses_a_time_that_no_server_can_count(tmp_path: Path, setting: str, value: str) -> None:
    """It would end an actor at its start, or never end it."""
    file = tmp_path / "file.toml"
    file.write_text(f"{setting} = {value}\n")
    result = run("check", str(file))
    assert result.exit_code == 1
    assert f"at `{setting}`" in result.stdout


def test_check_accepts_a_good_file(tmp_path: Path) -> None:
    """Exit status 0, whatever the environment says."""
    file = tmp_path / "good.toml"
    file.write_text("[limits.llm]\nrequests_per_minute = 60\n[queues.agent]\nmax_attempts = 5\n")
    assert run("check", str(file), env={"MILLSTREAM_LEASE": "banana"}).exit_code == 0


def test_check_warns_of_limits_that_do_not_do_what_they_seem_to(tmp_path: Path) -> None:
    """A key that nobody configured, shadow left on, and a limit without any bound are allowed, and told."""
    file = tmp_path / "file.toml"
    file.write_text(
        '[limits.a]\nshadow = true\nconcurrency = 1\n[limits.b]\n[queues.q]\nlimits = ["a", "c/{pins.model}"]\n'
    )
    told = json.loads(run("check", str(file), "--json").stdout)
    assert told["ok"]
    for part in ("never granted: c/{pins.model}", "shadow mode, so that they hold nothing up: a", "`b` limits nothing"):
        assert any(part in warning for warning in told["warnings"]), told


@pytest.mark.parametrize("content", [None, "x = [", "\x00"])
def test_check_fails_on_what_is_no_file(tmp_path: Path, content: str | None) -> None:
    """Missing and broken files are reported, not traced back."""
    file = tmp_path / "some.toml"
    if content is not None:
        file.write_text(content)
    result = run("check", str(file))
    assert result.exit_code == 1
    assert "some.toml: " in result.stdout


def test_schema_export_writes_the_contract_and_removes_nothing(tmp_path: Path) -> None:
    """A folder with files of its own keeps them."""
    (tmp_path / "mine.json").write_text("{}")
    told = json.loads(run("schema", "export", str(tmp_path), "--json").stdout)
    assert str(tmp_path / "envelope.json") in told["files"]
    assert all(json.loads(Path(file).read_text())["$schema"] for file in told["files"])
    assert (tmp_path / "mine.json").read_text() == "{}"


def test_version_has_stable_keys() -> None:
    """Programs may rely on them."""
    assert {"millstream", "python", "system"} <= json.loads(run("version", "--json").stdout).keys()


@pytest.mark.parametrize("payload", ["{", "text", "NaN", "[" * 100_000, "@/no/such/file"])
def test_send_refuses_what_is_no_json_before_it_connects(payload: str) -> None:
    """Wrong use, said at once."""
    assert run("send", "t", payload, env=NOWHERE).exit_code == 2


@pytest.mark.parametrize("option", [("--delay", "soon"), ("--deadline", "yesterday"), ("--priority", "urgent")])
def test_send_refuses_options_that_do_not_fit(option: tuple[str, str]) -> None:
    """Wrong use, said at once."""
    assert run("send", "t", "{}", *option, env=NOWHERE).exit_code == 2


def test_send_without_a_server_fails() -> None:
    """The address that was tried is named."""
    result = run("send", "t", "{}", env=NOWHERE)
    assert result.exit_code == 1
    assert "nats://127.0.0.1:9" in result.stderr


def test_up_uses_the_server_of_the_configuration(tmp_path: Path) -> None:
    """A server that is given in any layer is used, and none is started beside it."""
    file = tmp_path / "some.toml"
    file.write_text('[nats]\nurl = "nats://127.0.0.1:9"\nconnect_timeout_s = 0.3\n')
    result = run("--config", str(file), "up", "--http-port", "0", "--data-dir", str(tmp_path / "data"))
    assert result.exit_code == 1
    assert "nats://127.0.0.1:9" in result.stderr
    assert not (tmp_path / "data" / "nats").exists()


def test_doctor_tells_what_cannot_be_reached_and_what_to_do() -> None:
    """Exit status 1; every failed check carries a remedy."""
    result = run("doctor", "--json", "--http-url", "http://127.0.0.1:9", env=NOWHERE)
    told = json.loads(result.stdout)
    failed = {check["name"]: check["todo"] for check in told["checks"] if check["status"] == "fail"}
    assert (result.exit_code, told["ok"]) == (1, False)
    assert failed.keys() == {"server", "tracker"}
    assert all(failed.values())
