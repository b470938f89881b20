"""Rows about a provider that refuses: a limit set twice too high, and a herd of tasks before a closed door."""

from __future__ import annotations

import asyncio

from bench.permits.common import PROCESSES, SLOTS, Outcome, Sizes, Stage, at_least, at_most, stage, told, total
from tests.support.enforcing import Rule
from tests.support.many import Ending, endings, submit_all
from tests.support.permit_load import Slots
from tests.support.provider import Call, KeyConfig
from tests.support.waiting import wait_until
from tests.support.windows import bins, fullest

HERD_PER_S = 20
REFUSED_S = 5.0
UNDER_WAY_S = 0.6
"""What was granted before the first refusal may still arrive: booked ahead, used late, and on its way."""
HONEST = ("seconds", "date")
JUNK = ("0", "-1", "abc", "99999999")


async def twice_too_high(sizes: Sizes) -> Outcome:
    """The limit allows twice what the provider does: how much of the true rate is used, at how many refusals."""
    row = "aimd"
    window_s, warm_s, seconds = sizes.window_s, sizes.pick(30, 60), sizes.pick(40, 300)
    true = int(window_s * 100)
    rule = Rule("requests", true, window_s, "sliding_log")
    with stage(f'[limits.llm]\nrequests = "{2 * true}/{window_s:g}s"\n', {"llm": KeyConfig(rules=(rule,))}) as on:
        on.fleet.governor()
        loads = on.loads([Slots(("llm",), "llm", SLOTS)], warm_s + seconds)
        counts = await loads.finished()
        calls = await on.provider.log("llm")
    start = loads.began + warm_s
    seen = [call for call in calls if start <= call.at < loads.ends]
    good = sum(call.status == 200 for call in seen)
    ratio, share = good / (true * seconds / window_s), (len(seen) - good) / max(1, len(seen))
    warm = [call for call in calls if call.at < start]
    lines = [
        at_least(row, "goodput over the true limit", ratio, sizes.pick(0.9, 0.97)),
        at_most(row, "share of 429s", share, 0.01),
        told(row, "share of 429s while warming up", sum(c.status == 429 for c in warm) / max(1, len(warm))),
        told(row, "counted", total(counts)),
    ]
    return Outcome(lines, {"goodput_ratio": ratio, "share_429": share})


async def herd(sizes: Sizes) -> Outcome:
    """300 tasks on 4 workers meet a provider that refuses for a while, with Retry-After in every form and as junk."""
    outcome = Outcome()
    tasks = int(sizes.pick(100, 300))
    for form in ("seconds", "abc") if sizes.quick else (*HONEST, *JUNK):
        outcome.lines += (await _herd(form, tasks)).lines
    return outcome


async def _herd(form: str, tasks: int) -> Outcome:
    with stage(f'[limits.llm]\nrequests = "{HERD_PER_S * 60}/min"\n') as on:
        fleet = on.fleet
        fleet.dispatcher()
        fleet.governor()
        for _ in range(PROCESSES):
            on.worker(SLOTS)
        async with fleet.plain() as client, fleet.broker() as broker:
            await submit_all(
                fleet, client, ({"task_id": f"t{n}", "task_type": "asked", "payload": {}} for n in range(tasks))
            )
            await wait_until(lambda: _calls(on, tasks // 5), f"{tasks // 5} calls", timeout=60)
            until = await on.provider.refuse("llm", REFUSED_S, form)
            ended = await endings(fleet, broker, tasks, timeout=180)
        await asyncio.sleep(1.0)  # a second arrival of one that has ended would come now
        calls = await on.provider.log("llm")
    return judge_herd(form, calls, ended, until, tasks)


async def _calls(on: Stage, count: int) -> bool:
    return len(await on.provider.log("llm")) >= count


def judge_herd(form: str, calls: list[Call], ended: dict[str, list[Ending]], until: float, tasks: int) -> Outcome:
    """What the log says of one outage that was told in one form."""
    row = f"herd {form}"
    refused = [call.at for call in calls if call.status == 429]
    first = refused[0] if refused else until
    inside = [call.at for call in calls if first + UNDER_WAY_S < call.at < until]
    after = [call.at for call in calls if call.at >= until]
    most = max(bins(after, until, after[-1] + 0.1), default=0) if after else 0
    attempts = sum(one.attempt != 1 for found in ended.values() for one in found)
    done = sum([one.kind for one in found] == ["completed"] for found in ended.values())
    lines = [
        at_most(row, "calls in a 100 ms bin afterwards", most, max(2.0, 2 * HERD_PER_S * 0.1)),
        at_most(row, "tasks whose attempts were touched", attempts, 0),
        at_least(row, "tasks completed once", done, tasks),
        told(row, "refused, while the first refusal was on its way", f"{len(refused)}, {len(refused) - len(inside)}"),
        told(row, "seconds from the end of the outage to the first call", after[0] - until if after else "never"),
        told(row, "most in any 100 ms", fullest(after, 0.1)),
    ]
    if form in HONEST:
        lines.insert(0, at_most(row, "calls inside Retry-After", len(inside), 0))
    else:
        lines.append(told(row, "calls inside the outage", float(len(inside))))
    return Outcome(lines)
