"""Steps that all actors share: appending by compare-and-set, and acking."""

from __future__ import annotations

from collections.abc import Iterator

from millstream_schemas.lifecycle import DECISION_KINDS
from tests.policy.model.rules import Rules
from tests.policy.model.state import Flying, Job, Message, State, lease_ends, put, settle

Step = tuple[str, State]


def moved(job: Job, phase: str, event: int = 0, expect: int = 0) -> Job:
    """The same delivery, one phase further."""
    return Job(job.box, job.seq, job.item, job.delivery, job.resets, phase, event, expect)


def stored(rules: Rules, state: State, event: int) -> State:
    """The chain with one more event; the decision consumer gets to know of those that it listens for."""
    chain, flying = (*state.chain, event), state.flying
    if flying:  # what flies and expects an earlier end can no more be stored
        flying = tuple(one for one in flying if one[0] != "event" or one[2] >= len(chain))
    if rules.kind(event) not in DECISION_KINDS:
        return state._replace(chain=chain, flying=flying)
    return state._replace(chain=chain, flying=flying, decisions=(*state.decisions, Message(len(chain))))


def unanswered(state: State, publish: Flying) -> State:
    """Fault: no answer within the time limit; the message may be stored now, later or never."""
    return state._replace(faults=state.faults - 1, flying=tuple(sorted((*state.flying, publish))))


def append(rules: Rules, state: State, role: str, job: Job, then: Job, otherwise: Job) -> Iterator[Step]:
    """Append the job's event on the sequence that it expects: `then` when stored, `otherwise` when not (known to be)."""
    kind = rules.kind(job.event)
    if len(state.chain) != job.expect:
        yield f"{role}: {kind} on {job.expect} is refused", put(state, role, job, otherwise)
        return
    yield f"{role}: {kind} is stored", put(stored(rules, state, job.event), role, job, then)
    if state.faults:
        lost = unanswered(state, ("event", job.event, job.expect))
        yield f"FAULT {role}: {kind} gets no answer", put(lost, role, job, otherwise)


def ack(state: State, role: str, job: Job) -> Iterator[Step]:
    """The last phase of a job."""
    yield f"{role}: acks {job.box} {job.seq}", put(settle(state, job), role, job, ())
    if state.faults:
        lost = lease_ends(state._replace(faults=state.faults - 1), job)
        yield f"FAULT {role}: ack of {job.box} {job.seq} is lost", put(lost, role, job, ())


def publish(state: State, what: str, body: int, fence: int) -> State:
    """Store what follows an event: WORK, its schedules and HELD by message id, dead letters create-only."""
    if what == "letter":
        return state._replace(letters=tuple(sorted({*state.letters, body})))
    if what == "held":
        return hold(state, body, fence)
    if fence in state.known:
        return state
    known = tuple(sorted((*state.known, fence)))
    if what == "later":
        return state._replace(later=tuple(sorted((*state.later, body))), known=known)
    if what == "timer":
        return state._replace(timers=tuple(sorted((*state.timers, body))), known=known)
    return arrive(state._replace(known=known), body)


def hold(state: State, item: int, fence: int) -> State:
    """One more entry in HELD, unless it is there by its message id."""
    if fence in state.held_known:
        return state
    seq, known = state.held_seq + 1, tuple(sorted((*state.held_known, fence)))
    return state._replace(held=(*state.held, (seq, item)), held_seq=seq, held_known=known)


def tick(state: State, item: int) -> State:
    """A timer of the dispatcher's fires."""
    seq = state.work_seq + 1
    return state._replace(ticks=(*state.ticks, Message(seq, item)), work_seq=seq)


def arrive(state: State, item: int) -> State:
    """A message comes into WORK: published, or fired by a schedule (no message id guards those)."""
    seq = state.work_seq + 1
    return state._replace(work=(*state.work, Message(seq, item)), work_seq=seq)
