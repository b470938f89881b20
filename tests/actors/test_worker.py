"""The worker over the in-memory broker: fairness without bells, the hard stop, and retries asked for."""

from __future__ import annotations

import asyncio

import pytest

from millstream.app import App
from millstream.errors import Retry
from millstream.faults import faulty
from millstream.worker import actor
from millstream_schemas.events import AttemptFailed
from tests.support.millrace import millrace
from tests.support.waiting import wait_until

BACKLOG = 150


async def test_a_class_whose_bell_was_lost_gets_its_turn_while_another_keeps_the_worker_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A redelivery rings no bell either, and a worker that is never idle never polls."""
    monkeypatch.setattr(actor, "POLL_MAX_S", 0.3)
    mill = await millrace(worker={"concurrency": 1})
    app = App("a")
    done: list[str] = []

    @app.task("note")
    async def note(name: str) -> None:
        done.append(name)
        await asyncio.sleep(0.02)

    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(mill.worker(app).run(stop))
        for number in range(BACKLOG):
            await mill.client.send("note", f"normal {number}")
        await mill.admit()
        await wait_until(lambda: len(done) >= 10, "the worker is busy, and has found its other classes empty")
        await mill.client.send("note", "low", priority="low")
        await mill.admit()
        await wait_until(lambda: "low" in done, "the low task")
        assert len(done) < BACKLOG
        stop.set()


async def test_a_task_claimed_after_the_grace_is_handed_back_without_a_start() -> None:
    """The claim was slow; the hard stop has passed, and nothing would end the handler any more."""
    mill = await millrace(worker={"grace_s": 0.0})
    app = App("a")
    began: list[int] = []

    @app.task("long")
    async def long() -> None:
        began.append(1)
        await asyncio.sleep(3600)

    broker = faulty(mill.broker, "publish[.started]:after:1:delay=1")
    stop = asyncio.Event()
    handle = await mill.client.send("long")
    await mill.admit()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(mill.worker(app, broker).run(stop))

        async def claimed() -> bool:
            return "started" in await mill.kinds(handle.key)

        await wait_until(claimed, "the claim")
        stop.set()
    assert await mill.kinds(handle.key) == ["queued", "started", "interrupted"]
    assert began == []


async def test_a_retry_that_the_handler_asks_for_does_not_depend_on_retry_on() -> None:
    """`retry_on` classifies what was not raised on purpose."""
    mill = await millrace()
    app = App("a")

    class Again(Retry):
        """A handler's own kind of it."""

    @app.task("again")
    async def again() -> None:
        raise Again(after=60)

    stop = asyncio.Event()
    handle = await mill.client.send("again", retry_policy={"retry_on": ["http_429"]})
    await mill.admit()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(mill.worker(app).run(stop))

        async def over() -> bool:
            return "attempt_failed" in await mill.kinds(handle.key)

        await wait_until(over, "the attempt")
        stop.set()
    await mill.decide()
    life = await mill.life(handle.key)
    assert [str(event.__struct_config__.tag) for event in life][-2:] == ["attempt_failed", "retrying"]
    assert isinstance(life[-2], AttemptFailed)
