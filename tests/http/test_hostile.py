"""Hostile requests: refused quickly, nothing echoed, nothing done across sites."""

from __future__ import annotations

import logging
import statistics
import time
from urllib.parse import quote

import pytest

from tests.http.harness import Running
from tests.tracker.histories import card

SCRIPT = '"><script>alert(1)</script>'
NUMBERS = [
    "1000000000",
    "-1",
    "0",
    "NaN",
    "Infinity",
    "9223372036854775808",
    "1e3",
    "0x10",
    "１２",
    "201",
    "9" * 5000,
    " 5",
]


async def test_numbers_out_of_bounds_are_refused_in_no_time(mill: Running) -> None:
    """400 with a code, half of them in under 50 ms over a warm connection, however busy the machine."""
    took: list[float] = []
    for number in NUMBERS:
        for path in ("/v1/tasks", "/v1/dlq"):
            began = time.perf_counter()
            answer = await mill.client.get(path, params={"limit": number})
            took.append(time.perf_counter() - began)
            assert (answer.status_code, answer.json()["code"]) == (400, "bad_parameter"), number
    assert statistics.median(took) < 0.05


FILTERS = [
    "state=happy", "state=", "state=failed&state=happy", "queue=a.b", "queue=%3E", "queue=%00", "tenant=*", "tenant=%24SYS", "tag=%00",
    "since=yesterday", "since=2026-05-09T10:05:00", "since=2026-13-01T00:00:00Z", "until=9999-12-31T23:59:59-14:00", "inbox_seq=0",
    "inbox_seq=9223372036854775808", "cursor=!!", "cursor=bjotMQ", "cursor=bjo5MjIzMzcyMDM2ODU0Nzc1ODA4", "q=" + "x" * 129,
    "stat=failed", "limit=5&limit=6", "offset=10", quote(SCRIPT) + "=1", "run_id=" + "%0a",
]  # fmt: skip


async def test_filters_that_are_not_valid_are_refused(mill: Running) -> None:
    """A filter that is not understood is never silently dropped; only an empty one is none."""
    for query in FILTERS:
        answer = await mill.client.get(f"/v1/tasks?{query}")
        assert answer.status_code == (200 if query == "state=" else 400), query
        assert "<script" not in answer.text


async def test_a_fault_of_ours_is_logged_whole_and_told_without_its_text(
    mill: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller learns where to look, the log what to mend."""
    heard: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("millstream.http"), "handle", heard.append)

    async def broken(_bucket: str) -> dict[str, bytes]:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(mill.broker, "kv_all", broken)
    answer = await mill.client.get("/v1/workers")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "log" in answer.json()["detail"]
    assert "secret" not in answer.text
    (record,) = heard
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_what_was_sent_is_not_echoed(mill: Running) -> None:
    """No reflected markup in any answer, and JSON or problem JSON is what it says."""
    for name in ("q", "tag", "run_id", "task_type", "cursor", "state", "queue", "since", "limit", "other"):
        answer = await mill.client.get("/v1/tasks", params={name: SCRIPT})
        assert "<script" not in answer.text
        assert answer.headers["content-type"] in ("application/json", "application/problem+json")
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_sql_in_a_filter_is_text(mill: Running) -> None:
    """Values are bound; they select nothing and break nothing."""
    mill.stream.completed(card("t"))
    await mill.tell()
    for injection in ("' OR 1=1 --", '"; DROP TABLE task; --', "%", "_", "x') UNION SELECT doc FROM task --"):
        for name in ("q", "tag", "run_id", "task_type"):
            found = await mill.get(f"/v1/tasks?{name}={quote(injection)}")
            assert [item for item in found["items"] if injection not in item["task_type"]] == []
        assert (await mill.client.get(f"/v1/dlq/{quote(injection, safe='')}")).status_code == 404
    assert (await mill.get("/v1/tasks"))["total"] == 1


PATHS = [
    "/v1/tasks/" + quote(SCRIPT, safe=""), "/v1/tasks/..%2f..%2fetc%2fpasswd", "/static/..%2fapp.py", "/static/../app.py", "/static/%00",
    "/v1/queues/a.b/stream", "/v1/queues/%3E/stream", "/v1/nothing", "/v1/tasks/" + "x" * 5000, "/v1/dlq/%24SYS.%3E", "/.env",
]  # fmt: skip


async def test_paths_that_lead_nowhere_are_problems(mill: Running) -> None:
    """404 as a problem, whatever the path holds."""
    for path in PATHS:
        answer = await mill.client.get(path)
        assert answer.status_code == 404, path
        assert answer.headers["content-type"] == "application/problem+json"
        assert "<script" not in answer.text


async def test_stored_markup_comes_out_as_json_strings(mill: Running) -> None:
    """A producer's and a handler's texts are data everywhere; the type is never HTML."""
    of = card("<img src=x onerror=alert(1)>", task_type=SCRIPT)
    mill.stream.failed(of, SCRIPT, title=SCRIPT, tags=[SCRIPT])
    await mill.tell()
    for path in (f"/v1/tasks/{of.key}", "/v1/tasks", "/v1/dlq"):
        answer = await mill.client.get(path)
        assert answer.headers["content-type"] == "application/json"
        assert SCRIPT in str(answer.json())
    metrics = await mill.client.get("/metrics")
    assert "<" not in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain")


async def test_other_sites_cannot_make_a_browser_act(mill: Running) -> None:
    """A form or script of another page is refused; our own page and plain clients are not."""
    for headers, status in (
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Origin": str(mill.client.base_url).rstrip("/")}, 202),
        ({"Origin": str(mill.client.base_url).rstrip("/")}, 202),
        ({}, 202),
    ):
        answer = await mill.client.post("/v1/tasks", json={"task_type": "t"}, headers=headers)
        assert answer.status_code == status, headers
    assert len(await mill.broker.history(mill.names.inbox_stream, mill.names.submit_filter)) == 3


async def test_a_foreign_host_name_that_leads_here_is_refused(mill: Running) -> None:
    """A rebound name reads nothing from a tracker that listens on loopback."""
    for host, status in (
        ("evil.example", 421),
        ("evil.example:8420", 421),
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:8", 200),
    ):
        assert (await mill.client.get("/v1/tasks", headers={"Host": host})).status_code == status


async def test_reading_changes_nothing(mill: Running) -> None:
    """GET on what only POST may do is refused, and no GET writes to any stream."""
    mill.stream.failed(card("t"))
    await mill.tell()
    for path in ("/v1/tasks/t/cancel", "/v1/queues/notes/cancel", "/v1/dlq/replay"):
        assert (await mill.client.get(path)).status_code in (404, 405)
    for path in (
        "/",
        "/v1/tasks",
        "/v1/tasks/t",
        "/v1/tasks/t/why",
        "/v1/queues",
        "/v1/dlq",
        "/v1/dlq/t",
        "/v1/workers",
        "/v1/limits",
    ):
        await mill.client.get(path)
        assert (await mill.client.head(path)).content == b""
    for stream in (mill.names.inbox_stream, mill.names.control_stream, mill.names.dlq_stream):
        info = await mill.broker.stream_info(stream)
        assert info is not None
        assert info.last_seq == 0
    assert (await mill.client.delete("/v1/tasks/t")).status_code == 405


async def test_every_answer_carries_the_security_headers(mill: Running) -> None:
    """Pages, JSON, problems and streams alike; no inline script or style is allowed."""
    for path in ("/", "/v1/tasks", "/v1/nothing", "/metrics"):
        headers = (await mill.client.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
    async with mill.client.stream("GET", "/v1/stream") as response:
        assert "content-security-policy" in response.headers
