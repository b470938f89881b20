"""Fixtures for all tests. A real server is never optional: without one, the tests that need it fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.server import LocalServer
from tests.support.processes import Processes
from tests.support.tools import find_chromium, node_on_path

TESTS = Path(__file__).parent


def pytest_configure() -> None:
    """Let every subprocess find a `node`, the machine's own or the wheel's."""
    os.environ["PATH"] = node_on_path()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder what is selected by mark, so that no test can be forgotten."""
    for item in items:
        where = item.path.relative_to(TESTS)
        if where.parts[0] == "faults":
            item.add_marker(pytest.mark.faults)
        if where.parts[0] == "policy" and where.name.startswith("test_model"):
            item.add_marker(pytest.mark.model)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[LocalServer]:
    """A fresh nats-server for this test alone: it may be killed, stopped and restarted."""
    with LocalServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture(scope="module")
def shared_nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """One nats-server for all tests of a module; they keep apart by prefix and leave it running."""
    with LocalServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def processes(nats_server: LocalServer, tmp_path: Path) -> Iterator[Processes]:
    """Starts actors as real processes against `nats_server`; none outlives the test."""
    started = Processes(tmp_path / "logs", {"MILLSTREAM_NATS_URL": nats_server.url})
    yield started
    started.close()


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a browser; its lack is a skip with a reason on a developer's machine and a failure in CI."""
    return find_chromium()
