"""`millstream demo` as a real process: the whole path on real files, in a small and fast variant."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.demo import bundled_texts
from millstream.demo.documents import Document, Unreadable, broken_document, plan, read_text
from millstream.demo.notes import Related, Relation
from millstream.demo.report import mutual
from tests.support.waiting import wait_until_sync

KEYS = [
    "submitted",
    "completed",
    "failed",
    "retried",
    "throttled",
    "provider_calls",
    "provider_429",
    "limit_per_minute",
    "max_calls_in_any_minute",
    "elapsed_s",
    "notes",
]


class Demo:
    """One `millstream demo …` with its two channels apart."""

    def __init__(self, arguments: tuple[str, ...], logs: Path, env: dict[str, str]) -> None:
        self._logs = logs
        foreign = ("MILLSTREAM_", "OPENAI_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        with (logs / "stdout").open("wb") as out, (logs / "stderr").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "millstream", "demo", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=logs,
                env={**clean, "TMPDIR": str(logs), **env},
            )

    @property
    def stdout(self) -> str:
        return (self._logs / "stdout").read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return (self._logs / "stderr").read_text(encoding="utf-8")

    def page(self) -> str:
        """The address of the tracker's page, as it is told early."""

        def told() -> str | None:
            assert self.process.poll() is None, self.stderr
            found = re.search(r"http://127\.0\.0\.1:\d+$", self.stderr, re.MULTILINE)
            return found[0] if found else None

        return wait_until_sync(told, "the demo names its page") or ""

    def end(self, timeout: float = 120.0) -> int:
        """The exit status."""
        return self.process.wait(timeout)

    def figures(self) -> dict[str, Any]:
        """The JSON of the last line."""
        found: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return found


Start = Callable[..., Demo]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a demo; none outlives the test."""
    logs = tmp_path / "logs"
    logs.mkdir()
    with ExitStack() as stack:

        def run(*arguments: str | Path, **env: str) -> Demo:
            demo = Demo(tuple(map(str, arguments)), logs, env)
            stack.callback(demo.process.wait)
            stack.callback(demo.process.kill)
            return demo

        yield run


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder of four notes, one of them in a folder below, and files that are no notes."""
    folder = tmp_path / "notes"
    (folder / "deeper").mkdir(parents=True)
    for number, (name, text) in enumerate(list(bundled_texts().items())[:4]):
        where = folder / "deeper" if number == 3 else folder
        (where / name).write_text(text, encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.md").write_text("# Hidden", encoding="utf-8")
    return folder


def test_every_note_takes_its_way_and_the_figures_add_up(start: Start, notes: Path) -> None:
    """Submit to outcome through all actors: waits, retries and one dead letter on the way, and no call too many."""
    demo = start(notes, "--limit", "60", "--json")
    page = demo.page()

    def letters() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{page}/v1/dlq", timeout=10).json()["items"]
        return found

    letter = wait_until_sync(letters, "the broken file is dead-lettered")[0]
    assert (letter["title"], letter["reason"]) == ("broken.md", "fatal")
    assert "UTF-8" in httpx.get(f"{page}/v1/dlq/{letter['key']}", timeout=10).json()["failure"]["message"]

    assert demo.end() == 0, demo.stderr
    found = demo.figures()
    assert list(found) == KEYS
    assert (found["submitted"], found["completed"], found["failed"]) == (13, 12, 1)
    assert found["retried"] >= 1
    assert found["throttled"] >= 1
    assert found["provider_429"] == 0
    assert found["provider_calls"] == found["completed"] + found["retried"]
    assert found["max_calls_in_any_minute"] <= found["limit_per_minute"] == 60
    assert [note["title"] for note in found["notes"]] == _titles()[:4]
    assert all(note["summary"] and note["related"] for note in found["notes"])
    assert demo.stdout.count("\n") == 1
    assert not list((notes.parent / "logs").glob("millstream-demo-*")), "the data was left behind"


def _titles() -> list[str]:
    return [text.splitlines()[0].removeprefix("# ") for text in bundled_texts().values()]


def test_another_endpoint_is_called_where_the_environment_names_one(start: Start, notes: Path) -> None:
    """OPENAI_BASE_URL replaces the local model server; calls are then counted on our side, and rightly."""
    command = [sys.executable, "-m", "millstream.demo.modelserver", "--port", "0", "--requests-per-minute", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as endpoint:
        try:
            assert endpoint.stdout is not None
            told = json.loads(endpoint.stdout.readline())
            demo = start(notes, "--max-files", "2", "--limit", "120", "--json", OPENAI_BASE_URL=told["base_url"])
            assert demo.end() == 0, demo.stderr
            calls = httpx.get(f"{told['url']}/stats", timeout=10).json()["calls"]
        finally:
            endpoint.kill()
    found = demo.figures()
    assert found["provider_calls"] == calls == 6
    assert found["submitted"] == 7


def test_an_interrupt_ends_all_of_it(start: Start, notes: Path, tmp_path: Path) -> None:
    """Ctrl-C drains the actors and ends the server; no traceback, status 130."""
    data = tmp_path / "data"
    demo = start(notes, "--limit", "4", "--data-dir", data)

    def told() -> bool:
        assert demo.process.poll() is None, demo.stderr
        return "Watch it live" in demo.stdout

    wait_until_sync(told, "the demo runs")
    assert list((data / "nats").glob("*.ports"))
    demo.process.send_signal(signal.SIGINT)
    assert demo.end(30) == 130
    assert "Traceback" not in demo.stdout + demo.stderr
    assert not list((data / "nats").glob("*.ports")), "the server has not ended"


def test_a_run_over_its_time_says_so_and_fails(start: Start, notes: Path) -> None:
    """Figures that do not add up are shown, named, and end with status 1."""
    demo = start(notes, "--limit", "4", "--max-files", "2", "--timeout", "3", "--json")
    assert demo.end(60) == 1
    found = demo.figures()
    assert found["submitted"] > found["completed"] + found["failed"]
    assert "PROBLEM: the run did not end within its time limit" in demo.stderr


def test_wrong_use_ends_before_anything_starts(start: Start, notes: Path, tmp_path: Path) -> None:
    """A folder without notes, and a data folder in use, are the caller's to put right: status 2."""
    empty = tmp_path / "empty"
    empty.mkdir()
    demo = start(empty)
    assert demo.end(30) == 2
    assert "holds no .md" in demo.stderr
    demo = start(notes, "--data-dir", notes)
    assert demo.end(30) == 2
    assert "is not empty" in demo.stderr
    demo = start(notes, "--data-dir", next(notes.iterdir()) / "data")
    assert demo.end(30) == 2
    assert "cannot be made" in demo.stderr


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 40])
def test_the_default_limit_makes_any_number_of_notes_wait_a_few_minutes(count: int) -> None:
    """At the governor's pace a run takes 65 s at least and less than four minutes, retries included."""
    limits = plan([Document(Path("x"), "x", 500)] * count, None)
    calls = limits.calls + limits.calls // (limits.error_every - 1)
    interval_s = 60.36 / limits.requests_per_minute
    assert calls > limits.requests_per_minute
    assert limits.calls >= limits.error_every, "no call would fail"
    assert (calls - 1) * interval_s >= 65
    assert (calls + 1) * interval_s < 200
    assert limits.tokens_per_minute >= 2 * 1_500


def test_what_is_no_text_is_told_from_what_is(tmp_path: Path) -> None:
    """Bytes of another encoding, NULs, emptiness and absence are named; a byte order mark is no fault."""
    (tmp_path / "good.md").write_bytes(b"\xef\xbb\xbf# Good")
    assert read_text(tmp_path / "good.md") == "# Good"
    (tmp_path / "nul.md").write_bytes(b"a\0b")
    (tmp_path / "empty.md").write_bytes(b" \n")
    broken = broken_document(tmp_path).path
    for path, said in ((broken, "UTF-8"), (tmp_path / "nul.md", "NUL"), (tmp_path / "empty.md", "empty")):
        with pytest.raises(Unreadable, match=said):
            read_text(path)
    with pytest.raises(Unreadable, match="cannot be read"):
        read_text(tmp_path / "absent.md")


def test_relations_are_shown_both_ways() -> None:
    """The first note to be related knew nobody; it is shown with those that found it later."""
    first = Relation(path="a", title="A", summary="s", related=[], remark="")
    second = Relation(path="b", title="B", summary="s", related=[Related(path="a", title="A", score=0.5)], remark="")
    shown = {note.path: [(other.title, other.score) for other in note.related] for note in mutual([second, first])}
    assert shown == {"a": [("B", 0.5)], "b": [("A", 0.5)]}
