"""One trace from the producer to the outcome: through retries, parking, dead letters, replays and children."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
TRACESTATE = "vendor=opaque,other=1"

Headers = dict[str, Any] | None
GIVEN: dict[str, tuple[dict[str, Any], Headers]] = {
    "ids": ({"trace_context": {"trace_id": TRACE_ID, "parent_span_id": SPAN_ID}}, None),
    "w3c_text": ({"trace_context": {"traceparent": TRACEPARENT, "tracestate": TRACESTATE}}, None),
    "headers": ({}, {"traceparent": TRACEPARENT, "tracestate": TRACESTATE}),
    "headers_in_capitals": ({}, {"TraceParent": TRACEPARENT.upper(), "TRACESTATE": TRACESTATE}),
    "envelope_wins": (
        {"trace_context": {"trace_id": TRACE_ID, "parent_span_id": SPAN_ID}},
        {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
    ),
    "headers_beside_a_bad_envelope": ({"trace_context": {"trace_id": "nonsense"}}, {"traceparent": TRACEPARENT}),
}
BAD: dict[str, tuple[dict[str, Any], Headers]] = {
    "nothing": ({}, None),
    "empty": ({"trace_context": {}}, None),
    "nonsense": ({"trace_context": {"traceparent": "nonsense"}}, {"traceparent": "more of it"}),
    "zero_trace": ({"trace_context": {"trace_id": "0" * 32, "parent_span_id": SPAN_ID}}, None),
    "zero_span": ({"trace_context": {"traceparent": f"00-{TRACE_ID}-{'0' * 16}-01"}}, None),
    "version_ff": ({"trace_context": {"traceparent": f"ff-{TRACE_ID}-{SPAN_ID}-01"}}, None),
    "too_much": ({}, {"traceparent": TRACEPARENT + "-00"}),
    "short": ({"trace_context": {"trace_id": TRACE_ID[:-1], "parent_span_id": SPAN_ID}}, None),
    "not_hexadecimal": ({}, {"traceparent": TRACEPARENT.replace("4bf9", "zzzz")}),
    "nul_and_more": ({"trace_context": {"traceparent": f"\x00{TRACEPARENT}"}}, None),
}


async def _run(fleet: Fleet, task: dict[str, Any], headers: Headers = None, state: str = "completed") -> dict[str, Any]:
    async with fleet.plain() as client:
        await fleet.submit(client, task, headers=headers)
    found = await fleet.wait_for(task["task_id"], "completed", "failed", "expired", "cancelled")
    assert found["state"] == state, found["error"]
    return found


@pytest.mark.parametrize("handler", ["trace", "trace.sync"])
@pytest.mark.parametrize("given", GIVEN)
async def test_handler_runs_in_the_producers_trace(shared_fleet: Fleet, given: str, handler: str) -> None:
    """Ids or W3C text in the envelope, or headers in any case: the handler's span continues it, and HTTP shows it."""
    fields, headers = GIVEN[given]
    task = {"task_id": f"{handler}-{given}", "task_type": handler, **fields}
    found = await _run(shared_fleet, task, headers)
    assert found["result"] == {"trace_id": TRACE_ID, "span_id": SPAN_ID}
    assert found["trace_id"] == TRACE_ID


@pytest.mark.parametrize("bad", BAD)
async def test_bad_trace_context_starts_a_new_trace(shared_fleet: Fleet, bad: str) -> None:
    """The task runs, in a trace of its own that is the same wherever it is shown."""
    fields, headers = BAD[bad]
    found = await _run(shared_fleet, {"task_id": f"bad-{bad}", "task_type": "trace", **fields}, headers)
    assert re.fullmatch("[0-9a-f]{32}", found["trace_id"])
    assert found["trace_id"] not in (TRACE_ID, "0" * 32)
    assert found["result"]["trace_id"] == found["trace_id"]
    assert found["result"]["span_id"] != "0" * 16


async def test_trace_goes_through_parking_retries_dead_letter_and_replay(shared_fleet: Fleet) -> None:
    """Every execution, every event and the dead letter carry it; a replay goes on with it."""
    task = {
        "task_id": "long-way",
        "task_type": "trace.flaky",
        "payload": {"failures": 2},
        "budget": {"max_attempts": 2},
        "retry_policy": {"base_seconds": 0.1, "jitter": False},
    }
    failed = await _run(shared_fleet, task, {"traceparent": TRACEPARENT, "tracestate": TRACESTATE}, state="failed")
    assert failed["trace_id"] == TRACE_ID
    letter = (await shared_fleet.get("/v1/dlq/long-way", tenant="acme")).json()
    assert letter["trace_id"] == TRACE_ID
    assert letter["envelope"]["trace_context"] == {
        "trace_id": TRACE_ID,
        "parent_span_id": SPAN_ID,
        "traceparent": TRACEPARENT,
        "tracestate": TRACESTATE,
    }
    replayed = await shared_fleet.post("/v1/dlq/replay", {"task_id": "long-way", "tenant_id": "acme"})
    assert replayed.status_code == 202
    found = await shared_fleet.wait_for("long-way", "completed")
    assert found["trace_id"] == TRACE_ID
    assert found["result"] == {"trace_id": TRACE_ID, "span_id": SPAN_ID}
    executions = shared_fleet.starts("long-way")
    assert len(executions) >= 4  # parked, failed, failed, replayed
    assert {one["trace_id"] for one in executions} == {TRACE_ID}
    assert {one["traceparent"] for one in executions} == {TRACEPARENT}
    async with shared_fleet.broker() as broker:
        life = shared_fleet.names.life("acme", found["key"])
        events = await broker.history(shared_fleet.names.events_stream, life)
    assert len(events) > 8
    assert {json.loads(event.body)["card"]["trace_id"] for event in events} == {TRACE_ID}


async def test_child_tasks_share_their_parents_trace(shared_fleet: Fleet) -> None:
    """`ctx.spawn` hands it on; a retried parent's children are the same tasks, in the same trace."""
    task = {
        "task_id": "mother",
        "task_type": "parent",
        "payload": {"children": 2, "failures": 1},
        "retry_policy": {"base_seconds": 0.1, "jitter": False},
    }
    found = await _run(shared_fleet, task, {"traceparent": TRACEPARENT})
    assert len(found["result"]) == 2
    for child_id in found["result"]:
        child = await shared_fleet.wait_for(child_id, "completed", tenant="acme")
        assert child["trace_id"] == TRACE_ID
        assert child["parent_id"] == "mother"
        assert len(shared_fleet.starts(child_id)) == 1


async def test_submit_that_fits_nothing_still_has_a_trace(shared_fleet: Fleet) -> None:
    """The dead letter of an envelope that cannot be read goes on with the headers' trace, so that its producer finds it."""
    async with shared_fleet.plain() as client:
        seq = await shared_fleet.submit(client, b"{", headers={"traceparent": TRACEPARENT})

    async def failed() -> list[dict[str, Any]]:
        answer = await shared_fleet.get("/v1/tasks", inbox_seq=seq, state="failed")
        found: list[dict[str, Any]] = answer.json()["items"]
        return found

    [task] = await wait_until(failed, "the submit is dead-lettered")
    assert task["trace_id"] == TRACE_ID
