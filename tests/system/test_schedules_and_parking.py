"""What waits comes back: once, never early, and as often as it has to, whatever the server's duplicate window."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

LEASE_S = 1.0


async def _nothing_left(fleet: Fleet) -> None:
    """Wait until INBOX and WORK are empty: then nothing can start any more."""
    async with fleet.broker() as broker:

        async def empty() -> bool:
            infos = [await broker.stream_info(name) for name in (fleet.names.inbox_stream, fleet.names.work_stream)]
            return all(info is not None and info.messages == 0 for info in infos)

        await wait_until(empty, "INBOX and WORK are empty")


async def test_delay_of_five_leases_starts_once_and_never_early(make_fleet: Callable[..., Fleet]) -> None:
    """The window in which the server knows duplicates is over long before the task is due."""
    fleet = make_fleet(f"dedupe_s = {LEASE_S}\n", lease_s=LEASE_S)
    fleet.all_at_once()
    delay_s = 5 * LEASE_S
    async with fleet.plain() as client:
        sent_at = time.time()
        await fleet.submit(client, {"task_id": "later", "task_type": "echo", "delay_seconds": delay_s})
        waiting = await fleet.wait_for("later", "scheduled", "completed")
        assert waiting["state"] == "scheduled"
        await fleet.wait_for("later", "completed")
    await _nothing_left(fleet)
    starts = fleet.starts("later")
    assert len(starts) == 1
    assert starts[0]["at"] >= sent_at + delay_s
    assert starts[0]["attempt"] == 1


async def test_delay_survives_a_dispatcher_that_schedules_it_twice(make_fleet: Callable[..., Fleet]) -> None:
    """It died between schedule and ack; its successor schedules the task again, after the duplicate window."""
    fleet = make_fleet(f"dedupe_s = {LEASE_S}\n", lease_s=LEASE_S)
    doomed = fleet.dispatcher(env={"MILLSTREAM_FAULTS": "ack[mill.submit.]:before:1:exit"})
    fleet.tracker()
    fleet.worker()
    async with fleet.plain() as client:
        sent_at = time.time()
        await fleet.submit(client, {"task_id": "later", "task_type": "echo", "delay_seconds": 5 * LEASE_S})
        doomed.wait()
        fleet.dispatcher()
        await fleet.wait_for("later", "completed")
    await _nothing_left(fleet)
    starts = fleet.starts("later")
    assert len(starts) == 1
    assert starts[0]["at"] >= sent_at + 5 * LEASE_S


@pytest.mark.parametrize(
    ("dedupe_s", "after_s"), [(120.0, 0.2), (1.0, 1.5)], ids=["within_the_window", "beyond_the_window"]
)
async def test_task_parked_three_times_within_one_attempt_is_still_there(
    make_fleet: Callable[..., Fleet], dedupe_s: float, after_s: float
) -> None:
    """Throttled three times: it comes back each time, not before it was told to, and has used up one attempt."""
    fleet = make_fleet(f"dedupe_s = {dedupe_s}\n", lease_s=LEASE_S)
    fleet.all_at_once()
    payload = {"raise": "throttled", "times": 3, "after": after_s}
    async with fleet.plain() as client:
        await fleet.submit(
            client, {"task_id": "parked", "task_type": "signal", "payload": payload, "budget": {"max_attempts": 1}}
        )
        found = await fleet.wait_for("parked", "completed", "failed")
    assert found["state"] == "completed", found["error"]
    assert (found["attempt"], found["throttles"], found["errors"], found["crashes"]) == (1, 3, 0, 0)
    await _nothing_left(fleet)
    starts = [one["at"] for one in fleet.starts("parked")]
    assert len(starts) == 4
    assert all(later - earlier >= after_s for earlier, later in pairwise(starts))
    kinds = [line["kind"] for line in found["timeline"]]
    assert kinds == ["queued", *["started", "parked", "scheduled"] * 3, "started", "completed"]


async def test_snoozed_task_costs_no_attempt(make_fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    """A handler puts its task off to an instant, which is a park of another name."""
    fleet = make_fleet(lease_s=LEASE_S)
    fleet.all_at_once()
    payload = {"raise": "snooze", "after": 1.0, "flag": str(tmp_path / "flag")}
    async with fleet.plain() as client:
        await fleet.submit(
            client, {"task_id": "snoozed", "task_type": "signal", "payload": payload, "budget": {"max_attempts": 1}}
        )
        found = await fleet.wait_for("snoozed", "completed", "failed")
    assert found["state"] == "completed", found["error"]
    assert (found["attempt"], found["throttles"], found["errors"]) == (1, 0, 0)
    first, second = fleet.starts("snoozed")
    assert second["at"] - first["at"] >= 1.0


# --- what a retry policy may say -------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str]] = {
    "zero": ('{"factor": 0}', "$.retry_policy.factor"),
    "negative": ('{"factor": -1.5}', "$.retry_policy.factor"),
    "nan": ('{"factor": NaN}', "$"),
    "infinity": ('{"factor": Infinity}', "$"),
    "overflow": ('{"factor": 1e999}', "$.retry_policy.factor"),
    "text": ('{"factor": "nan"}', "$.retry_policy.factor"),
    "negative_base": ('{"base_seconds": -1}', "$.retry_policy.base_seconds"),
    "endless_cap": ('{"max_seconds": 1e999}', "$.retry_policy.max_seconds"),
}


async def test_retry_policy_that_is_no_number_is_refused(fleet: Fleet) -> None:
    """Each is dead-lettered as `invalid_envelope` with the path of the fault, and the next good task is done."""
    actors = fleet.all_at_once()
    async with fleet.plain() as client:
        sent: dict[str, int] = {}
        for name, (policy, _) in REFUSED.items():
            body = f'{{"task_type": "echo", "retry_policy": {policy}}}'.encode()
            sent[name] = await fleet.submit(client, body)
        await fleet.submit(client, {"task_id": "good", "task_type": "echo", "retry_policy": {"factor": 1e-3}})
        await fleet.wait_for("good", "completed")
    for name, seq in sent.items():

        async def listed(seq: int = seq) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await fleet.get("/v1/tasks", inbox_seq=seq)).json()["items"]
            return found

        [task] = await wait_until(listed, f"the task of {name}")
        whole = await fleet.task(task["task_id"], "acme")
        assert whole is not None
        assert (whole["state"], whole["error"]["reason"]) == ("failed", "invalid_envelope"), name
        assert (name, whole["error"]["path"]) == (name, REFUSED[name][1])
    assert not [one for one in fleet.starts() if one["task_id"] != "good"]
    assert all(actor.running for actor in actors.values())
