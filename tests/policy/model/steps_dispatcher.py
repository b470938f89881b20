"""Dispatchers: submits, undecided events and ticks, each by event first, then publish, then ack."""

from __future__ import annotations

from collections.abc import Iterator

from tests.policy.model.numbers import Messages, Next
from tests.policy.model.rules import Rules
from tests.policy.model.state import Job, State, lend, put, queue
from tests.policy.model.steps_common import Step, ack, append, moved, publish, unanswered

ROLE = "dispatchers"


def dispatcher_steps(rules: Rules, state: State) -> Iterator[Step]:
    """All that any dispatcher may do now."""
    for slot in set(state.dispatchers):  # equal slots have equal futures
        yield from _busy(rules, state, slot) if slot else _idle(rules, state)


def _idle(rules: Rules, state: State) -> Iterator[Step]:
    for box in ("inbox", "decisions", "ticks"):
        for message in queue(state, box):
            if message.leased:
                continue
            seq, item = message.seq, message.item
            if box == "inbox":
                first = rules.first_event(seq, item)
            elif box == "ticks":
                first = rules.held.first_tick(seq, item)
            else:
                first = rules.decision(state.chain[seq - 1], seq)
            job = Job(box, seq, item, message.delivery + 1, message.resets, *first)
            yield f"{ROLE}: take {box} {seq}", put(lend(state, box, message), ROLE, (), job)


def _busy(rules: Rules, state: State, job: Job) -> Iterator[Step]:
    match job.phase:
        case "append":
            stands = _standing(rules, state, moved(job, "follow", job.event, job.expect + 1))
            yield from append(rules, state, ROLE, job, stands, moved(job, "read"))
        case "read":
            after = _standing(rules, state, moved(job, *_verdict(rules, state, job)))
            yield f"{ROLE}: read the last event, {after.phase} ({job.box} {job.seq})", put(state, ROLE, job, after)
        case "follow" | "beside":
            yield from _follow(rules, state, job)
        case _:
            yield from ack(state, ROLE, job)


def _verdict(rules: Rules, state: State, job: Job) -> Next:
    if job.box == "decisions":
        return rules.decided(state.chain, job.seq)
    last, last_seq = state.chain[-1] if state.chain else 0, len(state.chain)
    if job.box == "ticks":
        return rules.held.tick(job.seq, job.item, last, last_seq)
    return rules.standing(job.seq, job.item, last, last_seq)


def _consequence(rules: Rules, state: State, job: Job) -> Messages:
    if job.box == "ticks":
        return rules.held.after_tick(job.item, job.event, job.expect)
    if job.box == "inbox":
        return rules.release(job.seq, job.item, job.event, job.expect)
    return rules.consequence(job.seq, state.chain[job.seq - 1], job.event, job.expect)


def _standing(rules: Rules, state: State, job: Job) -> Job:
    """The job as it is; where nothing follows its event, only the ack is left."""
    if job.phase == "follow" and not _consequence(rules, state, job):
        return moved(job, "ack")
    return job


def _follow(rules: Rules, state: State, job: Job) -> Iterator[Step]:
    """Publish what follows: one message, or an entry in HELD and beside it the timer of a deadline."""
    messages = _consequence(rules, state, job)
    what, body = messages[0 if job.phase == "follow" else 1]
    more = job.phase == "follow" and len(messages) > 1
    after = moved(job, "beside", job.event, job.expect) if more else moved(job, "ack")
    yield f"{ROLE}: publish {what} for {job.expect}", put(publish(state, what, body, job.expect), ROLE, job, after)
    if state.faults:  # the actor publishes again, with the same message id
        lost = unanswered(state, (what, body, job.expect))
        yield f"FAULT {ROLE}: {what} for {job.expect} gets no answer", lost
