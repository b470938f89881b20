"""`make bench-governor`: what the rate-governor promises, measured at a stub provider whose log is the judge.

Each row starts its own server, its own processes and its own provider, and ends them; `--rows` runs some of them,
`--quick` runs small versions. With `--json` the last line is one JSON object, null where a row was not run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from bench.permits import adaptive, bound, budgets, fairness, queues, speed  # noqa: E402
from bench.permits.common import Line, Outcome, Sizes  # noqa: E402
from millstream.loop import loop_factory  # noqa: E402

ROWS: Mapping[str, Callable[[Sizes], Awaitable[Outcome]]] = {
    "window": bound.any_window,
    "utilisation": bound.utilisation_1d,
    "utilisation_2d": bound.utilisation_2d,
    "utilisation_workers": bound.utilisation_workers,
    "idle": bound.after_idle,
    "jain": fairness.shares,
    "tokens": fairness.tokens,
    "quiet": fairness.quiet,
    "latency": speed.latency,
    "rate": speed.rate,
    "failover": speed.failover,
    "aimd": adaptive.twice_too_high,
    "herd": adaptive.herd,
    "budget": budgets.race,
    "pools": queues.side_by_side,
    "hierarchy": queues.many_pools,
    "releaser": queues.releaser_kills,
    "throughput": queues.throughput,
}
FIGURES = (
    "max_window_ratio", "utilisation", "utilisation_2d", "jain", "permit_p50_ms", "permit_p99_ms", "acquires_per_s",
    "permits_per_s", "failover_s", "overshoot_failover", "goodput_ratio", "share_429",
)  # fmt: skip
WORST: Mapping[str, Callable[[float, float], float]] = {"max_window_ratio": max, "utilisation": min}
"""Which of two rows' figures stands for both."""


def show(line: Line) -> None:
    """One line of the table."""
    mark = {None: " ", True: "✓", False: "✗"}[line.met]
    print(f"{mark} {line.row:<20} {line.measure:<58} {line.value:<16} {line.must}", flush=True)


def run_row(name: str, sizes: Sizes, figures: dict[str, float | None]) -> bool:
    """Run one row and show it; False where it failed or a target was missed."""
    began = time.monotonic()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            outcome = runner.run(_started(ROWS[name], sizes))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (one row that cannot run must not hide the others)
        show(
            Line(name, "could not be measured", f"{type(error).__name__}: {str(error).splitlines()[:1]}", "", met=False)
        )
        return False
    for line in outcome.lines:
        show(line)
    print(f"  {name:<20} took {time.monotonic() - began:.0f} s", flush=True)
    for key, value in outcome.figures.items():
        known, worst = figures.get(key), WORST.get(key)
        figures[key] = value if known is None or worst is None else worst(known, value)
    return all(line.met is not False for line in outcome.lines)


async def _started(row: Callable[[Sizes], Awaitable[Outcome]], sizes: Sizes) -> Outcome:
    return await row(sizes)


def plain(value: float | None) -> float | None:
    """A figure as JSON can carry it."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def main() -> None:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="windows of 10 s and short runs, as in CI")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"some of: {', '.join(ROWS)}")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON in the last line")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a target was missed")
    chosen = parser.parse_args()
    names = [name.strip() for name in chosen.rows.split(",") if name.strip()]
    unknown = sorted(set(names) - set(ROWS))
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    figures: dict[str, float | None] = dict.fromkeys(FIGURES)
    good = [run_row(name, Sizes(quick=chosen.quick), figures) for name in names]
    if chosen.json:
        print(json.dumps({key: plain(figures[key]) for key in FIGURES}), flush=True)
    sys.exit(1 if chosen.strict and not all(good) else 0)


if __name__ == "__main__":
    main()
