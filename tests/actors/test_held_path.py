"""Metered tasks on their way to HELD, over the in-memory broker: what is decided once, and what crashes leave over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from millstream.clock import SystemClock
from millstream.dispatcher.admission import Admitter
from millstream.dispatcher.advisories import Sweeper
from millstream.dispatcher.commands import Commander
from millstream.dispatcher.context import Fixed, MeteringTable, Served
from millstream.dispatcher.decisions import Decider
from millstream.dispatcher.ticks import Ticker
from millstream.policy.metering import Metered, lane_of, lane_token
from millstream.ports import Outgoing, Unanswered
from millstream.settings import build
from millstream_schemas.codec import decode_work_item, encode
from millstream_schemas.commands import HandlerInfo, Replay, WorkerInfo
from millstream_schemas.events import (
    AttemptFailed,
    Cause,
    Expired,
    Failure,
    Held,
    Interrupted,
    Parked,
    Released,
    Scheduled,
    Started,
    WorkItem,
)
from tests.actors.test_dispatcher import advisory, watch
from tests.support.millrace import Mill, millrace
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from millstream.client import Handle
    from millstream_schemas.events import Event

QUEUE = "metered"
QUEUES = {QUEUE: {"limits": ["tenant/{tenant_id}"]}}
LANE = lane_of("default", ["tenant/default"])
AGAIN = lane_token(LANE, again=True)
SOON = {"strategy": "fixed", "base_seconds": 0.3, "jitter": False}


async def metered(**settings: Any) -> Mill:
    """A mill with a queue whose tasks share a limit of their tenant."""
    return await millrace(queues=QUEUES, **settings)


async def sent(mill: Mill, **options: Any) -> Handle:
    """A task of the metered queue, admitted."""
    handle = await mill.client.send("echo", {"a": 1}, queue=QUEUE, **options)
    await mill.admit()
    return handle


async def the_entry(mill: Mill) -> tuple[str, WorkItem]:
    """The only entry of HELD."""
    (entry,) = await mill.held()
    return entry


async def work_left(mill: Mill) -> int:
    """How many messages WORK holds: work, timers and ticks."""
    info = await mill.broker.stream_info(mill.names.work_stream)
    return 0 if info is None else info.messages


async def ticked(mill: Mill, kind: str, key: str) -> None:
    """Wait until a timer of a task has fired."""
    subject = mill.names.tick(kind, QUEUE, key)

    async def fired() -> bool:
        return await mill.broker.last(mill.names.work_stream, subject) is not None

    await wait_until(fired, f"{subject} fires")


async def rung(mill: Mill) -> list[bytes]:
    """What the releaser is told from now on."""
    heard: list[bytes] = []
    await mill.broker.listen(mill.names.held_bell, lambda _, body: heard.append(body))
    return heard


async def release(mill: Mill, item: WorkItem) -> WorkItem:
    """What the releaser does to an entry, up to the message in WORK: the item as a worker gets it."""
    card = msgspec.structs.replace(item.card, cause=Cause(stream=mill.names.held_stream, seq=1))
    answer = await mill.journal.append(Released(card=card), item.fence)
    return msgspec.structs.replace(item, fence=getattr(answer, "seq", 0), card=card)


async def test_a_metered_task_that_is_due_is_held_in_its_lane_and_leaves_work_empty() -> None:
    """The event names lane and pool, the entry holds all that a worker needs; the releaser hears of the lane."""
    mill = await metered()
    heard = await rung(mill)
    handle = await sent(mill, limits=["model/x"])
    lane, item = await the_entry(mill)
    (event,) = await mill.life(handle.key)
    assert isinstance(event, Held)
    assert (event.reason, event.lane, event.limits, event.again) == (
        "limits",
        lane,
        ["model/x", "tenant/default"],
        False,
    )
    assert lane == lane_of("default", ["model/x", "tenant/default"])
    assert (item.lane, item.limits, item.card) == (lane, event.limits, event.card)
    assert item.fence == (await mill.journal.last("default", handle.key)).seq
    assert await work_left(mill) == 0
    await wait_until(lambda: heard, "the bell")
    assert heard == [mill.names.held(QUEUE, "normal", lane).encode()]


async def test_a_batch_of_held_tasks_rings_one_bell_that_names_each_lane_once() -> None:
    """However many there are."""
    mill = await metered()
    heard = await rung(mill)
    for tenant in ("b", "a", "b"):
        await mill.client.send("echo", None, queue=QUEUE, tenant=tenant)
    await mill.admit()
    lanes = sorted(mill.names.held(QUEUE, "normal", lane_of(tenant, [f"tenant/{tenant}"])) for tenant in "ab")
    await wait_until(lambda: heard, "the bell")
    assert heard == ["\n".join(lanes).encode()]


async def test_a_fair_queue_without_limits_is_held_and_a_plain_one_beside_it_is_not() -> None:
    """A plain task costs what it cost: one event, one message."""
    mill = await millrace(queues={"shared": {"fair": True}})
    heard = await rung(mill)
    fair = await mill.client.send("echo", None, queue="shared")
    plain = await mill.client.send("echo", None)
    await mill.admit()
    assert await mill.kinds(fair.key) == ["held"]
    assert await mill.kinds(plain.key) == ["queued"]
    lane, item = await the_entry(mill)
    assert (lane, item.limits) == (lane_of("default", ()), [])
    record = await mill.broker.last(mill.names.work_stream, mill.names.work_of_key(plain.key))
    assert record is not None
    assert b"lane" not in record.body
    await wait_until(lambda: heard, "the bell")
    assert heard == [mill.names.held("shared", "normal", lane).encode()]


async def test_limits_that_a_worker_announced_hold_its_tasks_also_when_it_has_gone() -> None:
    """They wait for a worker to come back, not for the day when nobody remembers the limit."""
    mill = await millrace()
    served = mill.dispatcher.served
    worker = WorkerInfo(worker_id="w", queues=["default"], slots=1, handlers=[handler("echo", "model/{pins.model}")])
    served.refresh([worker])
    before = await mill.client.send("echo", None, pins={"model": "x"})
    served.refresh([])
    after = await mill.client.send("echo", None)
    await mill.admit()
    assert served.task_types == frozenset()
    assert [item.limits for _, item in await mill.held()] == [["model/x"], ["model/-"]]
    assert await mill.kinds(before.key) == await mill.kinds(after.key) == ["held"]


def handler(task_type: str, *limits: str) -> HandlerInfo:
    """What a worker announces of one handler."""
    return HandlerInfo(task_type=task_type, queue="default", limits=list(limits))


def test_a_worker_that_announces_other_limits_replaces_those_of_the_workers_before_it() -> None:
    """Live workers of one type add up: a deploy meters by both until the old ones have gone."""
    served = Served()
    old = WorkerInfo(worker_id="1", queues=[], slots=1, handlers=[handler("a", "x")])
    new = WorkerInfo(worker_id="2", queues=[], slots=1, handlers=[handler("a", "y")])
    served.refresh([old, new])
    assert served.limits == {"a": ("x", "y")}
    served.refresh([new])
    assert served.limits == {"a": ("y",)}


def test_what_is_known_of_a_kind_is_found_anew_when_settings_or_announcements_change() -> None:
    """And only then: between two changes it costs one look."""
    served = Served()
    table = MeteringTable(served)
    plain, limited = build({}), build({"queues": {"q": {"limits": ["k"]}}, "tenants": {"t": {"limits": ["t"]}}})
    kind = ("q", "a", "t")
    assert table.metered(plain, kind) == ()
    assert table.metered(limited, kind) == (Metered(limits=("k",)), Metered(limits=("t",)))
    assert table.metered(limited, kind) is table.metered(limited, kind)
    served.refresh([WorkerInfo(worker_id="1", queues=[], slots=1, handlers=[handler("a", "x")])])
    assert table.metered(limited, kind)[0] == Metered(limits=("x",))
    known = table.known
    served.refresh([WorkerInfo(worker_id="1", queues=[], slots=1, handlers=[handler("a", "x")])])
    table.metered(limited, kind)
    assert table.known is known


def changed(mill: Mill, **settings: Any) -> Mill:
    """The same mill after a change of its configuration."""
    return replace(mill, dispatcher=replace(mill.dispatcher, configured=Fixed(build({"lease_s": 2, **settings}))))


# --- redelivered -------------------------------------------------------------------------------------


async def test_a_redelivered_submit_reads_lane_and_limits_from_the_event_that_stands() -> None:
    """The limits were changed in between: what was decided stays decided."""
    mill = await metered()
    handle = await mill.client.send("echo", None, queue=QUEUE)
    submits = await mill.broker.pull(mill.names.inbox_stream, mill.names.inbox_consumer, 10)
    await Admitter(mill.dispatcher).handle(submits)
    other = changed(mill, queues={QUEUE: {"limits": ["other"]}})
    await Admitter(other.dispatcher).handle(submits)
    assert await mill.kinds(handle.key) == ["held"]
    assert {lane for lane, _ in await mill.held()} == {LANE}
    await Admitter(changed(mill).dispatcher).handle(submits)
    assert await work_left(mill) == 0


async def test_a_plain_task_that_is_redelivered_stays_plain_when_its_queue_was_given_limits() -> None:
    """The other way round."""
    mill = await millrace()
    handle = await mill.client.send("echo", None, queue=QUEUE)
    submits = await mill.broker.pull(mill.names.inbox_stream, mill.names.inbox_consumer, 10)
    await Admitter(mill.dispatcher).handle(submits)
    await Admitter(changed(mill, queues=QUEUES).dispatcher).handle(submits)
    assert await mill.kinds(handle.key) == ["queued"]
    assert await mill.held() == []


class Losing:
    """A broker that loses the next publishes whose subject holds a word."""

    def __init__(self, mill: Mill, word: str, count: int = 1) -> None:
        self._target, self._word, self.left = mill.broker, word, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    async def publish_all(self, outgoing: list[Outgoing]) -> list[Any]:
        """Store all but the lost ones, of which nothing is heard."""
        answers: list[Any] = []
        for one in outgoing:
            lost = self.left > 0 and self._word in one.subject
            self.left -= lost
            answers.append(Unanswered() if lost else await self._target.publish(one))
        return answers


def losing(mill: Mill, word: str) -> Mill:
    """The same mill over a broker that loses one publish."""
    broker: Any = Losing(mill, word)
    context = replace(mill.dispatcher, broker=broker, journal=replace(mill.journal, broker=broker))
    return replace(mill, dispatcher=context)


@pytest.mark.parametrize("word", [".held.", ".later."])
async def test_a_submit_is_not_done_before_its_entry_and_the_timer_of_its_deadline_are_there(word: str) -> None:
    """Either may be lost; the redelivered submit publishes both again, and equal ones are stored once."""
    mill = await metered()
    await mill.client.send("echo", None, queue=QUEUE, deadline_at=SystemClock().now() + 3600)
    submits = await mill.broker.pull(mill.names.inbox_stream, mill.names.inbox_consumer, 10)
    await Admitter(losing(mill, word).dispatcher).handle(submits)
    inbox = await mill.broker.stream_info(mill.names.inbox_stream)
    assert inbox is not None
    assert inbox.messages == 1
    await Admitter(mill.dispatcher).handle(submits)
    inbox = await mill.broker.stream_info(mill.names.inbox_stream)
    assert inbox is not None
    assert inbox.messages == 0
    assert (len(await mill.held()), await work_left(mill)) == (1, 1)


# --- not due yet --------------------------------------------------------------------------------------


async def test_a_delayed_metered_task_is_held_when_it_is_due_behind_its_lane() -> None:
    """Lane and pool stand on the schedule; nothing comes to WORK that a worker could take."""
    mill = await metered()
    handle = await sent(mill, delay=0.3)
    (event,) = await mill.life(handle.key)
    assert isinstance(event, Scheduled)
    assert (event.lane, event.limits) == (LANE, ["tenant/default"])
    assert await mill.held() == []
    heard = await rung(mill)
    await ticked(mill, "hold", handle.key)
    await mill.tick()
    assert await mill.kinds(handle.key) == ["scheduled", "held"]
    lane, item = await the_entry(mill)
    held = (await mill.life(handle.key))[-1]
    assert isinstance(held, Held)
    assert held.card.cause.stream == mill.names.work_stream
    assert (lane, held.again, item.lane, item.limits) == (LANE, False, LANE, ["tenant/default"])
    assert item.fence == (await mill.journal.last("default", handle.key)).seq
    assert await work_left(mill) == 0
    await wait_until(lambda: heard, "the bell")
    assert heard == [mill.names.held(QUEUE, "normal", LANE).encode()]


async def test_a_tick_whose_entry_was_lost_publishes_it_again_and_a_second_tick_does_nothing() -> None:
    """Event first, then publish, then ack; a schedule may fire twice."""
    mill = await metered()
    handle = await sent(mill, delay=0.3)
    await ticked(mill, "hold", handle.key)
    subject = mill.names.tick("hold", QUEUE, handle.key)
    (record,) = await mill.broker.history(mill.names.work_stream, subject)
    await mill.broker.publish(Outgoing(subject, record.body))
    first, second = await mill.broker.pull(mill.names.work_stream, mill.names.ticks_consumer, 10)
    await Ticker(losing(mill, ".held.").dispatcher).handle([first])
    assert await mill.held() == []
    await Ticker(mill.dispatcher).handle([second])
    assert await mill.held() == []
    assert await work_left(mill) == 1, "only the second tick is done"
    await Ticker(mill.dispatcher).handle([first])
    assert len(await mill.held()) == 1
    assert await work_left(mill) == 0
    assert await mill.kinds(handle.key) == ["scheduled", "held"]


async def test_a_tick_at_its_delivery_limit_is_acted_upon_like_any_other() -> None:
    """The task must not end for the dispatcher's troubles, least of all as one that crashes workers."""
    mill = await metered()
    handle = await sent(mill, delay=0.3)
    await ticked(mill, "hold", handle.key)
    record = await mill.broker.last(mill.names.work_stream, mill.names.ticks_of_key(handle.key))
    assert record is not None
    watched = watch(mill)
    told = advisory(mill, mill.names.work_stream, record.seq)
    body = {"stream": told.stream, "consumer": mill.names.ticks_consumer, "stream_seq": record.seq, "deliveries": 50}
    told = msgspec.structs.replace(told, body=msgspec.json.encode({**body, "stream": mill.names.work_stream}))
    watched.full_for = {"held"}
    sweeper = Sweeper(mill.dispatcher, Admitter(mill.dispatcher), Decider(mill.dispatcher), Ticker(mill.dispatcher))
    await sweeper.handle(told)
    assert watched.acked == []
    watched.full_for = set()
    await sweeper.handle(told)
    assert watched.acked == [told]
    assert await mill.kinds(handle.key) == ["scheduled", "held"]
    assert (len(await mill.held()), await work_left(mill)) == (1, 0)


async def test_a_tick_of_a_kind_that_this_version_does_not_know_is_left_alone() -> None:
    """A newer dispatcher set it and will understand it."""
    mill = await metered()
    await mill.broker.publish(Outgoing(mill.names.tick("remind", QUEUE, "k"), b"{}"))
    await mill.tick()
    assert await work_left(mill) == 1


# --- deadlines ------------------------------------------------------------------------------------------


async def test_a_task_that_is_still_held_at_its_deadline_expires() -> None:
    """By a timer of the server's: nobody needs to look at it."""
    mill = await metered()
    handle = await sent(mill, deadline_at=SystemClock().now() + 0.4)
    await ticked(mill, "expire", handle.key)
    await mill.tick()
    held, expired = await mill.life(handle.key)
    assert isinstance(held, Held)
    assert isinstance(expired, Expired)
    assert expired.card.cause.stream == mill.names.work_stream
    assert await work_left(mill) == 0
    assert len(await mill.held()) == 1, "which the releaser removes when it comes to it"


async def test_a_deadline_after_the_release_is_the_workers_to_keep() -> None:
    """Its timer fires and changes nothing."""
    mill = await metered()
    handle = await sent(mill, deadline_at=SystemClock().now() + 0.4)
    await release(mill, (await the_entry(mill))[1])
    await ticked(mill, "expire", handle.key)
    await mill.tick()
    assert await mill.kinds(handle.key) == ["held", "released"]
    assert await work_left(mill) == 0


# --- decisions --------------------------------------------------------------------------------------------


async def started(mill: Mill, item: WorkItem) -> int:
    """The sequence of a worker's claim."""
    card = msgspec.structs.replace(item.card, release=item.fence, execution_id="e")
    answer = await mill.journal.append(Started(card=card, worker_id="w"), item.fence)
    return getattr(answer, "seq", 0)


async def ended(mill: Mill, event: Event, fence: int) -> None:
    """Append how an execution ended, and let the dispatcher decide."""
    await mill.journal.append(event, fence)
    await mill.decide()


async def test_a_retry_waits_for_its_time_and_then_before_its_lane() -> None:
    """With its history; what ran already goes before what did not."""
    mill = await metered()
    handle = await sent(mill, retry_policy=SOON)
    item = await release(mill, (await the_entry(mill))[1])
    failure = Failure(reason="error", error_type="E", classes=["E"])
    await ended(mill, AttemptFailed(card=item.card, failure=failure, item=item), await started(mill, item))
    assert (await mill.kinds(handle.key))[-1] == "retrying"
    await ticked(mill, "hold", handle.key)
    await mill.tick()
    held = (await mill.life(handle.key))[-1]
    assert isinstance(held, Held)
    assert (held.again, held.card.attempt, held.limits) == (True, 2, ["tenant/default"])
    (_, _), (lane, again) = await mill.held()
    assert (lane, len(again.history), again.lane) == (AGAIN, 1, LANE)


async def test_interrupted_work_is_held_again_at_once() -> None:
    """A deploy must not take it past the limit, nor behind those that have not run."""
    mill = await metered()
    handle = await sent(mill)
    item = await release(mill, (await the_entry(mill))[1])
    await ended(mill, Interrupted(card=item.card, item=item), await started(mill, item))
    assert (await mill.kinds(handle.key))[-2:] == ["interrupted", "held"]
    assert [lane for lane, _ in await mill.held()] == [LANE, AGAIN]
    assert await work_left(mill) == 0


async def test_a_throttled_task_goes_on_counting_how_long_while_it_is_held() -> None:
    """Else it could be thrown from one wait into the next for ever."""
    mill = await metered()
    handle = await sent(mill)
    item = await release(mill, (await the_entry(mill))[1])
    soon = SystemClock().now() + 0.3
    await ended(mill, Parked(card=item.card, until=soon, reason="throttled", item=item), item.fence)
    scheduled = (await mill.life(handle.key))[-1]
    assert isinstance(scheduled, Scheduled)
    assert scheduled.lane == LANE
    await ticked(mill, "hold", handle.key)
    await mill.tick()
    held = (await mill.life(handle.key))[-1]
    assert isinstance(held, Held)
    assert held.again
    assert (held.card.waiting_for, held.card.throttles) == ("throttled", 1)
    assert held.card.waiting_since == scheduled.card.waiting_since > 0
    again = await release(mill, (await mill.held())[-1][1])
    assert again.card.waiting_since == held.card.waiting_since
    await ended(mill, Parked(card=again.card, until=soon + 1, reason="throttled", item=again), again.fence)
    twice = (await mill.life(handle.key))[-1]
    assert isinstance(twice, Scheduled)
    assert (twice.card.waiting_since, twice.card.throttles) == (held.card.waiting_since, 2)


async def test_a_plain_task_that_was_throttled_is_metered_from_then_on() -> None:
    """Its limits were not known when it was admitted, a worker found them."""
    mill = await millrace()
    handle = await mill.client.send("echo", None)
    await mill.admit()
    record = await mill.broker.last(mill.names.work_stream, mill.names.work_of_key(handle.key))
    assert record is not None
    item = decode_work_item(record.body)
    mill.dispatcher.served.refresh(
        [WorkerInfo(worker_id="w", queues=["default"], slots=1, handlers=[handler("echo", "model")])]
    )
    parked = Parked(card=item.card, until=SystemClock().now() + 0.3, reason="throttled", item=item)
    await ended(mill, parked, item.fence)
    event = (await mill.life(handle.key))[-1]
    assert isinstance(event, Scheduled)
    assert (event.lane, event.limits) == (lane_of("default", ["model"]), ["model"])
    subject = mill.names.tick("hold", "default", handle.key)

    async def fired() -> bool:
        return await mill.broker.last(mill.names.work_stream, subject) is not None

    await wait_until(fired, "the timer fires")
    await mill.tick()
    _, held = await the_entry(mill)
    assert (held.lane, held.limits) == (event.lane, ["model"])


async def test_a_task_of_a_fair_queue_is_metered_anew_when_a_worker_found_its_limits() -> None:
    """And stays as it was decided, however often that is delivered and whatever is known by then."""
    mill = await millrace(queues={QUEUE: {"fair": True}})
    handle = await sent(mill)
    _, item = await the_entry(mill)
    assert (item.lane, item.limits) == (lane_of("default", ()), [])
    item = await release(mill, item)
    worker = WorkerInfo(worker_id="w", queues=[QUEUE], slots=1, handlers=[handler("echo", "model")])
    mill.dispatcher.served.refresh([worker])
    parked = Parked(card=item.card, until=SystemClock().now() + 60, reason="throttled", item=item)
    await mill.journal.append(parked, item.fence)
    lent = await mill.broker.pull(mill.names.events_stream, mill.names.decisions_consumer, 10)
    await Decider(losing(mill, ".later.").dispatcher).handle(lent)
    other = WorkerInfo(worker_id="v", queues=[QUEUE], slots=1, handlers=[handler("echo", "other")])
    mill.dispatcher.served.refresh([worker, other])
    await Decider(mill.dispatcher).handle(lent)
    *_, event = await mill.life(handle.key)
    assert isinstance(event, Scheduled)
    assert (event.lane, event.limits) == (lane_of("default", ["model"]), ["model"])
    (timer,) = await mill.broker.history(mill.names.work_stream, mill.names.later_of_key(handle.key))
    waiting = decode_work_item(timer.body)
    assert (waiting.lane, waiting.limits) == (event.lane, event.limits)


# --- commands ---------------------------------------------------------------------------------------------


async def commanded(mill: Mill) -> None:
    """Carry out what operators asked for."""
    for delivery in await mill.broker.pull(mill.names.control_stream, mill.names.control_consumer, 10):
        await Commander(mill.dispatcher).handle(delivery)


async def test_a_cancel_removes_timers_and_ticks_and_ends_the_task_where_it_is_held() -> None:
    """Its entry counts for nothing from then on."""
    mill = await metered()
    waiting = await sent(mill, delay=60)
    due = await sent(mill, delay=0.3)
    held = await sent(mill, deadline_at=SystemClock().now() + 3600)
    await ticked(mill, "hold", due.key)
    for handle in (waiting, due, held):
        await handle.cancel()
    await commanded(mill)
    assert await work_left(mill) == 0
    for handle in (waiting, due, held):
        assert (await mill.kinds(handle.key))[-1] == "cancelled"


async def test_a_replayed_task_is_metered_by_what_holds_now() -> None:
    """It failed as a plain one; it comes back through the lane, behind those that wait there."""
    mill = await millrace()
    handle = await mill.client.send("echo", None, queue=QUEUE, retry_policy={"strategy": "none"})
    await mill.admit()
    record = await mill.broker.last(mill.names.work_stream, mill.names.work_of_key(handle.key))
    assert record is not None
    item = decode_work_item(record.body)
    failure = Failure(reason="fatal", error_type="E")
    await ended(mill, AttemptFailed(card=item.card, failure=failure, item=item), await started(mill, item))
    command = Replay(tenant_id="default", task_id=handle.task_id, key=handle.key)
    await mill.broker.publish(Outgoing(mill.names.control("replay", "default"), encode(command)))
    await commanded(changed(mill, queues=QUEUES))
    event = (await mill.life(handle.key))[-1]
    assert isinstance(event, Held)
    assert (event.card.generation, event.lane, event.again) == (2, LANE, False)
    lane, replayed = await the_entry(mill)
    assert (lane, replayed.limits, replayed.card.generation) == (LANE, ["tenant/default"], 2)
