"""Fair order: shares by weight, order within a tenant, room kept, and nothing that depends on how often one asks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.policy.fairness import CLASS_WEIGHTS, Lane, Order, Plan, Shares, Take, plan
from millstream.policy.supply import Bound, Need, Pool, Room, Used, cost

EVEN = Shares(lambda _tenant: 1.0, lambda _pool, _need: 1.0)
BOUNDS = {"llm": Bound((40.0,)), "search": Bound((8.0, 4000.0), places=9)}
QUEUES = ("q1", "q2")
POOLS: tuple[Pool, ...] = ((), ("llm",), ("llm", "search"))


def lane(tenant: str, heads: Sequence[int], **changes: object) -> Lane:
    """A lane of one queue, class and pool, unless said otherwise."""
    one = Lane(id=f"{tenant}-{heads[:1]}", queue="q1", priority="normal", tenant=tenant, pool=(), heads=tuple(heads))
    return replace(one, **changes)  # type: ignore[arg-type]


def bound(key: str) -> Bound:
    """What a key lets through; without limit where none is given."""
    return BOUNDS.get(key, Bound())


def only_llm(llm: Bound) -> Callable[[str], Bound]:
    """One key that limits, and others that do not."""

    def bound_of(key: str) -> Bound:
        return llm if key == "llm" else Bound()

    return bound_of


def room(amount: int = 1000, **changes: Any) -> Room:
    """The same room in every queue."""
    return replace(Room(dict.fromkeys(QUEUES, amount)), **changes)


def without(lanes: Sequence[Lane], takes: Sequence[Take]) -> list[Lane]:
    """The lanes once what was taken is gone."""
    gone = Counter(take.lane for take in takes)
    return [replace(one, heads=one.heads[gone[one.id] :], needs=one.needs[gone[one.id] :]) for one in lanes]


def tenants(lanes: Sequence[Lane], made: Plan) -> list[str]:
    """Who was served, in order."""
    owner = {one.id: one.tenant for one in lanes}
    return [owner[take.lane] for take in made.takes]


needs = st.sampled_from([Need(), Need(1, 100, 60, 40), Need(1, 1000, 900, 100), Need(3, 0, 0, 0)])


@st.composite
def many_lanes(draw: st.DrawFn) -> list[Lane]:
    """Lanes of a few queues, classes, tenants and pools; every sequence lies in one of them."""
    count = draw(st.integers(1, 12))
    sequences = list(range(1, 1 + draw(st.integers(count, 120))))
    owners = draw(st.lists(st.integers(0, count - 1), min_size=len(sequences), max_size=len(sequences)))
    return [
        Lane(
            id=f"lane{number}",
            queue=draw(st.sampled_from(QUEUES)),
            priority=draw(st.sampled_from([*CLASS_WEIGHTS])),
            tenant=draw(st.sampled_from(["a", "b", "c", "d"])),
            pool=draw(st.sampled_from(POOLS)),
            heads=tuple(seq for seq, owner in zip(sequences, owners, strict=True) if owner == number),
            more=draw(st.booleans()),
            again=draw(st.booleans()),
            needs=tuple(draw(needs) for owner in owners if owner == number),
        )
        for number in range(count)
    ]


waiting = st.builds(Used, st.sampled_from([0.0, 0.1, 0.3, 2.0]), st.just(0.1), st.integers(1, 4))
rooms = st.builds(
    Room,
    st.dictionaries(st.sampled_from(QUEUES), st.integers(0, 40)),
    st.sets(st.sampled_from(POOLS[1:]), max_size=1),
    st.just(bound),
    st.dictionaries(st.sampled_from(sorted(BOUNDS)), waiting),
)


def keys_used(lanes: Sequence[Lane], made: Plan, given_room: Room) -> list[tuple[str, Used]]:
    """What each key was used before each take of a plan that needs it."""
    by_id, used, at = {one.id: one for one in lanes}, dict(given_room.used), Counter[str]()
    found: list[tuple[str, Used]] = []
    for take in made.takes:
        one = by_id[take.lane]
        for key in one.pool:
            before = used.get(key, Used())
            found.append((key, before))
            used[key] = before.more(bound(key).seconds(one.need(at[one.id])))
        at[one.id] += 1
    assert used == {**given_room.used, **made.room.used}
    return found


@given(many_lanes(), rooms, st.integers(0, 60))
def test_a_plan_keeps_to_the_room_there_is(lanes: list[Lane], given_room: Room, most: int) -> None:
    """Of every queue, of every key and altogether: what fills a key is the last that goes."""
    made = plan({}, lanes, given_room, EVEN, most)
    by_id = {one.id: one for one in lanes}
    taken = [by_id[take.lane] for take in made.takes]
    assert len(made.takes) <= most
    for queue, count in Counter(one.queue for one in taken).items():
        assert count <= given_room.queues.get(queue, 0)
    assert not any(one.pool in given_room.shut for one in taken)
    for key, used in keys_used(lanes, made, given_room):
        assert not used.fills(bound(key)), f"{key} was full before the last of its tasks"


@given(many_lanes(), rooms, st.integers(0, 60))
def test_a_plan_takes_from_the_front_of_each_lane(lanes: list[Lane], given_room: Room, most: int) -> None:
    """Nothing is left out, and nothing taken twice."""
    made = plan({}, lanes, given_room, EVEN, most)
    for one in lanes:
        taken = [take.seq for take in made.takes if take.lane == one.id]
        assert taken == list(one.heads[: len(taken)])


@given(many_lanes(), rooms)
def test_no_room_is_left_unused_while_somebody_could_use_it(lanes: list[Lane], given_room: Room) -> None:
    """Unless the lane whose turn it is has to be read first."""
    made = plan({}, lanes, given_room, EVEN, 1000)
    if made.dry is not None:
        return
    full = made.room.full()
    for one in without(lanes, made.takes):
        open_queue = made.room.queues.get(one.queue, 0) > 0
        open_pool = one.pool not in given_room.shut and full.isdisjoint(one.pool)
        assert not (one.heads and open_queue and open_pool), f"{one.id} could have gone on"


@given(many_lanes(), rooms, st.integers(1, 60), st.integers(1, 7))
def test_order_does_not_depend_on_how_much_is_planned_at_once(
    lanes: list[Lane], given_room: Room, total: int, step: int
) -> None:
    """Many small plans serve the same entries as a large one, in the same order."""
    lanes = [replace(one, more=False) for one in lanes]
    whole = plan({}, lanes, given_room, EVEN, total)
    order: Order = {}
    left, takes, now = list(lanes), list[Take](), given_room
    while len(takes) < total:
        made = plan(order, left, now, EVEN, min(step, total - len(takes)))
        if not made.takes:
            break
        order, now, left, takes = made.order, made.room, without(left, made.takes), [*takes, *made.takes]
    assert takes == list(whole.takes)


def in_steps(lanes: Sequence[Lane], given_room: Room, step: int) -> list[int]:
    """The sequences that plans of a few entries each take, one after the other."""
    order: Order = {}
    seqs: list[int] = []
    while (made := plan(order, lanes, given_room, EVEN, step)).takes:
        order, given_room, lanes = made.order, made.room, without(lanes, made.takes)
        seqs += [take.seq for take in made.takes]
    return seqs


@pytest.mark.parametrize("step", [1, 2, 100])
def test_an_entry_without_room_gives_its_tenant_no_precedence(step: int) -> None:
    """Whether the limit was full before a plan or has filled up in it: the oldest that may be released goes first."""
    lanes = [
        lane("a", [50], pool=("llm",), priority="high", id="fills"),
        lane("c", [1], pool=("llm",), priority="low", id="blocked"),
        lane("c", [70], priority="low", id="c"),
        lane("b", [60], priority="low", id="b"),
    ]
    one_more = room(bound=only_llm(Bound(places=1)))
    assert in_steps(lanes, one_more, step) == [50, 60, 70]


@pytest.mark.parametrize("step", [1, 2, 100])
def test_what_waited_before_and_lost_its_room_does_not_hold_its_tenant_back(step: int) -> None:
    """The tenant's place is that of its oldest entry, whichever of its lanes goes first."""
    lanes = [
        lane("a", [50], pool=("llm",), priority="high", id="fills"),
        lane("c", [70], pool=("llm",), priority="low", again=True, id="blocked"),
        lane("c", [1], priority="low", id="c"),
        lane("b", [60], priority="low", id="b"),
    ]
    one_more = room(bound=only_llm(Bound(places=1)))
    assert in_steps(lanes, one_more, step) == [50, 1, 60]


@pytest.mark.parametrize("again", [False, True])
def test_an_empty_lane_counts_as_absent(again: bool) -> None:
    """With nothing known and nothing to come it moves nobody's turn, also where it would go before the others."""
    lanes = [lane("a", [1, 4], id="a"), lane("b", [2, 3], id="b")]
    empty = lane("a", [], again=again, id="empty")
    assert plan({}, [empty, *lanes], room(), EVEN, 9) == plan({}, lanes, room(), EVEN, 9)


@given(many_lanes(), rooms)
def test_a_plan_changes_nothing_that_it_reads(lanes: list[Lane], given_room: Room) -> None:
    """The order, the room and the lanes are as they were."""
    order = plan({}, lanes, given_room, EVEN, 5).order
    before = copy.deepcopy((order, lanes, given_room))
    plan(order, lanes, given_room, EVEN, 1000)
    assert (order, lanes, given_room) == before


weights = st.sampled_from([0.5, 1.0, 2.0, 3.0, 10.0])
costs = st.sampled_from([0.25, 1.0, 4.0])


@settings(max_examples=60)
@given(st.lists(st.tuples(weights, costs), min_size=2, max_size=6), st.integers(1, 300), st.integers(1, 17))
def test_tenants_that_wait_all_the_time_share_by_weight(
    flows: list[tuple[float, float]], total: int, step: int
) -> None:
    """At any moment no two differ by more than one task of each, measured in cost over weight."""
    pools: dict[str, Pool] = {f"t{number}": (f"pool{number}",) for number in range(len(flows))}
    weight = {f"t{number}": flow[0] for number, flow in enumerate(flows)}
    charge: dict[Pool, float] = {(f"pool{number}",): flow[1] for number, flow in enumerate(flows)}
    shares = Shares(weight.__getitem__, lambda pool, _need: charge[pool])
    lanes = [
        lane(tenant, range(1 + 1000 * number, 400 + 1000 * number), pool=pools[tenant])
        for number, tenant in enumerate(weight)
    ]
    used: Counter[str] = Counter()
    served: dict[str, float] = dict.fromkeys(weight, 0.0)
    order: Order = {}
    while sum(used.values()) < total:
        made = plan(order, lanes, room(), shares, step)
        for tenant in tenants(lanes, made):
            used[tenant] += 1
            served[tenant] += charge[pools[tenant]] / weight[tenant]
            least = min(served, key=served.__getitem__)
            most = charge[pools[tenant]] / weight[tenant] + charge[pools[least]] / weight[least]
            assert served[tenant] - served[least] <= most + 1e-9
        order, lanes = made.order, without(lanes, made.takes)
        if any(not one.heads for one in lanes):
            break  # one of them has nothing left to wait for


sizes = st.lists(st.sampled_from([1, 50, 100, 333, 1000, 20_000]), min_size=1, max_size=4)
scarce = st.sampled_from([Bound((10.0, 1000.0)), Bound((None, 1000.0), typical_s=0.5), Bound((10.0,))])


def sized(number: int, kinds: Sequence[int], pool: Pool) -> Lane:
    """A lane of a tenant whose tasks take tokens of these sizes in turn."""
    of_each = tuple(Need(1, size, size, 0) for size in (list(kinds) * 200)[:200])
    seqs = range(1000 * number, 1000 * number + 200)
    return lane(f"t{number}", seqs, pool=pool, id=f"t{number}", needs=of_each)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(weights, sizes), min_size=2, max_size=5), scarce, st.integers(0, 9), st.booleans())
def test_tenants_share_a_key_by_weight_whatever_their_tasks_take(
    flows: list[tuple[float, list[int]]], llm: Bound, beside: int, own: bool
) -> None:
    """Measured in seconds of it, though it is full most of the time while somebody goes on with what needs no limit."""
    weight = {f"t{number}": flow[0] for number, flow in enumerate(flows)} | {"free": 1.0}
    pools: list[Pool] = [("llm", f"tenant/{number}") if own else ("llm",) for number in range(len(flows))]
    lanes = [sized(number, flow[1], pools[number]) for number, flow in enumerate(flows)]
    largest = {one.id: max(map(llm.seconds, one.needs)) / weight[one.id] for one in lanes}
    served = dict.fromkeys(largest, 0.0)
    lanes.append(lane("free", range(100_000, 102_000), id="free"))
    shares = Shares(weight.__getitem__, lambda pool, need: cost(need, [llm] if pool else []))
    order: Order = {}
    # Each round one of `llm` begins: there is room for one, and for some that need none.
    only_one = room(1 + beside, bound=only_llm(llm), used={"llm": Used(0.2, 0.0, 1)})
    while all(one.heads for one in lanes):
        made = plan(order, lanes, only_one, shares, 1000)
        by_id, at = {one.id: one for one in lanes}, Counter[str]()
        for take in made.takes:
            if take.lane in served:
                served[take.lane] += llm.seconds(by_id[take.lane].need(at[take.lane])) / weight[take.lane]
                at[take.lane] += 1
        order, lanes = made.order, without(lanes, made.takes)
        if all(one.heads for one in lanes):
            for one, other in combinations(served, 2):
                assert abs(served[one] - served[other]) <= largest[one] + largest[other] + 1e-6


def test_one_with_many_and_twenty_with_few_go_in_turn() -> None:
    """A flood of one tenant does not stand before the others."""
    flood = lane("flood", range(1, 15_001))
    few = [lane(f"t{number:02}", range(20_000 + 100 * number, 20_050 + 100 * number)) for number in range(20)]
    served = tenants([flood, *few], plan({}, [flood, *few], room(21 * 50), EVEN, 21 * 50))
    assert set(Counter(served).values()) == {50}
    for name in {*served}:
        places = [place for place, tenant in enumerate(served) if tenant == name]
        assert max(after - before for before, after in pairwise(places)) <= 2 * 21


def test_who_comes_back_has_saved_up_nothing() -> None:
    """A tenant that was away takes its turn, not all turns that it missed."""
    busy = lane("busy", range(1, 1001))
    first = plan({}, [busy], room(), EVEN, 500)
    late = lane("late", range(2000, 2100))
    lanes = [*without([busy], first.takes), late]
    served = tenants(lanes, plan(first.order, lanes, room(), EVEN, 20))
    assert Counter(served) == {"busy": 10, "late": 10}


def test_classes_share_eight_to_three_to_one_and_none_starves() -> None:
    """While all three wait; alone each has everything."""
    lanes = [
        lane("a", range(1 + 1000 * number, 900 + 1000 * number), priority=name, id=name)
        for number, name in enumerate(CLASS_WEIGHTS)
    ]
    made = plan({}, lanes, room(), EVEN, 120)
    assert Counter(take.lane for take in made.takes) == {"high": 80, "normal": 30, "low": 10}
    alone = plan({}, lanes[2:], room(), EVEN, 120)
    assert len(alone.takes) == 120


def test_unused_share_of_a_class_goes_to_the_others_by_their_weights() -> None:
    """No class waits for one that is empty."""
    lanes = [
        lane("a", range(1, 900), priority="normal", id="normal"),
        lane("a", range(1000, 1900), priority="low", id="low"),
    ]
    made = plan({}, lanes, room(), EVEN, 80)
    assert Counter(take.lane for take in made.takes) == {"normal": 60, "low": 20}


def test_what_waited_before_goes_first_and_then_the_oldest() -> None:
    """Within one tenant, over its lanes."""
    old = lane("a", [1, 4, 9], pool=("x",), id="old")
    young = lane("a", [2, 3, 8], pool=("y",), id="young")
    again = lane("a", [7, 10], pool=("x",), id="again", again=True)
    made = plan({}, [old, young, again], room(), EVEN, 100)
    assert [take.seq for take in made.takes] == [7, 10, 1, 2, 3, 4, 8, 9]


def test_a_closed_pool_does_not_hold_up_its_tenants_other_lanes() -> None:
    """The tenant goes on with what is open."""
    closed = lane("a", [1, 2], pool=("llm",), id="closed")
    free = lane("a", [3, 4], id="free")
    made = plan({}, [closed, free], room(shut={("llm",)}), EVEN, 100)
    assert [take.seq for take in made.takes] == [3, 4]
    assert made.dry is None


def test_a_lane_that_is_not_read_far_enough_stops_the_plan_at_its_turn() -> None:
    """The others do not go ahead of it; what was planned until then stands."""
    dry = lane("a", [1], more=True, id="dry")
    rich = lane("b", [2, 3, 4, 5], id="rich")
    made = plan({}, [dry, rich], room(), EVEN, 100)
    assert ([take.seq for take in made.takes], made.dry) == ([1, 2], "dry")
    lanes = [replace(dry, heads=(6,), more=False), replace(rich, heads=(3, 4, 5))]
    assert [take.seq for take in plan(made.order, lanes, room(), EVEN, 100).takes] == [6, 3, 4, 5]


def test_queues_take_turns_for_a_pool_that_they_share() -> None:
    """The first by name does not take it all."""
    pool = ("llm",)  # eleven: what its rate starts in a quarter of a second, and one more
    lanes = [
        lane("a", range(1 + 100 * number, 50 + 100 * number), queue=queue, pool=pool, id=queue)
        for number, queue in enumerate(QUEUES)
    ]
    made = plan({}, lanes, room(bound=bound), EVEN, 100)
    assert Counter(take.lane for take in made.takes) == {"q1": 6, "q2": 5}


def test_the_order_remembers_only_who_is_ahead_of_time() -> None:
    """Its size does not grow with tenants that are gone, and an idle queue leaves nothing behind."""
    order: Order = {}
    flood = lane("flood", range(1000, 2000))
    for number in range(200):
        made = plan(order, [flood, lane(f"t{number}", [number + 1])], room(), EVEN, 2)
        order, flood = made.order, without([flood], made.takes)[0]
    assert sum(len(turns.tags) for turns in order.values()) <= 8
    assert plan(order, [replace(flood, heads=(1,))], room(), EVEN, 1).order == {}


def test_newcomers_do_not_overtake_for_ever() -> None:
    """Among those who have had the same share, the one whose task is oldest goes first, whatever its name."""
    order: Order = {}
    lanes = [lane("zoe", [1])]
    for number in range(10):
        lanes += [lane(f"t{number}", [10 * number + 11]), lane(f"u{number}", [10 * number + 12])]
        made = plan(order, lanes, room(), EVEN, 1)
        order, lanes = made.order, [one for one in without(lanes, made.takes) if one.heads]
        if "zoe" not in {one.tenant for one in lanes}:
            return
    raise AssertionError("a tenant starved")
