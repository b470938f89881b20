"""The releaser over the in-memory broker: what it lets go, what it leaves, and what it makes of crashes and doubts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import pytest

from millstream.dispatcher import lanes, releaser
from millstream.dispatcher.context import Context
from millstream.dispatcher.releaser import Releaser, Term
from millstream.errors import NoAnswer
from millstream.policy.supply import Pool
from millstream.ports import Broker, Feed, Outgoing, Published, Refused, Unanswered
from millstream_schemas.codec import decode_dead_letter
from millstream_schemas.envelope import UsageEstimate
from millstream_schemas.events import Cancelled, Cause, Failed, Released
from millstream_schemas.permits import Gate, GatePart
from tests.support.releasing import QUEUE, ReleaseHouse, release_house, releasing
from tests.support.waiting import wait_until

LLM = ("llm",)
MONTH = ("month",)


class Troubled:
    """A broker that does not store, or does not answer, for subjects that hold a given part, so many times."""

    def __init__(self, target: Broker) -> None:
        self._target = target
        self.refused: dict[str, int] = {}
        self.unanswered: dict[str, int] = {}
        self.deaf: set[str] = set()
        self.published: Counter[str] = Counter()
        self.feeds: list[Sequence[str]] = []

    def __getattr__(self, name: str) -> Any:
        return _deaf if name in self.deaf else getattr(self._target, name)

    async def feed(self, stream: str, filters: Sequence[str], after_seq: int, *, bodies: bool = True) -> Feed:
        """Remember who is followed."""
        self.feeds.append(filters)
        return await self._target.feed(stream, filters, after_seq, bodies=bodies)

    async def publish(self, outgoing: Outgoing) -> Published:
        """As `publish_all`."""
        return (await self.publish_all([outgoing]))[0]

    async def publish_all(self, outgoing: Sequence[Outgoing]) -> list[Published]:
        """Store; an unanswered message is stored, a refused one is not."""
        answers: list[Published] = []
        for one in outgoing:
            self.published[one.subject.split(".")[1]] += 1
            if _strikes(self.refused, one.subject):
                answers.append(Refused(10047, "no room"))
                continue
            answer = await self._target.publish(one)
            answers.append(Unanswered() if _strikes(self.unanswered, one.subject) else answer)
        return answers


async def _deaf(*_: Any) -> None:
    raise NoAnswer("nobody answers")


def _strikes(times: dict[str, int], subject: str) -> bool:
    for part, left in times.items():
        if part in subject and left:
            times[part] -= 1
            return True
    return False


def troubled(house: ReleaseHouse) -> tuple[Troubled, Context]:
    """A context whose broker has troubles of its own; nobody else's has."""
    broker = Troubled(house.broker)
    port = cast(Broker, cast(Any, broker))
    journal = replace(house.context.journal, broker=port)
    return broker, replace(house.context, broker=port, journal=journal)


async def test_a_held_task_is_released_with_its_entry_as_cause_and_then_removed() -> None:
    """Event, work message, removal; a bell rings for the workers."""
    async with release_house() as house:
        rung: list[bytes] = []
        await house.broker.listen(house.names.bell(QUEUE), lambda _, body: rung.append(body))
        await house.worker(5)
        (key,) = await house.hold(1)
        assert await house.life(key) == ["held"]
        entry = await house.broker.last(house.names.held_stream, house.names.held_filter)
        assert entry is not None
        async with releasing(house):
            (item,) = await house.released(1)
            await wait_until(_nothing_held(house), "an empty HELD")
        events = await house.events(key)
        assert [type(event).__name__ for event in events] == ["Held", "Released"]
        assert events[1].card.cause == Cause(stream=house.names.held_stream, seq=entry.seq)
        assert item.card == events[1].card
        assert item.lane
        record = await house.broker.last(house.names.events_stream, house.names.life("acme", key))
        assert record is not None
        assert item.fence == record.seq
        assert rung == [b"normal"]


async def test_a_bell_is_enough_to_release_what_comes_later() -> None:
    """No count of HELD is waited for: the clock stands still."""
    async with release_house() as house, releasing(house):
        await house.worker(5)
        await house.hold(1)
        await house.released(1)
        await house.hold(2, "other")
        await house.released(3)


async def test_what_lies_in_held_without_a_bell_is_found_by_count() -> None:
    """A bell may be lost; the next look finds the lane, and the entry in a lane that is known."""
    async with release_house() as house:
        await house.worker(5)
        silent = replace(house.context, bells=cast(Any, _NoBells(house.context)))
        async with releasing(house):
            loud, house.context = house.context, silent
            await house.hold(1)
            house.clock.advance(5.0)
            await house.released(1)
            await house.hold(1)
            house.clock.advance(5.0)
            await house.released(2)
            house.context = loud


async def test_no_more_is_released_than_workers_will_begin_soon() -> None:
    """Two for each slot; as tasks begin, others follow, and what has begun counts as the rate of the queue."""
    async with release_house() as house:
        await house.worker(3)
        await house.hold(40)
        async with releasing(house):
            items = await house.released(6)
            await house.begin(items[:2])
            await house.released(4 + 2 + 2)  # two places that are free, and two more for the pace
            house.clock.advance(1.0)
            assert len(await house.held()) == 40 - 10


async def test_nothing_is_released_without_live_slots() -> None:
    """No worker, one that drains, one of another queue; released as soon as one is there."""
    async with release_house() as house:
        await house.worker(5, name="d", draining=True)
        await house.worker(5, queue="other", name="o")
        await house.hold(3)
        async with releasing(house):
            await house.released(0)
            await house.worker(1)
            house.clock.advance(1.0)
            await house.released(2)


async def test_tenants_go_in_turn() -> None:
    """The order of release, not only the shares."""
    async with release_house() as house:
        await house.hold(30, "big")
        await house.hold(3, "small")
        await house.hold(3, "tiny")
        await house.worker(6)
        async with releasing(house):
            items = await house.released(12)
        assert Counter(item.card.tenant_id for item in items) == {"big": 6, "small": 3, "tiny": 3}
        assert {item.card.tenant_id for item in items[:3]} == {"big", "small", "tiny"}


async def test_classes_go_by_their_weights() -> None:
    """Eight, three and one; the tenants of each in turn."""
    async with release_house() as house:
        for priority in ("low", "normal", "high"):
            for tenant in ("a", "b"):
                await house.hold(30, tenant, priority=priority)
        await house.worker(12)
        async with releasing(house):
            items = await house.released(24)
        assert Counter(item.card.priority for item in items) == {"high": 16, "normal": 6, "low": 2}
        assert Counter(item.card.tenant_id for item in items) == {"a": 12, "b": 12}


async def test_tenants_share_by_what_their_tasks_take() -> None:
    """One whose tasks take ten times the tokens is released a tenth as often."""
    async with release_house(limits={"llm": {"tokens": "60_000/min"}}) as house:
        house.gates[LLM] = Gate(keys=LLM, open=True, rate_per_s=2.0, parts=(GatePart(tokens=1000.0),))
        await house.govern()
        await house.worker(100)
        for tenant, tokens in (("large", 1000), ("small", 100)):
            await house.hold(40, tenant, limits=["llm"], usage_estimate=UsageEstimate(tokens_in=tokens))
        served: Counter[str] = Counter()
        async with releasing(house):
            while sum(served.values()) < 33:
                items = await wait_until(house.work, "tasks in WORK")
                await house.begin(items)
                served.update(item.card.tenant_id for item in items)
        assert served["large"] * 1000 == pytest.approx(served["small"] * 100, abs=1100), served


async def test_tenants_share_by_configured_weight() -> None:
    """`tenants.<name>.weight`."""
    async with release_house(tenants={"gold": {"weight": 3.0}}) as house:
        await house.hold(30, "gold")
        await house.hold(30, "basic")
        await house.worker(10)
        async with releasing(house):
            items = await house.released(20)
        assert Counter(item.card.tenant_id for item in items) == {"gold": 15, "basic": 5}


async def test_a_long_lane_is_read_in_pieces_and_released_whole_and_in_order() -> None:
    """Far more than one page, none left out and none twice."""
    async with release_house() as house:
        await house.worker(300)
        keys = await house.hold(700)
        async with releasing(house):
            begun: list[str] = []
            while len(begun) < len(keys):
                items = await wait_until(house.work, "tasks in WORK")
                begun += [item.card.key for item in items]
                await house.begin(items)
        assert begun == keys


# --- gates --------------------------------------------------------------------------------------------


async def test_a_pool_with_limits_waits_for_its_gate() -> None:
    """Closed while the governor is silent, then as much as its rate allows for a quarter of a second; fair tasks go on."""
    async with release_house(limits={"llm": {"requests": "600/min"}}) as house:
        house.gates[LLM] = Gate(keys=LLM, open=True, rate_per_s=10.0)
        await house.worker(50)
        await house.hold(20, limits=["llm"])
        free = await house.hold(3, "free")
        async with releasing(house):
            items = await house.released(3)
            assert [item.card.key for item in items] == free
            await house.govern()
            items = await house.released(3 + 4)
            assert {item.card.key for item in items} > set(free)
            await house.begin([item for item in items if item.limits][:2])
            await house.released(3 + 4)


async def test_a_limit_that_many_pools_share_is_supplied_once() -> None:
    """Whatever other limits each of them has; the rest of the queue keeps its room, and tenants go in turn."""
    async with release_house(limits={"llm": {"requests": "60/min"}}) as house:
        parts = (GatePart(requests=1.0), GatePart(requests=10.0))
        for number in range(12):
            own: Pool = ("llm", f"tenant/t{number}")
            house.gates[own] = Gate(keys=own, open=True, rate_per_s=1.0, parts=parts)
        await house.govern()
        await house.worker(10)
        for number in range(12):
            await house.hold(3, f"t{number}", limits=["llm", f"tenant/t{number}"])
        served: list[str] = []
        async with releasing(house):
            for _ in range(12):
                items = await house.released(2)
                await house.begin(items[:1])
                served.append(items[0].card.tenant_id)
                free = await house.hold(4, "free")
                items = await house.released(2 + 4)
                assert {item.card.key for item in items} >= set(free)
                await house.begin([item for item in items if not item.limits])
        assert len(set(served)) == 12


async def test_a_gate_that_closes_stops_its_pool_alone() -> None:
    """And opens it again as soon as the governor says so."""
    async with release_house(limits={"llm": {"requests": "600/min"}}) as house:
        house.gates[LLM] = Gate(keys=LLM, open=False, reason="paused", wait_s=60.0)
        await house.govern()
        await house.worker(50)
        await house.hold(5, limits=["llm"])
        other = await house.hold(2, limits=["search"])
        async with releasing(house):
            items = await house.released(2)
            assert [item.card.key for item in items] == other
            house.gates[LLM] = Gate(keys=LLM, open=True)
            house.said()
            await house.released(7)


async def test_a_governor_that_falls_silent_closes_its_pools() -> None:
    """After a second and a half."""
    async with release_house(limits={"llm": {"requests": "600/min"}}) as house:
        await house.govern()
        await house.worker(2)
        await house.hold(20, limits=["llm"])
        async with releasing(house):
            items = await house.released(4)
            assert house.serving is not None
            await house.serving.close()
            house.clock.advance(2.0)
            await house.settled()
            await house.begin(items)
            await house.released(0)
            house.clock.advance(1.0)  # the pace of those that began is over
            await house.govern()
            await house.released(4)


async def test_without_a_governor_a_pool_with_a_safe_rate_goes_on_and_no_other() -> None:
    """Only once no successor can have come; all of its limits must allow it."""
    safe = {"requests": "600/min", "on_governor_down": "safe_rate", "safe_rate": "120/min"}
    async with release_house(limits={"llm": safe, "search": {"requests": "600/min"}}) as house:
        await house.worker(50)
        alone = await house.hold(5, limits=["llm"])
        await house.hold(5, limits=["llm", "search"])
        async with releasing(house):
            for _ in range(6):
                await _let_pass(house, 0.5)
            await house.released(0)
            for _ in range(4):
                await _let_pass(house, 0.5)
            items = await house.released(2)
            assert [item.card.key for item in items] == alone[:2]
            await house.begin(items)
            items = await house.released(2)
            assert [item.card.key for item in items] == alone[2:4]


async def _let_pass(house: ReleaseHouse, seconds: float) -> None:
    """So slowly that the elected one can renew its lock meanwhile, which it does each real second."""
    house.clock.advance(seconds)
    await asyncio.sleep(seconds / 2)


async def test_the_governor_is_told_what_a_task_of_a_pool_takes_on_average() -> None:
    """The rate of a gate is tasks a second, whatever a task takes."""
    async with release_house(limits={"llm": {"requests": "600/min"}}) as house:
        await house.govern()
        for tokens in (100, 300):
            await house.hold(1, limits=["llm"], usage_estimate=UsageEstimate(tokens_in=tokens, tokens_out=10))
        async with releasing(house):
            await wait_until(lambda: house.asked, "a question")
        (pool,) = house.asked[-1].pools
        assert (pool.keys, pool.tokens_in, pool.tokens_out) == (LLM, 200, 10)


async def test_an_idle_releaser_asks_no_governor() -> None:
    """Without a pool that waits there is nothing to ask."""
    async with release_house() as house:
        await house.govern()
        await house.worker(5)
        async with releasing(house):
            await house.hold(2)
            await house.released(2)
        assert house.asked == []


async def test_a_pool_whose_tasks_come_back_unbegun_is_left_alone_for_a_while() -> None:
    """Each time for longer; a start, or news of the gate, ends it. Others go on."""
    async with release_house(limits={"llm": {"requests": "1/h"}}) as house:
        house.gates[LLM] = Gate(keys=LLM, open=True, rate_per_s=0.0003)
        await house.govern()
        await house.worker(10)
        await house.hold(20, limits=["llm"])
        async with releasing(house):
            await house.park(await house.released(2))
            await house.released(0)
            await house.hold(3)
            await house.begin(await house.released(3))
            house.clock.advance(0.6)
            await house.park(await house.released(2))
            house.clock.advance(0.6)
            await house.released(0)
            house.clock.advance(0.6)
            await house.park(await house.released(2))
            house.gates[LLM] = Gate(keys=LLM, open=True, rate_per_s=8.0)
            house.said()
            await house.begin(await house.released(3))
            await house.released(3)


async def test_tasks_that_come_back_for_want_of_a_slow_limit_pause_it_for_all_its_pools() -> None:
    """Else each of many pools would send its own out and back; a pool without that limit goes on."""
    async with release_house(limits={"llm": {"requests": "1/h"}}) as house:
        for number in range(4):
            own: Pool = ("llm", f"tenant/t{number}")
            parts = (GatePart(requests=0.0003), GatePart(requests=10.0))
            house.gates[own] = Gate(keys=own, open=True, rate_per_s=0.0003, parts=parts)
        await house.govern()
        await house.worker(10)
        for number in range(4):
            await house.hold(3, f"t{number}", limits=["llm", f"tenant/t{number}"])
        async with releasing(house):
            await house.park(await house.released(2))
            await house.released(0)
            other = await house.hold(2, limits=["search"])
            items = await house.released(2)
            assert [item.card.key for item in items] == other
            house.clock.advance(0.6)
            items = await house.released(2 + 2)
            assert all("llm" in item.limits for item in items if item.card.key not in other)


# --- doubts and crashes -------------------------------------------------------------------------------


async def test_a_task_that_moved_on_is_only_removed() -> None:
    """Cancelled while it was held: nothing reaches WORK."""
    async with release_house() as house:
        (key,) = await house.hold(1)
        last = await house.context.journal.last("acme", key)
        assert last.event is not None
        await house.context.journal.append(Cancelled(card=last.event.card), last.seq)
        await house.worker(5)
        async with releasing(house):
            await wait_until(_nothing_held(house), "an empty HELD")
        assert await house.work() == []
        assert await house.life(key) == ["held", "cancelled"]


async def test_a_release_that_a_dead_releaser_began_is_finished() -> None:
    """Its event stands, its work message does not: one execution, no second event."""
    async with release_house() as house:
        (key,) = await house.hold(1)
        last = await house.context.journal.last("acme", key)
        entry = await house.broker.last(house.names.held_stream, house.names.held_filter)
        assert last.event is not None
        assert entry is not None
        card = msgspec.structs.replace(last.event.card, cause=Cause(stream=house.names.held_stream, seq=entry.seq))
        await house.context.journal.append(Released(card=card), last.seq)
        await house.worker(5)
        async with releasing(house):
            (item,) = await house.released(1)
            await wait_until(_nothing_held(house), "an empty HELD")
        assert item.card.key == key
        assert await house.life(key) == ["held", "released"]


async def test_two_entries_of_one_event_release_it_once() -> None:
    """A dispatcher's redelivery beyond the window of duplicates leaves a second entry."""
    async with release_house() as house:
        (key,) = await house.hold(1)
        entry = await house.broker.last(house.names.held_stream, house.names.held_filter)
        assert entry is not None
        await house.broker.publish(Outgoing(entry.subject, entry.body))
        await house.worker(5)
        async with releasing(house):
            await house.released(1)
            await wait_until(_nothing_held(house), "an empty HELD")
        assert await house.life(key) == ["held", "released"]


async def test_answers_that_are_lost_lose_and_double_nothing() -> None:
    """Of the event, and of the work message."""
    async with release_house() as house:
        await house.worker(50)
        keys = await house.hold(20)
        broker, context = troubled(house)
        broker.unanswered = {".released": 7, ".work.": 5}
        async with releasing(house, context):
            items = await house.released(20)
            await wait_until(_nothing_held(house), "an empty HELD")
        assert {item.card.key for item in items} == set(keys)
        for key in keys:
            assert await house.life(key) == ["held", "released"]


async def test_a_full_store_only_delays() -> None:
    """What is refused waits in its lane, in its place."""
    async with release_house() as house:
        await house.worker(50)
        keys = await house.hold(10)
        broker, context = troubled(house)
        broker.refused = {".released": 12, ".work.": 9}
        async with releasing(house, context):
            items = await house.released(10)
            await wait_until(_nothing_held(house), "an empty HELD")
        assert {item.card.key for item in items} == set(keys)


async def test_entries_that_could_not_be_removed_are_removed_later() -> None:
    """And nothing is released for them again."""
    async with release_house() as house:
        await house.worker(50)
        keys = await house.hold(5)
        broker, context = troubled(house)
        broker.deaf = {"delete"}
        async with releasing(house, context):
            await house.released(5)
            assert len(await house.held()) == 5
            broker.deaf = set()
            await wait_until(_nothing_held(house), "an empty HELD")
        for key in keys:
            assert await house.life(key) == ["held", "released"]


async def test_a_successor_counts_what_its_predecessor_released() -> None:
    """Released and not begun stays within the depth over a change of the releaser."""
    async with release_house() as house:
        await house.worker(3)
        await house.hold(40)
        async with releasing(house):
            items = await house.released(6)
        await house.begin(items[:2])
        async with releasing(house):
            items = await house.released(6)
            await house.begin(items[:1])
            await house.released(5 + 1 + 1)


async def test_one_of_two_dispatchers_releases_and_the_other_takes_over() -> None:
    """The second stands by until the first lets go of the lock."""
    async with release_house() as house:
        await house.worker(50)
        async with asyncio.TaskGroup() as group:
            stop = asyncio.Event()
            async with releasing(house):
                group.create_task(Releaser(replace(house.context, broker=house.server.connect())).run(stop))
                await house.hold(3)
                await house.released(3)
                assert house.telemetry.counts["releaser.elected"] == 1
            await house.hold(3)
            await house.released(6)
            assert house.telemetry.counts["releaser.elected"] == 2
            stop.set()


class _Held:
    """A lock that is held whatever happens."""

    def held(self) -> bool:
        """Always."""
        return True


async def test_two_that_both_believe_to_lead_release_everything_once() -> None:
    """A leader that was suspended beyond its lease goes on for a moment: the stream decides."""
    async with release_house() as house:
        await house.worker(100)
        keys = await house.hold(150)
        contexts = [replace(house.context, broker=house.server.connect()) for _ in range(2)]
        terms = [Term(context, cast(Any, _Held())) for context in contexts]
        async with asyncio.TaskGroup() as group:
            for term in terms:
                group.create_task(term.run())
            items = await house.released(150)
            await wait_until(_nothing_held(house), "an empty HELD")
            for term in terms:
                term.end()
        assert sorted(item.card.key for item in items) == sorted(keys)
        for key in keys:
            assert await house.life(key) == ["held", "released"]


async def test_what_was_read_ahead_is_forgotten_where_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """And read again when its turn comes: nothing is lost, and the order of each lane stands."""
    monkeypatch.setattr(lanes, "MOST_BYTES", 5000)
    async with release_house() as house:
        await house.worker(4)
        keys = {tenant: await house.hold(12, tenant) for tenant in ("a", "b", "c")}
        begun: list[str] = []
        async with releasing(house):
            while len(begun) < 36:
                items = await wait_until(house.work, "tasks in WORK")
                begun += [item.card.key for item in items]
                await house.begin(items)
        for own in keys.values():
            assert [key for key in begun if key in own] == own


async def test_a_queue_that_has_been_idle_is_followed_anew_when_it_is_busy_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its plain tasks are not listened to meanwhile, and the depth is right afterwards."""
    async with release_house() as house:
        await house.worker(2)
        await house.hold(4)
        monkeypatch.setattr(releaser, "IDLE_LOOK_EVERY_S", 0.02)
        broker, context = troubled(house)
        term = Term(context, cast(Any, _Held()))
        async with asyncio.TaskGroup() as group:
            group.create_task(term.run())
            await house.begin(await house.released(4))
            for _ in range(4):
                house.clock.advance(40.0)
                await house.settled()
            assert len(broker.feeds) == 1
            await house.worker(2)
            await house.hold(20)
            await house.begin(await house.released(4))
            await house.released(2 * 2 + 4)
            assert len(broker.feeds) == 2
            term.end()


async def test_an_entry_of_a_newer_peer_is_left_alone_and_holds_up_nobody() -> None:
    """It is reported once, and the lane goes on behind it."""
    async with release_house() as house:
        await house.worker(5)
        await house.hold(1)
        entry = await house.broker.last(house.names.held_stream, house.names.held_filter)
        assert entry is not None
        await house.broker.delete(house.names.held_stream, entry.seq)
        newer = msgspec.json.encode({**msgspec.json.decode(entry.body), "v": 99})
        await house.broker.publish(Outgoing(entry.subject, newer))
        await house.broker.publish(Outgoing(entry.subject, entry.body))
        async with releasing(house):
            await house.released(1)
            house.clock.advance(5.0)
            await house.settled()
            house.clock.advance(5.0)
            await house.settled()
        info = await house.broker.stream_info(house.names.held_stream)
        assert info is not None
        assert info.messages == 1
        assert house.telemetry.counts["message.unknown"] == house.telemetry.counts["releaser.elected"]


async def test_a_release_that_is_lost_from_work_gives_its_place_back() -> None:
    """Somebody purged WORK: the depth of the queue is not filled with ghosts for ever."""
    async with release_house() as house:
        await house.worker(1)
        await house.hold(4)
        async with releasing(house):
            await house.released(2)
            await house.broker.purge(house.names.work_stream, house.names.work_class(QUEUE, "normal"), 10**6)
            house.clock.advance(40.0)
            await house.worker(1)
            await house.released(2)


# --- the end of a wait --------------------------------------------------------------------------------


async def test_a_head_whose_deadline_passes_expires() -> None:
    """Also without a worker that could ever run it."""
    async with release_house() as house:
        deadline = datetime.fromtimestamp(house.clock.now() + 30, UTC)
        (key,) = await house.hold(1, deadline_at=deadline)
        (other,) = await house.hold(1)
        async with releasing(house):
            await house.settled()
            assert await house.life(key) == ["held"]
            house.clock.advance(31.0)
            await wait_until(lambda: _ended(house, key), "an end")
            await house.settled()
        assert await house.life(key) == ["held", "expired"]
        assert await house.life(other) == ["held"]
        assert await house.held() == [other]


async def test_a_task_that_limits_hold_up_for_too_long_fails_with_a_dead_letter() -> None:
    """`throttled_out`; one that only waits for its turn does not, nor one that waits for the end of a budget's period."""
    async with release_house(limits={"llm": {"requests": "600/min"}}, max_throttle_s=4) as house:
        house.gates[LLM] = Gate(keys=LLM, open=False, reason="paused")
        await house.govern()
        house.gates[MONTH] = Gate(keys=MONTH, open=False, reason="budget_exhausted", limiting_key="month")
        keys = await house.hold(3, limits=["llm"])
        (fair,) = await house.hold(1)
        (paid,) = await house.hold(1, limits=["month"])
        async with releasing(house):
            await house.passed(2.0)
            assert await house.life(keys[0]) == ["held"]
            await house.passed(4.0)
            await wait_until(lambda: _ended(house, keys[2]), "an end")
            await wait_until(lambda: _holds_only(house, fair, paid), "two entries")
        for key in keys:
            event = (await house.events(key))[-1]
            assert isinstance(event, Failed)
            assert event.reason == "throttled_out"
            letter = await house.broker.last(house.names.dlq_stream, house.names.dlq_of_key("acme", key))
            assert letter is not None
            assert decode_dead_letter(letter.body).envelope is not None
        assert await house.life(fair) == await house.life(paid) == ["held"]


async def test_a_held_task_without_events_ends_as_lost() -> None:
    """It is never run."""
    async with release_house() as house:
        (key,) = await house.hold(1)
        await house.broker.purge(house.names.events_stream, house.names.life("acme", key), 10**6)
        await house.worker(5)
        async with releasing(house):
            await wait_until(_nothing_held(house), "an empty HELD")
        event = (await house.events(key))[-1]
        assert isinstance(event, Failed)
        assert event.reason == "history_lost"
        assert await house.work() == []


async def test_a_broker_in_trouble_does_not_end_the_releaser() -> None:
    """It goes on once the broker answers."""
    async with release_house() as house:
        await house.worker(5)
        broker, context = troubled(house)
        async with releasing(house, context) as running:
            broker.deaf = {"page", "subjects"}
            await house.hold(2)
            house.clock.advance(3.0)
            await wait_until(lambda: house.telemetry.counts["broker.trouble"] >= 2, "trouble")
            assert running()
            broker.deaf = set()
            await house.released(2)


def _nothing_held(house: ReleaseHouse) -> Any:
    async def empty() -> bool:
        return not await house.held()

    return empty


async def _ended(house: ReleaseHouse, key: str) -> bool:
    return (await house.life(key))[-1] in ("failed", "expired")


async def _holds_only(house: ReleaseHouse, *keys: str) -> bool:
    return await house.held() == list(keys)


class _NoBells:
    """Every bell is lost."""

    def __init__(self, context: Context) -> None:
        self.due = context.bells.due

    def announce(self, published: Any) -> None:
        """Say nothing."""
        for _ in published:
            continue
