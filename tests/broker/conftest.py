"""Every test that asks for `setup` runs twice: over the in-memory broker and over a real nats-server."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from millstream_schemas.names import Names
from tests.broker.setups import Setup, memory_setup, nats_setup


@pytest.fixture(params=["memory", "nats"])
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    """A broker with the topology declared under a prefix that no other test uses."""
    names = Names(f"t{uuid.uuid4().hex[:10]}")
    if request.param == "memory":
        async with memory_setup(names) as made:
            yield made
    else:
        async with nats_setup(names, request.getfixturevalue("shared_nats_server")) as made:
            yield made
