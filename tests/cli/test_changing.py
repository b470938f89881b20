"""Commands that change something: cancel and the replay of dead letters."""

from __future__ import annotations

import json

from tests.cli.fake_tracker import HOSTILE, FakeTracker, page, problem, task

REPLAY = "POST /v1/dlq/replay"


def letters(tracker: FakeTracker, *idents: str) -> None:
    """Let the tracker hold these dead letters."""
    found = [task(ident, "failed", reason="fatal", failed_at="2026-01-02T03:04:05Z") for ident in idents]
    tracker.on("GET /v1/dlq", page(found))
    for letter in found:
        tracker.on(f"GET /v1/dlq/{letter['task_id']}", letter)


def test_cancel_names_the_task_and_the_note(tracker: FakeTracker) -> None:
    """The tracker is asked once, with who and why."""
    tracker.on("POST /v1/tasks/x/cancel", task("x", "processing"), status=202)
    result = tracker.run("cancel", "x", "--note", "not needed", "--tenant", "acme")
    assert result.exit_code == 0
    assert tracker.bodies("POST /v1/tasks/x/cancel") == [{"by": "cli", "note": "not needed"}]
    assert tracker.queries("POST /v1/tasks/x/cancel") == [{"tenant": ["acme"]}]


def test_cancelling_what_is_over_fails(tracker: FakeTracker) -> None:
    """The tracker's refusal is the command's failure."""
    tracker.on("POST /v1/tasks/x/cancel", problem(409, "already_final", "The task is completed"))
    result = tracker.run("cancel", "x")
    assert result.exit_code == 1
    assert "The task is completed" in result.stderr


def test_a_whole_queue_is_cancelled_only_when_that_is_meant(tracker: FakeTracker) -> None:
    """Without a person to ask, `--yes` must say so."""
    tracker.on("POST /v1/queues/q/cancel", {"cancelled": 3, "queue": "q", "seq": 1}, status=202)
    refused = tracker.run("cancel", "--queue", "q")
    assert refused.exit_code == 2
    assert not tracker.asked
    done = tracker.run("cancel", "--queue", "q", "--yes", "--json")
    assert json.loads(done.stdout)["cancelled"] == 3


def test_cancel_wants_one_target(tracker: FakeTracker) -> None:
    """Neither none nor two."""
    assert tracker.run("cancel").exit_code == 2
    assert tracker.run("cancel", "x", "--queue", "q").exit_code == 2


def test_dead_letters_are_listed_and_shown(tracker: FakeTracker) -> None:
    """The list says why; one letter shows its envelope; both are inert."""
    letters(tracker, "x")
    failure = {"reason": "fatal", "error_type": "ValueError", "message": HOSTILE, "fingerprint": "f"}
    history = [{"attempt": 1, "reason": "fatal", "message": HOSTILE, "ended_at": None}]
    whole = task("x", "failed", reason="fatal", failure=failure, history=history, envelope={"payload": {"note": 42}})
    tracker.on("GET /v1/dlq/x", whole)
    assert "fatal" in tracker.run("dlq", "list").stdout
    shown = tracker.run("dlq", "show", "x").stdout
    assert '"note": 42' in shown
    assert "\x1b" not in shown
    assert json.loads(tracker.run("dlq", "show", "x", "--json").stdout) == whole


def test_replay_sends_the_keys_of_the_letters(tracker: FakeTracker) -> None:
    """An id may be two tenants'; a key is one task's."""
    letters(tracker, "x", "y")
    tracker.on(REPLAY, {"replayed": 2, "skipped": []}, status=202)
    result = tracker.run("dlq", "replay", "x", "y", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"dry_run": False, "replayed": 2, "skipped": [], "ids": ["x", "y"]}
    assert tracker.bodies(REPLAY)[0]["ids"] == ["key-x", "key-y"]


def test_replaying_all_needs_a_yes(tracker: FakeTracker) -> None:
    """Without a person to ask, nothing is replayed."""
    letters(tracker, "x", "y")
    tracker.on(REPLAY, {"replayed": 2, "skipped": []}, status=202)
    assert tracker.run("dlq", "replay", "--all").exit_code == 2
    assert tracker.bodies(REPLAY) == []
    assert tracker.run("dlq", "replay", "--all", "--yes", "--queue", "agent-run").exit_code == 0
    assert tracker.queries("GET /v1/dlq")[-1]["queue"] == ["agent-run"]


def test_a_dry_run_replays_nothing(tracker: FakeTracker) -> None:
    """It names what would be replayed."""
    letters(tracker, "x", "y")
    result = tracker.run("dlq", "replay", "--all", "--dry-run")
    assert (result.exit_code, result.stdout.split()) == (0, ["x", "y"])
    assert tracker.bodies(REPLAY) == []


def test_all_pages_are_replayed_in_chunks(tracker: FakeTracker) -> None:
    """A long dead-letter queue is neither cut at a page nor sent in one request."""
    first, second = ([task(f"{name}{i}", "failed") for i in range(150)] for name in "ab")
    tracker.on("GET /v1/dlq", page(first, "more"), page(second))
    tracker.on(REPLAY, {"replayed": 100, "skipped": []}, status=202)
    assert tracker.run("dlq", "replay", "--all", "--yes").exit_code == 0
    assert [len(body["ids"]) for body in tracker.bodies(REPLAY)] == [100, 100, 100]
    assert tracker.queries("GET /v1/dlq")[1]["cursor"] == ["more"]


def test_what_could_not_be_replayed_fails_the_command(tracker: FakeTracker) -> None:
    """A letter that was replayed by someone else meanwhile is named."""
    letters(tracker, "x")
    tracker.on(REPLAY, {"replayed": 0, "skipped": [{"task_id": "x", "state": "queued"}]}, status=202)
    result = tracker.run("dlq", "replay", "x")
    assert result.exit_code == 1
    assert "skipped x: it is queued" in result.stderr


def test_replay_wants_ids_or_all(tracker: FakeTracker) -> None:
    """Filters choose among all; ids are chosen already."""
    for args in ([], ["x", "--all"], ["x", "--queue", "q"]):
        assert tracker.run("dlq", "replay", *args).exit_code == 2
