"""The bench runs and prints what it promises; its figures are for people, never for a test."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.source import REPOSITORY

KEYS = {"millstream_tasks_per_s", "submit_per_s", "bare_per_s", "p50_ms", "p95_ms", "p99_ms", "recovery_s"}


def test_the_bench_ends_with_its_figures() -> None:
    """A small run: the last line is JSON with every figure, each a positive number."""
    argv = [sys.executable, "bench/run.py", "--tasks", "300", "--runs", "1", "--latency-tasks", "100"]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) >= KEYS
    assert all(value > 0 for value in figures.values())
