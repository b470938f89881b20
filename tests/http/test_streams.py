"""Server-sent events: live, resumed from anywhere, bounded, and a snapshot a second."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from millstream.clock import SystemClock
from millstream.http.views import event_frame
from millstream.memory import MemoryServer
from millstream.tracker.hub import CLIENT_QUEUE, Hub, Interest
from millstream.tracker.model import Change
from millstream.tracker.projection import apply
from millstream_schemas.events import Queued
from millstream_schemas.infos import Progress
from tests.http.harness import Frame, Running, frames, running, take
from tests.support.waiting import wait_until
from tests.tracker.histories import NAMES, START, Stream, card


async def test_a_stream_tells_what_happens_with_the_sequence_as_id(mill: Running) -> None:
    """Without a last id it begins with what comes next; infos are told as such."""
    mill.stream.completed(card("before"))
    await mill.tell()
    async with mill.client.stream("GET", "/v1/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        mill.stream.add(Queued(card=card("t")), card("t"))
        mill.stream.add(Progress(key=card("t").key, fraction=0.4, message="half"), card("t"))
        await mill.tell()
        found = await take(response, 2)
    assert [(frame.event, frame.id, frame.data["kind"]) for frame in found] == [
        ("task", "4", "queued"),
        ("info", "5", "progress"),
    ]
    assert found[0].data["task_id"] == "t"
    assert found[0].data["state"] == "queued"
    assert found[1].data["detail"] == "40% half"


@pytest.mark.parametrize("how", ["header", "query"])
async def test_a_client_may_resume_at_any_sequence(mill: Running, how: str) -> None:
    """History from the store and live events join without gap or repetition."""
    for number in range(400):
        mill.stream.completed(card(f"t{number}"))
    await mill.tell()
    for last in (0, 1, 617, 1199):
        headers = {"Last-Event-ID": str(last)} if how == "header" else {}
        path = "/v1/stream" if how == "header" else f"/v1/stream?last_event_id={last}"
        async with mill.client.stream("GET", path, headers=headers) as response:
            name = f"more-{how}-{last}"
            mill.stream.add(Queued(card=card(name)), card(name))
            await mill.tell()
            found = await take(response, mill.told - last)
        assert [int(frame.id) for frame in found] == list(range(last + 1, mill.told + 1))


async def test_nothing_is_lost_or_repeated_while_folding_goes_on(mill: Running) -> None:
    """A client that drops the connection again and again sees every sequence once."""
    total = 1500

    async def write() -> None:
        for number in range(total // 3):
            mill.stream.completed(card(f"t{number}"))
            if number % 25 == 24:
                await mill.tell()

    seen: list[int] = []

    async def read() -> None:
        while len(seen) < total:
            headers = {"Last-Event-ID": str(seen[-1])} if seen else {"Last-Event-ID": "0"}
            async with mill.client.stream("GET", "/v1/stream", headers=headers) as response:
                seen.extend(int(frame.id) for frame in await take(response, min(97, total - len(seen))))

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        group.create_task(read())
    assert seen == list(range(1, total + 1))


async def test_filters_hold_for_history_and_live_events(mill: Running) -> None:
    """By queue, tenant, state, kind and task."""
    for number in range(5):
        mill.stream.completed(card(f"t{number}", queue="a" if number % 2 else "b"))
    await mill.tell()
    for query, count in (
        ("queue=a", 6),
        ("queue=a&state=completed", 2),
        ("kind=queued", 5),
        ("task_id=t3", 3),
        ("tenant=nobody&queue=a", 0),
    ):
        async with mill.client.stream("GET", f"/v1/stream?last_event_id=0&{query}") as response:
            mill.stream.completed(card(f"end-{query}", queue="a", tenant_id="nobody"))
            await mill.tell()
            found = [] if count == 0 else await take(response, count)
        assert len(found) == count
        if query == "task_id=t3":
            assert {frame.data["task_id"] for frame in found} == {"t3"}


async def test_an_id_that_never_was_is_answered_with_a_reset(mill: Running) -> None:
    """The client asks for a fresh view and goes on live."""
    mill.stream.completed(card("t"))
    await mill.tell()
    async with mill.client.stream("GET", "/v1/stream?last_event_id=99999") as response:
        reader = frames(response)
        assert (await anext(reader)).event == "reset"
        mill.stream.add(Queued(card=card("new")), card("new"))
        await mill.tell()
        assert (await anext(reader)).data["task_id"] == "new"


async def test_a_bad_last_id_is_refused(mill: Running) -> None:
    """A problem, not a stream."""
    for value in ("-1", "NaN", "1e3", "9223372036854775808", "x", "%00"):
        answer = await mill.client.get(f"/v1/stream?last_event_id={value}")
        assert (answer.status_code, answer.json()["code"]) == (400, "bad_parameter")


async def test_head_opens_no_stream(mill: Running) -> None:
    """It ends at once, on both streams."""
    for path in ("/v1/stream", "/v1/queues/notes/stream"):
        answer = await mill.client.head(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")


async def test_a_queue_stream_sends_a_snapshot_a_second(mill: Running) -> None:
    """Sums and tasks of the active batch, with the error told."""
    mill.stream.failed(card("bad"), "it broke", title="Bad one")
    mill.stream.completed(card("good"))
    mill.stream.at += 1.0
    mill.stream.add(Queued(card=card("waits")), card("waits"))
    await mill.tell()
    async with mill.client.stream("GET", "/v1/queues/notes/stream") as response:
        first, second = await take(response, 2)
    for frame in (first, second):
        assert frame.event == "status"
        sums = {name: frame.data[name] for name in ("total", "queued", "processing", "completed", "failed")}
        assert sums == {"total": 3, "queued": 1, "processing": 0, "completed": 1, "failed": 1}
    tasks = {task["task_id"]: task for task in first.data["tasks"]}
    assert {name: task["state"] for name, task in tasks.items()} == {
        "waits": "queued",
        "bad": "failed",
        "good": "completed",
    }
    assert tasks["bad"]["error"] == "it broke"
    assert tasks["bad"]["title"] == "Bad one"
    assert tasks["good"]["created_at"]


async def test_the_snapshot_begins_anew_after_the_last_task_ended(tmp_path: Path) -> None:
    """The view is empty then; the history is not."""
    async with running(tmp_path, batch_ends_after_s=1.0) as mill:
        mill.stream.completed(card("t"))
        await mill.tell()
        async with mill.client.stream("GET", "/v1/queues/notes/stream") as response:
            async with asyncio.timeout(20):
                async for frame in frames(response):
                    if frame.data["total"] == 0:
                        break
        assert (await mill.get("/v1/tasks"))["total"] == 1


async def test_stopping_says_goodbye_to_open_streams_at_once(tmp_path: Path) -> None:
    """The actor ends although clients hold streams open."""
    async with running(tmp_path) as mill:
        client = httpx.AsyncClient(base_url=mill.client.base_url, timeout=20)
        opened = await client.send(client.build_request("GET", "/v1/stream"), stream=True)
        began = asyncio.get_running_loop().time()
    found: list[Frame] = [frame async for frame in frames(opened)]
    assert [frame.event for frame in found] == ["bye"]
    assert asyncio.get_running_loop().time() - began < 3
    await client.aclose()


async def test_a_tracker_whose_file_was_deleted_shows_the_same_again(tmp_path: Path) -> None:
    """Rebuilt from the stream, and clients resume at their ids."""
    server = MemoryServer(SystemClock())
    async with running(tmp_path, server) as mill:
        for number in range(30):
            mill.stream.completed(card(f"t{number}"), number, tags=["x"])
        mill.stream.failed(card("bad"))
        await mill.tell()
        listed, task = await mill.get("/v1/tasks?limit=200"), await mill.get("/v1/tasks/bad")
        database = mill.tracker.database
    for path in database.parent.glob("tracker.sqlite3*"):
        path.unlink()
    async with running(tmp_path, server) as mill:
        await mill.folded(94)
        assert await mill.get("/v1/tasks?limit=200") == listed
        assert await mill.get("/v1/tasks/bad") == task
        async with mill.client.stream("GET", "/v1/stream?last_event_id=90") as response:
            assert [int(frame.id) for frame in await take(response, 4)] == [91, 92, 93, 94]


async def test_a_file_made_from_another_stream_is_rebuilt(tmp_path: Path) -> None:
    """A position beyond the stream, or a record of another time there: the file is of no use."""
    async with running(tmp_path) as mill:
        for number in range(5):
            mill.stream.completed(card(f"old{number}"))
        await mill.tell()
    for count in (1, 9):
        async with running(tmp_path) as mill:
            for number in range(count):
                mill.stream.completed(card(f"new{number}"))
            await mill.tell()
            assert (await mill.get("/v1/tasks"))["total"] == count


async def test_a_slow_client_is_closed_and_others_are_not_disturbed() -> None:
    """The hub drops the one whose queue is full; the publisher waits for nobody."""
    hub = Hub(0, event_frame)
    slow, quick = hub.subscribe(Interest()), hub.subscribe(Interest())
    stream = Stream()
    got = 0
    for number in range(CLIENT_QUEUE + 5):
        of = card(f"t{number}")
        record = stream.add(Queued(card=of), of)
        step = apply(None, Queued(card=of), record.seq, START, NAMES.inbox_stream)
        hub.publish([Change(row=step.row, entry=step.entry, info=False)], record.seq)
        got += len(await quick.take(1.0))
    assert got == CLIENT_QUEUE + 5
    assert (slow.overflowed, quick.overflowed, hub.dropped) == (True, False, 1)


async def test_a_client_that_leaves_is_forgotten(mill: Running) -> None:
    """Streams are counted while they are open."""
    for _ in range(3):
        async with mill.client.stream("GET", "/v1/stream"):
            pass

    async def gone() -> bool:
        return "millstream_sse_clients 0" in (await mill.client.get("/metrics")).text

    await wait_until(gone, "closed streams are no longer counted")
