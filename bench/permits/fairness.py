"""Rows about fair order, through the releaser: shares by weight, gaps, and one task behind thousands."""

from __future__ import annotations

import asyncio
import time

from bench.permits.common import PROCESSES, SLOTS, Outcome, Sizes, Stage, at_least, at_most, stage, told
from millstream.ports import Broker
from tests.support.many import held, submit_all
from tests.support.provider import Call
from tests.support.waiting import wait_until
from tests.support.windows import between, jain, longest_gap

SMALL_TENANTS = 20
SMALL_TASKS = 50
RATE_PER_S = 50
WEIGHTS = {"big": 1.0, **{f"small{n:02d}": 2.0 if n < SMALL_TENANTS // 2 else 1.0 for n in range(SMALL_TENANTS)}}
QUIET_TASKS = 5
NOISY_CALL_S = 0.1
TOKENS_PER_S = 2000
TOKENS = {"large": 1000, "small": 100}
"""What one task of each tenant takes of a limit of tokens."""


def _tasks(task_type: str, prefix: str, count: int, **payload: object) -> list[dict[str, object]]:
    return [{"task_id": f"{prefix}-{n}", "task_type": task_type, "payload": payload} for n in range(count)]


async def shares(sizes: Sizes) -> Outcome:
    """One tenant with 15,000 tasks, 20 with 50, weights 1 and 2: who got what while all of them waited."""
    row, big = "jain", int(sizes.pick(2000, 15_000))
    weights = "\n".join(f"[tenants.{name}]\nweight = {weight:g}" for name, weight in WEIGHTS.items())
    # The queue itself names the limit, so that all is held before the first worker is there.
    config = f'[limits.llm]\nrequests = "{RATE_PER_S * 60}/min"\n[queues.calls]\nlimits = ["llm"]\n{weights}\n'
    with stage(config) as on:
        fleet = on.fleet
        fleet.dispatcher()
        fleet.governor()
        async with fleet.plain() as client, fleet.broker() as broker:
            count = await submit_all(fleet, client, _tasks("call", "big", big), tenant="big")
            for name in WEIGHTS:
                if name != "big":
                    count += await submit_all(fleet, client, _tasks("call", name, SMALL_TASKS), tenant=name)

            async def all_there() -> bool:
                return await held(broker, fleet) >= count

            await wait_until(all_there, f"{count} tasks are held", timeout=120)
            for _ in range(PROCESSES):
                on.worker(SLOTS)
            await asyncio.sleep(SMALL_TASKS * sum(WEIGHTS.values()) / 2 / RATE_PER_S + 10)
        calls = await on.provider.log("llm")
    return _judge(row, calls)


def _judge(row: str, calls: list[Call]) -> Outcome:
    """Over the time in which every tenant still has something waiting."""
    by_tenant = {name: [call.at for call in calls if call.tag == name] for name in WEIGHTS}
    dry = [times[SMALL_TASKS - 1] for name, times in by_tenant.items() if name != "big" and len(times) >= SMALL_TASKS]
    ends = min(dry, default=calls[-1].at)
    start = min(calls[0].at, ends)
    got = {name: between(times, start, ends) for name, times in by_tenant.items()}
    index = jain([len(times) / WEIGHTS[name] for name, times in got.items()])
    per_s = sum(len(times) for times in got.values()) / max(0.001, ends - start)
    fair_gap_s = sum(WEIGHTS.values()) / max(0.001, per_s)
    lightest = [name for name, weight in WEIGHTS.items() if weight == 1.0 and name != "big"]
    gap_s = max(longest_gap(got[name], start, ends) for name in lightest)
    lines = [
        at_least(row, "Jain index over weighted tenants", index, 0.99),
        at_most(row, "longest gap of the smallest tenants over the fair gap", gap_s / fair_gap_s, 2.0),
        at_least(row, "all 21 wait for", ends - start, 5.0, " s"),
        told(row, "starts/s meanwhile", per_s),
        told(row, "starts of big, of weight 2, of weight 1", _means(got)),
    ]
    return Outcome(lines, {"jain": index})


def _means(got: dict[str, list[float]]) -> str:
    def mean(weight: float) -> float:
        counts = [len(times) for name, times in got.items() if WEIGHTS[name] == weight and name != "big"]
        return sum(counts) / len(counts)

    return f"{len(got['big'])}, {mean(2.0):.1f}, {mean(1.0):.1f}"


async def tokens(sizes: Sizes) -> Outcome:
    """Two tenants whose tasks take 1000 and 100 tokens, in one pool, while both wait: who got how many tokens."""
    row, seconds = "tokens", sizes.pick(12, 40)
    config = f'[limits.llm]\ntokens = "{TOKENS_PER_S * 60}/min"\n[queues.calls]\nlimits = ["llm"]\n'
    with stage(config) as on:
        fleet = on.fleet
        fleet.dispatcher()
        fleet.governor()
        async with fleet.plain() as client, fleet.broker() as broker:
            count = 0
            for name, size in TOKENS.items():
                tasks = _tasks("call", name, int(2 * seconds * TOKENS_PER_S / size), tokens=size)
                estimated = [{**task, "usage_estimate": {"tokens_in": size}} for task in tasks]
                count += await submit_all(fleet, client, estimated, tenant=name)

            async def all_there() -> bool:
                return await held(broker, fleet) >= count

            await wait_until(all_there, f"{count} tasks are held", timeout=120)
            on.worker(SLOTS)
            await asyncio.sleep(seconds)
        calls = await on.provider.log("llm")
    got = {name: size * sum(call.tag == name for call in calls) for name, size in TOKENS.items()}
    most, all_of = max(TOKENS.values()), sum(got.values())
    return Outcome(
        [
            at_most(row, "tokens between the two, in large tasks", abs(got["large"] - got["small"]) / most, 4.0),
            at_least(row, "tokens/s over the limit's rate", all_of / (calls[-1].at - calls[0].at) / TOKENS_PER_S, 0.9),
            told(row, "tokens of large, small", f"{got['large']}, {got['small']}"),
        ]
    )


async def quiet(sizes: Sizes) -> Outcome:
    """One task of a quiet tenant behind 15,000 of another: how much later it starts than in an empty system."""
    row, noisy = "quiet", int(sizes.pick(2000, 15_000))
    with stage("[queues.calls]\nfair = true\n") as on:
        fleet = on.fleet
        fleet.dispatcher()
        for _ in range(PROCESSES):
            on.worker(SLOTS)
        sent: dict[str, float] = {}
        async with fleet.plain() as client, fleet.broker() as broker:

            async def one(name: str) -> None:
                task = {"task_id": name, "task_type": "free", "payload": {"tag": name}}
                sent[name] = time.monotonic()
                await submit_all(fleet, client, [task], tenant="quiet")
                await wait_until(lambda: _arrived(on, name), f"{name} has started", timeout=120)

            for number in range(QUIET_TASKS):
                await one(f"empty-{number}")
            await submit_all(fleet, client, _tasks("free", "noisy", noisy, seconds=NOISY_CALL_S), tenant="noisy")
            await wait_until(lambda: _many_held(on, broker), "many are held", timeout=60)
            for number in range(QUIET_TASKS):
                await one(f"behind-{number}")
            left = await held(broker, fleet)
        at = {call.tag: call.at for call in await on.provider.log("free")}
    took = {name: at[name] - moment for name, moment in sent.items()}
    empty = [s for name, s in took.items() if name.startswith("empty")]
    behind = [s for name, s in took.items() if name.startswith("behind")]
    return Outcome(
        [
            at_most(
                row, "the worst, later than in an empty system", max(behind) - sorted(empty)[len(empty) // 2], 2.0, " s"
            ),
            told(row, "in an empty system, ms", ", ".join(f"{s * 1000:.0f}" for s in empty)),
            told(row, "behind the noisy tenant, ms", ", ".join(f"{s * 1000:.0f}" for s in behind)),
            told(row, "noisy tasks still held at the end", float(left)),
        ]
    )


async def _arrived(on: Stage, name: str) -> bool:
    return any(call.tag == name for call in await on.provider.log("free"))


async def _many_held(on: Stage, broker: Broker) -> bool:
    return await held(broker, on.fleet) > 500
