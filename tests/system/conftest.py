"""Fixtures of the tests that run a whole Millstream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.server import LocalServer
from millstream_schemas.names import DEFAULT_PREFIX
from tests.support.fleet import Fleet
from tests.support.processes import Processes


@pytest.fixture
def fleet(nats_server: LocalServer, processes: Processes, tmp_path: Path) -> Fleet:
    """A fleet with the default configuration and a lease of 2 s; its actors are started by the test."""
    return Fleet(nats_server, processes, tmp_path)


@pytest.fixture
def make_fleet(nats_server: LocalServer, processes: Processes, tmp_path: Path) -> Callable[..., Fleet]:
    """Makes a fleet with a configuration of its own."""

    def make(config: str = "", lease_s: float = 2.0, prefix: str = DEFAULT_PREFIX) -> Fleet:
        return Fleet(nats_server, processes, tmp_path, config=config, lease_s=lease_s, prefix=prefix)

    return make


@pytest.fixture(scope="module")
def shared_fleet(
    request: pytest.FixtureRequest, shared_nats_server: LocalServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """One running fleet for all tests of a module, one process of each actor; no test may end one of them.

    `LEASE_S`, `CONFIG` and `CONCURRENCY` of the module shape it.
    """
    folder = tmp_path_factory.mktemp("fleet")
    processes = Processes(folder / "logs", {"MILLSTREAM_NATS_URL": shared_nats_server.url})
    module = request.module
    fleet = Fleet(
        shared_nats_server,
        processes,
        folder,
        lease_s=getattr(module, "LEASE_S", 2.0),
        config=getattr(module, "CONFIG", ""),
    )
    try:
        fleet.all_at_once(getattr(module, "CONCURRENCY", 10))
        yield fleet
        for name, actor in fleet.actors.items():
            assert actor.running, f"the {name} ended with {actor.returncode}"
    finally:
        processes.close()
