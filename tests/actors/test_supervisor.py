"""What a connection that is closed for good does to the actors of a process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from millstream import connecting, supervisor
from millstream.errors import BrokerClosed
from millstream.jetstream.broker import JetStreamBroker
from millstream.settings import Settings, build
from millstream.supervisor import Run, Starter, Supervisor, run_process

if TYPE_CHECKING:
    from millstream.ports import Broker
    from millstream.server import LocalServer

LIMIT_S = 30.0


class Actor:
    """Works until it is cancelled, on a connection that the client library gives up as soon as it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended_by: BaseException | None = None
        self.told_to_stop = False
        self._opened: list[Broker] = []

        async def open_broker(*args: Any, **kwargs: Any) -> Broker:
            broker = await connecting.open_broker(*args, **kwargs)
            self._opened.append(broker)
            return broker

        monkeypatch.setattr(supervisor, "open_broker", open_broker)

    async def start(self, supervisor: Supervisor) -> Run:
        await supervisor.broker("worker")
        return self._run

    async def _run(self, stop: asyncio.Event) -> None:
        (broker,) = self._opened
        assert isinstance(broker, JetStreamBroker)
        await broker._wire.client.close()  # as after an authentication that was withdrawn
        try:
            async with asyncio.timeout(LIMIT_S):
                await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            self.ended_by, self.told_to_stop = error, stop.is_set()
            raise


@pytest.fixture
def settings(nats_server: LocalServer) -> Settings:
    """The settings of a process at the test's server."""
    return build({"nats": {"url": nats_server.url}})


async def test_connection_closed_for_good_ends_all_actors(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cancelled, not asked to drain: nothing could be committed any more. The fault names the cause."""
    actor = Actor(monkeypatch)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(BrokerClosed, match="closed for good"):
            await Supervisor(settings).run([Starter("worker", actor.start)], signals=False)
    assert isinstance(actor.ended_by, asyncio.CancelledError)
    assert not actor.told_to_stop


def test_process_whose_connection_is_closed_for_good_exits_with_1(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that whatever supervises it starts a new one; what happened is said on standard error."""
    monkeypatch.setattr(supervisor, "_spare_the_collector", lambda: None)  # the collector is this process's own
    actor = Actor(monkeypatch)
    assert run_process(settings, [Starter("worker", actor.start)]) == 1
    assert isinstance(actor.ended_by, asyncio.CancelledError)
    assert "millstream: the connection to the server was closed for good" in capsys.readouterr().err
