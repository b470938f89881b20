"""One key, one task: however many producers send it, in whatever order its id and key arrive."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

PROCESSES = 5
TIMES = 50
LEASE_S = 10.0


async def _infos(fleet: Fleet, task_id: str, tenant: str, **counts: int) -> dict[str, Any]:
    """The task once its infos count so much."""

    async def told() -> dict[str, Any] | None:
        found = await fleet.task(task_id, tenant)
        if found is None or any(found["infos"][name] < count for name, count in counts.items()):
            return None
        return found

    found = await wait_until(told, f"{task_id} has {counts}")
    assert found is not None
    assert {name: found["infos"][name] for name in counts} == counts
    return found


async def _total(fleet: Fleet, tenant: str, state: str = "") -> int:
    total: int = (await fleet.get("/v1/tasks", tenant=tenant, state=state)).json()["total"]
    return total


async def _drained(fleet: Fleet) -> None:
    """Wait until every submit was acked by the dispatcher."""
    async with fleet.broker() as broker:

        async def empty() -> bool:
            info = await broker.stream_info(fleet.names.inbox_stream)
            return info is not None and info.messages == 0

        await wait_until(empty, "the inbox is empty")


async def test_one_key_from_five_processes_fifty_times_is_one_task(shared_fleet: Fleet, tmp_path: Path) -> None:
    """250 submits at once: one task id, one execution, and every other one is told as a duplicate."""
    fleet, gate = shared_fleet, tmp_path / "gate"
    envelope = json.dumps({"task_type": "echo", "idempotency_key": "order:42", "payload": {"amount": 1}})
    argv = [sys.executable, "-m", "tests.support.flood", fleet.server.url, "mill.submit.five.agent-run", str(TIMES)]
    floods = [fleet.processes.start_command([*argv, envelope, str(gate)], "flood") for _ in range(PROCESSES)]
    for flood in floods:
        flood.wait_for_log("ready")
    gate.touch()
    for flood in floods:
        assert flood.wait() == 0, flood.log()
    sequences = [seq for flood in floods for seq in json.loads(flood.log().splitlines()[-1])["stored"]]
    assert len(set(sequences)) == PROCESSES * TIMES
    listed = (await fleet.get("/v1/tasks", tenant="five")).json()
    task_id = listed["items"][0]["task_id"]
    found = await fleet.wait_for(task_id, "completed", tenant="five")
    found = await _infos(fleet, task_id, "five", duplicates=PROCESSES * TIMES - 1, conflicts=0)
    assert await _total(fleet, "five") == 1
    assert len(fleet.starts(task_id)) == 1
    assert found["result"] == {"amount": 1}
    await _drained(fleet)


async def test_same_key_with_another_payload_is_a_conflict_that_changes_nothing(shared_fleet: Fleet) -> None:
    """Over NATS an info on the first task, over HTTP a 409; the first keeps its payload, result and single run."""
    fleet = shared_fleet
    first = {"task_id": "first", "task_type": "echo", "idempotency_key": "k", "payload": {"a": 1, "b": 2}}
    async with fleet.plain() as client:
        await fleet.submit(client, first, tenant="conf")
        before = await fleet.wait_for("first", "completed", tenant="conf")
        await fleet.submit(client, {**first, "payload": {"a": 1, "b": 3}}, tenant="conf")
        await fleet.submit(client, {**first, "task_type": "sleep"}, tenant="conf")
        await fleet.submit(client, {**first, "payload": {"b": 2, "a": 1.0}}, tenant="conf")
        await fleet.submit(client, {**first, "payload": {"b": 2, "a": 1}}, tenant="conf")  # the same JSON value
    after = await _infos(fleet, "first", "conf", conflicts=3, duplicates=1)
    answer = await fleet.post("/v1/tasks", {**first, "payload": None, "tenant_id": "conf", "queue": "agent-run"})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    for name in ("state", "result", "attempt", "generation", "ended_at"):
        assert after[name] == before[name], name
    assert await _total(fleet, "conf") == 1
    assert len(fleet.starts("first")) == 1


async def test_same_key_of_two_tenants_is_two_tasks(shared_fleet: Fleet) -> None:
    """A key means nothing beyond its tenant."""
    fleet = shared_fleet
    async with fleet.plain() as client:
        for tenant in ("one", "two"):
            task = {"task_id": "same", "task_type": "echo", "idempotency_key": "same", "payload": tenant}
            await fleet.submit(client, task, tenant=tenant)
    for tenant in ("one", "two"):
        found = await fleet.wait_for("same", "completed", tenant=tenant)
        assert (found["result"], found["infos"]["conflicts"]) == (tenant, 0)


async def test_id_and_key_together_name_one_task(shared_fleet: Fleet) -> None:
    """The key decides; an id that belongs to another task is a conflict told there, and nothing runs for it."""
    fleet = shared_fleet

    def task(**fields: Any) -> dict[str, Any]:
        return {"task_type": "echo", "payload": 1, **fields}

    async with fleet.plain() as client:
        await fleet.submit(client, task(task_id="A", idempotency_key="ka"), tenant="alias")
        await fleet.wait_for("A", "completed", tenant="alias")
        # the same id and key again: a duplicate
        await fleet.submit(client, task(task_id="A", idempotency_key="ka"), tenant="alias")
        await _infos(fleet, "A", "alias", duplicates=1, conflicts=0)
        # the id with another key: taken
        await fleet.submit(client, task(task_id="A", idempotency_key="other"), tenant="alias")
        await _infos(fleet, "A", "alias", duplicates=1, conflicts=1)
        # the id alone: taken as well, for its key differs from the task's
        await fleet.submit(client, task(task_id="A"), tenant="alias")
        await _drained(fleet)
        # the key under another id: the same task
        await fleet.submit(client, task(task_id="B", idempotency_key="ka"), tenant="alias")
        await _infos(fleet, "A", "alias", duplicates=2)
        # an id without a key first, then with one: taken
        await fleet.submit(client, task(task_id="C"), tenant="alias")
        await fleet.wait_for("C", "completed", tenant="alias")
        await fleet.submit(client, task(task_id="C", idempotency_key="kc"), tenant="alias")
        await _infos(fleet, "C", "alias", conflicts=1)
        # without id or key every submit is a task of its own
        for _ in range(2):
            await fleet.submit(client, task(title="anonymous"), tenant="alias")
        await _drained(fleet)

    async def all_done() -> bool:
        return await _total(fleet, "alias", "completed") == 4

    await wait_until(all_done, "A, C and two without a name are completed")
    assert await _total(fleet, "alias") == 4
    assert (len(fleet.starts("A")), len(fleet.starts("B")), len(fleet.starts("C"))) == (1, 0, 1)
    second_name = await fleet.task("B", "alias")
    assert second_name is not None
    assert second_name["task_id"] == "A"


async def test_key_in_flight_is_free_again_after_the_end(shared_fleet: Fleet) -> None:
    """`unique: in_flight`: a duplicate while the task runs, a new generation once it is over, conflicts apart."""
    fleet = shared_fleet
    task = {"task_id": "fly", "task_type": "sleep", "idempotency_key": "fly", "unique": "in_flight"}
    async with fleet.plain() as client:
        await fleet.submit(client, {**task, "payload": {"seconds": 0.6}}, tenant="fly")
        await fleet.wait_for("fly", "processing", tenant="fly")
        for _ in range(3):
            await fleet.submit(client, {**task, "payload": {"seconds": 0.6}}, tenant="fly")
        await fleet.submit(client, {**task, "payload": {"seconds": 0.0}}, tenant="fly")
        first = await fleet.wait_for("fly", "completed", tenant="fly")
        await _infos(fleet, "fly", "fly", duplicates=3, conflicts=1)
        assert (first["generation"], len(fleet.starts("fly"))) == (1, 1)
        await fleet.submit(client, {**task, "payload": {"seconds": 0.1}}, tenant="fly")

        async def second() -> bool:
            found = await fleet.task("fly", "fly")
            return found is not None and found["generation"] == 2 and found["state"] == "completed"

        await wait_until(second, "the second generation is completed")
    assert len(fleet.starts("fly")) == 2
    assert await _total(fleet, "fly") == 1


async def test_unique_without_a_key_is_unique_by_content(shared_fleet: Fleet) -> None:
    """Type, payload and context make the key: order of members and spacing do not count, a number's form does."""
    fleet = shared_fleet
    bodies = [
        b'{"task_type":"echo","unique":"history","payload":{"x":1,"y":[1,2]},"context":{"turns":["a","b"]}}',
        b'{ "unique": "history", "context": {"turns": ["a", "b"]}, "payload": {"y": [1, 2], "x": 1}, "task_type": "echo" }',
        b'{"task_type":"echo","unique":"history","payload":{"x":1,"y":[2,1]},"context":{"turns":["a","b"]}}',
        b'{"task_type":"echo","unique":"history","payload":{"x":1,"y":[1,2]},"context":{"turns":["a","c"]}}',
        b'{"task_type":"echo","unique":"history","payload":{"x":1,"y":[1,2]}}',
    ]
    async with fleet.plain() as client:
        await asyncio.gather(*(fleet.submit(client, body, tenant="cont") for body in bodies for _ in range(3)))
    await _drained(fleet)

    async def all_done() -> bool:
        return await _total(fleet, "cont", "completed") == 4

    await wait_until(all_done, "four different contents are completed")
    assert await _total(fleet, "cont") == 4
    items = (await fleet.get("/v1/tasks", tenant="cont")).json()["items"]
    ids = {item["task_id"] for item in items}
    assert len([start for start in fleet.starts() if start["task_id"] in ids]) == 4


async def test_submit_answers_over_http_name_the_same_task(shared_fleet: Fleet) -> None:
    """`Idempotency-Key` twice: two times 202 with one id, the second marked as replayed; the header must fit the body."""
    fleet = shared_fleet
    body = {"task_type": "echo", "payload": time.time(), "queue": "agent-run"}
    headers = {"Idempotency-Key": "over-http", "Prefer": "wait=20"}
    first = await fleet.post("/v1/tasks", body, headers=headers)
    second = await fleet.post("/v1/tasks", body, headers=headers)
    assert (first.status_code, second.status_code) == (202, 202)
    assert first.json()["task_id"] == second.json()["task_id"]
    assert second.headers["idempotent-replayed"] == "true"
    assert len(fleet.starts(first.json()["task_id"])) == 1
    differing = await fleet.post("/v1/tasks", {**body, "idempotency_key": "another"}, headers=headers)
    assert (differing.status_code, differing.json()["code"]) == (422, "invalid_envelope")
