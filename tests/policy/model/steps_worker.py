"""Workers: claim, run, commit; or hand back without a claim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.policy.model.numbers import Next
from tests.policy.model.rules import Grip, Rules
from tests.policy.model.state import Job, State, count_start, lease_ends, lend, put
from tests.policy.model.steps_common import Step, ack, append, moved

ROLE = "workers"
RELEASED_AGAIN = ("parked", "interrupted")
"""Outcomes that use up no attempt: each chain has one at the most, for else it has no end."""


def worker_steps(rules: Rules, outcomes: Sequence[str], state: State) -> Iterator[Step]:
    """All that any worker may do now; `outcomes` is how executions may end."""
    for slot in set(state.workers):  # equal slots have equal futures
        yield from _busy(rules, outcomes, state, slot) if slot else _idle(rules, state)


def _idle(rules: Rules, state: State) -> Iterator[Step]:
    for message in state.work:
        if not message.leased:
            grip = Grip(message.seq, message.item, message.delivery + 1, message.resets)
            job = Job("work", *grip, *rules.first_claim(grip))
            label = f"{ROLE}: take work {grip.seq}, delivery {grip.delivery}"
            yield label, put(lend(state, "work", message), ROLE, (), job)


def _busy(rules: Rules, outcomes: Sequence[str], state: State, job: Job) -> Iterator[Step]:
    match job.phase:
        case "claim":
            yield from _claim(rules, outcomes, state, job)
        case "run":
            for name in _possible(rules, outcomes, state):
                event = rules.outcome(_grip(job), job.event, name)
                ending = moved(job, "commit", event, job.expect)
                yield from _end(rules, put(state, ROLE, job, ending), ending)
        case "commit" | "back":
            yield from _end(rules, state, job)
        case "claim_read" | "commit_read" | "back_read":
            yield from _read(rules, outcomes, state, job)
        case _:
            yield from ack(state, ROLE, job)


def _claim(rules: Rules, outcomes: Sequence[str], state: State, job: Job) -> Iterator[Step]:
    runs = moved(job, "run", job.event, job.expect + 1)
    refused = moved(job, "claim_read")
    for label, after in append(rules, state, ROLE, job, runs, refused):
        started = runs in after.workers and len(after.chain) > len(state.chain)
        yield label, count_start(after, rules.fence(job.item), 1) if started else after
    if job.expect == rules.fence(job.item):
        yield from _hand_back(rules, outcomes, state, job)


def _hand_back(rules: Rules, outcomes: Sequence[str], state: State, job: Job) -> Iterator[Step]:
    """Before the claim: no permit in time, or a stop."""
    for name in _possible(rules, outcomes, state):
        if name in RELEASED_AGAIN:
            ending = moved(job, "back", rules.outcome(_grip(job), 0, name), rules.fence(job.item))
            yield from _end(rules, put(state, ROLE, job, ending), ending)


def _possible(rules: Rules, outcomes: Sequence[str], state: State) -> list[str]:
    spent = any(rules.kind(event) in RELEASED_AGAIN for event in state.chain)
    return [name for name in outcomes if not (spent and name in RELEASED_AGAIN)]


def _end(rules: Rules, state: State, job: Job) -> Iterator[Step]:
    """Append the outcome."""
    refused = moved(job, f"{job.phase}_read", job.event, job.expect)
    yield from append(rules, state, ROLE, job, moved(job, "committed"), refused)


def _read(rules: Rules, outcomes: Sequence[str], state: State, job: Job) -> Iterator[Step]:
    after = moved(job, *_verdict(rules, state, job))
    read = put(state, ROLE, job, after)
    if after.phase == "run":
        read = count_start(read, rules.fence(job.item), 1)
    if after.phase == "silent":  # no heartbeat either: the lease runs out
        read = put(lease_ends(state, job), ROLE, job, ())
    yield f"{ROLE}: read the last event, {after.phase} (work {job.seq})", read
    if job.phase == "claim_read" and "interrupted" in _possible(rules, outcomes, state):
        event = rules.outcome(_grip(job), 0, "interrupted")
        stopped = moved(job, "back_read", event, rules.fence(job.item))
        yield f"{ROLE}: told to stop before it knows whether it has claimed", put(state, ROLE, job, stopped)


def _verdict(rules: Rules, state: State, job: Job) -> Next:
    last, last_seq = (state.chain[-1] if state.chain else 0), len(state.chain)
    match job.phase:
        case "claim_read":
            return rules.claim(_grip(job), last, last_seq)
        case "commit_read":
            return rules.commit(_grip(job), job.event, last, last_seq)
        case _:
            return rules.hand_back(_grip(job), job.event, last, last_seq)


def _grip(job: Job) -> Grip:
    return Grip(job.seq, job.item, job.delivery, job.resets)
