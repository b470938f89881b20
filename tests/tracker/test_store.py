"""The read model's file: exactly once, rebuilt when deleted, bounded."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from millstream.errors import AlreadyRunning
from millstream.ports import Record
from millstream.tracker.folding import Folded, Folder
from millstream.tracker.queries import Filter, Reader
from millstream.tracker.statements import ROWS_AT_ONCE
from millstream.tracker.store import Store
from millstream.tracker.view import View
from millstream_schemas.events import Interrupted, Queued, TaskInfo
from millstream_schemas.infos import Duplicate, Progress
from tests.tracker.histories import NAMES, START, Stream, card, item


@contextmanager
def folder(path: Path, prefix: str = "mill") -> Generator[Folder]:
    """A folder on a file, closed afterwards."""
    store = Store(path, prefix)
    try:
        yield Folder(store, NAMES, 5.0)
    finally:
        store.close()


def dump(path: Path) -> list[str]:
    """Everything in the file as SQL."""
    connection = sqlite3.connect(path)
    try:
        return list(connection.iterdump())
    finally:
        connection.close()


def history() -> list[Record]:
    """Twenty good tasks, one dead letter, one that waits and has two names."""
    stream = Stream()
    for number in range(20):
        stream.completed(
            card(f"good-{number}", inbox_seq=number + 1),
            {"n": number},
            title=f"Note {number}",
            tags=["a", f"t{number}"],
        )
    stream.failed(card("bad", inbox_seq=50), attempts=3, run_id="run-1")
    stream.add(Queued(card=card("waits", inbox_seq=51)), card("waits"))
    stream.held(card("held", inbox_seq=53), "llm")
    for name, seq in (("released", 54), ("gone", 55)):
        stream.held(card(name, inbox_seq=seq), "llm")
        stream.released(card(name, inbox_seq=seq))
    stream.started(card("gone", inbox_seq=55))
    stream.alias(card("waits"), "other-name")
    stream.add(Duplicate(key=card("waits").key, inbox_seq=52), card("waits"))
    return stream.records


def fold_all(path: Path, records: list[Record], size: int) -> None:
    """Fold in batches of `size`."""
    with folder(path) as folding:
        for start in range(0, len(records), size):
            folding.fold(records[start : start + size])


def test_the_same_rows_come_of_any_batching_and_of_a_rebuild(tmp_path: Path) -> None:
    """One event at a time, all at once, or after the file was deleted: the tables are equal."""
    records = history()
    for name, size in (("one", 1), ("seven", 7), ("all", 1000)):
        fold_all(tmp_path / name, records, size)
    assert dump(tmp_path / "one") == dump(tmp_path / "seven") == dump(tmp_path / "all")
    (tmp_path / "one").unlink()
    fold_all(tmp_path / "one", records, 3)
    assert dump(tmp_path / "one") == dump(tmp_path / "all")


def test_folding_goes_on_at_the_position_in_the_file(tmp_path: Path) -> None:
    """A new process begins after the last record whose batch was committed."""
    records = history()
    with folder(tmp_path / "db") as folding:
        folding.fold(records[:31])
    with folder(tmp_path / "db") as folding:
        assert folding.position.seq == records[30].seq
        folding.fold(records[31:])
    fold_all(tmp_path / "whole", records, 1000)
    assert dump(tmp_path / "db") == dump(tmp_path / "whole")


def test_a_failed_batch_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    """Rows and position move together or not at all."""
    records = history()
    path = tmp_path / "db"
    with folder(path) as folding:
        folding.fold(records[:10])
        before = dump(path)
        spoiler = sqlite3.connect(path, isolation_level=None)
        spoiler.execute(
            "CREATE TRIGGER spoil BEFORE INSERT ON timeline WHEN NEW.seq = 20 BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        with pytest.raises(sqlite3.DatabaseError):
            folding.fold(records[10:30])
        spoiler.execute("DROP TRIGGER spoil")
        spoiler.close()
        assert dump(path) == before
        folding.fold(records[10:])
    fold_all(tmp_path / "whole", records, 1000)
    assert dump(path) == dump(tmp_path / "whole")


def test_two_trackers_on_one_file_do_not_fold_twice(tmp_path: Path) -> None:
    """The second one to move the position is told."""
    records = history()
    with folder(tmp_path / "db") as one, folder(tmp_path / "db") as two:
        one.fold(records[:5])
        with pytest.raises(AlreadyRunning):
            two.fold(records[:5])


@pytest.mark.parametrize("damage", ["version", "garbage", "prefix"])
def test_a_file_that_is_not_ours_is_begun_anew(tmp_path: Path, damage: str) -> None:
    """Another version, a broken file or another prefix: deleted, and the position is 0."""
    path = tmp_path / "db"
    fold_all(path, history(), 100)
    if damage == "version":
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    elif damage == "garbage":
        path.write_bytes(b"not a database at all" * 1000)
    with folder(path, "other" if damage == "prefix" else "mill") as folding:
        assert folding.position.seq == 0


def test_what_cannot_be_read_is_counted_and_passed_over(tmp_path: Path) -> None:
    """A newer kind or version, broken bytes, a card that speaks for another task: never fatal."""
    stream = Stream()
    of = card("t")
    subject = NAMES.event(of.tenant_id, of.key, of.queue, "queued")
    stream.raw(subject, b'{"kind":"dreamt","card":{},"v":1}')
    stream.raw(subject, b'{"kind":"queued","v":2}')
    stream.raw(subject, b"\xff\x00")
    stream.raw(NAMES.info(of.tenant_id, of.key, of.queue, "progress"), b'{"kind":"progress","key":"x","fraction":0.5}')
    stream.raw(NAMES.event("evil", of.key, of.queue, "queued"), msgspec.json.encode(Queued(card=of)))
    stream.add(Queued(card=of), of)
    with folder(tmp_path / "db") as folding:
        counts = folding.fold(stream.records).counts
        assert (counts.skipped, counts.illegal, counts.orphaned, counts.folded) == (3, 1, 1, 1)
        assert folding.position.seq == 6


@pytest.mark.parametrize("field", ["attempt", "errors", "generation", "inbox_seq"])
def test_a_number_that_the_file_cannot_hold_costs_its_own_record_only(tmp_path: Path, field: str) -> None:
    """JSON has no largest number: what does not fit is passed over, and all around it is folded."""
    stream = Stream()
    stream.completed(card("before", inbox_seq=1))
    of = card("huge")
    huge = msgspec.json.encode(Queued(card=card("huge", **{field: 10**30})))
    stream.raw(NAMES.event(of.tenant_id, of.key, of.queue, "queued"), huge)
    stream.completed(card("after", inbox_seq=2))
    with folder(tmp_path / "db") as folding:
        folded = folding.fold(stream.records)
        assert (folded.counts.folded, folded.counts.skipped, folding.position.seq) == (6, 1, 7)
        assert [change.entry.seq for change in folded.changes] == [1, 2, 3, 5, 6, 7]
        assert {key: by for key, by in folded.moves.items() if by} == {("default", "notes", "completed"): 2}


async def test_a_long_timeline_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Lines of other tasks between them do not matter, and more than one page of rows is written at a time."""
    stream = Stream()
    for name in ("t", "other"):
        stream.add(Queued(card=card(name)), card(name))
    for number in range(3 * ROWS_AT_ONCE):
        stream.add(Progress(key=card("t").key, fraction=0.5, message=str(number)), card("t"))
        stream.add(Progress(key=card("other").key, fraction=0.5), card("other"))
    fold_all(tmp_path / "db", stream.records, 70)
    reader = Reader(tmp_path / "db")
    try:
        row = await reader.find("t")
        assert row is not None
        lines = await reader.timeline(row)
        assert [line.entry.seq for line in lines] == [1, *range(3, len(stream.records) + 1, 2)]
    finally:
        reader.close()


async def test_tasks_are_found_by_id_key_other_name_and_submit(tmp_path: Path) -> None:
    """An alias leads to its task, and so does the sequence of a dropped duplicate."""
    fold_all(tmp_path / "db", history(), 100)
    reader = Reader(tmp_path / "db")
    try:
        key = card("waits").key
        for name in ("waits", key, "other-name"):
            row = await reader.find(name)
            assert row is not None
            assert row.key == key
            assert await reader.find(name, "somebody") is None
        for seq in (51, 52):
            assert [row.key for row in (await reader.page(Filter(inbox_seq=seq), 10)).items] == [key]
    finally:
        reader.close()


async def test_pages_by_cursor_hold_every_task_once_while_new_ones_come(tmp_path: Path) -> None:
    """Keyset paging is not moved by what is added in front."""
    stream = Stream()
    for number in range(25):
        stream.add(Queued(card=card(f"t{number}"), task=TaskInfo(run_id="r")), card(f"t{number}"))
    with folder(tmp_path / "db") as folding:
        folding.fold(stream.records)
        reader = Reader(tmp_path / "db")
        try:
            seen: list[str] = []
            before: int | None = None
            while True:
                page = await reader.page(Filter(run_id="r"), 10, before)
                seen += [row.task_id for row in page.items]
                more = len(seen)
                stream.add(Queued(card=card(f"new{more}"), task=TaskInfo(run_id="r")), card(f"new{more}"))
                folding.fold(stream.records[-1:])
                if page.next is None:
                    break
                before = page.next
            assert seen == [f"t{number}" for number in reversed(range(25))]
        finally:
            reader.close()


async def test_filters_agree_with_a_plain_scan(tmp_path: Path) -> None:
    """Each filter selects what it says, and the tally counts the same."""
    records = history()
    fold_all(tmp_path / "db", records, 100)
    store = Store(tmp_path / "db", "mill")
    view = View(store.position(), store.tally(), store.batches())
    reader = Reader(tmp_path / "db")
    try:
        for wanted, count in (
            (Filter(), 25),
            (Filter(states=("failed",)), 1),
            (Filter(states=("failed", "queued")), 3),
            (Filter(states=("held",)), 1),
            (Filter(queue="notes", tenant="default", states=("completed",)), 20),
            (Filter(queue="nothing"), 0),
            (Filter(tag="a"), 20),
            (Filter(tag="t7"), 1),
            (Filter(run_id="run-1"), 1),
            (Filter(task_type="notes.summarize"), 25),
            (Filter(text="note 1"), 11),
            (Filter(text="%"), 0),
            (Filter(since=START + 0.3), 15),
            (Filter(until=START + 0.3), 10),
        ):
            assert len((await reader.page(wanted, 100)).items) == count, wanted
            assert await reader.count(wanted) == count, wanted
            assert view.total(wanted) in (None, count)
    finally:
        reader.close()
        store.close()


async def test_a_held_task_has_its_place_in_its_lane(tmp_path: Path) -> None:
    """What ran before goes first, the rest in the order in which it was held; other classes and tenants have other lanes."""
    stream = Stream()
    for number in range(4):
        stream.held(card(f"t{number}"), "llm")
    stream.held(card("high", priority="high"), "llm")
    stream.held(card("other", tenant_id="acme"), "llm")
    stream.held(card("elsewhere"), "search")
    stream.held(card("fair"))
    for name in ("t2", "t3"):
        stream.released(card(name))
    stream.started(card("t2"))
    stream.add(Interrupted(card=card("t2"), item=item(card("t2"))), card("t2"))
    stream.held(card("t2"), "llm", again=True)
    with folder(tmp_path / "db") as folding:
        reader = Reader(tmp_path / "db")
        try:
            folding.fold(stream.records)

            async def place(name: str, tenant: str = "default") -> tuple[int, int, int, int]:
                row = await reader.find(name, tenant)
                assert row is not None
                found = await reader.place(row)
                return found.place, found.of, found.lanes, found.waiting

            assert [await place(name) for name in ("t2", "t0", "t1")] == [(n, 3, 3, 5) for n in (1, 2, 3)]
            assert await place("high") == await place("other", "acme") == (1, 1, 3, 5)
            assert await place("elsewhere") == await place("fair") == (1, 1, 1, 1)
            stream.released(card("t0"))
            folding.fold(stream.records[-1:])
            assert await place("t1") == (2, 2, 3, 4)
        finally:
            reader.close()


def test_the_sweep_forgets_old_tasks_whole_and_keeps_those_that_wait(tmp_path: Path) -> None:
    """Nothing of a swept task stays in any table."""
    path = tmp_path / "db"
    with folder(path) as folding:
        folding.fold(history())
        moves = folding.sweep(["notes"], START + 10_000)
        assert sum(moves.values()) == -21
        assert folding.sweep(["notes"], START + 10_000) == {}
    connection = sqlite3.connect(path)
    counts = {
        name: connection.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0]
        for name in ("task", "timeline", "result", "tag", "submit", "alias", "held")
    }
    connection.close()
    assert counts == {"task": 4, "timeline": 8, "result": 0, "tag": 0, "submit": 5, "alias": 1, "held": 1}


async def test_a_query_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    """The time limit ends it, and the connection serves the next one."""
    stream = Stream()
    for number in range(3000):
        stream.add(Queued(card=card(f"t{number}")), card(f"t{number}"))
    fold_all(tmp_path / "db", stream.records, 500)
    reader = Reader(tmp_path / "db", limit_s=-1.0)
    try:
        with pytest.raises(TimeoutError):
            await reader.page(Filter(text="nowhere"), 10)
        assert await reader.find("t1") is not None
    finally:
        reader.close()


def test_changes_are_told_in_the_order_of_the_stream(tmp_path: Path) -> None:
    """One change a record, with its sequence."""
    records = history()
    with folder(tmp_path / "db") as folding:
        folded: Folded = folding.fold(records)
    told = [change.entry.seq for change in folded.changes]
    assert told == sorted(told)
    assert len(told) == len(records) - 1  # the alias is not a task's
