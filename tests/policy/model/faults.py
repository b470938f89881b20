"""What may go wrong at any moment, beside publishes without an answer and lost acks; and what time brings by itself."""

from __future__ import annotations

from collections.abc import Iterator

from tests.policy.model.rules import Rules
from tests.policy.model.state import (
    Flying,
    Job,
    Message,
    State,
    count_start,
    holds_lease,
    lease_ends,
    put,
    queue,
    with_queue,
)
from tests.policy.model.steps_common import Step, arrive, publish, stored, tick

ROLES = ("dispatchers", "workers", "cancellers", "releasers")
BOXES = ("inbox", "control", "decisions", "work", "ticks")


def time_steps(rules: Rules, state: State) -> Iterator[Step]:
    """A producer submits; a schedule fires; a publish that had no answer is stored late, or never."""
    if state.unsent:
        submit = Message(state.unsent[0], item=len(state.chain))
        accepted = state._replace(inbox=(*state.inbox, submit), unsent=state.unsent[1:])
        yield f"producer: submit {submit.seq} is accepted", accepted
    for item in set(state.later):
        waiting = list(state.later)
        waiting.remove(item)
        fired = tick(state, item) if rules.held.has_lane(item) else arrive(state, item)
        yield "a schedule fires", fired._replace(later=tuple(waiting))
        if state.faults:
            yield "FAULT a schedule fires and stays", fired._replace(faults=state.faults - 1)
    for fence in state.timers:
        fired = tick(state, -fence)
        yield (
            f"the deadline of {fence} passes",
            fired._replace(timers=tuple(one for one in state.timers if one != fence)),
        )
    for flying in set(state.flying):
        others = list(state.flying)
        others.remove(flying)
        landed = state._replace(flying=tuple(others))
        yield f"an unanswered {flying[0]} is never stored", landed
        late = _land(rules, landed, flying)
        if late is not landed:
            yield f"an unanswered {flying[0]} is stored after all", late


def _land(rules: Rules, state: State, flying: Flying) -> State:
    what, body, expect = flying
    if what != "event":
        return publish(state, what, body, expect)
    return stored(rules, state, body) if len(state.chain) == expect else state


def fault_steps(rules: Rules, state: State) -> Iterator[Step]:
    """One fault, at the cost of one from the budget."""
    if not state.faults:
        return
    left = state._replace(faults=state.faults - 1)
    for role in ROLES:
        slots: tuple[Job | tuple[()], ...] = getattr(state, role)
        for slot in set(slots):
            if slot:
                crashed = put(lease_ends(_loss(rules, left, slot), slot), role, slot, ())
                yield f"FAULT {role}: crash with {slot.box} {slot.seq} in {slot.phase}", crashed
    for box in BOXES:
        for message in queue(state, box):
            if message.leased:
                free = message._replace(leased=False)
                lost = with_queue(left, box, tuple(free if one is message else one for one in queue(state, box)))
                if box == "work":
                    lost = count_start(lost, rules.fence(message.item), -1)
                yield f"FAULT the lease of {box} {message.seq} is lost", lost
    yield from _server_faults(rules, state, left)


def _server_faults(rules: Rules, state: State, left: State) -> Iterator[Step]:
    for message in state.work:
        if message.delivery:
            anew = message._replace(delivery=0, resets=message.resets + 1, leased=False)
            reset = left._replace(work=tuple(anew if one is message else one for one in state.work))
            if message.leased:
                reset = count_start(reset, rules.fence(message.item), -1)
            yield f"FAULT the server forgets the delivery count of work {message.seq}", reset
    if state.known:
        yield "FAULT the duplicate window of WORK is over", left._replace(known=())
    if state.held_known:
        yield "FAULT the duplicate window of HELD is over", left._replace(held_known=())


def _loss(rules: Rules, state: State, job: Job) -> State:
    if job.box == "work" and holds_lease(state, job):
        return count_start(state, rules.fence(job.item), -1)
    return state
