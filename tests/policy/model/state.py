"""What the model remembers between two steps: streams, leases and what each actor holds in its hand.

Everything is a tuple of small numbers and words, so that a state can be hashed quickly. Events and WORK items stand
here as numbers; `rules.Rules` knows the real messages behind them. Dispatchers are interchangeable, and so are workers:
their slots are kept sorted, so that states which differ by names alone are one.
"""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    """A message of a work queue and its lease."""

    seq: int
    """Sequence in its stream; of the decision consumer's messages: in EVENTS."""
    item: int = 0
    """WORK: the number of its body. INBOX: how many events the task had when the submit was accepted, as its time.
    Ticks: the number of the item that is due, or minus the fence of the held event whose deadline has passed."""
    delivery: int = 0
    resets: int = 0
    """How often the server has lost the delivery count: keeps executions apart that it does not."""
    leased: bool = False


class Job(NamedTuple):
    """A delivery, or an entry of HELD, in an actor's hand, and how far the actor has come with it."""

    box: str
    """Which queue it came from: a field of State."""
    seq: int
    item: int
    delivery: int
    resets: int
    phase: str
    event: int = 0
    """The event to append, or the one that stands."""
    expect: int = 0
    """The sequence to append on, or that of the event that stands; while reading: the one that was refused."""


Slot = Job | tuple[()]
"""What an actor holds; idle actors hold nothing and sort first."""

Queue = tuple[Message, ...]
Flying = tuple[str, int, int]
"""A publish without an answer, which may yet be stored: what ("event", "work", "later", "held", "timer", "letter"), body,
expectation."""


class State(NamedTuple):
    """One moment of the whole system."""

    inbox: Queue
    control: Queue
    dispatchers: tuple[Slot, ...]
    workers: tuple[Slot, ...]
    cancellers: tuple[Slot, ...]
    faults: int
    """How many more may happen."""
    unsent: tuple[int, ...] = ()
    """INBOX sequences of the submits that the producer has still to make, in order."""
    chain: tuple[int, ...] = ()
    """The life of the task: the event at sequence n is chain[n - 1]."""
    decisions: Queue = ()
    """What the decision consumer still has to deliver."""
    work: Queue = ()
    later: tuple[int, ...] = ()
    """Schedules that have not fired: the items that they hold."""
    work_seq: int = 0
    """The last sequence of WORK."""
    known: tuple[int, ...] = ()
    """Message ids (fences) inside WORK's duplicate window."""
    letters: tuple[int, ...] = ()
    """Generations that have a dead letter; a second publish of one is refused, for the subject is create-only."""
    flying: tuple[Flying, ...] = ()
    starts: tuple[tuple[int, int], ...] = ()
    """For each release: handler starts minus leases lost."""
    ticks: Queue = ()
    """Timers of the dispatcher's that fired; they share the sequences of WORK."""
    timers: tuple[int, ...] = ()
    """Fences of held events whose deadline has a timer that has not fired."""
    held: tuple[tuple[int, int], ...] = ()
    """HELD: sequence and item of each entry."""
    held_seq: int = 0
    """The last sequence of HELD."""
    held_known: tuple[int, ...] = ()
    """Message ids inside HELD's duplicate window."""
    releasers: tuple[Slot, ...] = ()
    """More than one where an elected one does not know yet that it was replaced."""


def queue(state: State, box: str) -> Queue:
    """The queue that a job's `box` names."""
    found: Queue = getattr(state, box)
    return found


def with_queue(state: State, box: str, messages: Queue) -> State:
    """The state with another queue in `box`."""
    match box:
        case "inbox":
            return state._replace(inbox=messages)
        case "decisions":
            return state._replace(decisions=messages)
        case "work":
            return state._replace(work=messages)
        case "ticks":
            return state._replace(ticks=messages)
        case _:
            return state._replace(control=messages)


def lend(state: State, box: str, message: Message) -> State:
    """Deliver `message`: its count rises and its lease begins."""
    lent = message._replace(delivery=message.delivery + 1, leased=True)
    return with_queue(state, box, tuple(lent if one is message else one for one in queue(state, box)))


def settle(state: State, job: Job) -> State:
    """Ack: the message is gone, whichever delivery of it the ack belongs to (a late ack is accepted)."""
    return with_queue(state, job.box, tuple(one for one in queue(state, job.box) if one.seq != job.seq))


def is_held(message: Message, job: Job) -> bool:
    """Whether the job's delivery is the current one of `message` and its lease lasts."""
    return message.leased and message.seq == job.seq and message[2:4] == job[3:5]


def holds_lease(state: State, job: Job) -> bool:
    """Whether the job still has the lease that its delivery came with; nobody leases the entries of HELD."""
    return job.box != "held" and any(is_held(message, job) for message in queue(state, job.box))


def lease_ends(state: State, job: Job) -> State:
    """The job's lease runs out; a newer delivery of the same message is not touched."""
    if job.box == "held":
        return state
    messages = tuple(one._replace(leased=False) if is_held(one, job) else one for one in queue(state, job.box))
    return with_queue(state, job.box, messages)


def put(state: State, role: str, old: Slot, new: Slot) -> State:
    """The state in which one actor of `role` that held `old` holds `new`."""
    slots = list[Slot](getattr(state, role))
    slots[slots.index(old)] = new
    return with_slots(state, role, tuple(sorted(slots)))


def with_slots(state: State, role: str, slots: tuple[Slot, ...]) -> State:
    """The state with other hands for `role`."""
    match role:
        case "dispatchers":
            return state._replace(dispatchers=slots)
        case "workers":
            return state._replace(workers=slots)
        case "releasers":
            return state._replace(releasers=slots)
        case _:
            return state._replace(cancellers=slots)


def count_start(state: State, release: int, change: int) -> State:
    """Count a handler start (+1) or a lost lease (-1) of one release."""
    counts = dict(state.starts)
    counts[release] = counts.get(release, 0) + change
    return state._replace(starts=tuple(sorted(counts.items())))
