"""Rows about time: what a permit costs beside a bare nats-py echo in the same run, and how soon a successor leads."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.permits.common import Outcome, Sizes, Stage, at_least, at_most, served, stage, told, total
from millstream_schemas.topology import LEADER_TTL_S
from tests.support.leaders import leader
from tests.support.permit_load import Slots
from tests.support.provider import Call, KeyConfig
from tests.support.windows import fullest, most_at_once, resumed_after

OPEN = '[limits.open]\nrequests = "1_000_000_000/min"\n'
RUNS = 3
LATENCY_SLOTS = 8
RATE_SLOTS = (64, 128)
BATCH = 16


@dataclass(frozen=True, slots=True)
class Found:
    """What one probe measured."""

    rate: float
    p50_ms: float
    p99_ms: float


@contextmanager
def _opened() -> Generator[Stage]:
    """A governor with a limit that never holds, and the echo, on one server."""
    with stage(OPEN) as on:
        on.fleet.governor()
        server = on.processes.start_command(
            [sys.executable, "-m", "bench.permits.probe", "serve", on.fleet.server.url], "echo"
        )
        server.wait_for_log("ready")
        yield on


async def _probe(on: Stage, kind: str, concurrency: int, seconds: float, *more: str) -> Found:
    argv = [sys.executable, "-m", "bench.permits.probe", kind, on.fleet.server.url, str(concurrency), f"{seconds:g}"]
    process = on.processes.start_command([*argv, *more], kind)
    status = await asyncio.to_thread(process.wait, seconds + 60)
    if status != 0:
        raise SystemExit(f"bench: the probe {kind} ended with {status}:\n{process.log()[-2000:]}")
    return Found(**json.loads(process.log().splitlines()[-1]))


async def latency(sizes: Sizes) -> Outcome:
    """How long a permit takes that no limit holds, 8 at once, beside an echo; the best of 3 alternating runs."""
    row, seconds = "latency", sizes.pick(2, 8)
    pairs: list[tuple[Found, Found]] = []
    with _opened() as on:
        for _ in range(RUNS):
            echo = await _probe(on, "echo", LATENCY_SLOTS, seconds)
            pairs.append((await _probe(on, "permits", LATENCY_SLOTS, seconds), echo))
    permit, echo = min(pairs, key=lambda pair: pair[0].p50_ms / pair[1].p50_ms)
    lines = [
        at_most(row, "p50 over that of the echo", permit.p50_ms / echo.p50_ms, 3.0),
        at_most(row, "p50 (to be reported)", permit.p50_ms, 1.0, " ms"),
        at_most(row, "p99 (to be reported)", permit.p99_ms, 10.0, " ms"),
        told(row, "echo p50, p99", f"{echo.p50_ms:.3f}, {echo.p99_ms:.3f} ms"),
        told(row, "permits/s, echoes/s", f"{permit.rate:,.0f}, {echo.rate:,.0f}"),
    ]
    return Outcome(lines, {"permit_p50_ms": permit.p50_ms, "permit_p99_ms": permit.p99_ms})


async def rate(sizes: Sizes) -> Outcome:
    """How many permits a second, one by one with 64 and 128 at once and in batches of 16, beside the echo."""
    row, seconds = "rate", sizes.pick(2, 8)
    outcome = Outcome()
    best: dict[int, tuple[Found, Found, Found]] = {}
    batches: list[Found] = []
    with _opened() as on:
        for _ in range(RUNS):
            for slots in RATE_SLOTS:
                echo = await _probe(on, "echo", slots, seconds)
                one = await _probe(on, "bare", slots, seconds, "1")
                client = await _probe(on, "permits", slots, seconds)
                if slots not in best or one.rate / echo.rate > best[slots][0].rate / best[slots][1].rate:
                    best[slots] = (one, echo, client)
            batches.append(await _probe(on, "bare", RATE_SLOTS[0], seconds, str(BATCH)))
    for slots, (one, echo, client) in best.items():
        outcome.lines += [
            at_least(row, f"acquires over echoes, {slots} at once", one.rate / echo.rate, 0.5),
            told(row, f"acquires/s, {slots} at once", f"{one.rate:,.0f} (p99 {one.p99_ms:.1f} ms)"),
            told(row, f"echoes/s, {slots} at once", f"{echo.rate:,.0f} (p99 {echo.p99_ms:.1f} ms)"),
            told(row, f"permits/s through our client, {slots} at once", f"{client.rate:,.0f}"),
        ]
    permits = max(found.rate for found in batches)
    outcome.lines.append(at_least(row, f"permits/s in batches of {BATCH} (to be reported)", permits, 50_000))
    outcome.figures = {
        "acquires_per_s": max(one.rate for one, _, _ in best.values()),
        "permits_per_s": permits,
    }
    return outcome


# --- failover ------------------------------------------------------------------------------------

PLACES = 8
CALL_S = 0.2
LEARNED_S = 17.0
"""After a takeover: until what nobody renews counts as free again."""


async def failover(sizes: Sizes) -> Outcome:
    """The leader is killed with a standby beside it: how soon permits flow again, at what overshoot, with all places."""
    window_s, kills = sizes.window_s, int(sizes.pick(1, 3))
    amount = int(window_s * 50)
    seconds = 5 + kills * (LEARNED_S + 6)
    config = f'[limits.llm]\nrequests = "{amount}/{window_s:g}s"\n[limits.places]\nconcurrency = {PLACES}\n'
    slots = (Slots(("llm",), "llm", 5), Slots(("places",), "places", 5))
    with stage(config, {"places": KeyConfig(latency_s=CALL_S)}) as on:
        fleet = on.fleet
        governors = [fleet.governor(), fleet.start("governor", name="standby")]
        loads = on.loads(slots, seconds)
        killed: list[float] = []
        async with fleet.broker() as broker:
            for number in range(kills):
                await _until(loads.began + 5 + number * (LEARNED_S + 6))
                victim = await leader(fleet, broker, fleet.names.governor_lock, governors)
                killed.append(time.monotonic())
                victim.kill()
                governors = [one for one in governors if one is not victim]
                governors.append(fleet.start("governor", name="standby"))
        counts = await loads.finished()
        calls = await on.provider.log()
    return _failed_over(calls, killed, amount, window_s, [total(counts)])


def _failed_over(calls: list[Call], killed: list[float], amount: int, window_s: float, notes: list[str]) -> Outcome:
    row = "failover"
    times = served(calls, "llm")
    took = max(resumed_after(times, at, LEADER_TTL_S + 4) for at in killed)
    spans = [(call.at, call.ended) for call in calls if call.key == "places" and call.ended]
    overshoot = max(fullest(times, window_s) / amount, most_at_once(spans) / PLACES) - 1
    after = [most_at_once([span for span in spans if at + LEARNED_S < span[0] < at + LEARNED_S + 5]) for at in killed]
    lines = [
        at_most(row, "seconds until permits flow again", took, LEADER_TTL_S + 1, " s"),
        at_most(row, "overshoot, rate and places", max(0.0, overshoot), 0.0),
        at_least(row, f"places of {PLACES} in use again", min(after), PLACES),
        *(told(row, "counted", note) for note in notes),
    ]
    return Outcome(lines, {"failover_s": took, "overshoot_failover": max(0.0, overshoot)})


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
