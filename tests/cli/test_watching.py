"""`millstream watch` over the event stream: where it begins, how it resumes, when it ends and with which status."""

from __future__ import annotations

import json

import pytest

from millstream.cli import api, output
from millstream.cli.api import parse_events
from tests.cli.fake_tracker import HOSTILE, FakeTracker, event, page, problem, task


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that broke is resumed at once."""
    monkeypatch.setattr(api, "RESUME_S", 0.0)


@pytest.mark.parametrize(("state", "status"), [("completed", 0), ("failed", 1), ("cancelled", 1), ("expired", 1)])
def test_watch_ends_with_the_task(tracker: FakeTracker, state: str, status: int) -> None:
    """Exit status 0 for `completed` alone; every event was a line."""
    tracker.on("GET /v1/tasks/x", task("x", "queued", 5), task("x", state, 7))
    tracker.streams = [b"retry: 2000\nid: 5\n\n" + event(6, "x", "started", "processing") + event(7, "x", state, state)]
    result = tracker.run("watch", "x")
    assert result.exit_code == status
    assert [line.split()[2] for line in result.stdout.splitlines()[:2]] == ["started", state]
    assert tracker.resumed_after() == ["5"]


def test_a_task_that_is_over_is_not_waited_for(tracker: FakeTracker) -> None:
    """No stream is opened; `--json` prints the task."""
    tracker.on("GET /v1/tasks/x", task("x", "completed", result=6))
    result = tracker.run("watch", "x", "--json")
    assert (result.exit_code, json.loads(result.stdout)["result"]) == (0, 6)
    assert tracker.resumed_after() == []


@pytest.mark.parametrize("terminal", [False, True])
def test_a_broken_stream_is_resumed_after_the_last_event(
    tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Neither a gap nor a second beginning, and no matter what the tracker says while it starts again."""
    monkeypatch.setattr(output, "on_terminal", lambda: terminal)
    moving = [task("x", "processing", 6)] if terminal else []  # the bar asks how far the task is
    tracker.on("GET /v1/tasks/x", task("x", "queued", 5), *moving, task("x", "completed", 9))
    bye, end = b"event: bye\ndata: {}\n\n", event(9, "x", "completed", "completed")
    tracker.streams = [event(6, "x", "started", "processing"), bye, end]
    result = tracker.run("watch", "x")
    assert result.exit_code == 0
    assert tracker.resumed_after() == ["5", "6", "6"]


def test_after_a_reset_the_task_is_read_anew(tracker: FakeTracker) -> None:
    """What the stream has forgotten is not missed."""
    tracker.on("GET /v1/tasks/x", task("x", "queued", 5), task("x", "completed", 9))
    tracker.streams = [b'event: reset\ndata: {"reason":"history_gone"}\n\n']
    assert tracker.run("watch", "x").exit_code == 0


def test_what_ended_between_a_reset_and_the_next_stream_is_found(tracker: FakeTracker) -> None:
    """The tracker closes a stream that is too slow; the new one begins behind the end of the task."""
    tracker.on("GET /v1/tasks/x", task("x", "queued", 5), task("x", "processing", 6), task("x", "completed", 9))
    tracker.streams = [b'event: reset\ndata: {"reason":"too_slow"}\n\n', b"retry: 2000\nid: 9\n\n"]
    assert tracker.run("watch", "x").exit_code == 0
    assert tracker.resumed_after() == ["5", None]


def test_a_tracker_that_refuses_the_stream_is_an_error(tracker: FakeTracker) -> None:
    """A stream that never opened is not tried for a minute."""
    tracker.on("GET /v1/tasks/x", task("x", "queued", 5))
    tracker.on("GET /v1/stream", problem(503, "too_many_streams", "Too many streams are open"))
    result = tracker.run("watch", "x")
    assert result.exit_code == 1
    assert "Too many streams" in result.stderr


def test_a_tracker_that_stays_away_is_given_up(tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time of patience the command fails instead of waiting for ever."""
    monkeypatch.setattr(api, "PATIENCE_S", 0.0)
    tracker.on("GET /v1/tasks/x", task("x", "queued", 5))
    tracker.on("GET /v1/stream", problem(503, "not_ready", "Not yet"))
    tracker.streams = [event(6, "x", "started", "processing")]
    assert tracker.run("watch", "x").exit_code == 1


def test_a_run_is_watched_to_the_end_of_all_its_tasks(tracker: FakeTracker) -> None:
    """A task that joins on the way counts; one failure fails the run."""
    before = page([task("a", "completed", 3), task("b", "processing", 4)])
    after = page(
        [task("a", "completed", 3), task("b", "completed", 101), task("c", "failed", 103, error={"reason": "fatal"})]
    )
    tracker.on("GET /v1/tasks", before, before, after)
    tracker.streams = [
        event(4, "b", "queued", "queued")  # older than what is known: it moves nothing
        + event(101, "b", "completed", "completed")
        + event(102, "c", "queued", "queued")
        + event(103, "c", "failed", "failed")
    ]
    result = tracker.run("watch", "--run", "r1", "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (told["total"], told["states"]) == (3, {"completed": 2, "failed": 1})
    assert tracker.queries("GET /v1/stream")[0]["run_id"] == ["r1"]
    assert tracker.resumed_after() == ["100"]


def test_a_run_that_nobody_knows_is_wrong_use(tracker: FakeTracker) -> None:
    """It would otherwise be waited for without end."""
    tracker.on("GET /v1/tasks", page([]))
    assert tracker.run("watch", "--run", "nobody").exit_code == 2


def test_everything_is_watched_as_one_line_of_json_each(tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an id there is no end but the tracker's; programs read line after line."""
    monkeypatch.setattr(api, "PATIENCE_S", 0.0)
    tracker.on("GET /v1/stream", problem(503, "not_ready", "Not yet"))
    tracker.streams = [
        event(1, "x", "queued", "queued") + event(2, "x", "progress", "queued", info=True, detail=HOSTILE)
    ]
    lines = tracker.run("watch", "--json").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [1, 2]


def test_events_are_split_at_line_feeds_alone() -> None:
    """Texts hold U+2028, U+0085 and friends, which other splitters take for the end of a line; chunks end anywhere."""
    whole = event(7, "x", "failed", "failed", detail="a\u2028b\u0085c\x0bd\x1ce")
    found = list(parse_events(iter([whole[i : i + 1] for i in range(len(whole))])))
    assert [(each.id, each.event, each.data["detail"]) for each in found] == [(7, "task", "a\u2028b\u0085c\x0bd\x1ce")]


def test_frames_that_hold_no_event_are_skipped() -> None:
    """Beats, broken JSON and carriage returns do not end a watch."""
    frames = b": beat\r\n\r\nid: 4\n\ndata: {broken\n\ndata: [1]\n\nid: 5\r\nevent: task\r\ndata: {}\r\n\r\n"
    found = [(each.id, each.event) for each in parse_events(iter([frames]))]
    assert found == [(4, "position"), (5, "task")]
