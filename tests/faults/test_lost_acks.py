"""Exits and losses at each step between an event, the message that follows from it, and the ack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from millstream.faults import EXIT_STATUS
from millstream_schemas.codec import decode_event
from tests.support.draining import drained, messages
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until, wait_until_sync

if TYPE_CHECKING:
    from millstream.ports import Broker

SHORT = "dedupe_s = 1\n"
LEASE_S = 1.0


async def _outcomes(fleet: Fleet, broker: Broker, expected: dict[str, str]) -> None:
    """Wait until each task has an outcome and nothing is left that could give it another; then check that it is the one."""

    async def all_ended() -> bool:
        found = await fleet.outcomes(broker)
        return set(expected) <= {task_id for task_id, kinds in found.items() if kinds}

    await wait_until(all_ended, f"outcomes of {sorted(expected)}", timeout=60)
    await drained(fleet, broker)
    found = await fleet.outcomes(broker)
    assert {task_id: found[task_id] for task_id in expected} == {
        task_id: Counter([kind]) for task_id, kind in expected.items()
    }


# --- the worker ------------------------------------------------------------------------------------

WORKER_LOSSES = {
    "ack_lost": ("ack[.work.]:before:1:lose", "task.superseded"),
    "ack_and_outcome_answer_lost": ("publish[.completed]:after:1:lose;ack[.work.]:before:1:lose", "task.superseded"),
    "outcome_answer_lost": ("publish[.completed]:after:1:lose", None),
    "claim_answer_lost": ("publish[.started]:after:1:lose", None),
    "outcome_lost": ("publish[.completed]:before:1:lose", None),
    "claim_lost": ("publish[.started]:before:1:lose", None),
}


@pytest.mark.parametrize("loss", WORKER_LOSSES)
async def test_loss_at_the_worker_causes_no_second_execution(make_fleet: Callable[..., Fleet], loss: str) -> None:
    """Whatever was committed stands: a redelivered message is dropped, gone for good, and no dead letter."""
    plan, says = WORKER_LOSSES[loss]
    fleet = make_fleet(SHORT, lease_s=LEASE_S)
    fleet.dispatcher()
    worker = fleet.worker(env={"MILLSTREAM_FAULTS": plan})
    async with fleet.plain() as client, fleet.broker() as broker:
        await fleet.submit(client, {"task_id": "one", "task_type": "echo", "payload": 1})
        await _outcomes(fleet, broker, {"one": "completed"})
        if says is not None:
            wait_until_sync(lambda: says in worker.log(), "the redelivery was seen")
        assert await messages(broker, fleet.names.dlq_stream) == 0
    assert len(fleet.starts("one")) == 1


async def test_worker_that_dies_before_its_ack_leaves_a_committed_task(make_fleet: Callable[..., Fleet]) -> None:
    """The outcome is stored, the process gone: another worker gets the message and drops it."""
    fleet = make_fleet(SHORT, lease_s=LEASE_S)
    fleet.dispatcher()
    first = fleet.worker(env={"MILLSTREAM_FAULTS": "publish[.completed]:after:1:exit"})
    async with fleet.plain() as client, fleet.broker() as broker:
        await fleet.submit(client, {"task_id": "one", "task_type": "echo", "payload": 1})
        assert first.wait() == EXIT_STATUS
        fleet.worker()
        await _outcomes(fleet, broker, {"one": "completed"})
    assert len(fleet.starts("one")) == 1


async def test_worker_that_dies_after_its_claim_is_succeeded(make_fleet: Callable[..., Fleet]) -> None:
    """The claim is stored, the handler never ran: the successor counts a crash and runs it once."""
    fleet = make_fleet(SHORT, lease_s=LEASE_S)
    fleet.dispatcher()
    fleet.tracker()
    first = fleet.worker(env={"MILLSTREAM_FAULTS": "publish[.started]:after:1:exit"})
    async with fleet.plain() as client, fleet.broker() as broker:
        await fleet.submit(client, {"task_id": "one", "task_type": "echo", "payload": 1})
        assert first.wait() == EXIT_STATUS
        fleet.worker()
        await _outcomes(fleet, broker, {"one": "completed"})
    found = await fleet.wait_for("one", "completed")
    assert (found["attempt"], found["crashes"], found["errors"]) == (1, 1, 0)
    assert len(fleet.starts("one")) == 1


# --- the dispatcher --------------------------------------------------------------------------------

DISPATCHER_EXITS: dict[str, Sequence[str]] = {
    "admission": [
        "publish_all[.queued]:before:1:exit",
        "publish_all[.queued]:after:1:exit",
        "publish_all[mill.work.]:before:1:exit",
        "publish_all[mill.work.]:after:1:exit",
        "ack[mill.submit.]:before:1:exit",
        "ack[mill.submit.]:after:1:exit",
    ],
    "delay": [
        "publish_all[.scheduled]:after:1:exit",
        "publish_all[mill.later.]:after:1:exit",
    ],
    "retry": [
        "publish_all[.retrying]:before:1:exit",
        "publish_all[.retrying]:after:1:exit",
        "publish_all[mill.later.]:before:1:exit",
        "publish_all[mill.later.]:after:1:exit",
        "ack[.attempt_failed]:before:1:exit",
    ],
    "dead_letter": [
        "publish_all[.failed]:before:1:exit",
        "publish_all[.failed]:after:1:exit",
        "publish_all[mill.dlq.]:before:1:exit",
        "publish_all[mill.dlq.]:after:1:exit",
        "ack[.attempt_failed]:before:1:exit",
    ],
    "invalid": [
        "publish_all[.failed]:after:1:exit",
        "publish_all[mill.dlq.]:after:1:exit",
        "ack[mill.submit.]:before:1:exit",
    ],
}

FAST = {"base_seconds": 0.2, "jitter": False}
TASKS: dict[str, tuple[dict[str, Any], str, int]] = {
    "admission": ({"task_type": "echo"}, "completed", 1),
    "delay": ({"task_type": "echo", "delay_seconds": 0.5}, "completed", 1),
    "retry": ({"task_type": "flaky", "payload": {"failures": 1}, "retry_policy": FAST}, "completed", 2),
    "dead_letter": ({"task_type": "flaky", "payload": {"failures": 9}, "budget": {"max_attempts": 1}}, "failed", 1),
    "invalid": ({"task_type": 5}, "failed", 0),
}


@pytest.mark.parametrize("step", DISPATCHER_EXITS)
async def test_dispatcher_that_dies_at_any_point_loses_and_doubles_nothing(
    make_fleet: Callable[..., Fleet], step: str
) -> None:
    """A new dispatcher finishes what the old one began: one outcome, one dead letter, no execution too many."""
    task, outcome, starts = TASKS[step]
    fleet = make_fleet(SHORT, lease_s=LEASE_S)
    fleet.worker()
    expected: dict[str, str] = {}
    async with fleet.plain() as client, fleet.broker() as broker:
        for number, plan in enumerate(DISPATCHER_EXITS[step]):
            doomed = fleet.dispatcher(env={"MILLSTREAM_FAULTS": plan})
            task_id = f"{step}-{number}"
            seq = await fleet.submit(client, {"task_id": task_id, **task})
            assert doomed.wait() == EXIT_STATUS, f"{plan} did not strike"
            successor = fleet.dispatcher()
            expected[await _task_id(fleet, broker, seq) if step == "invalid" else task_id] = outcome
            await _outcomes(fleet, broker, expected)
            assert len(fleet.starts(task_id)) == starts, plan
            letters = number + 1 if outcome == "failed" else 0
            assert await messages(broker, fleet.names.dlq_stream) == letters, plan
            successor.kill()


async def _task_id(fleet: Fleet, broker: Broker, inbox_seq: int) -> str:
    """The id of a task whose envelope could not be read, from the first event that its submit caused."""

    async def found() -> str | None:
        for events in (await fleet.life(broker)).values():
            card = decode_event(events[0][1].body).card
            if card.origin.seq == inbox_seq:
                return card.task_id
        return None

    task_id = await wait_until(found, f"the task of submit {inbox_seq}")
    assert task_id is not None
    return task_id
