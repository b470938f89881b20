"""The client: what it refuses before it sends, and whose outcome a handle tells."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from millstream.app import App
from millstream.errors import CallerError, InvalidTask, SettingsError, TaskConflict, TaskFailed
from millstream.settings import build, load
from millstream_schemas.events import Cancelled, Completed
from tests.support.millrace import Mill, millrace

IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "a delay that is no duration": ({"delay": "soon"}, "$.delay_seconds"),
    "an instant beyond the calendar": ({"deadline_at": 1e20}, "$.deadline_at"),
    "an instant before 1970": ({"not_before": datetime(1960, 1, 1, tzinfo=UTC)}, "$.not_before"),
    "two earliest starts": ({"delay": 5, "not_before": 2e9}, "$.delay_seconds"),
    "two payloads": ({"payload_ref": "s3://bucket/x"}, "$.payload_ref"),
    "another tenant's name": ({"tenant_id": "other"}, "$.tenant_id"),
    "an approval": ({"approval": {"required": True}}, "$.approval.required"),
    "an option that does not exist": ({"colour": "red"}, "$.colour"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
async def test_what_the_dispatcher_would_refuse_is_refused_before_it_is_sent(name: str) -> None:
    """With the path of the fault, so that no handle waits for a task that never was."""
    mill = await millrace()
    options, path = IMPOSSIBLE[name]
    with pytest.raises(InvalidTask) as refused:
        await mill.client.send("echo", {"a": 1}, **options)
    assert refused.value.path == path
    info = await mill.broker.stream_info(mill.names.inbox_stream)
    assert info is not None
    assert info.messages == 0


async def end(mill: Mill, key: str, result: object) -> None:
    """Complete a task in the place of a worker."""
    last = await mill.journal.last("default", key)
    assert last.event is not None
    await mill.journal.append(
        Completed(card=last.event.card, result=msgspec.Raw(msgspec.json.encode(result))), last.seq
    )


async def test_a_handle_of_a_conflicting_submit_does_not_tell_the_first_ones_result() -> None:
    """The key belongs to another input; whoever sent this one must hear of it."""
    mill = await millrace()
    first = await mill.client.send("add", {"a": 1}, idempotency_key="k")
    second = await mill.client.send("add", {"a": 2}, idempotency_key="k")
    equal = await mill.client.send("add", {"a": 1}, idempotency_key="k")
    await mill.admit()
    with pytest.raises(TaskConflict):
        await second.result(timeout=5)
    await end(mill, first.key, "one")
    assert [await first.result(timeout=5), await equal.result(timeout=5)] == ["one", "one"]


async def test_a_handle_of_a_key_that_was_free_again_tells_its_own_result() -> None:
    """Not that of the task which had the key before."""
    mill = await millrace()
    options = {"idempotency_key": "k", "unique": "in_flight"}
    before = await mill.client.send("add", {"a": 1}, **options)
    await mill.admit()
    await end(mill, before.key, "old")
    after = await mill.client.send("add", {"a": 2}, **options)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(after.result(timeout=10))
        await mill.admit()
        await end(mill, after.key, "new")
    assert waiting.result() == "new"
    assert await before.result(timeout=5) == "old"


async def test_a_handle_of_a_duplicate_in_flight_tells_the_result_that_it_joined() -> None:
    """It was admitted while the first one still ran, so no generation of its own ever comes."""
    mill = await millrace()
    options = {"idempotency_key": "k", "unique": "in_flight"}
    first = await mill.client.send("add", {"a": 1}, **options)
    await mill.admit()
    joined = await mill.client.send("add", {"a": 1}, **options)
    await mill.admit()
    await end(mill, first.key, "one")
    assert await joined.result(timeout=5) == "one"


async def test_the_result_of_a_cancelled_task_says_why() -> None:
    """With the note of whoever cancelled it."""
    mill = await millrace()
    handle = await mill.client.send("add", {"a": 1})
    await mill.admit()
    last = await mill.journal.last("default", handle.key)
    assert last.event is not None
    await mill.journal.append(Cancelled(card=last.event.card, note="no need"), last.seq)
    with pytest.raises(TaskFailed, match="cancelled: no need"):
        await handle.result(timeout=5)


@pytest.mark.parametrize("limits", ["llm", [""], ["x" * 129], [f"k{n}" for n in range(17)]])
def test_limits_that_no_permit_could_name_are_refused_with_the_handler(limits: Any) -> None:
    """A text would be taken for a list of letters, and its tasks would wait for limits that nobody has."""
    with pytest.raises(CallerError, match="`limits` takes a list"):
        App("a").task("t", limits=limits)


def test_a_value_in_the_place_of_a_table_is_told_as_such(tmp_path: Any) -> None:
    """Even where the environment sets a member of the table."""
    path = tmp_path / "millstream.toml"
    path.write_text('nats = "nats://127.0.0.1:4222"', encoding="utf-8")
    with pytest.raises(SettingsError, match=r"\$\.nats"):
        load(path, {"MILLSTREAM_NATS_URL": "nats://127.0.0.1:4333"})


def test_a_misspelt_member_of_a_retry_policy_is_told() -> None:
    """A setting that is skipped in silence would be noticed when the first provider is overrun."""
    with pytest.raises(SettingsError, match=r"`base` - at `\$\.queues\.q\.retry_policy`"):
        build({"queues": {"q": {"retry_policy": {"base": 5}}}})


@pytest.mark.parametrize("default", [{"max_cost_usd": 1e10}, {"max_runtime_seconds": "100d"}, {"max_tokens": 10**13}])
def test_a_queue_default_that_no_envelope_may_hold_is_refused(default: dict[str, Any]) -> None:
    """No worker could read a task that it was filled into."""
    with pytest.raises(SettingsError, match=r"\$\.queues"):
        build({"queues": {"q": default}})
