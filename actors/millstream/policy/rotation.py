"""In which order a worker asks its classes for work: smooth weighted rotation, so that no class starves."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

WEIGHTS: Mapping[str, int] = {"high": 8, "normal": 3, "low": 1}

ClassOfWork = tuple[str, str]
"""A queue and a priority."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The classes in the order to ask them, and the credit to begin the next turn with."""

    order: tuple[ClassOfWork, ...]
    credit: Mapping[ClassOfWork, int]


def next_turn(credit: Mapping[ClassOfWork, int], ready: Iterable[ClassOfWork]) -> Turn:
    """Every ready class earns its weight; the richest goes first and pays what all earned together.

    Over many turns each class goes first in proportion to its weight among the classes that are ready.
    """
    earned = {one: credit.get(one, 0) + WEIGHTS[one[1]] for one in ready}
    if not earned:
        return Turn((), {})
    order = tuple(sorted(earned, key=lambda one: (-earned[one], -WEIGHTS[one[1]], one)))
    total = sum(WEIGHTS[one[1]] for one in earned)
    return Turn(order, {**earned, order[0]: earned[order[0]] - total})


@dataclass
class Rotation:
    """The turns of one worker over its classes, with what it knows of their emptiness."""

    classes: tuple[ClassOfWork, ...]
    credit: Mapping[ClassOfWork, int] = field(default_factory=dict[ClassOfWork, int])
    resting: set[ClassOfWork] = field(default_factory=set[ClassOfWork])
    rung: dict[ClassOfWork, int] = field(default_factory=dict[ClassOfWork, int])

    def order(self) -> tuple[ClassOfWork, ...]:
        """The classes to ask now, best first; those that rest are left out."""
        turn = next_turn(self.credit, [one for one in self.classes if one not in self.resting])
        self.credit = turn.credit
        return turn.order

    def bell(self, one: ClassOfWork) -> None:
        """There may be work in a class."""
        self.rung[one] = self.rung.get(one, 0) + 1
        self.resting.discard(one)

    def bells(self, one: ClassOfWork) -> int:
        """How often the bell of a class has rung; to be read before asking it."""
        return self.rung.get(one, 0)

    def rest(self, one: ClassOfWork, bells: int) -> None:
        """The class was found empty; it rests, unless its bell has rung since `bells` was read."""
        if self.rung.get(one, 0) == bells:
            self.resting.add(one)

    def wake_all(self) -> None:
        """Ask every class again."""
        self.resting.clear()
