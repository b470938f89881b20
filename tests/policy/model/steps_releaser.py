"""Releasers: they look at HELD without a lease, let a task go, and remove its entry."""

from __future__ import annotations

from collections.abc import Iterator

from tests.policy.model.rules import Rules
from tests.policy.model.state import Job, State, put
from tests.policy.model.steps_common import Step, append, moved, publish, unanswered

ROLE = "releasers"


def releaser_steps(rules: Rules, state: State, *, remove_first: bool) -> Iterator[Step]:
    """All that any releaser may do now; with `remove_first` an entry goes before what follows its event is stored."""
    for slot in set(state.releasers):  # equal slots have equal futures
        if not slot:
            yield from _idle(rules, state)
        elif slot.phase == "follow" and remove_first:
            early = state._replace(held=_without(state, slot))
            yield f"{ROLE}: remove entry {slot.seq} at once", put(early, ROLE, slot, slot._replace(phase="late"))
        else:
            yield from _busy(rules, state, slot)


def _idle(rules: Rules, state: State) -> Iterator[Step]:
    for seq, item in state.held:
        for choice in rules.held.choices(seq, item):
            job = Job("held", seq, item, 0, 0, *choice)
            yield f"{ROLE}: choose {rules.kind(job.event)} for entry {seq}", put(state, ROLE, (), job)


def _busy(rules: Rules, state: State, job: Job) -> Iterator[Step]:
    match job.phase:
        case "append":
            stands = moved(job, "follow", job.event, job.expect + 1)
            yield from append(rules, state, ROLE, job, stands, moved(job, "read", job.event, job.expect))
        case "read":
            after = moved(job, *rules.held.entry(job.seq, job.item, job.event, state.chain))
            yield f"{ROLE}: read the last event, {after.phase} (entry {job.seq})", put(state, ROLE, job, after)
        case "follow" | "late":
            yield from _follow(rules, state, job)
        case _:
            yield f"{ROLE}: remove entry {job.seq}", put(state._replace(held=_without(state, job)), ROLE, job, ())


def _without(state: State, job: Job) -> tuple[tuple[int, int], ...]:
    return tuple(entry for entry in state.held if entry[0] != job.seq)


def _follow(rules: Rules, state: State, job: Job) -> Iterator[Step]:
    removes = moved(job, "remove")
    message = rules.held.after_release(job.seq, job.item, job.event, job.expect)
    if message is None:
        yield f"{ROLE}: nothing follows (entry {job.seq})", put(state, ROLE, job, removes)
        return
    what, body = message
    yield f"{ROLE}: publish {what} for {job.expect}", put(publish(state, what, body, job.expect), ROLE, job, removes)
    if state.faults:
        lost = unanswered(state, (what, body, job.expect))
        yield f"FAULT {ROLE}: {what} for {job.expect} gets no answer", lost
