"""The releaser against what it must not trust or wait for: cancels by the thousand, entries that are none, lost reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import pytest

from millstream.dispatcher import releaser
from millstream.dispatcher.context import Context
from millstream.dispatcher.depth import Depth
from millstream.dispatcher.gates import Gates
from millstream.errors import MessageTooLarge, NoAnswer
from millstream.ports import Broker, Outgoing, Record
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import Cancelled, Cause, Failed, Failure, Held, Released, Started, WorkItem
from millstream_schemas.permits import Gate, Pool
from tests.support.releasing import QUEUE, ReleaseHouse, release_house, releasing
from tests.support.waiting import wait_until


async def cancel(house: ReleaseHouse, keys: Sequence[str]) -> None:
    """End tasks where they are."""
    for key in keys:
        last = await house.context.journal.last("acme", key)
        assert last.event is not None
        await house.context.journal.append(Cancelled(card=last.event.card), last.seq)


async def the_entry(house: ReleaseHouse) -> Record:
    """The last entry of HELD."""
    record = await house.broker.last(house.names.held_stream, house.names.held_filter)
    assert record is not None
    return record


def nothing_held(house: ReleaseHouse) -> Any:
    """A predicate to wait for."""

    async def empty() -> bool:
        info = await house.broker.stream_info(house.names.held_stream)
        return info is not None and info.messages == 0

    return empty


async def left_in_held(house: ReleaseHouse) -> int:
    """How many entries there are, whatever they hold."""
    info = await house.broker.stream_info(house.names.held_stream)
    assert info is not None
    return info.messages


class Patched:
    """A broker with some methods of its own."""

    def __init__(self, target: Broker, **methods: Any) -> None:
        self._target = target
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._target, name)


def patched(house: ReleaseHouse, **methods: Any) -> Context:
    """The house's context over such a broker."""
    broker = cast(Broker, cast(Any, Patched(house.broker, **methods)))
    return replace(house.context, broker=broker, journal=replace(house.context.journal, broker=broker))


# --- cancels ------------------------------------------------------------------------------------------


async def test_cancelled_tasks_before_the_others_cost_no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them in a queue that has room for two: nothing begins meanwhile that could wake the releaser."""
    monkeypatch.setattr(releaser, "PAUSE_S", 3600.0)
    async with release_house() as house:
        await house.worker(1)
        gone = await house.hold(1000)
        await cancel(house, gone)
        stay = await house.hold(2)
        async with releasing(house):
            items = await house.released(2)
            await wait_until(nothing_held(house), "an empty HELD")
        assert [item.card.key for item in items] == stay


async def test_cancels_by_the_thousand_while_tasks_are_released_leave_nothing_behind() -> None:
    """Released or not, each task ends once, HELD is empty, and the depth of the queue is free again."""
    async with release_house() as house:
        await house.worker(100)
        keys = await house.hold(1500)

        async def cancel_some(start: int) -> None:
            for key in keys[start::4]:
                await cancel(house, [key])
                await asyncio.sleep(0)

        async with releasing(house):
            async with asyncio.TaskGroup() as group:
                cancels = [group.create_task(cancel_some(start)) for start in range(3)]
                while not all(one.done() for one in cancels) or await left_in_held(house) or await house.work():
                    await begin_or_drop(house, await house.work())
            house.clock.advance(1.0)
            await house.worker(100)
            more = await house.hold(250)
            items = await house.released(200)
            assert [item.card.key for item in items] == more[:200]
        ends = Counter([(await house.life(key))[-1] for key in keys])
        assert set(ends) <= {"cancelled", "started"}
        assert ends["started"] >= 375
        for key in keys:
            life = await house.life(key)
            assert life.count("released") <= 1
            assert life.count("cancelled") <= 1


async def begin_or_drop(house: ReleaseHouse, items: Sequence[WorkItem]) -> None:
    """What a worker does: claim what still waits, and take the message out of WORK in either case."""
    for item in items:
        card = msgspec.structs.replace(item.card, release=item.fence, execution_id="e")
        await house.context.journal.append(Started(card=card, worker_id="w"), item.fence)
        record = await house.broker.last(house.names.work_stream, house.names.work_of_key(item.card.key))
        if record is not None:
            await house.broker.delete(house.names.work_stream, record.seq)
    await asyncio.sleep(0.01)


async def test_a_cancel_that_is_heard_of_before_the_answer_to_its_release_takes_no_place() -> None:
    """The feed may be faster than the batch that the release is part of."""
    async with release_house() as house:
        await house.worker(5)
        (key,) = await house.hold(1)
        depth = Depth(house.context, asyncio.Event())
        await depth.count_slots()
        await depth.watch([QUEUE])
        last = await house.context.journal.last("acme", key)
        assert isinstance(last.event, Held)
        released = Released(card=last.event.card)
        fence = getattr(await house.context.journal.append(released, last.seq), "seq", 0)
        await house.context.journal.append(Cancelled(card=last.event.card), fence)
        room = depth.room(QUEUE)
        item = WorkItem(fence=fence, card=last.event.card, envelope=Envelope(task_type="work"), lane="lane")
        async with asyncio.TaskGroup() as group:
            following = group.create_task(depth.run())

            def is_noticed() -> bool:
                depth.released(item)
                return depth.room(QUEUE) == room

            await wait_until(is_noticed, "the cancel is heard of, and the release after it takes no place")
            following.cancel()


# --- what is owed and what is left --------------------------------------------------------------------


async def test_the_dead_letter_of_a_task_that_was_submitted_again_is_still_published() -> None:
    """Its end stood, the releaser died, the key was free again and a second generation began."""
    async with release_house(limits={"llm": {"requests": "1/h"}}) as house:
        house.gates[("llm",)] = Gate(keys=("llm",), open=False, reason="paused")
        await house.govern()
        again: dict[str, Any] = {"limits": ["llm"], "idempotency_key": "one", "unique": "in_flight"}
        (key,) = await house.hold(1, **again)
        entry = await the_entry(house)
        last = await house.context.journal.last("acme", key)
        assert last.event is not None
        card = msgspec.structs.replace(last.event.card, cause=Cause(stream=house.names.held_stream, seq=entry.seq))
        failure = Failure(reason="error", error_type="Throttled", message="for too long")
        await house.context.journal.append(Failed(card=card, reason="throttled_out", failure=failure), last.seq)
        house.clock.advance(1.0)
        assert await house.hold(1, **again) == [key]
        assert await house.life(key) == ["held", "failed", "held"]
        house.gates[("llm",)] = Gate(keys=("llm",), open=True)
        await house.worker(5)
        async with releasing(house):
            await house.released(1)
            await wait_until(nothing_held(house), "an empty HELD")
        letter = await house.broker.last(house.names.dlq_stream, house.names.dlq_of_key("acme", key))
        assert letter is not None
        assert letter.subject == house.names.dlq("acme", QUEUE, key, 1)
        assert await house.life(key) == ["held", "failed", "held", "released"]


async def test_the_timer_of_a_deadline_goes_with_the_entry_of_the_released_task() -> None:
    """Its own alone; and a task without a deadline costs no purge."""
    async with release_house() as house:
        far = datetime.fromtimestamp(house.clock.now() + 3600, UTC)
        (timed,) = await house.hold(1, deadline_at=far)
        await house.hold(3)
        purged: list[str] = []

        async def purge(stream: str, filter: str, up_to_seq: int) -> int:
            purged.append(filter)
            return await house.broker.purge(stream, filter, up_to_seq)

        fence = (await house.context.journal.last("acme", timed)).seq
        later = house.names.later(QUEUE, timed, fence)
        assert await house.broker.last(house.names.work_stream, later) is not None
        await house.worker(5)
        async with releasing(house, patched(house, purge=purge)):
            await house.released(4)
            await wait_until(nothing_held(house), "an empty HELD")
        assert purged == [later]
        assert await house.broker.last(house.names.work_stream, later) is None
        assert len(await house.work()) == 4


# --- entries that are none ----------------------------------------------------------------------------


async def spoilt(house: ReleaseHouse, body: bytes, subject: str | None = None) -> None:
    """Put something into HELD that is no entry of its lane, before what comes later."""
    (_, seq) = (await house.hold(1), (await the_entry(house)).seq)
    record = await the_entry(house)
    await house.broker.delete(house.names.held_stream, seq)
    await house.broker.publish(Outgoing(subject or record.subject, body or record.body))


BODIES = {
    "not json": b"\xff\xfe{",
    "empty": b"{}",
    "deeply nested": b"[" * 100_000,
    "a list": b"[1]",
}


@pytest.mark.parametrize("name", BODIES)
async def test_an_entry_that_cannot_be_read_is_reported_once_and_holds_up_nobody(name: str) -> None:
    """It stays where it is; the lane goes on behind it."""
    async with release_house() as house:
        await house.worker(50)
        for _ in range(20):
            await spoilt(house, BODIES[name])
        keys = await house.hold(3)
        async with releasing(house):
            items = await house.released(3)
            house.clock.advance(5.0)
            await house.settled()
            house.clock.advance(5.0)
            await house.settled()
        assert [item.card.key for item in items] == keys
        counts = house.telemetry.counts
        assert counts["message.unknown"] == 20 * counts["releaser.elected"]
        assert await left_in_held(house) == 20


def _edited(record: Record, **changes: Any) -> bytes:
    body = msgspec.json.decode(record.body)
    for path, value in changes.items():
        *way, name = path.split("__")
        at = body
        for step in way:
            at = at[step]
        at[name] = value
    return msgspec.json.encode(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"card__queue": "elsewhere"},
        {"card__queue": "a.b"},
        {"card__tenant_id": "*"},
        {"card__key": ">"},
        {"lane": "other"},
        {"envelope__deadline_at": "0001-01-01T00:00:00Z"},
        {"v": 99},
        {"card__priority": "urgent.>"},
    ],
    ids=str,
)
async def test_an_entry_that_lies_is_left_alone_and_the_lane_goes_on(changes: dict[str, Any]) -> None:
    """It names another lane, or what may stand in no subject, or a moment that there is not."""
    async with release_house() as house:
        await house.worker(50)
        await house.hold(1)
        record = await the_entry(house)
        await house.broker.delete(house.names.held_stream, record.seq)
        await house.broker.publish(Outgoing(record.subject, _edited(record, **changes)))
        keys = await house.hold(4)
        async with releasing(house):
            items = await house.released(4)
            house.clock.advance(5.0)
            await house.settled()
        assert [item.card.key for item in items] == keys
        assert await left_in_held(house) == 1
        assert house.telemetry.counts["message.faulty"] == 0


async def test_a_subject_with_a_wildcard_in_it_is_no_lane() -> None:
    """The server stores it as it stands; as a filter it would read the lanes of others."""
    async with release_house() as house:
        await house.worker(50)
        (key,) = await house.hold(1)
        record = await the_entry(house)
        wide = record.subject.rsplit(".", 1)[0] + ".*"
        async with releasing(house):
            house.broker.tell(house.names.held_bell, wide.encode())
            await house.settled()
            house.broker.tell(house.names.held_bell, f"{wide}\n{wide}".encode())
            (item,) = await house.released(1)
            await house.settled()
        assert item.card.key == key
        assert house.telemetry.counts["message.unknown"] == 1


async def test_a_task_that_a_newer_peer_wrote_to_holds_up_nobody() -> None:
    """Its entry is left for a newer releaser; nobody waits for it, also where a pool has one place only."""
    async with release_house(limits={"llm": {"concurrency": 1}}) as house:
        house.gates[("llm",)] = Gate(keys=("llm",), open=True, places=1)
        await house.govern()
        await house.worker(5)
        newer, *others = await house.hold(3, limits=["llm"])
        subject = house.names.event("acme", newer, QUEUE, "held")
        last = await house.context.journal.last("acme", newer)
        record = await house.broker.get(house.names.events_stream, last.seq)
        assert record is not None
        body = msgspec.json.encode({**msgspec.json.decode(record.body), "v": 99})
        await house.broker.publish(Outgoing(subject, body))
        async with releasing(house):
            (item,) = await house.released(1)
            assert item.card.key == others[0]
            await house.begin([item])
            (item,) = await house.released(1)
            assert item.card.key == others[1]
        assert house.telemetry.counts["message.unknown"] == 1
        assert await left_in_held(house) == 1


# --- faults in the middle of a turn -------------------------------------------------------------------


async def test_what_was_chosen_before_a_read_failed_is_released_all_the_same() -> None:
    """It has left its lane by then: nobody would come back to it."""
    async with release_house() as house:
        await house.worker(200)
        keys = await house.hold(120)
        fails = [0]

        async def page(*args: Any) -> list[Record]:
            fails[0] += args[0] == house.names.held_stream
            if fails[0] % 2 == 0:
                raise NoAnswer("nobody answers")
            return await house.broker.page(*args)

        async with releasing(house, patched(house, page=page)):
            items = await house.released(120)
            await wait_until(nothing_held(house), "an empty HELD")
        assert sorted(item.card.key for item in items) == sorted(keys)
        assert house.telemetry.counts["broker.trouble"] > 0


async def test_a_batch_that_is_tried_one_by_one_loses_nothing_when_the_broker_goes_away_meanwhile() -> None:
    """The faulty one of them stays where it is, the others wait again."""
    async with release_house() as house:
        await house.worker(50)
        keys = await house.hold(20)
        calls = [0]

        async def publish_all(outgoing: Sequence[Outgoing]) -> list[Any]:
            if any(f".{keys[3]}." in one.subject for one in outgoing):
                raise ValueError("a fault of this program")
            calls[0] += 1
            if 5 <= calls[0] <= 8:
                raise NoAnswer("nobody answers")
            return await house.broker.publish_all(outgoing)

        async with releasing(house, patched(house, publish_all=publish_all)):
            items = await house.released(19)
        assert {item.card.key for item in items} == {*keys} - {keys[3]}


# --- made-up names ------------------------------------------------------------------------------------


async def test_queues_that_nobody_works_for_are_not_followed() -> None:
    """Anybody may make up names of queues with a limit of his own; the feed follows those with workers."""
    async with release_house() as house:
        await house.worker(5)
        for number in range(100):
            await house.hold(1, queue=f"made-up-{number}", limits=["llm"])
        followed: list[Sequence[str]] = []

        async def feed(stream: str, filters: Sequence[str], after_seq: int, *, bodies: bool = True) -> Any:
            followed.append(filters)
            return await house.broker.feed(stream, filters, after_seq, bodies=bodies)

        async with releasing(house, patched(house, feed=feed)):
            await house.hold(3)
            await house.released(3)
        assert {name.split(".")[4] for filters in followed for name in filters} == {QUEUE}


@pytest.mark.parametrize("name", ["_", "-", "-again", "later", "hold", "expire", "held", "EVENT", "0", "x" * 64, "--"])
async def test_a_tenant_or_queue_with_a_strange_name_is_held_and_released_like_any_other(name: str) -> None:
    """Words of the subjects' own, the least and the longest."""
    async with release_house(queues={name: {"fair": True}}) as house:
        await house.worker(9, queue=name)
        deadline = datetime.fromtimestamp(house.clock.now() + 3600, UTC)
        keys = await house.hold(2, tenant=name, queue=name, deadline_at=deadline)
        keys += await house.hold(2, tenant="acme", queue=name)
        async with releasing(house):
            items = await house.released(4, queue=name)
            await wait_until(nothing_held(house), "an empty HELD")
            await house.begin(items)
        assert sorted(item.card.key for item in items) == sorted(keys)
        info = await house.broker.stream_info(house.names.work_stream)
        assert info is not None
        assert info.messages == 0


async def test_pools_with_long_names_by_the_hundred_keep_no_other_from_its_gate() -> None:
    """Together they are larger than a message may be; the batches around them are asked for all the same."""
    async with release_house(limits={"llm": {"requests": "600/min"}}) as house:
        house.gates[("llm",)] = Gate(keys=("llm",), open=True)
        await house.govern()
        await house.worker(5)
        sizes: list[int] = []

        async def request(subject: str, body: bytes, timeout_s: float) -> bytes:
            answer = await house.broker.request(subject, body, timeout_s)
            sizes.extend((len(body), len(answer)))
            if max(len(body), len(answer)) > 1024 * 1024:
                raise MessageTooLarge("a question", len(body), 1024 * 1024)
            return answer

        for number in range(700):
            await house.hold(1, queue="other", limits=[f"{number}-{of}-".ljust(128, "x") for of in range(16)])
        (key,) = await house.hold(1, limits=["llm"])
        async with releasing(house, patched(house, request=request)):
            (item,) = await house.released(1)
        assert item.card.key == key
        assert max(sizes) < 512 * 1024
        assert house.telemetry.counts["broker.trouble"] == 0


async def test_a_batch_of_gates_that_cannot_be_asked_for_is_told_and_keeps_no_other_from_its_gate() -> None:
    """It comes first, and fails each time."""
    async with release_house() as house:
        await house.govern()
        pools = [Pool(keys=("bad", *(f"{number}-{of}-".ljust(128, "x") for of in range(15)))) for number in range(60)]

        async def request(subject: str, body: bytes, timeout_s: float) -> bytes:
            if b'"0-0-' in body:
                raise MessageTooLarge("a question", len(body), 1)
            return await house.broker.request(subject, body, timeout_s)

        gates = Gates(patched(house, request=request), lambda: [*pools, Pool(keys=("llm",))], lambda _changed: None)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(gates.run())
            await wait_until(lambda: gates.of(("llm",)), "the gate of a pool in another batch")
            asking.cancel()
        assert gates.of(pools[0].keys) is None
        assert house.telemetry.counts["broker.trouble"] >= 1


async def test_a_silent_governor_is_no_trouble_of_the_broker() -> None:
    """Nobody listens: its gates close by themselves, and nothing is told each quarter of a second."""
    async with release_house() as house:
        asked: list[str] = []

        async def request(subject: str, body: bytes, timeout_s: float) -> bytes:
            asked.append(subject)
            return await house.broker.request(subject, body, timeout_s)

        gates = Gates(patched(house, request=request), lambda: [Pool(keys=("llm",))], lambda _changed: None)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(gates.run())
            await wait_until(lambda: len(asked) > 1, "a second question")
            asking.cancel()
        assert house.telemetry.counts["broker.trouble"] == 0
