"""Bad input of every kind, through NATS and through HTTP: a typed dead letter or refusal, and the good ones go on."""

from __future__ import annotations

import base64
import json
import os
import pickle
import time
from dataclasses import dataclass
from typing import Any

import httpx

from millstream_schemas.codec import decode_dead_letter, decode_event
from millstream_schemas.events import DeadLetter
from tests.support.fleet import Fleet
from tests.support.rawnats import RawProducer
from tests.support.waiting import wait_until

LEASE_S = 30.0  # whatever is done within it was done before any redelivery
RAW_CAP_BYTES = 4096
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
OTHER_PARENT = "00-11111111111111111111111111111111-2222222222222222-01"


@dataclass(frozen=True)
class Bad:
    """A body that no dispatcher may take: where its first fault is, and whether it is no JSON at all."""

    name: str
    body: bytes
    path: str = "$"
    malformed: bool = False


def _task(**fields: Any) -> bytes:
    return json.dumps({"task_type": "echo", **fields}).encode()


def _text(literal: str) -> bytes:
    """A task with one member as literal JSON text."""
    return b'{"task_type": "echo", %b}' % literal.encode()


def _nested(depth: int) -> bytes:
    return b'{"task_type": "echo", "payload": %b1%b}' % (b"[" * depth, b"]" * depth)


SIX = [
    Bad("empty", b"", malformed=True),
    Bad("list", b"[]"),
    Bad("broken", b'{"task_type": "echo", ', malformed=True),
    Bad("not UTF-8", b'{"task_type": "echo", "title": "\xff\xfe"}', malformed=True),
    Bad("deep", _nested(100_000)),
    Bad("pickle", pickle.dumps({"task_type": os.getcwd}), malformed=True),
]

NAMES = [
    "*", ">", "a.b", " a", "a b", "", "..", "$JS", "$SYS", "a\r\nPUB x 0", "a\x00b", "\U0001f600", "\u202ea",
    "caf\u00e9", "cafe\u0301", "q" * 5000,
]  # fmt: skip

TABLE = [
    *SIX,
    Bad("null", b"null"),
    Bad("trailing", _task() + b" trailing", malformed=True),
    Bad("BOM", b"\xef\xbb\xbf" + _task(), malformed=True),
    Bad("lone surrogate", _text('"title": "\\ud800"'), malformed=True),
    Bad("lone surrogate in the payload", _text('"payload": "\\ud800"')),
    Bad("1,000 deep", _nested(1000)),
    Bad("65 deep in an object", b'{"task_type": "echo", "pins": ' + b'{"a":' * 65 + b"1" + b"}" * 65 + b"}"),
    Bad("NaN in the budget", _text('"budget": {"max_cost_usd": NaN}'), malformed=True),
    Bad("Infinity", _text('"delay_seconds": Infinity'), malformed=True),
    Bad("NaN in the payload", _text('"payload": NaN'), malformed=True),
    Bad("1e400", _text('"delay_seconds": 1e400'), "$.delay_seconds"),
    Bad("5,000 digits", _text('"budget": {"max_attempts": %s}' % ("9" * 5000)), "$.budget.max_attempts"),
    Bad("2**70", _task(budget={"max_attempts": 2**70}), "$.budget.max_attempts"),
    Bad("priority 2**70", _task(priority=2**70), "$.priority"),
    Bad("priority of 100 kB", _task(priority="\x00" + "p" * 100_000), "$.priority"),
    Bad("-1 attempts", _task(budget={"max_attempts": -1}), "$.budget.max_attempts"),
    Bad("0 attempts", _task(budget={"max_attempts": 0}), "$.budget.max_attempts"),
    Bad("delay -1", _task(delay_seconds=-1), "$.delay_seconds"),
    Bad("delay 1e308", _task(delay_seconds=1e308), "$.delay_seconds"),
    Bad("delay and not_before", _task(delay_seconds=1, not_before="2030-01-01T00:00:00Z"), "$.delay_seconds"),
    Bad("no zone", _task(deadline_at="2030-01-01T00:00:00"), "$.deadline_at"),
    Bad("zone +25:00", _task(deadline_at="2030-01-01T00:00:00+25:00"), "$.deadline_at"),
    Bad("second 60", _task(deadline_at="2030-12-31T23:59:60Z"), "$.deadline_at"),
    Bad("year 9999 in the west", _task(deadline_at="9999-12-31T23:59:59-14:00"), "$.deadline_at"),
    Bad("no type", b"{}"),
    Bad("empty type", _task(task_type=""), "$.task_type"),
    Bad("NUL in the id", _task(task_id="a\x00b"), "$.task_id"),
    Bad("line break in the id", _task(task_id="a\n"), "$.task_id"),
    Bad("id of 10 kB", _task(task_id="i" * 10_000), "$.task_id"),
    Bad("NUL in the key", _task(idempotency_key="a\x00b"), "$.idempotency_key"),
    Bad("key of 10 kB", _task(idempotency_key="k" * 10_000), "$.idempotency_key"),
    Bad("payload twice", _task(payload=1, payload_ref="object://x"), "$.payload_ref"),
    Bad("factor 0", _task(retry_policy={"factor": 0}), "$.retry_policy.factor"),
    Bad("factor below 0", _task(retry_policy={"factor": -2}), "$.retry_policy.factor"),
    Bad("version 2", _task(v=2), "$.v"),
    Bad("over the limit", _task(payload="x" * (256 * 1024))),
    *(Bad(f"tenant {name[:8]!r}", _task(tenant_id=name), "$.tenant_id") for name in NAMES),
    *(Bad(f"queue {name[:8]!r}", _task(queue=name), "$.queue") for name in NAMES),
]


async def _letters(fleet: Fleet, tenant: str, count: int) -> dict[int, DeadLetter]:
    """The dead letters of a tenant by INBOX sequence, once there are so many."""
    async with fleet.broker() as broker:
        found: dict[int, DeadLetter] = {}

        async def all_there() -> bool:
            records = await broker.history(fleet.names.dlq_stream, f"mill.dlq.{tenant}.>")
            letters = [decode_dead_letter(record.body) for record in records]
            assert len({letter.card.origin.seq for letter in letters}) == len(letters), "one letter for each"
            found.update({letter.card.origin.seq: letter for letter in letters})
            return len(found) >= count

        await wait_until(all_there, f"{count} dead letters of {tenant}")
        return found


async def _settled_inbox(fleet: Fleet) -> None:
    """Wait until the dispatcher has acked every submit."""
    async with fleet.broker() as broker:

        async def empty() -> bool:
            info = await broker.stream_info(fleet.names.inbox_stream)
            return info is not None and info.messages == 0

        await wait_until(empty, "the inbox is empty")


def _check_letter(letter: DeadLetter, bad: Bad) -> str:
    """What is wrong with a dead letter, or nothing."""
    failure = letter.failure
    wrong: list[str] = []
    if letter.reason != "invalid_envelope" or failure.error_type != "invalid_envelope":
        wrong.append(f"reason {letter.reason}/{failure.error_type}")
    if failure.path != bad.path or f"at `{bad.path}`" not in failure.message:
        wrong.append(f"path {failure.path}: {failure.message[:200]}")
    if bad.malformed and "(byte " not in failure.message:
        wrong.append(f"no byte offset: {failure.message[:200]}")
    if letter.raw_base64 != base64.b64encode(bad.body[:RAW_CAP_BYTES]).decode() or letter.raw_bytes != len(bad.body):
        wrong.append(f"raw bytes {letter.raw_bytes}")
    if len(failure.message) > 8192 or "\x00" in failure.message:
        wrong.append(f"text of {len(failure.message)} not cleaned and cut")
    return ", ".join(wrong)


async def test_six_bad_bodies_are_dead_letters_and_ten_good_tasks_complete(shared_fleet: Fleet) -> None:
    """The same processes take the good tasks at once, long before anything could be redelivered."""
    fleet = shared_fleet
    pids = {name: actor.pid for name, actor in fleet.actors.items()}
    began = time.monotonic()
    async with fleet.plain() as client:
        sent = {await fleet.submit(client, bad.body, tenant="six"): bad for bad in SIX}
        good = [f"good-{number}" for number in range(10)]
        for task_id in good:
            await fleet.submit(client, {"task_id": task_id, "task_type": "echo", "payload": task_id}, tenant="six")
    for task_id in good:
        found = await fleet.wait_for(task_id, "completed", tenant="six")
        assert found["result"] == task_id
    assert time.monotonic() - began < LEASE_S, "only a redelivery can have done them"
    letters = await _letters(fleet, "six", len(SIX))
    assert set(letters) == set(sent)
    wrong = {bad.name: told for seq, bad in sent.items() if (told := _check_letter(letters[seq], bad))}
    assert not wrong
    listed = (await fleet.get("/v1/dlq", tenant="six")).json()
    assert listed["total"] == len(listed["items"]) == 6
    for item in listed["items"]:
        assert item["error"]["reason"] == item["reason"] == "invalid_envelope"
        whole = (await fleet.get(f"/v1/dlq/{item['key']}", tenant="six")).json()
        letter = next(one for one in letters.values() if one.card.key == item["key"])
        assert (whole["raw_base64"], whole["raw_bytes"]) == (letter.raw_base64, letter.raw_bytes)
        assert whole["failure"]["path"] == letter.failure.path
    done = (await fleet.get("/v1/tasks", tenant="six", state="completed")).json()
    assert done["total"] == 10
    await _settled_inbox(fleet)
    assert all(actor.running for actor in fleet.actors.values())
    assert {name: actor.pid for name, actor in fleet.actors.items()} == pids


async def test_every_row_of_bad_input_over_nats_is_a_typed_dead_letter(shared_fleet: Fleet) -> None:
    """Each names the path of its first fault, keeps its bytes (capped), and the next good task is done."""
    fleet = shared_fleet
    async with fleet.plain() as client:
        sent = {await fleet.submit(client, bad.body, tenant="rows", queue="agent-run"): bad for bad in TABLE}
        await fleet.submit(client, {"task_id": "next", "task_type": "echo"}, tenant="rows")
    await fleet.wait_for("next", "completed", tenant="rows", timeout=LEASE_S)
    letters = await _letters(fleet, "rows", len(TABLE))
    wrong = {bad.name: told for seq, bad in sent.items() if (told := _check_letter(letters[seq], bad))}
    assert not wrong
    await _settled_inbox(fleet)


async def test_every_row_of_bad_input_over_http_is_refused_before_anything_is_stored(shared_fleet: Fleet) -> None:
    """`invalid_envelope` (or too large) as a problem, 400 where it is no JSON, and the inbox has not moved."""
    fleet = shared_fleet
    wrong: dict[str, str] = {}
    async with fleet.broker() as broker, httpx.AsyncClient(base_url=fleet.url, timeout=30) as http:
        before = await broker.stream_info(fleet.names.inbox_stream)
        for bad in TABLE:
            answer = await http.post("/v1/tasks", content=bad.body)
            problem = answer.json()
            expected = "payload_too_large" if len(bad.body) > 256 * 1024 else "invalid_envelope"
            statuses = {413} if expected == "payload_too_large" else {400} if bad.malformed else {400, 422}
            if problem.get("code") != expected or answer.status_code not in statuses:
                wrong[bad.name] = f"{answer.status_code} {answer.text[:200]}"
            elif expected == "invalid_envelope" and problem["path"] != bad.path:
                wrong[bad.name] = f"path {problem['path']}"
            elif len(answer.content) > 4096:
                wrong[bad.name] = f"an answer of {len(answer.content)} bytes"
        after = await broker.stream_info(fleet.names.inbox_stream)
        for name in NAMES:
            for where in ("tenant", "queue"):
                answer = await http.post("/v1/tasks", params={where: name}, content=_task())
                if answer.status_code != 400 or answer.json()["code"] != "bad_parameter":
                    wrong[f"{where}={name[:8]!r}"] = f"{answer.status_code} {answer.text[:200]}"
    assert not wrong
    assert before is not None
    assert after is not None
    assert before.last_seq == after.last_seq


async def test_odd_but_valid_input_runs(shared_fleet: Fleet) -> None:
    """Ids that look like paths are hashed, too many attempts are clamped and told, a past deadline expires unrun."""
    fleet = shared_fleet
    past = {"task_id": "past", "task_type": "echo", "deadline_at": "2001-01-01T00:00:00Z"}
    many = {"task_id": "many", "task_type": "echo", "budget": {"max_attempts": 10**9}, "nonsense": 1}
    ids = [
        "../../etc/passwd",
        "a/b/c",
        "<img src=x onerror=alert(1)>",
        "'; DROP TABLE task; --",
        "%2e%2e%2f",
        "\u202egnp",
    ]
    async with fleet.plain() as client:
        await fleet.submit(client, past, tenant="odd")
        await fleet.submit(client, many, tenant="odd")
        for ident in ids:
            await fleet.submit(client, {"task_id": ident, "task_type": "echo", "idempotency_key": ident}, tenant="odd")
        seq = await fleet.submit(client, _text('"payload": %s' % ("9" * 5000)), tenant="odd")
        other = await fleet.submit(client, _text('"payload": 1e400'), tenant="odd")
    assert (await fleet.wait_for("past", "expired", tenant="odd"))["attempts"] == []
    assert fleet.starts("past") == []
    found = await fleet.wait_for("many", "completed", tenant="odd")
    assert found["max_attempts"] == 1000
    assert found["infos"]["clamped"] == ["budget.max_attempts"]
    assert "nonsense" in found["infos"]["unknown_fields"]
    for ident in ids:
        listed = await _listed(fleet, ident)
        assert listed["task_id"] == ident
    for number in (seq, other):  # numbers that no handler can be given: an outcome all the same

        async def ended(wanted: int = number) -> bool:
            items = (await fleet.get("/v1/tasks", inbox_seq=wanted)).json()["items"]
            return bool(items) and items[0]["state"] in ("failed", "completed")

        await wait_until(ended, "the task with the odd number has an outcome")


async def _listed(fleet: Fleet, ident: str) -> dict[str, Any]:
    async def done() -> dict[str, Any] | None:
        items = (await fleet.get("/v1/tasks", tenant="odd", q=ident)).json()["items"]
        return next((item for item in items if item["task_id"] == ident and item["state"] == "completed"), None)

    found = await wait_until(done, f"{ident!r} is completed")
    assert found is not None
    return found


async def test_subjects_that_try_tricks_are_dead_letters_of_nobody(shared_fleet: Fleet) -> None:
    """Literal wildcards, NUL, emoji and broken UTF-8 where a tenant or queue should stand never name one."""
    fleet = shared_fleet
    tricks = [
        b"mill.submit.*.q", b"mill.submit.acme.*", b"mill.submit.acme.>", b"mill.submit.*.*", b"mill.submit.a\x00b.q",
        b"mill.submit.acme.q\x00", "mill.submit.\U0001f600.q".encode(), "mill.submit.\u202ea.q".encode(),
        "mill.submit.cafe\u0301.q".encode(), b"mill.submit.\xff\xfe.q", b"mill.submit.acme.$JS", b"mill.submit.$SYS.q",
        b"mill.submit.acme." + b"q" * 3900,
    ]  # fmt: skip
    body = _task(idempotency_key="trick")
    with RawProducer(fleet.server.url) as raw:
        stored = {subject: ack["seq"] for subject in tricks if (ack := raw.publish(subject, body)) and "seq" in ack}
        assert raw.publish(b"mill.submit.acme.agent-run", _task(task_id="after-tricks")) is not None
    assert set(stored) == set(tricks), "the server takes every one of them"
    await fleet.wait_for("after-tricks", "completed", timeout=LEASE_S)
    async with fleet.broker() as broker:

        async def letters() -> dict[int, DeadLetter]:
            records = await broker.history(fleet.names.dlq_stream, fleet.names.dlq_filter)
            read = [decode_dead_letter(record.body) for record in records]
            found = {letter.card.origin.seq: letter for letter in read if letter.card.origin.seq in stored.values()}
            return found if len(found) == len(stored) else {}

        found = await wait_until(letters, f"{len(stored)} dead letters")
        lives = await fleet.life(broker)
    for subject, seq in stored.items():
        letter = found[seq]
        assert letter.reason == "invalid_envelope", subject
        assert letter.failure.path in ("$.tenant_id", "$.queue"), subject
        assert "_" in (letter.card.tenant_id, letter.card.queue), subject
        assert [kind for kind, _ in lives[letter.card.key]] == ["failed"], subject
    await _settled_inbox(fleet)


async def test_headers_that_are_garbage_change_nothing(shared_fleet: Fleet) -> None:
    """Every `Nats-*` header is dropped, a bad or doubled traceparent starts a new trace, and the task runs."""
    fleet = shared_fleet
    headers = {
        "plain": b"traceparent: %b" % PARENT.encode(),
        "upper": b"TraceParent: %b" % PARENT.upper().encode(),
        "bad": b"traceparent: 00-zz-00f067aa0ba902b7-01",
        "zero": b"traceparent: 00-%b-00f067aa0ba902b7-01" % (b"0" * 32),
        "twice": b"traceparent: %b\r\ntraceparent: %b" % (PARENT.encode(), OTHER_PARENT.encode()),
        "twice-case": b"traceparent: %b\r\nTraceparent: %b" % (PARENT.encode(), OTHER_PARENT.encode()),
        "many": b"\r\n".join(b"X-Header-%d: %d" % (n, n) for n in range(200)),
        "name with space": b"bad name: 1\r\ntraceparent: %b" % PARENT.encode(),
        "no colon": b"this is no header at all",
        "bytes": b"X-Bytes: \xff\xfe\x00\x01",
        "forged": b"Nats-Request-Info: {\"acc\":\"$SYS\"}\r\nNats-Stream: MILL_WORK\r\nNats-Made-Up: 1",
        "trace-dest": b"Nats-Trace-Dest: mill.submit.victim.q",
    }  # fmt: skip
    refused = [b"Nats-TTL: 1s", b"Nats-Rollup: all", b"Nats-Schedule: @at 2001-01-01T00:00:00Z", b"Nats-Incr: 1"]
    subject = b"mill.submit.heads.agent-run"
    with RawProducer(fleet.server.url) as raw:
        for name, block in headers.items():
            ack = raw.publish(subject, _task(task_id=name), b"NATS/1.0\r\n" + block + b"\r\n\r\n")
            assert ack is not None, name
            assert "seq" in ack, (name, ack)
        for block in refused:
            ack = raw.publish(subject, _task(task_id="refused"), b"NATS/1.0\r\n" + block + b"\r\n\r\n")
            assert ack is None or "error" in ack, (block, ack)
    traces = {name: (await fleet.wait_for(name, "completed", tenant="heads"))["trace_id"] for name in headers}
    assert traces["plain"] == traces["upper"] == TRACE
    for name in ("bad", "zero", "twice", "twice-case"):
        assert len(traces[name]) == 32, name
        assert traces[name] not in (TRACE, OTHER_PARENT[3:35], "0" * 32), name
    assert (await fleet.task("refused", "heads")) is None
    async with fleet.broker() as broker:
        for events in (await fleet.life(broker)).values():
            for _, record in events:
                if decode_event(record.body).card.tenant_id == "heads":
                    ours = {
                        "Nats-TTL",
                        "Nats-Expected-Last-Subject-Sequence",
                        "Nats-Expected-Last-Subject-Sequence-Subject",
                    }
                    assert set(record.headers) <= ours


async def test_headers_that_are_garbage_change_nothing_over_http(shared_fleet: Fleet) -> None:
    """As over NATS: the caller's valid trace is taken, anything else starts a new one, and the task runs."""
    fleet = shared_fleet
    sent: dict[str, list[tuple[str, str]]] = {
        "plain": [("traceparent", PARENT)],
        "bad": [("traceparent", "garbage")],
        "twice": [("traceparent", PARENT), ("traceparent", OTHER_PARENT)],
        "many": [(f"X-Header-{n}", str(n)) for n in range(90)],
        "nats": [("Nats-Msg-Id", "1"), ("Nats-Rollup", "all"), ("Nats-TTL", "1s"), ("Nats-Schedule", "@at x")],
    }
    async with httpx.AsyncClient(base_url=fleet.url, timeout=40) as http:
        for name, headers in sent.items():
            answer = await http.post(
                "/v1/tasks",
                content=_task(task_id=f"http-{name}", queue="agent-run"),
                headers=[*headers, ("Prefer", "wait=20")],
            )
            assert answer.status_code == 202, (name, answer.text)
            found = await fleet.wait_for(f"http-{name}", "completed")
            assert (found["trace_id"] == TRACE) == (name == "plain"), name
