"""How much is supplied of each key, over all pools that need it, and what a task costs in fair order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.supply import (
    ONE,
    SLOW_S,
    Bound,
    Need,
    Pool,
    Room,
    Used,
    bound,
    bounds,
    contended,
    cost,
    need_of,
    to_blame,
    used,
)
from millstream_schemas.envelope import UsageEstimate
from millstream_schemas.permits import Gate, GatePart

LLM = Bound((1.0, 100.0, None, 20.0))
KEYS = {"llm": LLM, "wide": Bound((1000.0,)), "tool": Bound(places=3), "tokens": Bound((None, 100.0), typical_s=5.0)}


def of(key: str) -> Bound:
    """What a key of these tests lets through."""
    return KEYS.get(key, Bound())


def supplied(key: Bound, need: Need = ONE, waiting: int = 0) -> int:
    """How many of the same tasks are released until a key is full, or 1000."""
    so_far = Used().more(key.seconds(need), waiting) if waiting else Used()
    count = 0
    while count < 1000 and not so_far.fills(key):
        so_far, count = so_far.more(key.seconds(need)), count + 1
    return count


@pytest.mark.parametrize(
    ("key", "waiting", "expected"),
    [
        (Bound(), 10, 1000),
        (Bound((100.0,)), 0, 26),
        (Bound((100.0,)), 25, 1),
        (Bound((100.0,)), 60, 0),
        (Bound((0.01,)), 0, 2),
        (Bound(places=4), 1, 3),
        (Bound((100.0,), places=4), 0, 4),
        (Bound((2.0,), places=40), 0, 2),
        (Bound(places=0), 0, 1),
    ],
)
def test_a_key_is_supplied_for_a_quarter_of_a_second_and_one_more(key: Bound, waiting: int, expected: int) -> None:
    """By rate and places, whichever is less."""
    assert supplied(key, ONE, waiting) == expected


@given(st.lists(st.sampled_from([1, 10, 100, 5000]), max_size=50))
def test_tasks_of_all_sizes_fill_a_key_by_the_time_that_they_take(sizes: list[int]) -> None:
    """All but the least of them take less than a quarter of a second, or there is but one beside it."""
    key, so_far, taken = Bound((100.0, 1000.0)), Used(), list[float]()
    for size in sizes:
        if so_far.fills(key):
            break
        taken.append(key.seconds(Need(1, size)))
        so_far = so_far.more(taken[-1])
    assert so_far.seconds == pytest.approx(sum(taken))
    assert sum(sorted(taken)[1:]) <= 0.25 + max(taken, default=0.0)


def test_what_waits_on_a_key_counts_over_all_pools_that_need_it() -> None:
    """Forty pools over one slow key are supplied as one is; a key of their own does not help."""
    waiting: dict[tuple[Pool, Need], int] = {(("llm", f"tenant/{number}"), ONE): 1 for number in range(2)} | {
        (("wide",), ONE): 3
    }
    room = Room({}, bound=of, used=used(waiting, of))
    assert room.full() == {"llm"}
    assert room.used["llm"] == Used(2.0, 1.0, 2)
    assert room.used["wide"].count == 3


def test_seconds_are_those_of_the_scarcest_rate() -> None:
    """Requests, tokens, and tokens of each kind."""
    assert LLM.seconds(ONE) == 1.0
    assert LLM.seconds(Need(1, 500, 400, 100)) == 5.0
    assert LLM.seconds(Need(1, 110, 10, 100)) == 5.0
    assert LLM.seconds(Need(7, 0, 0, 0)) == 7.0
    assert Bound(places=3).seconds(Need(7, 500, 400, 100)) == 0.0


@pytest.mark.parametrize(
    ("need", "keys", "expected"),
    [
        (ONE, [], 1.0),
        (Need(1, 9000, 9000, 0), [], 1.0),
        (ONE, ["llm"], 1.0),
        (Need(1, 1000, 1000, 0), ["llm"], 10.0),
        (Need(1, 10, 10, 0), ["llm"], 1.0),
        (Need(3, 0, 0, 0), ["llm"], 3.0),
        (Need(1, 1000, 1000, 0), ["llm", "wide"], 10.0),
        (Need(1, 1000, 1000, 0), ["tokens"], 2.0),
        (Need(1, 100, 100, 0), ["tokens"], 0.2),
        (Need(1, 0, 0, 0), ["tokens"], 1.0),
        (Need(1, 1000, 1000, 0), ["tool"], 1.0),
        (Need(1, 0, 0, 0), ["tool", "other"], 1.0),
    ],
)
def test_cost_is_the_dominant_share_in_requests_else_in_average_tasks(
    need: Need, keys: list[str], expected: float
) -> None:
    """A task that says nothing of what it takes counts as one request."""
    assert cost(need, [of(key) for key in keys]) == pytest.approx(expected)


def test_a_task_takes_what_a_worker_will_reserve() -> None:
    """One request at least."""
    assert need_of(None) == ONE
    assert need_of(UsageEstimate(tokens_in=30, tokens_out=4)) == Need(1, 34, 30, 4)
    assert need_of(UsageEstimate(requests=5)) == Need(5, 0, 0, 0)


def test_keys_of_one_tenant_alone_are_no_matter_of_fairness() -> None:
    """Unless there are no others."""
    assert contended(("llm", "tenant/a"), {"tenant/a", "tenant/b"}) == ("llm",)
    assert contended(("tenant/a",), {"tenant/a"}) == ("tenant/a",)
    assert contended((), {"tenant/a"}) == ()


def test_bounds_are_read_from_the_parts_of_all_gates() -> None:
    """An average task of a key is one over the pools that need it, where requests are not limited."""
    by_tokens, own = GatePart(tokens=100.0), GatePart(requests=2.0, places=1)
    gates = [
        Gate(keys=("tokens", "tenant/a"), open=True, parts=(by_tokens, own)),
        Gate(keys=("tokens",), open=False, reason="paused", parts=(by_tokens,)),
        Gate(keys=("old",), open=True, rate_per_s=3.0, places=2),
        Gate(keys=("tokens", "nope"), open=False, reason="unknown_limit", rate_per_s=0.0),
    ]
    typical = {("tokens", "tenant/a"): Need(1, 900, 900, 0), ("tokens",): Need(1, 100, 100, 0)}
    assert bounds(gates, typical) == {
        "tokens": Bound((None, 100.0, None, None), None, 5.0),
        "tenant/a": bound(own),
        "old": Bound((3.0, None, None, None), 2),
    }


def test_a_slow_key_is_to_blame_for_what_comes_back_and_a_fast_one_is_not() -> None:
    """One tenant whose own places are taken must not stop all who share a fast key with it."""
    slow = {"slow": Bound((1 / SLOW_S,)), "fast": Bound((100.0,))}
    pool = ("fast", "slow")
    assert to_blame(pool, ONE, lambda key: slow.get(key, Bound())) == ("slow",)
    assert to_blame(("fast", "tool"), ONE, lambda key: slow.get(key, Bound())) == ("fast", "tool")
