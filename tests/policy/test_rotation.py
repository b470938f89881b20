"""The rotation of a worker over its classes: none starves, none is asked in vain, and no bell is missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.rotation import WEIGHTS, ClassOfWork, Rotation, next_turn

classes = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.sampled_from(sorted(WEIGHTS))), min_size=1, unique=True
).map(tuple)

steps = st.lists(st.tuples(st.sampled_from(["ask", "bell", "look", "rest", "wake"]), st.integers(0, 11)), max_size=60)


@given(ready=classes, turns=st.integers(0, 300))
def test_each_class_comes_first_by_its_weight(ready: tuple[ClassOfWork, ...], turns: int) -> None:
    """Over n turns at least floor(n * w / sum of w) - 1 times, whatever the others are; and every turn asks all."""
    rotation = Rotation(ready)
    first: Counter[ClassOfWork] = Counter()
    for _ in range(turns):
        order = rotation.order()
        assert sorted(order) == sorted(ready)
        first[order[0]] += 1
    total = sum(WEIGHTS[priority] for _, priority in ready)
    for one in ready:
        assert first[one] >= turns * WEIGHTS[one[1]] // total - 1


@given(ready=classes, turns=st.integers(1, 100))
def test_credit_is_neither_made_nor_lost(ready: tuple[ClassOfWork, ...], turns: int) -> None:
    """What all earned is what the first one pays."""
    credit = next_turn({}, ready).credit
    for _ in range(turns):
        credit = next_turn(credit, ready).credit
        assert sum(credit.values()) == 0


def test_no_ready_class_is_nothing_to_ask() -> None:
    """And no credit is owed to anyone."""
    assert next_turn({("a", "low"): 5}, []).order == ()
    assert next_turn({("a", "low"): 5}, []).credit == {}


@given(known=classes, history=steps)
def test_a_class_is_asked_unless_it_rests(known: tuple[ClassOfWork, ...], history: Sequence[tuple[str, int]]) -> None:
    """Asked are exactly those that were not found empty since their last bell, however looks and bells mix."""
    rotation = Rotation(known)
    resting: set[ClassOfWork] = set()
    looks: dict[ClassOfWork, int] = {}
    rung_since: set[ClassOfWork] = set()
    for step, number in history:
        one = known[number % len(known)]
        match step:
            case "bell":
                rotation.bell(one)
                resting.discard(one)
                rung_since.add(one)
            case "look":
                looks[one] = rotation.bells(one)
                rung_since.discard(one)
            case "rest" if one in looks:
                rotation.rest(one, looks[one])
                if one not in rung_since:
                    resting.add(one)
            case "wake":
                rotation.wake_all()
                resting.clear()
            case _:
                pass
        order = rotation.order()
        assert len(order) == len(set(order))
        assert set(order) == set(known) - resting


def test_a_bell_since_the_look_keeps_a_class_awake() -> None:
    """The message came between the answer “empty” and its reading."""
    one = ("a", "normal")
    rotation = Rotation((one,))
    bells = rotation.bells(one)
    rotation.bell(one)
    rotation.rest(one, bells)
    assert rotation.order() == (one,)
    rotation.rest(one, rotation.bells(one))
    assert rotation.order() == ()
    rotation.bell(one)
    assert rotation.order() == (one,)
