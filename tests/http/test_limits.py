"""Limits over HTTP: what the governor says of each, an operator's hand on one, and why a held task waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from millstream.policy.metering import lane_of
from millstream.ports import Outgoing
from millstream_schemas.codec import encode
from millstream_schemas.commands import HandlerInfo, WorkerInfo
from millstream_schemas.envelope import Envelope, UsageEstimate
from millstream_schemas.events import Scheduled, TaskInfo, WorkItem
from millstream_schemas.infos import BudgetWarning
from millstream_schemas.limit_states import DimensionState, LimitState, PriceState
from millstream_schemas.permits import (
    Denied,
    Gate,
    Gates,
    GatesListing,
    Limits,
    LimitsListing,
    Operate,
    PermitRequest,
    Pool,
)
from tests.http.harness import Running
from tests.tracker.histories import START, card

KEY = "anthropic/claude:x"
QUOTED = "anthropic%2Fclaude%3Ax"


def limit(key: str = KEY, **more: Any) -> LimitState:
    """A limit of 60 requests a minute that was slowed to 30."""
    rate = DimensionState(dimension="requests", configured=60, effective=30, used=12, window_s=60.0)
    values: dict[str, Any] = {
        "key": key, "dimensions": (rate,), "in_use": 2, "waiting": 7, "granted_total": 9, "throttled_total": 1,
    }  # fmt: skip
    return LimitState(**(values | more))


@dataclass
class FakeGovernor:
    """Answers what a test tells it to, and notes what it was asked to do."""

    gate: Callable[[tuple[str, ...]], Gate] = lambda keys: Gate(keys=keys, open=True)
    states: tuple[LimitState, ...] = (limit(),)
    prices: tuple[PriceState, ...] = ()
    operated: list[Operate] = field(default_factory=list[Operate])
    pools: list[Pool] = field(default_factory=list[Pool])
    asked: list[str] = field(default_factory=list[str])

    async def answer(self, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=PermitRequest)
        self.asked.append(str(request.__struct_config__.tag))
        match request:
            case Gates():
                self.pools = list(request.pools)
                return encode(GatesListing(items=tuple(self.gate(pool.keys) for pool in request.pools), epoch=3))
            case Operate():
                if request.key not in {state.key for state in self.states}:
                    return encode(Denied(reason="unknown_limit", epoch=3, key=request.key))
                self.operated.append(request)
                return encode(LimitsListing(items=self.states, epoch=3))
            case Limits():
                states = tuple(state for state in self.states if request.key in (None, state.key))
                told = LimitsListing(
                    items=states, epoch=3, revision=7, fault="no", prices=self.prices, unknown=("search",)
                )
                return encode(told)
            case _:
                raise AssertionError("nobody asks this of a governor over HTTP")


async def governor(mill: Running) -> FakeGovernor:
    """A governor that leads."""
    fake = FakeGovernor()
    for verb in ("limits", "gates", "operate"):
        await mill.broker.serve(mill.names.governor(verb), fake.answer)
    return fake


async def served(mill: Running) -> None:
    """A worker for the type of all tasks here."""
    handlers = [HandlerInfo(task_type="notes.summarize", queue="notes")]
    worker = WorkerInfo(worker_id="w1", queues=["notes"], slots=2, handlers=handlers)
    await mill.broker.kv_put(mill.names.workers_bucket, "w1", encode(worker))


async def test_limits_are_listed_with_every_dimension(mill: Running) -> None:
    """What the governor says, the revision that it works by, and the fault of a newer one; silence is a 503."""
    assert (await mill.get("/v1/limits", 503))["code"] == "governor_unavailable"
    fake = await governor(mill)
    fake.states = (limit(), limit("llm", paused_for_s=5.0, paused_why="told to", breaker="open", template="t/{queue}"))
    told = await mill.get("/v1/limits")
    assert (told["total"], told["epoch"], told["revision"], told["fault"]) == (2, 3, 7, "no")
    first, second = told["items"]
    assert first["dimensions"][0] | {"dimension": "requests", "effective": 30.0, "used": 12.0} == first["dimensions"][0]
    assert (first["in_use"], first["waiting"], first["paused_until"], first["shadow"]) == (2, 7, None, False)
    assert (second["breaker"], second["template"], second["paused_why"]) == ("open", "t/{queue}", "told to")
    assert second["paused_until"].endswith("Z")


async def test_prices_and_unknown_keys_are_listed_with_all_limits(mill: Running) -> None:
    """With the version of each price."""
    fake = await governor(mill)
    fake.prices = (PriceState(model="m", tokens_in=5.0, tokens_out=25.0, version="2026-05"),)
    told = await mill.get("/v1/limits")
    assert told["prices"] == [{"model": "m", "tokens_in": 5.0, "tokens_out": 25.0, "version": "2026-05"}]
    assert told["unknown"] == ["search"]
    assert "prices" not in await mill.get(f"/v1/limits/{QUOTED}")


async def test_limits_are_measured_with_few_series(mill: Running) -> None:
    """The hundred that are used most, whatever keys producers make; none while no governor answers."""
    assert "millstream_limit_" not in (await mill.client.get("/metrics")).text
    fake = await governor(mill)
    fake.states = (limit(paused_why="paused"), *(limit(f"t/{n}", in_use=0, waiting=0) for n in range(200)))
    lines = (await mill.client.get("/metrics")).text.splitlines()
    for line in (
        f'millstream_limit_effective{{limit="{KEY}",dimension="requests"}} 30',
        f'millstream_limit_waiting{{limit="{KEY}"}} 7',
        f'millstream_limit_closed{{limit="{KEY}"}} 1',
        "# TYPE millstream_limit_granted_total counter",
    ):
        assert line in lines
    assert sum(line.startswith("millstream_limit_in_use{") for line in lines) == 100


async def test_one_limit_is_found_by_its_key_whatever_stands_in_it(mill: Running) -> None:
    """Slashes and colons are a part of keys."""
    await governor(mill)
    for path in (f"/v1/limits/{QUOTED}", f"/v1/limits/{KEY}"):
        assert (await mill.get(path))["key"] == KEY
    assert (await mill.get("/v1/limits/nothing", 404))["code"] == "not_found"
    assert (await mill.get(f"/v1/limits/{'x' * 200}", 404))["code"] == "not_found"


async def test_an_operator_forces_a_breaker_and_reading_never_does(mill: Running) -> None:
    """The governor is told what to do and by whom; the answer is the limit as it is then."""
    fake = await governor(mill)
    path = f"/v1/limits/{QUOTED}/operate"
    answer = await mill.client.post(path, json={"operation": "open", "by": "me"})
    assert (answer.status_code, answer.json()["key"]) == (200, KEY)
    assert fake.operated == [Operate(key=KEY, operation="open", by="me")]
    assert (await mill.client.post("/v1/limits/nothing/operate", json={"operation": "auto"})).status_code == 404
    for body in ({}, {"operation": "explode"}, {"operation": "open", "key": "other"}):
        assert (await mill.client.post(path, json=body)).status_code == 400
    assert (await mill.client.post(path)).status_code == 400
    assert (await mill.client.get(path)).status_code == 404  # as a key, `…/operate` is none
    cross = await mill.client.post(path, json={"operation": "open"}, headers={"Origin": "http://evil.example"})
    assert cross.status_code == 403
    assert len(fake.operated) == 1


async def test_a_held_task_tells_its_place_the_limit_and_the_wait(mill: Running) -> None:
    """Place in its lane, lanes that share the limit, the limiting key and an estimate from its rate."""
    for number in range(3):
        mill.stream.held(card(f"t{number}"), KEY)
    mill.stream.held(card("other", tenant_id="acme"), KEY)
    await mill.tell()
    assert "no worker is alive" in (await mill.get("/v1/tasks/t1/why"))["why"]
    await served(mill)
    silent = await mill.get("/v1/tasks/t1/why")
    assert (silent["reason"], silent["expected_wait_s"]) == ("governor_unreachable", None)
    assert "the governor does not answer" in silent["why"]
    fake = await governor(mill)
    fake.gate = lambda keys: Gate(keys=keys, open=True, limiting_key=KEY, rate_per_s=0.5)
    told = await mill.get("/v1/tasks/t1/why")
    assert (told["state"], told["place"], told["of"], told["lanes"]) == ("held", 2, 3, 2)
    assert (told["limits"], told["limiting_key"], told["expected_wait_s"]) == ([KEY], KEY, 8.0)
    for part in ("place 2 of 3 in its lane", f"`{KEY}`", "30 a minute", "2 lanes take turns", "slowed to 50%", "8.0 s"):
        assert part in told["why"], told["why"]


async def test_a_closed_gate_says_what_closed_it(mill: Running) -> None:
    """A pause with its reason and end, a breaker that an operator forced open, a budget that is used up."""
    mill.stream.held(card("t"), KEY)
    await mill.tell()
    await served(mill)
    fake = await governor(mill)

    async def said(reason: str, wait_s: float, **state: Any) -> str:
        fake.states = (limit(**state),)
        fake.gate = lambda keys: Gate(keys=keys, open=False, reason=reason, limiting_key=KEY, wait_s=wait_s)
        told = await mill.get("/v1/tasks/t/why")
        assert (told["reason"], told["expected_wait_s"]) == (reason, wait_s or None)
        return str(told["why"])

    assert "is paused for 11.5 s (told to)" in await said("paused", 11.5, paused_why="told to")
    fake.states = (limit(breaker="forced_open", paused_why="forced open by operator cli:ops"),)
    fake.gate = lambda keys: Gate(keys=keys, open=False, reason="broken", limiting_key=KEY, wait_s=30.0)
    forced = await mill.get("/v1/tasks/t/why")
    assert "open until an operator says otherwise (forced open by operator cli:ops)" in forced["why"]
    assert forced["expected_wait_s"] is None
    assert "is open, for 4.0 s (faults of the provider)" in await said("broken", 4.0, breaker="open")
    assert "is paused for 2.0 s." in await said("paused", 2.0)
    assert "allowance for `anthropic/claude:x` is used up, for 2 h 0 min" in await said("exhausted", 7200.0)
    assert "the budget `anthropic/claude:x` is used up" in await said("budget_exhausted", 9.0)
    fake.gate = lambda keys: Gate(keys=keys, open=False, reason="unknown_limit", limiting_key=KEY, wait_s=5.0)
    told = await mill.get("/v1/tasks/t/why")
    assert f'add [limits."{KEY}"] to millstream.toml and restart the governor' in told["why"]
    assert "`millstream config apply FILE`" in told["why"]
    assert told["expected_wait_s"] is None


async def test_of_several_limits_the_tightest_one_is_named(mill: Running) -> None:
    """By its rate for what the first task of the lane is estimated to take."""
    await served(mill)
    fake = await governor(mill)
    of = card("t")
    mill.stream.held(of, "a", "b")
    await mill.tell()
    estimate = UsageEstimate(tokens_in=300, tokens_out=20)
    item = WorkItem(fence=1, card=of, envelope=Envelope(task_type=of.task_type, usage_estimate=estimate))
    subject = mill.names.held(of.queue, of.priority, lane_of(of.tenant_id, ("a", "b")))
    await mill.broker.publish(Outgoing(subject, encode(item)))
    rates: dict[tuple[str, ...], float] = {("a", "b"): 0.1, ("a",): 5.0, ("b",): 0.1}
    fake.gate = lambda keys: Gate(keys=keys, open=True, rate_per_s=rates[keys])
    told = await mill.get("/v1/tasks/t/why")
    assert (told["limiting_key"], told["expected_wait_s"]) == ("b", 10.0)
    assert "`b` lets 6 a minute start" in told["why"]
    assert [(pool.tokens_in, pool.tokens_out) for pool in fake.pools] == [(300, 20)] * 3


async def test_a_throttled_task_that_was_put_off_names_the_limit_that_is_in_the_way_now(mill: Running) -> None:
    """Beside the time that was planned; a task that its producer delayed asks nothing of the governor."""
    await served(mill)
    fake = await governor(mill)
    fake.gate = lambda keys: Gate(keys=keys, open=False, reason="paused", limiting_key=KEY, wait_s=9.0)
    info = TaskInfo(limits=[KEY])
    due_at = START + 1e9
    mill.stream.add(
        Scheduled(card=card("put-off"), due_at=due_at, task=info, why=f"throttled: limit {KEY}"), card("put-off")
    )
    mill.stream.add(Scheduled(card=card("later"), due_at=due_at, task=info), card("later"))
    await mill.tell()
    told = await mill.get("/v1/tasks/put-off/why")
    assert (told["limiting_key"], told["reason"], told["expected_wait_s"]) == (KEY, "paused", 9.0)
    assert f"(limit {KEY}); it is due" in told["why"]
    asked = len(fake.asked)
    assert "Its producer asked" in (await mill.get("/v1/tasks/later/why"))["why"]
    assert len(fake.asked) == asked


async def test_held_tasks_are_filtered_shown_and_counted_among_the_queued(mill: Running) -> None:
    """`state=held` lists them, the batch's `queued` counts them, and a released one is queued again."""
    mill.stream.held(card("t"), KEY)
    mill.stream.held(card("u"), KEY)
    mill.stream.released(card("u"))
    warning = BudgetWarning(key=card("t").key, budget=KEY, period="2026-05", spent=8.5, hard=10.0)
    mill.stream.add(warning, card("t"))
    await mill.tell()
    assert [each["task_id"] for each in (await mill.get("/v1/tasks?state=held"))["items"]] == ["t"]
    (queue,) = (await mill.get("/v1/queues"))["items"]
    assert (queue["states"], queue["batch"]["queued"]) == ({"held": 1, "queued": 1}, 2)
    task = await mill.get("/v1/tasks/t")
    assert (task["limits"], task["held_at"] is None, len(task["lane"])) == ([KEY], False, 26)
    assert [line["kind"] for line in task["timeline"]] == ["held", "budget_warning"]
    assert "8.50 of 10.00 USD" in task["timeline"][1]["detail"]
    assert (await mill.get("/v1/tasks/u"))["held_at"] is None
    await served(mill)
    assert "It was released from its lane" in (await mill.get("/v1/tasks/u/why"))["why"]
