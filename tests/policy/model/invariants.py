"""What must hold in every state, and where the system may come to rest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from millstream_schemas.events import Cause
from millstream_schemas.lifecycle import TERMINAL_KINDS, IllegalTransition, next_state
from millstream_schemas.lifecycle import State as Shown
from tests.policy.model.faults import BOXES
from tests.policy.model.numbers import CONTROL, INBOX, WORK
from tests.policy.model.rules import Grip, Rules
from tests.policy.model.state import Job, Message, State, queue

BY_WORKERS = frozenset({"completed", "attempt_failed", "parked", "interrupted", "cancelled"})


class Invariants:
    """Checks with what they have found out about chains so far. `redeliveries` bounds deliveries without a settlement."""

    def __init__(self, rules: Rules, redeliveries: int) -> None:
        self._rules = rules
        self._redeliveries = redeliveries
        self._chain_faults = lru_cache(None)(self._faults_of_chain)

    def broken(self, state: State) -> Iterator[str]:
        """The name of every invariant that does not hold in `state`."""
        yield from self._chain_faults(state.chain)
        if any(balance > 1 for _, balance in state.starts):
            yield "more starts of a release than 1 + leases lost"
        if any(
            message.delivery + message.resets > self._redeliveries for box in BOXES for message in queue(state, box)
        ):
            yield "a message is redelivered without end"
        if self._rules.metered and any(not self._is_released(state, message) for message in state.work):
            yield "a metered task in WORK that no releaser has let go"
        if not set(state.letters) <= self.failed_generations(state):
            yield "a dead letter of a task that has not failed"
        for slot in state.workers:
            if slot and slot.phase == "committed" and not self._has_outcome(state, slot):
                yield "a worker was told that its outcome stands, and it does not"

    def _is_released(self, state: State, message: Message) -> bool:
        fence = self._rules.fence(message.item)
        return fence <= len(state.chain) and self._rules.kind(state.chain[fence - 1]) == "released"

    def unfinished(self, state: State) -> Iterator[str]:
        """What is left over in a state from which nothing moves without a fault, unless a cancel comes."""
        if not state.chain or self._rules.kind(state.chain[-1]) not in TERMINAL_KINDS:
            yield "stuck: an accepted task has no outcome"
        for box in BOXES:
            if queue(state, box) and box != "control":  # the last step of all takes and acks it
                yield f"stuck: a message is left in {box}"
        if state.held:
            yield "stuck: an entry is left in HELD"
        if set(state.letters) != self.failed_generations(state):
            yield "stuck: a failed task has no dead letter"

    def failed_generations(self, state: State) -> set[int]:
        """The generations that ended as failed."""
        messages = (self._rules.events.message(event) for event in state.chain if self._rules.kind(event) == "failed")
        return {message.card.generation for message in messages}

    def _has_outcome(self, state: State, job: Job) -> bool:
        execution = Grip(job.seq, job.item, job.delivery, job.resets).execution_id
        return any(
            self._rules.kind(event) in BY_WORKERS
            and self._rules.events.message(event).card.execution_id == execution
            and self._rules.events.message(event).card.cause.stream == WORK
            for event in state.chain
        )

    def _faults_of_chain(self, chain: tuple[int, ...]) -> tuple[str, ...]:
        shown: Shown | None = None
        generation, commands, found = 0, list[Cause](), list[str]()
        for event in chain:
            kind, card = self._rules.kind(event), self._rules.events.message(event).card
            try:
                shown_before, shown = shown, next_state(shown, kind)
            except IllegalTransition as error:
                return (*found, f"not in the life cycle: {error}")
            begins = shown_before is None or shown_before in TERMINAL_KINDS
            if begins != (card.generation == generation + 1) or card.generation < generation:
                found.append("an event after the end of its generation" if begins else "a generation begins early")
            generation = card.generation
            if kind == "expired" and shown_before not in (None, "held"):
                found.append("a deadline ends a task that is not held")
            if card.cause.stream in (INBOX, CONTROL):
                commands.append(card.cause)
        if len(set(commands)) < len(commands):
            found.append("one submit or command acted twice")
        return tuple(found)
