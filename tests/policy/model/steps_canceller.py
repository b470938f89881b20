"""The dispatcher that holds a cancel command: append `cancelled`, remove what waits in WORK, ack.

Its entry in HELD stays: the releaser removes it when it comes to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.policy.model.rules import Rules
from tests.policy.model.state import Job, State, lend, put
from tests.policy.model.steps_common import Step, ack, append, moved

ROLE = "cancellers"


def canceller_steps(rules: Rules, state: State, *, purge_all: bool) -> Iterator[Step]:
    """All that the canceller may do now; `purge_all` forgets the bound of the purge.

    The bound: the last sequence of WORK is noted *before* the last event is read, and no more is purged. Whatever a
    later generation publishes lies above it.
    """
    (slot,) = state.cancellers
    if slot:
        yield from _busy(rules, state, slot, purge_all=purge_all)
        return
    for message in state.control:
        if not message.leased:
            first = "read" if purge_all else "note"
            job = Job("control", message.seq, 0, message.delivery + 1, message.resets, first)
            yield f"{ROLE}: take the command", put(lend(state, "control", message), ROLE, (), job)


def _busy(rules: Rules, state: State, job: Job, *, purge_all: bool) -> Iterator[Step]:
    match job.phase:
        case "note":  # `item` holds what was noted
            noted = moved(job._replace(item=state.work_seq), "read")
            yield f"{ROLE}: note that WORK ends at {state.work_seq}", put(state, ROLE, job, noted)
        case "read":
            after = moved(job, *rules.cancel(state.chain))
            yield f"{ROLE}: read the last event, {after.phase}", put(state, ROLE, job, after)
        case "append":
            yield from append(
                rules,
                state,
                ROLE,
                job,
                moved(job, "purge", 0, job.expect + 1),
                moved(job, "read" if purge_all else "note"),
            )
        case "purge":
            bound = state.work_seq if purge_all else job.item
            kept = tuple(message for message in state.work if message.seq > bound)
            later = () if purge_all else tuple(item for item in state.later if rules.fence(item) > job.expect)
            timers = () if purge_all else tuple(fence for fence in state.timers if fence > job.expect)
            ticks = tuple(message for message in state.ticks if message.seq > bound)
            purged = state._replace(work=kept, later=later, timers=timers, ticks=ticks)
            yield f"{ROLE}: purge WORK up to {bound}", put(purged, ROLE, job, moved(job, "ack"))
        case _:
            yield from ack(state, ROLE, job)
