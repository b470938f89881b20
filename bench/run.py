"""`make bench`: Millstream end to end beside a bare nats-py loop, in alternating runs on one machine.

End to end means: accepted, run, outcome committed, and visible in the tracker; one process for each actor, one for the
producer, one for the server. The figures that count are the ratios within one run: machines differ and are noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from millstream.server import LocalServer, dies_with_parent  # noqa: E402

LATENCY_PER_S = 100.0
CONCURRENCY = 256


class Mill:
    """A server and one process for each actor."""

    def __init__(self, folder: Path, server: LocalServer) -> None:
        self.env = {
            **os.environ,
            "MILLSTREAM_NATS_URL": server.url,
            "MILLSTREAM_HTTP_PORT": "0",
            "MILLSTREAM_DATA_DIR": str(folder / "data"),
            "MILLSTREAM_CONCURRENCY": str(CONCURRENCY),
            "MILLSTREAM_LOG_LEVEL": "ERROR",
            "PYTHONPATH": str(ROOT),
        }
        self.url = ""
        self._client = httpx.Client(timeout=10)  # one for all questions: making one costs more than the answer
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start one process for each actor, and wait until the tracker answers and knows the worker."""
        tracker = self._spawn("-m", "millstream", "tracker")
        self._spawn("-m", "millstream", "dispatcher")
        self._spawn("-m", "millstream", "governor")
        self._spawn("-m", "millstream", "worker", "bench.app:app")
        assert tracker.stdout is not None
        self.url = json.loads(tracker.stdout.readline())["http"]
        _until(lambda: len(self.get("/v1/workers")["items"]) == 1, "the worker is registered")

    def _spawn(self, *argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            dies_with_parent([sys.executable, *argv]), cwd=ROOT, env=self.env, stdout=subprocess.PIPE, text=True
        )
        self._processes.append(process)
        return process

    def get(self, path: str, **params: Any) -> Any:
        """One question to the tracker."""
        return self._client.get(f"{self.url}{path}", params=params).raise_for_status().json()

    def completed(self) -> int:
        """How many tasks the tracker shows as completed."""
        return int(self.get("/v1/tasks", state="completed", limit=1)["total"])

    def state(self, task_id: str) -> str:
        """The state of a task, empty where it is not known or the tracker cannot say."""
        answer = self._client.get(f"{self.url}/v1/tasks/{task_id}")
        return str(answer.json()["state"]) if answer.is_success else ""

    def stop(self) -> None:
        """End the actors."""
        self._client.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(30)


def _until(reached: Any, what: str, timeout_s: float = 120.0) -> None:
    ends = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > ends:
            raise SystemExit(f"bench: waited {timeout_s:g} s for: {what}")
        time.sleep(0.1)


@contextmanager
def _child(env: dict[str, str], *argv: str) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        dies_with_parent([sys.executable, *argv]), cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
        if process.wait(120) != 0:
            raise SystemExit(f"bench: {' '.join(argv)} failed")
    finally:
        process.kill()


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def mill_run(mill: Mill, name: str, count: int) -> tuple[float, float]:
    """Tasks per second from the first submit to the last one visible, and submits per second."""
    before = mill.completed()
    with _child(mill.env, "-m", "bench.producer", "flood", name, str(count)) as producer:
        times = _line(producer)
        _until(lambda: mill.completed() >= before + count, f"{count} tasks are visible")
        visible = time.time()
    return count / (visible - times["began"]), count / (times["ended"] - times["began"])


def bare_run(mill: Mill, url: str, count: int) -> float:
    """Messages per second of the bare loop, from the first publish to the last ack."""
    with _child(mill.env, "-m", "bench.bare", "consume", url, str(count)) as consumer:
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == "ready\n"
        with _child(mill.env, "-m", "bench.bare", "produce", url, str(count)) as producer:
            began = float(_line(producer)["began"])
        ended = float(_line(consumer)["ended"])
    return count / (ended - began)


def latency_run(mill: Mill, name: str, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds from submit to start and from start to visible, at a steady 100 tasks a second."""
    visible: dict[str, float] = {}
    drip = ("-m", "bench.producer", "drip", name, str(count), str(LATENCY_PER_S))
    with httpx.stream("GET", f"{mill.url}/v1/stream", timeout=60) as stream, _child(mill.env, *drip) as producer:
        lines = stream.iter_lines()
        while len(visible) < count:
            line = next(lines)
            if line.startswith("data:") and '"completed"' in line:
                event = json.loads(line[5:])
                visible.setdefault(event["task_id"], time.time())
        sent: dict[str, float] = _line(producer)
    started = {task_id: float(mill.get(f"/v1/tasks/{task_id}")["result"]) for task_id in sent}
    to_start = [(started[task_id] - at) * 1000 for task_id, at in sent.items()]
    to_visible = [(visible[task_id] - started[task_id]) * 1000 for task_id in sent]
    return to_start, to_visible


def recovery_run(mill: Mill, server: LocalServer) -> float:
    """Seconds from a killed server being back to a task done by the worker that had been idle."""
    server.kill()
    time.sleep(2.0)  # the outage
    server.restart()
    back = time.time()
    with _child(mill.env, "-m", "bench.producer", "drip", "recovered", "1", "1") as producer:
        _line(producer)
        _until(lambda: mill.state("recovered-0") == "completed", "the task after the outage is completed")
    return float(mill.get("/v1/tasks/recovered-0")["result"]) - back


def percentiles(values: list[float]) -> dict[str, float]:
    """The 50th, 95th and 99th percentile, in the values' unit."""
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 2), "p95": round(cuts[94], 2), "p99": round(cuts[98], 2)}


def main() -> None:
    """Run everything and print a table and, as the last line, the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=15_000, help="tasks of one run")
    parser.add_argument("--runs", type=int, default=3, help="alternating runs; medians are reported")
    parser.add_argument("--latency-tasks", type=int, default=1000)
    chosen = parser.parse_args()
    mills: list[float] = []
    submits: list[float] = []
    bares: list[float] = []
    with tempfile.TemporaryDirectory() as folder, LocalServer(Path(folder) / "nats") as server:
        mill = Mill(Path(folder), server)
        mill.start()
        try:
            mill_run(mill, "warm", 1000)
            for number in range(chosen.runs):
                rate, submit = mill_run(mill, f"run{number}", chosen.tasks)
                mills.append(rate)
                submits.append(submit)
                bares.append(bare_run(mill, server.url, chosen.tasks))
                print(f"run {number + 1}: millstream {rate:,.0f}/s, submit {submit:,.0f}/s, bare {bares[-1]:,.0f}/s")
            to_start, to_visible = latency_run(mill, "latency", chosen.latency_tasks)
            recovery_s = recovery_run(mill, server)
        finally:
            mill.stop()
    start, seen = percentiles(to_start), percentiles(to_visible)
    print(f"submit to start at {LATENCY_PER_S:g}/s: {start} ms; start to visible: {seen} ms")
    print(f"an idle worker ran a task {recovery_s:.2f} s after its killed server was back")
    figures = {
        "millstream_tasks_per_s": round(statistics.median(mills)),
        "submit_per_s": round(statistics.median(submits)),
        "bare_per_s": round(statistics.median(bares)),
        "ratio": round(statistics.median(mills) / statistics.median(bares), 3),
        "p50_ms": start["p50"],
        "p95_ms": start["p95"],
        "p99_ms": start["p99"],
        "visible_p50_ms": seen["p50"],
        "visible_p95_ms": seen["p95"],
        "visible_p99_ms": seen["p99"],
        "recovery_s": round(recovery_s, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
