"""Results and errors without an exact JSON form: the task ends at once, as failed, with a text that can be shown."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any

import pytest

from millstream.ports import Record
from millstream_schemas.codec import decode_dead_letter, decode_event, decode_info
from millstream_schemas.events import Completed
from millstream_schemas.infos import Progress
from tests.support.fleet import Fleet
from tests.support.handlers import ODD_ERRORS, ODD_RAISES, ODD_RESULTS, ODD_SIGNALS
from tests.support.waiting import wait_until

TERMINAL_WITHIN_S = 3.0
TEXT_BYTES = 8192


async def _ended(fleet: Fleet, task_type: str, payload: str) -> dict[str, Any]:
    """Run one task with a single attempt; it must have failed in time, by the stream's own clock."""
    task_id = f"{task_type}-{payload}"
    async with fleet.plain() as client:
        budget = {"max_attempts": 1}
        await fleet.submit(client, {"task_id": task_id, "task_type": task_type, "payload": payload, "budget": budget})
    found = await fleet.wait_for(task_id, "failed", "completed", "cancelled", "expired")
    assert found["state"] == "failed"
    async with fleet.broker() as broker:
        records = await broker.history(fleet.names.events_stream, fleet.names.life("acme", found["key"]))
        letter = await broker.last(fleet.names.dlq_stream, fleet.names.dlq_of_key("acme", found["key"]))
    kinds = [fleet.names.parse_event(record.subject).kind for record in records]
    assert kinds == ["queued", "started", "attempt_failed", "failed"]
    assert not any(isinstance(decode_event(record.body), Completed) for record in records)
    assert records[-1].at - records[0].at < TERMINAL_WITHIN_S
    assert letter is not None
    assert decode_dead_letter(letter.body).failure.message == found["error"]["message"]
    return found


def _check_text(text: str) -> None:
    """Cleaned and cut: storable, showable, and said to be cut where it is."""
    assert len(text.encode("utf-8")) <= TEXT_BYTES  # a lone surrogate would not encode
    assert not set(text) & {chr(code) for code in range(32) if chr(code) not in "\t\n\r"}
    json.dumps(text)


@pytest.mark.parametrize("name", sorted(ODD_RESULTS))
async def test_result_without_an_exact_json_form_fails_as_fatal(shared_fleet: Fleet, name: str) -> None:
    """`result_not_encodable`, told where; never null in its place, never `processing` for ever."""
    found = await _ended(shared_fleet, "odd.result", name)
    error = found["error"]
    assert (error["reason"], error["cause"]) == ("fatal", "result_not_encodable")
    assert error["path"].startswith("$")
    assert found["result"] is None
    assert "result_bytes" not in found
    _check_text(error["message"])


@pytest.mark.parametrize("name", ["nan", "cycle", "bytes"])
async def test_result_of_a_sync_handler_fails_alike(shared_fleet: Fleet, name: str) -> None:
    """The thread of a sync handler makes no difference."""
    found = await _ended(shared_fleet, "odd.result.sync", name)
    assert (found["error"]["reason"], found["error"]["cause"]) == ("fatal", "result_not_encodable")


@pytest.mark.parametrize("task_type", ["odd.error", "odd.error.sync"])
@pytest.mark.parametrize("name", sorted(ODD_ERRORS))
async def test_error_text_is_cleaned_and_cut(shared_fleet: Fleet, name: str, task_type: str) -> None:
    """NUL, escape sequences, lone surrogates and ten megabytes neither stop the task nor reach anybody."""
    found = await _ended(shared_fleet, task_type, name)
    error = found["error"]
    assert (error["reason"], error["cause"], error["type"]) == ("max_attempts", "error", "RuntimeError")
    _check_text(error["message"])
    _check_text(found["attempts"][0]["message"])
    assert ("[cut, " in error["message"]) == (name in ("huge", "wide"))
    whole = (await shared_fleet.get(f"/v1/dlq/{found['task_id']}")).json()
    assert whole["failure"]["message"] == error["message"]
    assert "odd_error" in whole["failure"]["traceback"]


@pytest.mark.parametrize("task_type", ["odd.raise", "odd.raise.sync"])
@pytest.mark.parametrize("name", sorted(ODD_RAISES))
async def test_whatever_a_handler_raises_ends_its_attempt(shared_fleet: Fleet, name: str, task_type: str) -> None:
    """Exits, cancellations, time-outs of its own and errors without a text are errors like any other."""
    found = await _ended(shared_fleet, task_type, name)
    assert found["error"]["cause"] == "error"
    assert found["error"]["type"] == type(ODD_RAISES[name]).__name__
    _check_text(found["error"]["message"])


async def _at_least(count: int, reading: Awaitable[list[Record]]) -> list[Record]:
    records = await reading
    return records if len(records) >= count else []


async def test_odd_reports_do_not_harm_the_execution(shared_fleet: Fleet) -> None:
    """Progress texts are cleaned and cut as errors are; an absurd usage changes nothing of the result."""
    async with shared_fleet.plain() as client:
        await shared_fleet.submit(client, {"task_id": "reports", "task_type": "odd.reports"})
    found = await shared_fleet.wait_for("reports", "completed", "failed")
    assert found["state"] == "completed"
    assert found["result"] == "reported"
    assert found["usage"] | {"runtime_s": 0} == {
        "tokens_in": 10**12 + 1,
        "tokens_out": 0,
        "cost_usd": 1e12,
        "runtime_s": 0,
    }
    assert len(shared_fleet.starts("reports")) == 1

    subject = shared_fleet.names.info("acme", found["key"], "agent-run", "progress")
    async with shared_fleet.broker() as broker:
        records = await wait_until(
            lambda: _at_least(2, broker.history(shared_fleet.names.events_stream, subject)), "both reports are stored"
        )
    first, last = [decode_info(record.body) for record in records]
    assert isinstance(first, Progress)
    assert isinstance(last, Progress)
    assert (first.fraction, first.message, last.fraction) == (0.0, "no number", 1.0)
    assert last.message.startswith("lone ")
    assert len(last.message.encode()) <= 512
    _check_text(last.message)


@pytest.mark.parametrize("name", sorted(ODD_SIGNALS))
async def test_signal_with_an_odd_time_or_reason_is_heeded_with_the_default(shared_fleet: Fleet, name: str) -> None:
    """A wait that is no number is no wait at all; the task runs again and completes."""
    task_id = f"signal-{name}"
    retry_policy = {"base_seconds": 0.05, "jitter": False}
    task = {"task_id": task_id, "task_type": "odd.signal", "payload": name, "retry_policy": retry_policy}
    async with shared_fleet.plain() as client:
        await shared_fleet.submit(client, task)
    found = await shared_fleet.wait_for(task_id, "completed", "failed")
    assert found["state"] == "completed"
    assert len(shared_fleet.starts(task_id)) == 2
    assert found["attempt"] == (2 if name.startswith("retry") else 1)


async def test_processes_live_and_run_good_tasks_after_all_of_it(shared_fleet: Fleet) -> None:
    """The same worker still answers."""
    async with shared_fleet.plain() as client:
        await shared_fleet.submit(client, {"task_id": "after", "task_type": "echo", "payload": 1})
    assert (await shared_fleet.wait_for("after", "completed"))["result"] == 1
    assert all(actor.running for actor in shared_fleet.actors.values())
