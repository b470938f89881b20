"""Commands that read: what they print, for people and for programs, and how they end."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from millstream.cli import output
from tests.cli.fake_tracker import HOSTILE, FakeTracker, page, problem, run, task

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]")


def test_a_listing_is_one_json_document(tracker: FakeTracker) -> None:
    """`--json` prints what the tracker answered, on one line, and nothing else."""
    tracker.on("GET /v1/tasks", page([task("a", "queued")], "next-page"))
    result = tracker.run("tasks", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == page([task("a", "queued")], "next-page")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_every_filter_of_the_listing_reaches_the_tracker(tracker: FakeTracker) -> None:
    """Flags become the parameters of `GET /v1/tasks`; durations become instants."""
    tracker.on("GET /v1/tasks", page([]))
    flags = (
        "--state failed --state queued --queue q --tenant acme --type t --run r --tag g --search s --limit 7 --cursor c"
    )
    assert tracker.run("tasks", *flags.split(), "--since", "5m").exit_code == 0
    query = tracker.queries("GET /v1/tasks")[0]
    since = query.pop("since")[0]
    assert output.parse_time(since) is not None
    assert query == {
        "state": ["failed,queued"],
        "queue": ["q"],
        "tenant": ["acme"],
        "task_type": ["t"],
        "run_id": ["r"],
        "tag": ["g"],
        "q": ["s"],
        "limit": ["7"],
        "cursor": ["c"],
    }


def test_without_a_terminal_a_table_is_plain_columns(tracker: FakeTracker) -> None:
    """No frames and no colours where a program reads."""
    tracker.on("GET /v1/tasks", page([task("a", "queued"), task("long-identifier", "failed")]))
    lines = tracker.run("tasks").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["ID", "STATE"], ["a", "queued"], ["long-identifier", "failed"]]
    assert "ago" in lines[1]


@pytest.mark.parametrize("terminal", [False, True])
def test_texts_of_strangers_are_inert(tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """No control character reaches the terminal, no line is broken, and markup is printed as it stands."""
    monkeypatch.setattr(output, "on_terminal", lambda: terminal)
    error = {"reason": "fatal", "type": HOSTILE, "message": HOSTILE, "fingerprint": HOSTILE, "traceback": HOSTILE}
    line = {"seq": 1, "at": None, "kind": "failed", "state": "failed", "attempt": 1, "detail": HOSTILE}
    attempt = {"attempt": 1, "outcome": "failed", "worker_id": HOSTILE, "message": HOSTILE}
    hostile = task("x", "failed", title=HOSTILE, tags=[HOSTILE], run_id=HOSTILE, error=error)
    whole = hostile | {"timeline": [line], "attempts": [attempt], "result": {"k": HOSTILE}}
    tracker.on("GET /v1/tasks", page([hostile]))
    tracker.on("GET /v1/tasks/x", whole)
    tracker.on("GET /v1/tasks/x/why", {"task_id": "x", "state": "failed", "why": HOSTILE, "source": HOSTILE})
    for command in (["tasks"], ["show", "x"], ["why", "x"]):
        result = tracker.run(*command)
        assert result.exit_code == 0
        assert not CONTROL.search(result.stdout), command
        assert "[bold]mark" in result.stdout or terminal
        assert "[bold]" in result.stdout


def test_hostile_texts_survive_as_json(tracker: FakeTracker) -> None:
    """A program gets the text as it was; a terminal gets ASCII."""
    tracker.on("GET /v1/tasks/x", task("x", "failed", title=HOSTILE))
    shown = tracker.run("show", "x", "--json").stdout
    assert json.loads(shown)["title"] == HOSTILE
    assert shown.isascii()
    assert "\x1b" not in shown


def test_show_tells_timeline_attempts_error_usage_and_trace(tracker: FakeTracker) -> None:
    """Everything that the tracker knows of a task is on one page."""
    error = {"reason": "fatal", "type": "ValueError", "message": "no such note", "fingerprint": "f00d"}
    line = {"seq": 4711, "at": "2026-01-02T03:04:05Z", "kind": "failed", "state": "failed", "attempt": 2, "detail": "d"}
    attempt = {
        "attempt": 2,
        "outcome": "failed",
        "started_at": "2026-01-02T03:04:05Z",
        "ended_at": "2026-01-02T03:04:08Z",
    }
    usage = {"tokens_in": 7, "tokens_out": 0, "cost_usd": 0.25, "runtime_s": 1.5}
    more: dict[str, Any] = {
        "error": error,
        "timeline": [line],
        "attempts": [attempt],
        "usage": usage,
        "trace_id": "c0ffee",
    }
    tracker.on("GET /v1/tasks/x", task("x", "failed", **more))
    shown = tracker.run("show", "x").stdout
    for text in ("c0ffee", "tokens_in 7", "cost_usd 0.25", "no such note", "f00d", "4711", "3.0s"):
        assert text in shown
    assert "tokens_out" not in shown


def test_show_tells_how_long_limits_held_a_task(tracker: FakeTracker) -> None:
    """All its turns together; a plain task says nothing of it."""
    tracker.on("GET /v1/tasks/x", task("x", "queued", limits=["llm", "tenant/acme"], held_s=12.4, held_at=None))
    shown = tracker.run("show", "x").stdout
    assert "llm, tenant/acme" in shown
    assert "for 12s" in shown
    tracker.on("GET /v1/tasks/y", task("y", "queued", limits=[], held_s=0.0, held_at=None))
    assert "held" not in tracker.run("show", "y").stdout


def test_ids_are_quoted_in_paths(tracker: FakeTracker) -> None:
    """An id with slashes, spaces or a question mark asks for that task and for nothing else."""
    tracker.on("GET /v1/tasks/a%2Fb%20c%3F%23", task("a/b c?#", "queued"))
    assert tracker.run("show", "a/b c?#", "--tenant", "acme").exit_code == 0
    assert tracker.queries("GET /v1/tasks/a%2Fb%20c%3F%23") == [{"tenant": ["acme"]}]


def test_an_unknown_task_is_wrong_use(tracker: FakeTracker) -> None:
    """404 ends with exit status 2 and says so on standard error alone."""
    result = tracker.run("why", "nobody")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "There is no task of this name" in result.stderr


def test_a_problem_is_shown_with_its_faults_and_trace(tracker: FakeTracker) -> None:
    """Code, status, the pointer of every fault, and the trace id are there for a report; strangers' texts are inert."""
    faults = [{"pointer": "#/since", "detail": "Expected a time"}, {"pointer": "#/x", "detail": HOSTILE}]
    answer = problem(400, "bad_parameter", "It does not fit", errors=faults, trace_id="abc123")
    tracker.on("GET /v1/tasks", answer)
    result = tracker.run("tasks")
    assert result.exit_code == 2
    for text in ("It does not fit (bad_parameter, HTTP 400)", "#/since: Expected a time", "trace abc123"):
        assert text in result.stderr
    assert not CONTROL.search(result.stderr)


def test_a_fault_of_the_tracker_is_a_failure(tracker: FakeTracker) -> None:
    """503 ends with exit status 1 and says when to try again."""
    tracker.on("GET /v1/limits", problem(503, "governor_unavailable", "No rate-governor answered", retry_after=2))
    result = tracker.run("limits")
    assert result.exit_code == 1
    assert "try again in 2 s" in result.stderr


def test_without_a_tracker_the_command_says_how_to_get_one() -> None:
    """A refused connection is explained, not traced back."""
    result = run("tasks", "--http-url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "no tracker answers at http://127.0.0.1:9: start it with `millstream up`" in result.stderr


def test_another_server_at_the_address_is_recognised(tracker: FakeTracker) -> None:
    """HTML or someone else's JSON is not taken for an answer."""
    tracker.on("GET /v1/queues", ["not", "ours"])
    result = tracker.run("queues")
    assert result.exit_code == 1
    assert "is no Millstream tracker" in result.stderr


def test_an_address_that_is_none_is_wrong_use() -> None:
    """Only HTTP addresses can be asked."""
    assert run("tasks", "--http-url", "ftp://example").exit_code == 2


def test_the_port_of_the_settings_is_asked_unless_told_otherwise(
    tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever moved the tracker in the settings need not repeat it for each command."""
    monkeypatch.delenv("MILLSTREAM_HTTP_URL", raising=False)
    tracker.on("GET /v1/queues", page([]))
    assert run("queues", env={"MILLSTREAM_HTTP_PORT": tracker.url.rpartition(":")[2]}).exit_code == 0


def test_queues_are_a_table(tracker: FakeTracker) -> None:
    """Every state has its column."""
    states = {"queued": 3, "held": 4}
    tracker.on("GET /v1/queues", page([{"queue": "agent-run", "states": states, "oldest_ready_age_s": 12.4}]))
    shown = tracker.run("queues").stdout
    assert "agent-run  3       4" in shown
    assert "12s" in shown


def test_an_empty_listing_says_so_on_standard_error(tracker: FakeTracker) -> None:
    """Standard output stays empty, so that nothing is taken for a row."""
    tracker.on("GET /v1/tasks", page([]))
    result = tracker.run("tasks")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no tasks\n")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.34, "340ms"), (1.5, "1.5s"), (12, "12s"), (300, "5m"), (10_800, "3h"), (200_000, "2d")]
)
def test_spans_are_said_in_their_largest_unit(seconds: float, words: str) -> None:
    """People read one number and one unit."""
    assert output.span(seconds) == words
