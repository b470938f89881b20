"""Waiting for permits: it takes no slot, no attempt and no delivery, it ends in bounded time, and nobody is overtaken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import msgspec
import pytest

from millstream.app import App
from millstream.clock import SystemClock, SystemIds
from millstream.context import Context
from millstream.errors import CallerError
from millstream.permits_client import DeniedPermit, WaitFor
from millstream.policy.claim import Hold, first_claim
from millstream.ports import Stored
from millstream.settings import Settings, build
from millstream.worker import Worker
from millstream.worker.slots import Slots
from millstream.worker.waits import keys_of
from millstream_schemas.codec import decode_work_item
from millstream_schemas.events import AttemptFailed, Event, Parked, WorkItem
from millstream_schemas.topology import work_consumer
from tests.support.desk import Desk
from tests.support.millrace import Mill, millrace
from tests.support.samples import CARD, ENVELOPE
from tests.support.waiting import wait_until

LEASE_S = 60
"""A third of it is the patience of a delivery: more than any of these tests waits."""


PLAIN = msgspec.structs.replace(ENVELOPE, limits=[])


class Race:
    """A worker over the in-memory broker whose permits come from a desk, with handlers that say when they run."""

    def __init__(self, mill: Mill, settings: Settings, desk: Desk, app: App) -> None:
        self.mill = mill
        self.settings = settings
        self.desk = desk
        self.app = app
        self.began: list[str] = []
        self.running = 0
        self.most = 0
        self.gates: dict[str, asyncio.Event] = {}
        self.stop = asyncio.Event()
        app.task("plain")(self._run)
        app.task("paid", limits=["paid"])(self._run)

    async def _run(self, ctx: Context, name: str) -> None:
        self.began.append(name)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if name in self.gates:
                await self.gates[name].wait()
        finally:
            self.running -= 1

    async def send(self, task_type: str, *names: str, **options: Any) -> list[str]:
        """Submit and admit one task for each name; returns their keys."""
        keys = [(await self.mill.client.send(task_type, name, task_id=name, **options)).key for name in names]
        await self.mill.admit()
        return keys

    def worker(self) -> Worker:
        mill = self.mill
        clock, ids = SystemClock(), SystemIds()
        return Worker(self.app, mill.broker, self.settings, clock, ids, mill.telemetry, permits=self.desk)

    @asynccontextmanager
    async def at_work(self) -> AsyncGenerator[Worker]:
        """A worker that runs meanwhile."""
        worker = self.worker()
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(worker.run(self.stop))
            yield worker
            self.stop.set()

    async def last(self, key: str) -> Event:
        """The last event of a task."""
        return (await self.mill.life(key))[-1]

    async def until(self, key: str, kind: str) -> Event:
        """Wait for a task's last event to be of a kind."""

        async def reached() -> Event | None:
            last = await self.last(key)
            return last if last.__struct_config__.tag == kind else None

        return await wait_until(reached, f"{kind} of {key}")


async def race(concurrency: int = 2, lease_s: float = LEASE_S, **settings: Any) -> Race:
    """One with two slots. `settings` are the worker's alone: here no dispatcher holds what they meter."""
    own = {"lease_s": lease_s, "worker": {"concurrency": concurrency, "grace_s": 30}}
    return Race(await millrace(**own), build({**own, **settings}), Desk(), App("a"))


async def test_deliveries_that_wait_hold_no_slot() -> None:
    """As many as there are slots may wait, and plain tasks of the same queue go on in all slots."""
    here = await race()
    here.desk.hold("paid")
    here.gates = {"plain-0": asyncio.Event(), "plain-1": asyncio.Event()}
    paid = await here.send("paid", "paid-0")
    async with here.at_work() as worker:
        await wait_until(lambda: here.desk.asked, "the paid one has asked")
        await here.send("plain", *[f"plain-{number}" for number in range(12)])
        await wait_until(lambda: here.running == 2, "both slots run plain tasks beside it")
        for gate in here.gates.values():
            gate.set()
        await wait_until(lambda: len(here.began) == 12, "all plain ones")
        assert "waiting=1" in repr(worker)
        assert await here.mill.kinds(paid[0]) == ["queued"]
        here.desk.hold("paid").set()
        await here.until(paid[0], "completed")
    assert here.desk.outstanding == 0


async def test_no_more_run_than_there_are_slots_and_no_more_wait_beside_them() -> None:
    """A backlog of both kinds: the worker's hand holds twice its slots at the most."""
    here = await race(concurrency=3)
    here.desk.hold("paid")
    names = [f"paid-{number}" for number in range(9)]
    await here.send("paid", *names)
    async with here.at_work() as worker:
        await wait_until(lambda: "waiting=3" in repr(worker), "as many wait as may")
        await here.send("plain", "late")
        held = (await here.mill.broker.consumers(here.mill.names.work_stream))[1:]
        assert sum(consumer.ack_pending for consumer in held) <= 3
        here.desk.hold("paid").set()
        await wait_until(lambda: len(here.began) == 10, "all of them")
    assert here.most <= 3
    assert here.desk.outstanding == 0


@pytest.mark.parametrize("seed", range(20))
async def test_neither_bound_is_ever_passed_and_nobody_is_left_in_line(seed: int) -> None:
    """Deliveries that run, wait, come back to a slot and leave in any order; the counts are looked at in every step."""
    chance = Random(seed)
    freed = asyncio.Event()
    slots = Slots(3, freed.set)

    def looked_at() -> None:
        assert 0 <= slots.taken <= slots.total, slots
        assert 0 <= slots.waiting <= slots.total, slots

    async def turns(most: int = 3) -> None:
        for _ in range(chance.randint(0, most)):
            await asyncio.sleep(0)
            looked_at()

    async def delivery() -> None:
        place = slots.place()
        try:
            while chance.random() < 0.5:
                with place.yielding(0 if chance.random() < 0.7 else 60):
                    await turns(most=20)
                if not await place.next_slot(60 if chance.random() < 0.8 else 0):
                    return
            await turns()
            if place.take_slot():
                place.begin()
                await turns()
        finally:
            place.leave()
            looked_at()

    left = 150
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        while left:
            freed.clear()
            room = slots.room
            slots.reserve(room)
            await turns()
            came = min(left, chance.randint(0, room))
            slots.release(room - came)
            for _ in range(came):
                group.create_task(delivery())
            left -= came
            if not room:
                await freed.wait()
    assert (slots.taken, slots.waiting, slots.room) == (0, 0, 3)


async def test_a_permit_that_comes_without_a_slot_goes_back_and_its_task_gets_the_next_slot() -> None:
    """Else it would starve: plain tasks are pulled whenever a slot is free."""
    here = await race()
    here.desk.hold("paid")
    here.gates = {f"plain-{number}": asyncio.Event() for number in range(4)}
    await here.send("paid", "paid")
    async with here.at_work() as worker:
        await wait_until(lambda: "waiting=1" in repr(worker), "the paid one waits")
        await here.send("plain", *here.gates)
        await wait_until(lambda: here.running == 2, "both slots are taken")
        here.desk.hold("paid").set()
        await wait_until(lambda: len(here.desk.returned) == 1, "the permit went back")
        assert here.desk.outstanding == 0
        here.gates[here.began[0]].set()
        await wait_until(lambda: len(here.began) >= 3, "the next one")
        assert here.began[2] == "paid"
        for gate in here.gates.values():
            gate.set()
        await wait_until(lambda: len(here.began) == 5, "the rest")
    assert here.desk.outstanding == 0


async def test_a_soft_stop_hands_back_at_once_what_waits() -> None:
    """Its execution has not begun: nothing is to be drained, and the next worker finds it as it was."""
    here = await race()
    here.desk.hold("paid")
    keys = await here.send("paid", "paid-0", "paid-1")
    async with here.at_work() as worker:
        await wait_until(lambda: "waiting=2" in repr(worker), "both wait")
    assert here.desk.given_up == 2
    assert here.desk.outstanding == 0
    here.stop.clear()
    here.desk.held.clear()
    async with here.at_work():
        for key in keys:
            await here.until(key, "completed")
    assert [await here.mill.kinds(key) for key in keys] == [["queued", "started", "completed"]] * 2


@pytest.mark.parametrize("reason", ["paused", "broken", "exhausted"])
async def test_behind_a_closed_gate_a_task_is_parked_at_once_until_it_opens(reason: str) -> None:
    """At no cost in attempts or deliveries, and `why` can name the limit; the slot is others'."""
    here = await race(concurrency=1)
    here.desk.answers["paid"] = WaitFor(60.0, "paid", reason)
    keys = await here.send("paid", *[f"paid-{number}" for number in range(20)])
    plain = await here.send("plain", "plain")
    before = datetime.now(UTC).timestamp()
    async with here.at_work():
        await here.until(plain[0], "completed")
        parked = [await here.until(key, "parked") for key in keys]
    for event in parked:
        assert isinstance(event, Parked)
        assert event.reason == "throttled"
        assert event.detail == f"limit paid: {reason}"
        assert 55 < event.until - before < 65
        assert (event.card.attempt, event.card.errors) == (1, 0)
    assert here.began == ["plain"]


async def test_a_wait_beyond_a_third_of_the_lease_is_parked() -> None:
    """A delivery is no place to sleep."""
    here = await race(lease_s=1)
    here.desk.hold("paid")
    (key,) = await here.send("paid", "paid")
    async with here.at_work():
        event = await here.until(key, "parked")
    assert isinstance(event, Parked)
    assert event.detail == "limit paid: requests"
    assert sum(asked.wait_s for asked in here.desk.asked) <= 1 / 3 + 0.1


async def test_a_deadline_that_comes_while_it_waits_ends_the_task() -> None:
    """It is not parked beyond it, nor run."""
    here = await race()
    here.desk.hold("paid")
    (key,) = await here.send("paid", "paid", deadline_at=datetime.now(UTC) + timedelta(seconds=1))
    async with here.at_work():
        event = await here.until(key, "attempt_failed")
    assert isinstance(event, AttemptFailed)
    assert event.failure.reason == "expired"
    assert here.began == []


@pytest.mark.parametrize(
    ("denied", "reason", "said"),
    [
        (DeniedPermit("budget_exhausted", "paid", 3600.0, "50 of 50 USD"), "budget_exhausted", "budget paid: 50 of 50 USD"),
        (DeniedPermit("too_large", "paid"), "fatal", "limit paid: "),
    ],
)  # fmt: skip
async def test_what_waiting_cannot_help_ends_the_attempt(denied: DeniedPermit, reason: str, said: str) -> None:
    """And names the limit."""
    here = await race()
    here.desk.answers["paid"] = denied
    (key,) = await here.send("paid", "paid")
    async with here.at_work():
        event = await here.until(key, "attempt_failed")
    assert isinstance(event, AttemptFailed)
    assert event.failure.reason == reason
    assert event.failure.message.startswith(said)
    assert here.began == []


async def test_an_unknown_limit_is_parked_with_what_to_do() -> None:
    """Fail closed, and say so."""
    here = await race()
    here.desk.answers["paid"] = DeniedPermit("unknown_limit", "paid")
    (key,) = await here.send("paid", "paid")
    async with here.at_work():
        event = await here.until(key, "parked")
    assert isinstance(event, Parked)
    assert 'add [limits."paid"] to millstream.toml' in event.detail


@pytest.mark.parametrize(("max_tokens", "starts"), [(100, False), (120, True)])
async def test_an_attempt_that_was_lost_counts_with_its_estimate(max_tokens: int, starts: bool) -> None:
    """Where that leaves too little of the task's own budget for another one, the task ends, its permit goes back."""
    here = await race()
    mill = here.mill
    estimate = {"tokens_in": 40, "tokens_out": 20}
    (key,) = await here.send("paid", "paid", budget={"max_tokens": max_tokens}, usage_estimate=estimate)
    await mill.broker.declare_consumer(
        work_consumer(mill.names, here.settings.lifetimes, "default", "normal", max_ack_pending=1000)
    )
    (lent,) = await mill.broker.pull(mill.names.work_stream, mill.names.work_consumer("default", "normal"), 1)
    dead = Hold(decode_work_item(lent.body), "dead", "dead", lent.stream, lent.seq, lent.delivery)
    claim = first_claim(dead)
    assert isinstance(await mill.journal.append(claim.event, claim.expect_seq), Stored)
    mill.broker.nak(lent)
    async with here.at_work():
        event = await here.until(key, "completed" if starts else "attempt_failed")
    assert event.card.crashes == 1
    assert here.began == (["paid"] if starts else [])
    assert here.desk.outstanding == 0
    if isinstance(event, AttemptFailed):
        assert event.failure.reason == "budget_exhausted"
        assert event.item is not None
        assert (event.item.usage.tokens_in, event.item.usage.tokens_out) == (40, 20)
        assert len(here.desk.returned) == 1


async def test_a_permit_that_runs_out_before_the_start_is_exchanged_for_another() -> None:
    """The claim may take long; a call that starts late may be one too many in its window."""
    here = await race()
    here.desk.use_by_s = -1.0
    (key,) = await here.send("paid", "paid")
    async with here.at_work():
        await here.until(key, "completed")
    assert len(here.desk.asked) == 2
    assert len(here.desk.returned) == 1
    assert len(here.desk.settled) == 1


async def test_a_permit_covers_what_handler_task_queue_type_and_tenant_ask_for() -> None:
    """Templates are filled from the task, each key counts once, and the estimate of the task is reserved."""
    here = await race(
        queues={"default": {"limits": ["queue/{queue}"]}},
        task_types={"typed": {"limits": ["type/{task_type}", "own"]}},
        tenants={"default": {"limits": ["tenant/{tenant_id}"]}},
    )
    here.app.task("typed", limits=["anthropic/{pins.model}", "own"])(lambda: None)
    (key,) = await here.send(
        "typed",
        "one",
        pins={"model": "opus"},
        usage_estimate={"requests": 2, "tokens_in": 900, "tokens_out": 100, "cost_usd": 0.25},
    )
    async with here.at_work():
        await here.until(key, "completed")
    (asked,) = here.desk.asked
    assert asked.keys == ("anthropic/opus", "own", "queue/default", "tenant/default", "type/typed")
    need = asked.need
    assert (need.requests, need.tokens_in, need.tokens_out, need.cost_usd, need.model) == (2, 900, 100, 0.25, "opus")
    assert (asked.task, asked.retry) == (key, False)


def test_what_the_dispatcher_found_and_what_the_task_names_count_as_well() -> None:
    """Keys of the pool are taken as they are, whatever stands in them."""
    app = App("a")
    task = app.task("notes.summarize", limits=["own", "tenant/{tenant_id}"])(lambda: None)
    envelope = msgspec.structs.replace(ENVELOPE, limits=["extra", "own"])
    item = WorkItem(fence=1, card=CARD, envelope=envelope, limits=["pool", "odd/{queue}"])
    assert keys_of(item, task, Settings()) == ("extra", "odd/{queue}", "own", "pool", "tenant/acme")
    bare = app.task("bare")(lambda: None)
    assert keys_of(msgspec.structs.replace(item, limits=[], envelope=PLAIN), bare, Settings()) == ()


async def test_more_limits_than_one_permit_can_be_on_are_fatal() -> None:
    """Nothing would change by asking again."""
    here = await race(
        queues={"default": {"limits": [f"queue-{number}" for number in range(16)]}},
        tenants={"default": {"limits": [f"tenant-{number}" for number in range(16)]}},
    )
    (key,) = await here.send("paid", "paid")
    async with here.at_work():
        event = await here.until(key, "attempt_failed")
    assert isinstance(event, AttemptFailed)
    assert event.failure.reason == "fatal"
    assert "33 limits, at most 32" in event.failure.message


@pytest.mark.parametrize(
    ("estimate", "prices"),
    [
        ({"cost_usd": 0.6}, {}),
        ({"tokens_in": 600_000}, {"opus": {"tokens_in": 1.0}}),
        ({"tokens_in": 900_000, "tokens_out": 200_000}, {}),
    ],
)
async def test_what_would_pass_the_tasks_own_budget_is_not_even_asked_for(
    estimate: dict[str, Any], prices: dict[str, Any]
) -> None:
    """By cost, by cost as priced, by tokens."""
    here = await race(prices=prices)
    budget = {"max_cost_usd": 0.5, "max_tokens": 1_000_000}
    (key,) = await here.send("paid", "paid", usage_estimate=estimate, budget=budget, pins={"model": "opus"})
    async with here.at_work():
        event = await here.until(key, "attempt_failed")
    assert isinstance(event, AttemptFailed)
    assert event.failure.reason == "budget_exhausted"
    assert "as estimated" in event.failure.message
    assert here.desk.asked == []


async def test_a_second_attempt_says_so_to_the_governor() -> None:
    """Retries may be rationed."""
    here = await race()
    here.app.task("flaky", limits=["paid"])(_flaky)
    retry = {"strategy": "none", "retry_on": ["ConnectionError"]}
    (key,) = await here.send("flaky", "flaky", retry_policy=retry)
    async with here.at_work():
        await here.until(key, "attempt_failed")
        await here.mill.decide()
        await here.until(key, "completed")
    assert [asked.retry for asked in here.desk.asked] == [False, True]
    assert [settlement.outcome for _, settlement in here.desk.settled] == ["unknown", "ok"]


async def _flaky(ctx: Context) -> None:
    if ctx.attempt == 1:
        raise ConnectionError


@pytest.mark.parametrize("limits", ["llm", ["{"], ["a/{nonsense}"], ["x" * 200], [""], [1]])
def test_limits_that_are_no_keys_are_refused_where_they_are_written(limits: Any) -> None:
    """A template that can never be filled would park its tasks for ever."""
    with pytest.raises(CallerError, match="limits"):
        App("a").task("t", limits=limits)
    assert msgspec.json.encode(limits)
