"""The life cycle as one table: in a state, an event leads to the state shown. Unlisted is an error."""

from typing import Final, Literal

State = Literal["queued", "held", "scheduled", "processing", "retrying", "completed", "failed", "cancelled", "expired"]

TERMINAL: Final[frozenset[str]] = frozenset({"completed", "failed", "cancelled", "expired"})
WAITING: Final[frozenset[str]] = frozenset({"queued", "held", "scheduled", "retrying"})
TERMINAL_KINDS: Final[frozenset[str]] = TERMINAL
RELEASING_KINDS: Final[frozenset[str]] = frozenset({"queued", "scheduled", "retrying", "released"})
"""Events that a message in WORK may follow from."""
DECISION_KINDS: Final[tuple[str, ...]] = ("attempt_failed", "parked", "interrupted")
"""Events on which the dispatcher decides what follows."""

_FROM_WAITING: Final[dict[str, State]] = {
    "queued": "queued",
    "held": "held",
    "released": "queued",
    "scheduled": "scheduled",
    "retrying": "retrying",
    "started": "processing",
    "attempt_failed": "retrying",
    "parked": "scheduled",
    "interrupted": "queued",
    "failed": "failed",
    "expired": "expired",
    "cancelled": "cancelled",
}
_NEW_GENERATION: Final[dict[str, State]] = {
    "queued": "queued",
    "held": "held",
    "scheduled": "scheduled",
    "expired": "expired",
}

TRANSITIONS: Final[dict[State | None, dict[str, State]]] = {
    None: {
        "queued": "queued",
        "held": "held",
        "scheduled": "scheduled",
        "expired": "expired",
        "failed": "failed",
        "cancelled": "cancelled",
        # a worker's outcome whose earlier events are gone: the history was lost, the outcome is kept
        "completed": "completed",
        "attempt_failed": "retrying",
        "parked": "scheduled",
        "interrupted": "queued",
    },
    "queued": _FROM_WAITING,
    "scheduled": _FROM_WAITING,
    "retrying": _FROM_WAITING,
    "held": _FROM_WAITING,
    "processing": {
        "started": "processing",
        "completed": "completed",
        "attempt_failed": "retrying",
        "parked": "scheduled",
        "interrupted": "queued",
        "failed": "failed",
        "cancelled": "cancelled",
    },
    "completed": _NEW_GENERATION,
    "failed": _NEW_GENERATION,
    "cancelled": _NEW_GENERATION,
    "expired": _NEW_GENERATION,
}


class IllegalTransition(ValueError):
    """An event came in a state whose row does not list it."""

    def __init__(self, state: str | None, event: str) -> None:
        super().__init__(f"event {event!r} is not possible in state {state or 'none'!r}")
        self.state = state
        self.event = event


def next_state(state: State | None, event: str) -> State:
    """The state shown after `event`; raises IllegalTransition for a pair that the table does not list."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(state, event) from None


def state_after(event: str) -> State:
    """The state that `event` leads to from anywhere: for readers that hold only a task's last event."""
    for row in TRANSITIONS.values():
        if event in row:
            return row[event]
    raise IllegalTransition(None, event)


def mermaid() -> str:
    """The table as a Mermaid state diagram, one line for each pair of states with the events that lead across."""
    lines = ["stateDiagram-v2"]
    for state, row in TRANSITIONS.items():
        across: dict[State, list[str]] = {}
        for event, target in row.items():
            across.setdefault(target, []).append(event)
        lines += [f"    {state or '[*]'} --> {target}: {', '.join(events)}" for target, events in across.items()]
    return "\n".join(lines)
