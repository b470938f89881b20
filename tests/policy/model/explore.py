"""Visits every state that a scenario can reach, breadth first, so that the trace of a violation is a shortest one."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from millstream_schemas.envelope import Unique
from tests.policy.model.faults import fault_steps, time_steps
from tests.policy.model.invariants import Invariants
from tests.policy.model.rules import Policy, Rules
from tests.policy.model.state import Message, State
from tests.policy.model.steps_canceller import canceller_steps
from tests.policy.model.steps_common import Step
from tests.policy.model.steps_dispatcher import dispatcher_steps
from tests.policy.model.steps_releaser import releaser_steps
from tests.policy.model.steps_worker import worker_steps


@dataclass(frozen=True)
class Scenario:
    """Who takes part, how executions may end and how much may go wrong."""

    outcomes: tuple[str, ...]
    faults: int
    dispatchers: int = 2
    workers: int = 2
    cancels: bool = True
    submits: int = 1
    unique: Unique | None = None
    delay_s: float | None = None
    purge_all: bool = False
    metered: bool = False
    """The queue has a limit: tasks are held until a releaser lets them go."""
    releasers: int = 1
    remove_first: bool = False
    deadline: bool = False
    """The tasks have one, which may pass at any moment while they are held."""
    too_long: bool = False
    """A held task may have waited for as long as it may."""
    policy: Policy = field(default_factory=Policy)
    stop_at_first: str | None = None
    """End the exploration where a violation of this name is found: for rules that are known to be broken."""
    bound: int = 12_000_000
    """More states than this fail the exploration: it is never cut off silently."""

    def start(self) -> State:
        """The first submit and the cancel are accepted, nothing has happened yet."""
        return State(
            inbox=(Message(1),),
            unsent=tuple(range(2, self.submits + 1)),
            control=(Message(1),) if self.cancels else (),
            dispatchers=((),) * self.dispatchers,
            workers=((),) * self.workers,
            cancellers=((),),
            releasers=((),) * (self.releasers if self.metered else 0),
            faults=self.faults,
        )


@dataclass(frozen=True)
class Report:
    """What an exploration saw. `violations`: the name of each broken invariant with a shortest trace to it."""

    states: int
    seconds: float
    violations: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def __str__(self) -> str:
        lines = [f"{self.states} states in {self.seconds:.1f} s"]
        for name, trace in self.violations.items():
            lines += [f"VIOLATED: {name}", *(f"  {number:2} {label}" for number, label in enumerate(trace, 1))]
        return "\n".join(lines)


class TooManyStates(Exception):
    """The exploration met its bound: raise the bound, or make the scenario smaller."""


def explore(scenario: Scenario) -> Report:
    """Visit every reachable state of `scenario`. Raises TooManyStates at its bound."""
    was_on = gc.isenabled()
    gc.disable()  # millions of tuples that hold no cycle: looking for one again and again takes longer than the visits
    try:
        return _Exploration(scenario).run()
    finally:
        if was_on:
            gc.enable()


def _takes_the_cancel(before: State, after: State) -> bool:
    return not any(before.cancellers) and any(after.cancellers)


class _Exploration:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rules = Rules(
            scenario.policy,
            delay_s=scenario.delay_s,
            unique=scenario.unique,
            metered=scenario.metered,
            deadline=scenario.deadline,
            too_long=scenario.too_long,
        )
        self._invariants = Invariants(self._rules, redeliveries=3 + 2 * scenario.faults)
        self._index: dict[State, int] = {scenario.start(): 0}
        self._states: list[State] = [scenario.start()]
        self._parents = array("I", [0])
        self._edges = array("I")
        """Steps without a fault, as pairs: from, to."""
        self._found: dict[str, int] = {}

    def run(self) -> Report:
        began = time.monotonic()
        number = 0
        while number < len(self._states) and not self._is_found(self._scenario.stop_at_first):
            self._visit(number, self._states[number])
            number += 1
        if not self._found:
            self._find_loop()
        traces = {name: self._trace(at) for name, at in self._found.items()}
        return Report(len(self._states), time.monotonic() - began, traces)

    def _is_found(self, name: str | None) -> bool:
        return name is not None and any(name in found for found in self._found)

    def _visit(self, number: int, state: State) -> None:
        broken = list(self._invariants.broken(state))
        for name in broken:
            self._found.setdefault(name, number)
        if broken:
            return  # what follows from a broken state says nothing more
        rests = True
        for _, after in self._steps(state):
            known = self._index.get(after)
            if known is None:
                known = self._add(after, number)
            if after.faults == state.faults:
                rests = rests and _takes_the_cancel(state, after)  # nobody may need a cancel to come to an end
                self._edges.append(number)
                self._edges.append(known)
        if rests:
            for name in self._invariants.unfinished(state):
                self._found.setdefault(name, number)

    def _steps(self, state: State) -> Iterator[Step]:
        yield from dispatcher_steps(self._rules, state)
        yield from releaser_steps(self._rules, state, remove_first=self._scenario.remove_first)
        yield from worker_steps(self._rules, self._scenario.outcomes, state)
        yield from canceller_steps(self._rules, state, purge_all=self._scenario.purge_all)
        yield from time_steps(self._rules, state)
        yield from fault_steps(self._rules, state)

    def _add(self, state: State, parent: int) -> int:
        number = len(self._states)
        if number >= self._scenario.bound:
            raise TooManyStates(f"more than {number} states")
        self._index[state] = number
        self._states.append(state)
        self._parents.append(parent)
        return number

    def _find_loop(self) -> None:
        """Without faults every path must end: peel off the states that nothing unpeeled leads to; a rest is a loop."""
        count = len(self._states)
        incoming = array("I", bytes(4 * count))
        first = array("I", bytes(4 * (count + 1)))
        for position in range(0, len(self._edges), 2):
            first[self._edges[position] + 1] += 1
            incoming[self._edges[position + 1]] += 1
        for number in range(count):
            first[number + 1] += first[number]
        # edges were noted state by state, so those of a state lie together
        free = [number for number in range(count) if not incoming[number]]
        peeled = 0
        while free:
            number = free.pop()
            peeled += 1
            for position in range(first[number], first[number + 1]):
                target = self._edges[2 * position + 1]
                incoming[target] -= 1
                if not incoming[target]:
                    free.append(target)
        if peeled < count:
            self._found["a loop without progress"] = next(n for n in range(count) if incoming[n])

    def _trace(self, number: int) -> list[str]:
        labels: list[str] = []
        while number:
            parent = self._parents[number]
            target = self._states[number]
            labels.append(next(label for label, after in self._steps(self._states[parent]) if after == target))
            number = parent
        return labels[::-1]
