"""Messages that the server delivers later."""

from __future__ import annotations

from millstream.ports import Outgoing, Refused, Schedule, Stored
from tests.broker.setups import ALL, Setup, sequence

DELAY_S = 0.7


def later(setup: Setup, key: str, delay_s: float, body: bytes = b"later", msg_id: str | None = None) -> Outgoing:
    """Work for `key` that is due in a while."""
    target = setup.names.work("q", "normal", key)
    schedule = Schedule(setup.now() + delay_s, target)
    return Outgoing(
        setup.names.later("q", key, 1), body, schedule=schedule, msg_id=msg_id, headers={"traceparent": "00-2"}
    )


async def test_a_schedule_fires_once_and_not_early(setup: Setup) -> None:
    """On its target, with body and headers, as a message of its own."""
    consumer = await setup.work(ack_wait_s=60.0)
    outgoing = later(setup, "a", DELAY_S)
    assert outgoing.schedule is not None
    seq = sequence(await setup.broker.publish(outgoing))
    assert await setup.pull(consumer) == []
    (fired,) = await setup.pull_some(consumer)
    assert setup.now() >= outgoing.schedule.at
    assert fired.at >= outgoing.schedule.at - 0.01
    assert (fired.subject, fired.body, fired.delivery) == (outgoing.schedule.target, b"later", 1)
    assert fired.headers["traceparent"] == "00-2"
    assert fired.seq > seq
    await setup.elapse(DELAY_S)
    assert await setup.pull(consumer) == []
    assert await setup.broker.get(setup.names.work_stream, seq) is None


async def test_what_is_overdue_fires_soon(setup: Setup) -> None:
    """A due time in the past."""
    consumer = await setup.work()
    assert isinstance(await setup.broker.publish(later(setup, "a", -100.0)), Stored)
    (fired,) = await setup.pull_some(consumer)
    assert fired.body == b"later"


async def test_a_schedule_takes_the_place_of_an_earlier_one(setup: Setup) -> None:
    """On the same subject: only the newest fires."""
    consumer = await setup.work(ack_wait_s=60.0)
    await setup.broker.publish(later(setup, "a", DELAY_S, b"old"))
    await setup.broker.publish(later(setup, "a", DELAY_S, b"new"))
    (fired,) = await setup.pull_some(consumer)
    assert fired.body == b"new"
    await setup.elapse(DELAY_S)
    assert await setup.pull(consumer) == []


async def test_a_purged_schedule_never_fires(setup: Setup) -> None:
    """By key, as a cancel does; another key's still does."""
    names = setup.names
    consumer = await setup.work(ack_wait_s=60.0)
    await setup.broker.publish(later(setup, "a", DELAY_S))
    await setup.broker.publish(later(setup, "b", DELAY_S))
    assert await setup.broker.purge(names.work_stream, names.later_of_key("a"), ALL) == 1
    (fired,) = await setup.pull_some(consumer)
    assert names.parse_work(fired.subject)[2] == "b"
    await setup.elapse(DELAY_S / 2)
    assert await setup.pull(consumer) == []


async def test_a_message_id_dedupes_the_schedule_and_not_what_it_fires(setup: Setup) -> None:
    """Two schedules of one id are one; the fired message is never taken for a duplicate."""
    consumer = await setup.work(ack_wait_s=60.0)
    seq = sequence(await setup.broker.publish(later(setup, "a", DELAY_S, msg_id="f1")))
    assert await setup.broker.publish(later(setup, "a", DELAY_S, msg_id="f1")) == Stored(seq, duplicate=True)
    assert len(await setup.pull_some(consumer)) == 1


async def test_a_schedule_needs_a_stream_that_takes_it_and_a_target_in_it(setup: Setup) -> None:
    """Otherwise the answer is a refusal."""
    names = setup.names
    away = Outgoing(names.later("q", "a", 1), b"", schedule=Schedule(setup.now() + 1, names.dlq("acme", "q", "a", 1)))
    plain = Outgoing(names.submit("acme", "q"), b"", schedule=Schedule(setup.now() + 1, names.submit("acme", "r")))
    codes = [each.code for each in await setup.broker.publish_all([away, plain]) if isinstance(each, Refused)]
    assert codes == [10190, 10188]
