"""`millstream config`: the configuration that a fleet shares, stored whole or not at all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from millstream.connecting import open_broker
from millstream.server import LocalServer
from millstream.settings import NatsSettings, Settings
from millstream_schemas.topology import topology
from tests.cli.fake_tracker import run

GOOD = '[limits.llm]\nrequests = "600/min"\n[tenants.acme]\nweight = 3\n'


@pytest.fixture
def url(nats_server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server with our buckets; commands run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    asyncio.run(_declare(Settings(nats=NatsSettings(url=nats_server.url))))
    return nats_server.url


async def _declare(settings: Settings) -> None:
    broker = await open_broker(settings, "test")
    await broker.declare(topology(settings.names, settings.lifetimes))
    await broker.close()


def config(url: str, *args: str, status: int = 0) -> Any:
    """The JSON of a `config` command."""
    result = run("config", *args, "--nats-url", url, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout) if result.stdout else result.stderr


def test_a_file_is_stored_and_shown_with_its_revision(url: str, tmp_path: Path) -> None:
    """TOML or JSON; a second one stands in place of the first, under a higher revision."""
    assert config(url, "show") == {"revision": 0, "document": {}}
    (tmp_path / "a.toml").write_text(GOOD)
    first = config(url, "apply", "a.toml")
    assert first["ok"]
    document = {"limits": {"llm": {"requests": "600/min"}}, "tenants": {"acme": {"weight": 3}}}
    assert config(url, "show") == {"revision": first["revision"], "document": document}
    (tmp_path / "b.json").write_text('{"limits": {"search": {"concurrency": 2}}}')
    second = config(url, "apply", "b.json")["revision"]
    assert second > first["revision"]
    assert config(url, "show")["document"] == {"limits": {"search": {"concurrency": 2}}}
    plain = run("config", "show", "--nats-url", url)
    assert "search" in plain.stdout
    assert f"revision {second}" in plain.stderr


def test_a_file_with_any_fault_is_not_stored(url: str, tmp_path: Path) -> None:
    """Every problem is named with its path, and what was stored stays."""
    (tmp_path / "good.toml").write_text(GOOD)
    revision = config(url, "apply", "good.toml")["revision"]
    (tmp_path / "bad.toml").write_text(
        '[limits.llm]\nrequests = "many"\n[limits.other]\ncolour = 1\n[tenants.acme]\nweight = 0\n'
    )
    told = config(url, "apply", "bad.toml", status=1)
    for where in ("limits.llm.requests", "limits.other.colour", "tenants.acme.weight"):
        assert any(where in problem for problem in told["problems"]), told
    for name, text in (
        ("nats.toml", '[nats]\nurl = "x"\n'),
        ("broken.json", "{"),
        ("list.json", "[1]"),
        ("no.toml", "x"),
    ):
        (tmp_path / name).write_text(text)
        assert not config(url, "apply", name, status=1)["ok"]
    assert not config(url, "apply", "missing.toml", status=1)["ok"]
    assert config(url, "show")["revision"] == revision


def test_a_change_is_made_only_upon_what_was_looked_at(url: str, tmp_path: Path) -> None:
    """`--revision` compares before it stores; `--dry-run` stores nothing."""
    (tmp_path / "a.toml").write_text(GOOD)
    assert config(url, "apply", "a.toml", "--dry-run")["revision"] is None
    assert config(url, "show")["revision"] == 0
    revision = config(url, "apply", "a.toml", "--revision", "0")["revision"]
    assert f"revision {revision} is stored by now" in config(url, "apply", "a.toml", "--revision", "0", status=1)
    assert config(url, "apply", "a.toml", "--revision", str(revision))["revision"] > revision


def test_the_file_is_judged_over_the_settings_of_this_process(url: str, tmp_path: Path) -> None:
    """What stands in millstream.toml and in the document together must be right as well."""
    (tmp_path / "millstream.toml").write_text("[limits.llm]\nrequests_per_minute = 60\n")
    (tmp_path / "a.toml").write_text(GOOD)
    told = config(url, "apply", "a.toml", status=1)
    assert "got both" in told["problems"][0]
