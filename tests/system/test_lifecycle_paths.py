"""Every way that a task can take, once, through real processes."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from millstream.policy.decide import TIMER_S
from millstream_schemas.codec import decode_dead_letter
from millstream_schemas.topology import MAX_DELIVER, work_consumer
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

LEASE_S = 2.0
CONFIG = """
[limits.llm]
requests_per_minute = 6000
"""
ENDED = ("completed", "failed", "cancelled", "expired")
QUICK = {"base_seconds": 0.05, "jitter": False}


async def _run(fleet: Fleet, task: dict[str, Any], timeout: float = 30.0) -> dict[str, Any]:
    """Submit a task as a plain producer and wait for its end."""
    async with fleet.plain() as client:
        await fleet.submit(client, task)
    return await fleet.wait_for(task["task_id"], *ENDED, timeout=timeout)


def _kinds(found: dict[str, Any]) -> list[str]:
    return [line["kind"] for line in found["timeline"] if not line["info"]]


def _gaps(fleet: Fleet, task_id: str) -> list[float]:
    return [after["at"] - before["at"] for before, after in pairwise(fleet.starts(task_id))]


async def _letters(fleet: Fleet, key: str) -> list[Any]:
    async with fleet.broker() as broker:
        records = await broker.history(fleet.names.dlq_stream, fleet.names.dlq_of_key("acme", key))
    return [decode_dead_letter(record.body) for record in records]


async def _work_left(fleet: Fleet, key: str) -> int:
    async with fleet.broker() as broker:
        stream = fleet.names.work_stream
        work = await broker.history(stream, fleet.names.work_of_key(key))
        return len(work) + len(await broker.history(stream, fleet.names.later_of_key(key)))


# --- retries ---------------------------------------------------------------------------------------


async def test_only_what_retry_on_names_is_retried_with_growing_delays(shared_fleet: Fleet) -> None:
    """As the notes application has it: a 429 gets 1, 2, 4 units of waiting, never early; another status fails fast."""
    policy = {"strategy": "exponential_backoff", "base_seconds": 0.2, "jitter": False, "retry_on": ["http_429"]}
    base = {"task_type": "http", "retry_policy": policy, "budget": {"max_attempts": 4}}
    found = await _run(shared_fleet, {**base, "task_id": "429", "payload": {"throttled": 3}})
    assert (found["state"], found["attempt"], found["errors"]) == ("completed", 4, 3)
    for gap, due in zip(_gaps(shared_fleet, "429"), (0.2, 0.4, 0.8), strict=True):
        assert gap >= due
    broken = await _run(shared_fleet, {**base, "task_id": "500", "payload": {"broken": 1}})
    assert (broken["state"], broken["error"]["reason"], broken["error"]["type"]) == ("failed", "fatal", "ServerFault")
    assert len(shared_fleet.starts("500")) == 1
    too_many = await _run(
        shared_fleet, {**base, "task_id": "429s", "payload": {"throttled": 9}, "budget": {"max_attempts": 2}}
    )
    assert (too_many["state"], too_many["error"]["reason"]) == ("failed", "max_attempts")
    assert len(shared_fleet.starts("429s")) == 2


async def test_fatal_on_wins_over_retry_on(shared_fleet: Fleet) -> None:
    """Named by a base class, an error is not tried again."""
    policy = {**QUICK, "retry_on": ["ConnectionError"], "fatal_on": ["OSError"]}
    task = {"task_id": "fatal-on", "task_type": "flaky", "payload": {"failures": 1}, "retry_policy": policy}
    found = await _run(shared_fleet, task)
    assert (found["state"], found["error"]["reason"]) == ("failed", "fatal")
    assert len(shared_fleet.starts("fatal-on")) == 1


async def test_retry_signal_waits_as_asked_and_uses_up_an_attempt(shared_fleet: Fleet) -> None:
    """The handler's own delay stands above the policy's."""
    payload = {"raise": "retry", "after": 0.5}
    found = await _run(
        shared_fleet, {"task_id": "retry", "task_type": "signal", "payload": payload, "retry_policy": QUICK}
    )
    assert (found["state"], found["attempt"], found["errors"]) == ("completed", 2, 1)
    assert _gaps(shared_fleet, "retry")[0] >= 0.5


async def test_throttled_signal_uses_up_no_attempt(shared_fleet: Fleet) -> None:
    """Parked twice within one attempt, and counted apart."""
    payload = {"raise": "throttled", "after": 0.3, "times": 2}
    task = {"task_id": "throttled", "task_type": "signal", "payload": payload, "budget": {"max_attempts": 1}}
    found = await _run(shared_fleet, task)
    assert (found["state"], found["attempt"], found["throttles"], found["errors"]) == ("completed", 1, 2, 0)
    assert all(gap >= 0.3 for gap in _gaps(shared_fleet, "throttled"))
    assert _kinds(found).count("parked") == 2


async def test_snooze_signal_waits_until_then(shared_fleet: Fleet, tmp_path: Path) -> None:
    """No attempt and no error; never early."""
    payload = {"raise": "snooze", "after": 0.4, "flag": str(tmp_path / "snoozed")}
    task = {"task_id": "snooze", "task_type": "signal", "payload": payload, "budget": {"max_attempts": 1}}
    found = await _run(shared_fleet, task)
    assert (found["state"], found["attempt"], found["errors"], found["throttles"]) == ("completed", 1, 0, 0)
    assert _gaps(shared_fleet, "snooze")[0] >= 0.4


async def test_fatal_signal_is_dead_lettered_at_once(shared_fleet: Fleet) -> None:
    """With the whole envelope, the attempt's history, the fingerprint and the trace."""
    task = {
        "task_id": "fatal", "task_type": "signal", "payload": {"raise": "fatal"}, "context": {"turns": ["kept"]},
        "trace_context": {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "parent_span_id": "00f067aa0ba902b7"},
    }  # fmt: skip
    found = await _run(shared_fleet, task)
    assert (found["state"], found["error"]["reason"], found["error"]["message"]) == ("failed", "fatal", "never again")
    assert len(shared_fleet.starts("fatal")) == 1
    (letter,) = await _letters(shared_fleet, found["key"])
    assert letter.card.trace_id == found["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert bytes(letter.envelope.context) == b'{"turns": ["kept"]}'
    assert [record.reason for record in letter.history] == ["fatal"]
    assert letter.failure.fingerprint == found["error"]["fingerprint"] != ""


async def test_cancel_signal_ends_the_task_as_cancelled(shared_fleet: Fleet) -> None:
    """Its handler's word; there is no dead letter."""
    found = await _run(shared_fleet, {"task_id": "cancels", "task_type": "signal", "payload": {"raise": "cancel"}})
    assert found["state"] == "cancelled"
    assert found["timeline"][-1]["detail"].endswith("not wanted any more")
    assert await _letters(shared_fleet, found["key"]) == []


# --- limits of time and cost -------------------------------------------------------------------------


async def test_handler_over_its_timeout_fails_and_is_retried(shared_fleet: Fleet) -> None:
    """Each attempt is ended at the handler's limit, and told as a time-out."""
    task = {"task_id": "timed", "task_type": "timed", "retry_policy": QUICK, "budget": {"max_attempts": 2}}
    found = await _run(shared_fleet, task)
    assert (found["state"], found["error"]["reason"], found["error"]["cause"]) == ("failed", "max_attempts", "timeout")
    assert len(shared_fleet.starts("timed")) == 2
    assert found["usage"]["runtime_s"] < 20


async def test_runtime_budget_ends_the_execution_and_the_task(shared_fleet: Fleet) -> None:
    """`max_runtime_seconds` counts over all attempts: once it is used up there is no other."""
    task = {
        "task_id": "runtime", "task_type": "sleep", "payload": {"seconds": 60}, "retry_policy": QUICK,
        "budget": {"max_runtime_seconds": 0.4, "max_attempts": 5},
    }  # fmt: skip
    found = await _run(shared_fleet, task)
    assert (found["state"], found["error"]["reason"]) == ("failed", "budget_exhausted")
    assert len(shared_fleet.starts("runtime")) == 1
    assert found["usage"]["runtime_s"] >= 0.4 - TIMER_S


async def test_cost_budget_ends_the_task(shared_fleet: Fleet) -> None:
    """A result that cost too much is no result."""
    task = {
        "task_id": "cost",
        "task_type": "agent.run",
        "payload": {"agent_id": "a"},
        "budget": {"max_cost_usd": 0.001},
    }
    found = await _run(shared_fleet, task)
    assert (found["state"], found["error"]["reason"]) == ("failed", "budget_exhausted")
    assert found["usage"]["cost_usd"] == pytest.approx(0.01)


async def test_retry_that_would_start_after_the_deadline_expires_instead(shared_fleet: Fleet) -> None:
    """At once, without waiting for it, and without a dead letter."""
    deadline = (datetime.now(UTC) + timedelta(seconds=60)).isoformat()
    task = {
        "task_id": "late", "task_type": "flaky", "payload": {"failures": 9}, "deadline_at": deadline,
        "retry_policy": {"base_seconds": 120, "jitter": False},
    }  # fmt: skip
    found = await _run(shared_fleet, task)
    assert found["state"] == "expired"
    assert await _letters(shared_fleet, found["key"]) == []


async def test_delayed_task_never_starts_early(shared_fleet: Fleet) -> None:
    """`delay_seconds` and `not_before` alike; shown as scheduled until then."""
    async with shared_fleet.plain() as client:
        before = time.time()
        at = datetime.now(UTC) + timedelta(seconds=1)
        await shared_fleet.submit(client, {"task_id": "delayed", "task_type": "echo", "delay_seconds": 0.8})
        await shared_fleet.submit(client, {"task_id": "not-before", "task_type": "echo", "not_before": at.isoformat()})
        await shared_fleet.wait_for("delayed", "scheduled", "completed")
    delayed = await shared_fleet.wait_for("delayed", "completed")
    await shared_fleet.wait_for("not-before", "completed")
    assert _kinds(delayed) == ["scheduled", "started", "completed"]
    assert shared_fleet.starts("delayed")[0]["at"] >= before + 0.8
    assert shared_fleet.starts("not-before")[0]["at"] >= at.timestamp()


# --- handlers ----------------------------------------------------------------------------------------


async def test_payload_that_does_not_fit_the_type_is_fatal(shared_fleet: Fleet) -> None:
    """Without a run of the handler, and with the path of the first fault."""
    task = {"task_id": "mismatch", "task_type": "typed", "payload": {"title": "x", "words": "many"}}
    found = await _run(shared_fleet, task)
    error = found["error"]
    assert (error["reason"], error["cause"], error["path"]) == ("fatal", "payload_mismatch", "$.words")
    assert shared_fleet.starts("mismatch") == []
    good = await _run(
        shared_fleet, {"task_id": "match", "task_type": "typed", "payload": {"title": "four", "words": 3}}
    )
    assert good["result"] == 7


async def test_handlers_that_run_for_several_leases_run_once(shared_fleet: Fleet) -> None:
    """Async, sync in a thread, and one that blocks its worker's loop: heartbeats come from elsewhere."""
    seconds = {"seconds": LEASE_S * 2}
    types = ("sleep", "sleep.sync", "block")
    async with shared_fleet.plain() as client:
        for task_type in types:
            await shared_fleet.submit(
                client, {"task_id": f"long-{task_type}", "task_type": task_type, "payload": seconds}
            )
    for task_type in types:
        found = await shared_fleet.wait_for(f"long-{task_type}", *ENDED)
        assert (found["state"], found["crashes"]) == ("completed", 0), task_type
        assert len(shared_fleet.starts(f"long-{task_type}")) == 1, task_type


async def test_limited_handler_runs_under_a_permit(shared_fleet: Fleet) -> None:
    """A task whose handler names a limit completes like any other, and used exactly one permit of it."""

    async def granted() -> int:
        listing = (await shared_fleet.get("/v1/limits")).json()
        (llm,) = [item for item in listing["items"] if item["key"] == "llm"]
        count: int = llm["granted_total"]
        return count

    before = await granted()
    found = await _run(shared_fleet, {"task_id": "limited", "task_type": "limited", "payload": 5})
    assert (found["state"], found["result"]) == ("completed", 5)
    assert await granted() == before + 1


# --- cancel ------------------------------------------------------------------------------------------


async def _cancel(fleet: Fleet, how: str, task_id: str) -> None:
    if how == "http":
        answer = await fleet.post(f"/v1/tasks/{task_id}/cancel", {"note": "enough"})
        assert answer.status_code == 202, answer.text
        again = await fleet.wait_for(task_id, "cancelled")
        late = await fleet.post(f"/v1/tasks/{again['task_id']}/cancel")
        assert (late.status_code, late.json()["code"]) == (409, "already_final")
    else:
        await asyncio.to_thread(fleet.cli, "cancel", task_id, "--note", "enough")


@pytest.mark.parametrize("how", ["http", "cli"])
async def test_waiting_scheduled_and_running_tasks_can_be_cancelled(shared_fleet: Fleet, how: str) -> None:
    """What waits never runs and leaves nothing behind; a running execution's outcome is refused and told as stale."""
    fleet = shared_fleet
    waiting, scheduled, running = (f"{how}-{name}" for name in ("waiting", "scheduled", "running"))
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": waiting, "task_type": "echo"}, queue="nobody")
        await fleet.submit(client, {"task_id": scheduled, "task_type": "echo", "delay_seconds": 3600})
        await fleet.submit(client, {"task_id": running, "task_type": "sleep", "payload": {"seconds": 3}})
    for task_id, state in ((waiting, "queued"), (scheduled, "scheduled"), (running, "processing")):
        await fleet.wait_for(task_id, state)
    for task_id in (running, waiting, scheduled):
        await _cancel(fleet, how, task_id)
    for task_id in (waiting, scheduled, running):
        found = await fleet.wait_for(task_id, *ENDED)
        assert found["state"] == "cancelled", task_id
        assert "enough" in found["timeline"][-1]["detail"] or task_id == running

        async def nothing_left(key: str = found["key"]) -> bool:
            return await _work_left(fleet, key) == 0

        await wait_until(nothing_left, f"nothing of {task_id} is left in WORK")
    assert fleet.starts(waiting) == fleet.starts(scheduled) == []

    async def told() -> bool:
        shown = await fleet.task(running)
        return shown is not None and shown["infos"]["stale_outcomes"] == 1

    await wait_until(told, "the dropped outcome is told")
    after = await fleet.task(running)
    assert after is not None
    assert (after["state"], after["result"], len(fleet.starts(running))) == ("cancelled", None, 1)


async def test_cancel_that_overtakes_its_submit_stands(shared_fleet: Fleet) -> None:
    """The task is cancelled before it is known, and its submit runs nothing."""
    fleet = shared_fleet
    command = {"verb": "cancel", "v": 1, "tenant_id": "acme", "task_id": "early", "by": "test"}
    async with fleet.plain() as client:
        await client.jetstream().publish("mill.control.cancel.acme", json.dumps(command).encode())
        await fleet.wait_for("early", "cancelled")
        await fleet.submit(client, {"task_id": "early", "task_type": "echo"})
        await fleet.submit(client, {"task_id": "after-early", "task_type": "echo"})
    await fleet.wait_for("after-early", "completed")
    found = await fleet.wait_for("early", "cancelled")
    assert _kinds(found) == ["cancelled"]
    assert fleet.starts("early") == []


# --- dead letters --------------------------------------------------------------------------------------


async def test_dead_letter_is_shown_and_replayed_as_a_new_generation(shared_fleet: Fleet, tmp_path: Path) -> None:
    """After the repair it completes with fresh counters, and its letter is gone."""
    fleet, flag = shared_fleet, tmp_path / "repaired"
    budget = {"max_attempts": 2}
    task = {"task_id": "broken", "task_type": "until.flag", "payload": {"flag": str(flag)}, "retry_policy": QUICK}
    found = await _run(fleet, {**task, "budget": budget, "context": {"kept": True}})
    assert (found["state"], found["error"]["reason"], found["errors"]) == ("failed", "max_attempts", 2)
    listed = json.loads(await asyncio.to_thread(fleet.cli, "dlq", "list", "--type", "until.flag", "--json"))
    assert [item["task_id"] for item in listed["items"]] == ["broken"]
    shown = json.loads(await asyncio.to_thread(fleet.cli, "dlq", "show", "broken", "--json"))
    assert (shown["reason"], shown["envelope"]["payload"], len(shown["history"])) == (
        "max_attempts",
        task["payload"],
        2,
    )
    assert shown["envelope"]["context"] == {"kept": True}
    flag.touch()
    answer = json.loads(await asyncio.to_thread(fleet.cli, "dlq", "replay", "broken", "--json"))
    assert answer["replayed"] == 1
    again = await fleet.wait_for("broken", "completed")
    assert (again["generation"], again["attempt"], again["errors"], again["result"]) == (2, 1, 0, 2)
    assert _kinds(again)[-3:] == ["queued", "started", "completed"]
    assert await _letters(fleet, found["key"]) == []
    assert again["trace_id"] == found["trace_id"]
    late = await fleet.post("/v1/dlq/replay", {"task_id": "broken"})
    assert (late.status_code, late.json()["code"]) == (409, "not_replayable")


async def test_message_at_its_delivery_limit_ends_as_crashed(shared_fleet: Fleet) -> None:
    """The server says so in an advisory: the dispatcher ends the task with a dead letter and removes the message."""
    fleet, names = shared_fleet, shared_fleet.names
    async with fleet.broker() as broker, fleet.plain() as client:
        spec = work_consumer(names, fleet.settings.lifetimes, "poison", "normal", max_ack_pending=10)
        await broker.declare_consumer(spec)
        await fleet.submit(client, {"task_id": "poison", "task_type": "echo", "payload": "kept"}, queue="poison")
        await fleet.wait_for("poison", "queued")
        deliveries = 0

        async def ended() -> dict[str, Any] | None:
            nonlocal deliveries  # handed back each time, as a worker that dies would, without the waiting
            for delivery in await broker.pull(names.work_stream, names.work_consumer("poison", "normal"), 1):
                deliveries += 1
                broker.nak(delivery)
            shown = await fleet.task("poison") if deliveries >= MAX_DELIVER else None
            return shown if shown is not None and shown["state"] in ENDED else None

        found = await wait_until(ended, "the task is ended")
        assert found is not None
        assert deliveries == MAX_DELIVER

        async def empty() -> bool:
            return await _work_left(fleet, found["key"]) == 0

        await wait_until(empty, "the message is gone")
    assert (found["state"], found["error"]["reason"]) == ("failed", "worker_crashed")
    (letter,) = await _letters(fleet, found["key"])
    assert letter.reason == "worker_crashed"
    assert bytes(letter.envelope.payload) == b'"kept"'


# --- drain -----------------------------------------------------------------------------------------


async def test_sigterm_lets_work_end_hands_back_the_rest_and_exits_well(fleet: Fleet) -> None:
    """Within the grace what runs may end; the rest goes to another worker at no cost in attempts, well within a lease."""
    fleet.dispatcher()
    fleet.tracker()
    first = fleet.worker(env={"MILLSTREAM_GRACE": "1.5s", "MILLSTREAM_LEASE": "30s"})
    async with fleet.plain() as client:
        await fleet.submit(client, {"task_id": "short", "task_type": "sleep", "payload": {"seconds": 0.8}})
        await fleet.submit(client, {"task_id": "thread", "task_type": "sleep.sync", "payload": {"seconds": 0.8}})
        await fleet.submit(client, {"task_id": "long", "task_type": "interruptible", "budget": {"max_attempts": 1}})
        await wait_until(lambda: len(fleet.starts()) == 3, "three tasks run")
        first.terminate()
        first.wait_for_log("actor.draining")
        second = fleet.worker()
        await fleet.submit(client, {"task_id": "new", "task_type": "echo", "payload": 1})
        assert (await fleet.wait_for("new", *ENDED))["state"] == "completed"
        found = await fleet.wait_for("long", *ENDED)
    assert first.wait() == 0
    assert (found["state"], found["result"]) == ("completed", "resumed")
    assert (found["attempt"], found["interruptions"], found["errors"], found["crashes"]) == (1, 1, 0, 0)
    assert [start["pid"] == second.pid for start in fleet.starts("long")] == [False, True]
    assert fleet.starts("new")[0]["pid"] == second.pid
    for task_id in ("short", "thread"):
        ended = await fleet.wait_for(task_id, *ENDED)
        assert (ended["state"], ended["interruptions"], len(fleet.starts(task_id))) == ("completed", 0, 1)
    second.terminate()
    assert second.wait() == 0
