"""A worker's clock is set right by the server's."""

from __future__ import annotations

from typing import Any, cast

import pytest

from millstream.errors import NoAnswer
from millstream.ports import Broker, StreamInfo
from millstream.worker.server_clock import ServerClock

SERVER = 1_000_000.0


class Machine:
    """A clock that is wrong by `off_s`; each look at it takes `way_s`."""

    def __init__(self, off_s: float, way_s: float) -> None:
        self.at = SERVER + off_s
        self.way_s = way_s

    def now(self) -> float:
        self.at += self.way_s
        return self.at

    def monotonic(self) -> float:
        return 5.0


class Server:
    """Tells its time, or nothing."""

    answers = True

    async def stream_info(self, stream: str) -> StreamInfo:
        if not self.answers:
            raise NoAnswer("none")
        return StreamInfo(stream, 0, 0, 0, 0, 0.0, -1, told_at=SERVER)


@pytest.mark.parametrize("off_s", [600.0, -600.0, 0.3])
async def test_wrong_clock_is_set_right(off_s: float) -> None:
    """And stays so while the server does not answer."""
    machine, server = Machine(off_s, 0.01), Server()
    clock = ServerClock(machine, cast(Broker, cast(Any, server)), "S")
    await clock.measure()
    assert clock.now() == pytest.approx(SERVER, abs=0.1)
    server.answers = False
    await clock.measure()
    assert clock.now() == pytest.approx(SERVER, abs=0.1)
    assert clock.monotonic() == 5.0


@pytest.mark.parametrize(("off_s", "way_s"), [(0.01, 0.001), (0.3, 0.4), (600.0, 2.0)])
async def test_what_the_way_may_explain_is_no_offset(off_s: float, way_s: float) -> None:
    """A slow answer, or one from a process that slept, sets nothing wrong."""
    machine = Machine(off_s, way_s)
    clock = ServerClock(machine, cast(Broker, cast(Any, Server())), "S")
    await clock.measure()
    at = machine.at
    assert clock.now() == pytest.approx(at + way_s)
