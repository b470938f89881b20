"""Fault points: what is lost, delayed or ended, and when."""

from __future__ import annotations

import time

import pytest

from millstream.errors import NoAnswer, SettingsError
from millstream.faults import EXIT_STATUS, Fault, faulty, parse_plan
from millstream.ports import Outgoing, Unanswered
from tests.broker.setups import Setup, sequence


class Left(Exception):
    """Raised where the process would have ended."""


def _leave(status: int) -> None:
    assert status == EXIT_STATUS
    raise Left


def _events(setup: Setup) -> list[Outgoing]:
    names = setup.names
    return [
        Outgoing(names.event("acme", f"k{index}", "q", kind), b"") for index, kind in enumerate(("queued", "started"))
    ]


def test_a_plan_is_read() -> None:
    """Every part of it."""
    assert parse_plan("publish_all[.queued]:after:1:exit; ack:before:2:lose ;publish:after:*:delay=0.5;") == (
        Fault("publish_all", ".queued", "after", 1, "exit"),
        Fault("ack", "", "before", 2, "lose"),
        Fault("publish", "", "after", 0, "delay", 0.5),
    )


@pytest.mark.parametrize(
    "plan",
    ["publish", "publish:later:1:exit", "publish:after:0:exit", "publish:after:1:explode", "publish:after:1:delay",
     "publish:after:1:exit=2", "publish:after:1:delay=x", "publish[x:after:1:exit"],
)  # fmt: skip
def test_a_plan_that_cannot_be_read_is_refused(plan: str) -> None:
    """A fault that never strikes would prove nothing."""
    with pytest.raises(SettingsError):
        parse_plan(plan)


async def test_an_operation_that_is_none_is_refused(setup: Setup) -> None:
    """A slip of the pen included."""
    with pytest.raises(SettingsError, match="publsh"):
        faulty(setup.broker, "publsh:after:1:exit")
    assert faulty(setup.broker, "") is setup.broker


async def test_lost_publishes_are_unanswered(setup: Setup) -> None:
    """Before: not stored. After: stored. Only the call and the messages that the plan names."""
    names = setup.names
    queued, started = _events(setup)
    broker = faulty(
        setup.broker, "publish_all[.queued]:before:1:lose;publish_all[.started]:after:2:lose;publish:after:1:lose"
    )
    first = await broker.publish_all([queued, started])
    assert first[0] == Unanswered()
    assert sequence(first[1]) > 0
    assert await setup.broker.last(names.events_stream, queued.subject) is None
    second = await broker.publish_all([queued, started])
    assert sequence(second[0]) > 0
    assert second[1] == Unanswered()
    assert len(await setup.broker.history(names.events_stream, started.subject)) == 2
    assert await broker.publish(queued) == Unanswered()
    assert len(await setup.broker.history(names.events_stream, queued.subject)) == 2


async def test_a_lost_ack_is_a_redelivery(setup: Setup) -> None:
    """And a lost take is one as well."""
    consumer = await setup.work()
    (seq,) = await setup.put("a")
    broker = faulty(setup.broker, "ack:after:1:lose;pull:after:1:lose")
    names = setup.names
    got: list[int] = []

    async def taken() -> bool:
        for delivery in await broker.pull(names.work_stream, consumer, 1):
            got.append(delivery.delivery)
            broker.ack([delivery])
        return len(got) == 2

    await setup.until(taken, "two deliveries after the lost one")
    assert got == [2, 3]
    await setup.gone(seq)


async def test_the_end_comes_before_or_after_what_was_done(setup: Setup) -> None:
    """After: it is stored."""
    queued, started = _events(setup)
    broker = faulty(setup.broker, "publish:before:1:exit;publish:after:2:exit", leave=_leave)
    for outgoing in (queued, started):
        with pytest.raises(Left):
            await broker.publish(outgoing)
    assert await setup.broker.last(setup.names.events_stream, queued.subject) is None
    assert await setup.broker.last(setup.names.events_stream, started.subject) is not None


async def test_other_answers_are_lost_loudly_and_delays_are_kept(setup: Setup) -> None:
    """Reads raise NoAnswer; what has no fault is passed on."""
    broker = faulty(setup.broker, "last:before:1:lose;get:after:1:delay=0.05;mailbox.take:after:1:exit", leave=_leave)
    with pytest.raises(NoAnswer):
        await broker.last(setup.names.events_stream, setup.names.event_filter)
    start = time.monotonic()
    assert await broker.get(setup.names.events_stream, 1) is None
    assert time.monotonic() - start >= 0.05
    assert broker.connected
    consumer = await setup.work()
    await setup.put("a")
    mailbox = await broker.mailbox(setup.names.work_stream, consumer, 4)
    with pytest.raises(Left):
        await mailbox.take(1)
    await mailbox.close()
