"""Fixtures of the tests that run a whole Millstream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.server import LocalServer
from tests.support.fleet import Fleet
from tests.support.processes import Processes


@pytest.fixture
def fleet(nats_server: LocalServer, processes: Processes, tmp_path: Path) -> Fleet:
    """A fleet with the default configuration and a lease of 2 s; its actors are started by the test."""
    return Fleet(nats_server, processes, tmp_path)


@pytest.fixture
def make_fleet(nats_server: LocalServer, processes: Processes, tmp_path: Path) -> Callable[..., Fleet]:
    """Makes a fleet with a configuration of its own."""

    def make(config: str = "", lease_s: float = 2.0) -> Fleet:
        return Fleet(nats_server, processes, tmp_path, config=config, lease_s=lease_s)

    return make
