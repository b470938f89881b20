"""Tasks over HTTP: submit, look at, wait for, cancel, replay."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from millstream.policy.admit import Submit, admit
from millstream.ports import Outgoing, Record
from millstream.settings import Settings
from millstream_schemas.codec import decode_command, decode_envelope, encode
from millstream_schemas.commands import Cancel, HandlerInfo, Replay, WorkerInfo
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import Completed, DeadLetter, Failure, Queued, Started, TaskInfo
from millstream_schemas.keys import derive_key
from tests.http.harness import Running
from tests.support.waiting import wait_until
from tests.tracker.histories import card

RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\Z")


async def inbox(mill: Running) -> list[Record]:
    """All submits that are stored."""
    return await mill.broker.history(mill.names.inbox_stream, mill.names.submit_filter)


async def commands(mill: Running) -> list[Any]:
    """All commands that are stored."""
    records = await mill.broker.history(mill.names.control_stream, mill.names.control_filter)
    return [decode_command(record.body) for record in records]


async def admitted(mill: Running) -> None:
    """Write the first event of each submit that has none, as the dispatcher does."""
    for record in (await inbox(mill))[mill.told :]:
        address = mill.names.parse_submit(record.subject)
        submit = Submit(
            envelope=decode_envelope(record.body)[0],
            tenant=address.tenant,
            queue=address.queue,
            stream=mill.names.inbox_stream,
            seq=record.seq,
            accepted_at=record.at,
        )
        verdict = admit(submit, Settings().queue(address.queue).defaults)
        mill.stream.add(verdict.event, verdict.card)
    await mill.tell()


async def test_a_submit_is_stored_and_answered_with_its_place(mill: Running) -> None:
    """202, Location and the whole task, before any dispatcher has seen it."""
    answer = await mill.client.post(
        "/v1/tasks", json={"task_type": "a.b", "payload": {"n": 2**60}, "title": "T", "colour": 1}
    )
    assert answer.status_code == 202
    task = answer.json()
    assert answer.headers["Location"] == f"/v1/tasks/{task['task_id']}" == task["status_url"]
    assert (task["state"], task["queue"], task["tenant_id"], task["title"]) == ("queued", "default", "default", "T")
    (record,) = await inbox(mill)
    assert record.subject == mill.names.submit("default", "default")
    assert task["inbox_seq"] == record.seq
    stored = json.loads(record.body)
    assert stored == {
        "task_type": "a.b",
        "payload": {"n": 2**60},
        "title": "T",
        "colour": 1,
        "task_id": task["task_id"],
    }
    await admitted(mill)
    shown = await mill.get(answer.headers["Location"])
    assert (shown["key"], shown["trace_id"], shown["state"]) == (task["key"], task["trace_id"], "queued")


async def test_right_after_the_answer_a_read_waits_for_the_first_event(mill: Running) -> None:
    """No 404 while the dispatcher is about to write it."""
    task = (await mill.client.post("/v1/tasks", json={"task_type": "a.b", "task_id": "x/../y z?"})).json()
    async with asyncio.TaskGroup() as group:
        read = group.create_task(mill.client.get(task["status_url"]))
        await asyncio.sleep(0)
        await admitted(mill)
    assert read.result().status_code == 200
    assert read.result().json()["task_id"] == "x/../y z?"
    assert (await mill.client.get("/v1/tasks/unheard-of")).status_code == 404


@pytest.mark.parametrize("header", ['"a b"', "a b"])
async def test_the_idempotency_header_becomes_the_key(mill: Running, header: str) -> None:
    """Quoted as the draft says, or bare; the same key again is the same task."""
    body = {"task_type": "a.b", "payload": 1}
    first = await mill.client.post("/v1/tasks?tenant=acme&queue=notes", json=body, headers={"Idempotency-Key": header})
    assert first.json()["key"] == derive_key("key", "acme", "a b")
    await admitted(mill)
    again = await mill.client.post("/v1/tasks?tenant=acme&queue=notes", json=body, headers={"Idempotency-Key": header})
    assert again.status_code == 202
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.json()["key"] == first.json()["key"]
    other = await mill.client.post(
        "/v1/tasks?tenant=acme&queue=notes", json=body | {"payload": 2}, headers={"Idempotency-Key": header}
    )
    assert other.status_code == 409
    assert other.json()["code"] == "conflict"
    assert len(await inbox(mill)) == 2


async def test_a_key_that_is_unique_in_flight_is_free_again_after_the_end(mill: Running) -> None:
    """Then another payload is no conflict, and `Prefer: wait` waits for the new outcome, not for the old one."""
    body = {"task_type": "a.b", "idempotency_key": "k", "unique": "in_flight", "payload": 1}
    await mill.client.post("/v1/tasks", json=body)
    await admitted(mill)
    (first,) = (await mill.get("/v1/tasks"))["items"]
    assert (await mill.client.post("/v1/tasks", json=body | {"payload": 2})).status_code == 409
    of = card(first["task_id"], key=first["key"], queue="default")
    mill.stream.started(of)
    mill.stream.add(Completed(card=of, result=msgspec.Raw(b"1")), of)
    await mill.tell()
    headers = {"Prefer": "wait=10"}
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(mill.client.post("/v1/tasks", json=body | {"payload": 2}, headers=headers))

        async def stored() -> bool:
            return len(await inbox(mill)) == 2

        await wait_until(stored, "the second submit is stored")
        again = msgspec.structs.replace(of, generation=2)
        mill.stream.add(Queued(card=again), again)
        mill.stream.started(again)
        mill.stream.add(Completed(card=again, result=msgspec.Raw(b"2")), again)
        await mill.tell()
    answer = asked.result()
    assert "Idempotent-Replayed" not in answer.headers
    assert (answer.json()["state"], answer.json()["generation"], answer.json()["result"]) == ("completed", 2, 2)
    expected = (await mill.client.post("/v1/tasks", json=body | {"payload": 3})).json()
    assert (expected["state"], expected["generation"], expected["result"]) == ("queued", 3, None)


async def test_prefer_wait_answers_with_the_outcome(mill: Running) -> None:
    """It returns as soon as the task is over, and says what it applied."""
    async with asyncio.TaskGroup() as group:
        headers = {"Prefer": "respond-async, wait=10"}
        asked = group.create_task(
            mill.client.post("/v1/tasks", json={"task_type": "a.b", "task_id": "t"}, headers=headers)
        )
        await wait_until(lambda: inbox(mill), "the submit is stored")
        await admitted(mill)
        of = card("t", queue="default", inbox_seq=1)
        mill.stream.started(of)
        mill.stream.add(Completed(card=of, result=msgspec.Raw(b'{"big":12345678901234567890}')), of)
        await mill.tell()
    answer = asked.result()
    assert answer.headers["Preference-Applied"] == "wait=10"
    assert answer.json()["state"] == "completed"
    assert b'"result":{"big":12345678901234567890}' in answer.content
    assert (await mill.client.get("/v1/tasks/t/result")).content == b'{"big":12345678901234567890}'


BAD: list[tuple[bytes, int, str]] = [
    (b"", 400, "#"),
    (b"[]", 422, "#"),
    (b"null", 422, "#"),
    (b'{"task_type":', 400, "#"),
    (b'{"task_type":"a"} x', 400, "#"),
    (b'\xef\xbb\xbf{"task_type":"a"}', 400, "#"),
    (b'{"task_type":"\xff"}', 400, "#"),
    (b'{"task_type":"\\ud800"}', 400, "#"),
    (b"[" * 1000 + b"]" * 1000, 400, "#"),
    (b"[" * 100_000, 400, "#"),
    (b'{"task_type":"a","payload":' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "#"),
    (b'{"task_type":"a","budget":{"max_attempts":-1}}', 422, "#/budget/max_attempts"),
    (b'{"task_type":"a","budget":{"max_cost_usd":NaN}}', 400, "#"),
    (b'{"task_type":"a","delay_seconds":1e308}', 422, "#/delay_seconds"),
    (b'{"task_type":"a","deadline_at":"2026-05-09T10:05:00"}', 422, "#/deadline_at"),
    (b'{"task_type":"a","tenant_id":"*"}', 422, "#/tenant_id"),
    (b'{"task_type":"a","queue":"a.b"}', 422, "#/queue"),
    (b'{"task_type":"a","tags":["x",7]}', 422, "#/tags/1"),
    (b'{"task_type":"a","payload":1,"payload_ref":"s3://x"}', 422, "#/payload_ref"),
    (b'{"task_type":"a","approval":{"required":true}}', 422, "#/approval/required"),
]


async def test_what_does_not_fit_is_refused_before_it_is_stored(mill: Running) -> None:
    """A problem with code, JSON path and pointer; nothing reaches the inbox."""
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for body, status, pointer in BAD:
        answer = await mill.client.post("/v1/tasks", content=body, headers={"traceparent": trace})
        problem = answer.json()
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert (problem["code"], problem["trace_id"]) == ("invalid_envelope", "4bf92f3577b34da6a3ce929d0e0e4736")
        assert [fault["pointer"] for fault in problem["errors"]] == [pointer], body[:100]
        assert answer.status_code == problem["status"] == status, body[:100]
    assert await inbox(mill) == []


async def test_a_body_over_the_limit_is_too_large(mill: Running) -> None:
    """Whether its length is told or not."""
    body = json.dumps({"task_type": "a", "payload": "x" * 300_000}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    for answer in (
        await mill.client.post("/v1/tasks", content=body),
        await mill.client.post("/v1/tasks", content=chunks()),
    ):
        assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")


async def test_names_and_keys_that_cannot_be_are_refused(mill: Running) -> None:
    """In the query, in headers, and where body and query disagree."""
    for path, body, header in (
        ("/v1/tasks?tenant=a.b", {}, None),
        ("/v1/tasks?queue=%3E", {}, None),
        ("/v1/tasks?queue=a", {"queue": "b"}, None),
        ("/v1/tasks?colour=red", {}, None),
        ("/v1/tasks", {}, '""'),
        ("/v1/tasks", {}, "x" * 513),
        ("/v1/tasks", {"idempotency_key": "a"}, "b"),
    ):
        headers = {} if header is None else {"Idempotency-Key": header}
        answer = await mill.client.post(path, json={"task_type": "t"} | body, headers=headers)
        assert answer.status_code in (400, 422), (path, answer.text)
    assert await inbox(mill) == []


async def test_a_task_is_shown_whole(mill: Running) -> None:
    """Counters, attempts, error, usage, trace and timeline, with times in UTC."""
    of = card("t", tenant_id="acme")
    mill.stream.failed(of, "it broke", attempts=2, title="My task", tags=["x"], run_id="r1", max_attempts=2)
    await mill.tell()
    task = await mill.get("/v1/tasks/t?tenant=acme")
    assert (task["state"], task["errors"], task["attempt"], task["max_attempts"]) == ("failed", 2, 2, 2)
    assert task["error"]["reason"] == "max_attempts"
    assert (task["error"]["type"], task["error"]["message"], task["error"]["fingerprint"]) == (
        "ValueError",
        "it broke",
        "f00d",
    )
    assert [each["outcome"] for each in task["attempts"]] == ["failed", "failed"]
    assert [entry["kind"] for entry in task["timeline"]] == [
        "queued", "started", "attempt_failed", "retrying", "started", "attempt_failed", "failed",
    ]  # fmt: skip
    assert [entry["seq"] for entry in task["timeline"]] == list(range(1, 8))
    for at in (task["created_at"], task["started_at"], task["ended_at"], task["timeline"][0]["at"]):
        assert RFC3339.match(at)
    assert (task["trace_id"], task["run_id"], task["tags"]) == (of.trace_id, "r1", ["x"])
    assert (await mill.client.get("/v1/tasks/t/result")).status_code == 409
    assert (await mill.client.get("/v1/tasks/t?tenant=other")).status_code == 404


async def test_lists_have_items_next_and_total(mill: Running) -> None:
    """Pages follow each other by cursor, and filters hold over all of them."""
    for number in range(7):
        of = card(f"t{number}", queue="notes" if number % 2 else "side", inbox_seq=number + 1)
        mill.stream.add(Queued(card=of, task=TaskInfo(tags=["even"] if number % 2 == 0 else [])), of)
    await mill.tell()
    first = await mill.get("/v1/tasks?limit=5")
    assert [item["task_id"] for item in first["items"]] == ["t6", "t5", "t4", "t3", "t2"]
    rest = await mill.get(f"/v1/tasks?limit=5&cursor={first['next']}")
    assert [item["task_id"] for item in rest["items"]] == ["t1", "t0"]
    assert (first["total"], rest["total"], rest["next"]) == (7, 7, None)
    assert (await mill.get("/v1/tasks?tag=even&queue=side"))["total"] == 4
    assert [item["task_id"] for item in (await mill.get("/v1/tasks?inbox_seq=3"))["items"]] == ["t2"]
    assert (await mill.get("/v1/tasks?state=failed,expired"))["items"] == []


async def test_a_cancel_is_sent_as_a_command_that_names_the_task(mill: Running) -> None:
    """202 for a task without outcome, 409 for one that has it, 404 for an unknown one."""
    mill.stream.add(Queued(card=card("t", tenant_id="acme")), card("t", tenant_id="acme"))
    mill.stream.completed(card("done"))
    await mill.tell()
    assert (await mill.client.post("/v1/tasks/t/cancel", json={"note": "no need"})).status_code == 202
    (command,) = await commands(mill)
    key = derive_key("id", "acme", "t")
    assert command == Cancel(tenant_id="acme", task_id="t", key=key, by="http", note="no need")
    late = await mill.client.post("/v1/tasks/done/cancel")
    assert (late.status_code, late.json()["code"], late.json()["state"]) == (409, "already_final", "completed")
    assert (await mill.client.post("/v1/tasks/nobody/cancel")).status_code == 404
    assert (await mill.client.post("/v1/tasks/t/cancel", json={"when": "now"})).status_code == 400
    assert (await mill.client.get("/v1/tasks/t/cancel")).status_code in (404, 405)


async def test_cancelling_a_queue_cancels_what_waits(mill: Running) -> None:
    """What runs, what is over and other queues are left alone."""
    for number in range(1203):
        mill.stream.add(Queued(card=card(f"t{number}")), card(f"t{number}"))
    mill.stream.add(Queued(card=card("runs")), card("runs"))
    mill.stream.started(card("runs"))
    mill.stream.completed(card("done"))
    mill.stream.add(Queued(card=card("side", queue="side")), card("side", queue="side"))
    await mill.tell()
    answer = await mill.client.post("/v1/queues/notes/cancel")
    assert answer.status_code == 202
    assert (answer.json()["cancelled"], answer.json()["queue"]) == (1203, "notes")
    records = await mill.broker.history(mill.names.control_stream, mill.names.control_filter, limit=2000)
    assert {decode_command(record.body).task_id for record in records} == {f"t{number}" for number in range(1203)}
    assert {decode_command(record.body).note for record in records} == {"the queue was cancelled"}


async def test_a_queue_whose_cancels_are_not_confirmed_is_not_told_to_be_cancelled(mill: Running) -> None:
    """503 with what was confirmed, and what to do."""
    mill.stream.add(Queued(card=card("t")), card("t"))
    await mill.tell()
    mill.broker._server._streams.pop(mill.names.control_stream)  # nobody answers any more
    answer = await mill.client.post("/v1/queues/notes/cancel")
    assert answer.status_code == 503
    assert (answer.json()["code"], answer.json()["cancelled"]) == ("broker_unavailable", 0)
    assert "ask again" in answer.json()["detail"]


async def test_dead_letters_are_listed_read_and_replayed(mill: Running) -> None:
    """The list comes from the read model, the letter from its stream, the replay is a command."""
    of = card("t", tenant_id="acme")
    mill.stream.failed(of, title="Bad")
    mill.stream.completed(card("good"))
    await mill.tell()
    failure = Failure(reason="error", error_type="ValueError", message="no", fingerprint="f00d")
    envelope = Envelope(task_type=of.task_type, payload=msgspec.Raw(b'{"big":12345678901234567890}'))
    letter = DeadLetter(card=of, reason="max_attempts", failure=failure, envelope=envelope)
    await mill.broker.publish(Outgoing(mill.names.dlq("acme", "notes", of.key, 1), encode(letter)))
    listed = await mill.get("/v1/dlq")
    assert [(item["task_id"], item["reason"], item["fingerprint"]) for item in listed["items"]] == [
        ("t", "max_attempts", "f00d")
    ]
    assert (listed["total"], listed["next"]) == (1, None)
    answer = await mill.client.get("/v1/dlq/t?tenant=acme")
    assert b'"payload":{"big":12345678901234567890}' in answer.content
    assert (await mill.client.get("/v1/dlq/good")).status_code == 404
    replayed = await mill.client.post("/v1/dlq/replay", json={"task_id": "t", "tenant_id": "acme"})
    assert (replayed.status_code, replayed.json()["replayed"]) == (202, 1)
    several = await mill.client.post("/v1/dlq/replay", json={"ids": [of.key, "good", "nobody"]})
    assert several.json()["replayed"] == 1
    assert [each["state"] for each in several.json()["skipped"]] == ["completed", "unknown"]
    assert await commands(mill) == [Replay(tenant_id="acme", task_id="t", key=of.key, by="http")] * 2
    for body, status in (({"task_id": "good"}, 409), ({"task_id": "nobody"}, 404), ({}, 422), ({"filter": {}}, 400)):
        assert (await mill.client.post("/v1/dlq/replay", json=body)).status_code == status


async def test_queues_workers_limits_and_reasons_are_told(mill: Running) -> None:
    """What the page and the command line ask for; limits come from whoever governs."""
    mill.stream.add(Queued(card=card("t")), card("t"))
    await mill.tell()
    (queue,) = (await mill.get("/v1/queues"))["items"]
    assert (queue["queue"], queue["states"], queue["active"]) == ("notes", {"queued": 1}, 1)
    assert queue["oldest_ready_age_s"] >= 0
    assert "no worker is alive" in (await mill.get("/v1/tasks/t/why"))["why"]
    worker = WorkerInfo(
        worker_id="w1", queues=["notes"], slots=2, handlers=[HandlerInfo(task_type="notes.summarize", queue="notes")]
    )
    await mill.broker.kv_put(mill.names.workers_bucket, "w1", encode(worker))
    await mill.broker.kv_put(mill.names.workers_bucket, "newer", b'{"what":1}')
    workers = await mill.get("/v1/workers")
    assert [each["worker_id"] for each in workers["items"]] == ["w1"]
    assert workers["unreadable"] == 1
    why = await mill.get("/v1/tasks/t/why")
    assert (why["task_id"], why["state"]) == ("t", "queued")
    assert "free slot" in why["why"]
    assert why["source"]
    assert (await mill.get("/v1/limits", 503))["code"] == "governor_unavailable"


async def test_a_worker_of_another_queue_is_no_reason_to_wait_for_a_slot(mill: Running) -> None:
    """A mistyped queue is told, although some worker knows the type of the task."""
    mill.stream.add(Queued(card=card("t", queue="nots")), card("t", queue="nots"))
    await mill.tell()
    worker = WorkerInfo(
        worker_id="w1", queues=["notes"], slots=2, handlers=[HandlerInfo(task_type="notes.summarize", queue="notes")]
    )
    await mill.broker.kv_put(mill.names.workers_bucket, "w1", encode(worker))
    why = (await mill.get("/v1/tasks/t/why"))["why"]
    assert "none of 1 live worker serves" in why
    assert "free slot" not in why


async def test_health_and_metrics(mill: Running) -> None:
    """Alive, ready, and measured with few series."""
    mill.stream.add(Queued(card=card("t")), card("t"))
    of = card("r")
    mill.stream.add(Queued(card=of), of)
    mill.stream.add(Started(card=of, worker_id="w"), of)
    mill.stream.raw(mill.names.event("default", of.key, "notes", "dreamt"), b'{"kind":"dreamt"}')
    await mill.tell()
    assert (await mill.get("/healthz"))["status"] == "ok"
    ready = await mill.get("/readyz")
    assert (ready["status"], ready["lag_events"], ready["broker"]) == ("ready", 0, True)
    text = (await mill.client.get("/metrics")).text
    for line in (
        'millstream_queue_tasks{queue="notes",state="queued"} 1',
        'millstream_queue_tasks{queue="notes",state="processing"} 1',
        'millstream_tracker_events_total{result="folded"} 3',
        'millstream_tracker_events_total{result="skipped"} 1',
        "millstream_tracker_lag_events 0",
        "millstream_dlq_messages 0",
        "millstream_sse_clients 0",
    ):
        assert line in text.splitlines()
    assert "millstream_build_info{version=" in text
