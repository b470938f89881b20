"""Learning after a takeover: places that may be in use are held back until the workers have said what they use."""

from __future__ import annotations

import msgspec
import pytest

from millstream.policy.limit_state import Rules
from millstream.policy.limits import Limit
from millstream.policy.permits import Snapshot
from millstream_schemas.permits import HeldPermit, Renew, Renewed
from tests.support.permit_desk import Desk, read, rpm, slots


def follow(desk: Desk, saved: Snapshot, elapsed_s: float, *limits: Limit, rules: Rules | None = None) -> Desk:
    """A governor that takes up a snapshot after a kill, by way of the wire."""
    heir = Desk(*limits, epoch=2, now=50.0, rules=rules)
    heir.governor.restore(msgspec.json.decode(msgspec.json.encode(saved), type=Snapshot), elapsed_s, heir.now)
    heir.wake()
    return heir


def renew(desk: Desk, worker: str, *permits: str, key: str = "tool") -> Renewed:
    """A worker says what it uses."""
    held = tuple(HeldPermit(permit=permit, keys=(key,)) for permit in permits)
    reply = desk.send(Renew(worker=worker, permits=held))
    assert isinstance(reply, Renewed)
    return reply


def test_places_wait_for_every_worker_that_was_there() -> None:
    """Two workers were heard of: both must have renewed, and a second must have passed."""
    limits = (slots("tool", 3),)
    desk = Desk(*limits)
    first, second = (desk.permit(desk.acquire("tool", worker=worker)) for worker in ("one", "two"))
    saved = desk.governor.snapshot(desk.now)
    heir = follow(desk, saved, 2.5, *limits)
    assert heir.waits(heir.acquire("tool")).reason == "learning"
    waiting = heir.acquire("tool", wait_s=10)
    renew(heir, "one", first)
    heir.advance(2)
    assert waiting not in heir.answers
    renew(heir, "two", second)
    heir.wake()
    heir.granted(waiting)
    assert not heir.governor.learning
    assert heir.waits(heir.acquire("tool")).reason == "concurrency"


def test_a_second_passes_in_any_case() -> None:
    """A worker that came after the snapshot is not in it, and may still have a place."""
    limits = (slots("tool", 1),)
    heir = follow(desk := Desk(*limits), desk.governor.snapshot(desk.now), 2.5, *limits)
    waiting = heir.acquire("tool", wait_s=10)
    renew(heir, "unseen", "1-9")
    heir.advance(1.1)
    assert waiting not in heir.answers
    assert heir.limit("tool").in_use == 1


def test_a_worker_that_never_comes_back_is_not_waited_for_for_ever() -> None:
    """Its permits keep their places until their leases run out; the other places are free after a while."""
    limits, rules = (slots("tool", 2),), Rules(relearn_s=5.0, lease_s=30.0)
    desk = Desk(*limits, rules=rules)
    desk.granted(desk.acquire("tool", worker="dead"))
    heir = follow(desk, desk.governor.snapshot(desk.now), 3.0, *limits, rules=rules)
    first, second = (heir.acquire("tool", wait_s=60) for _ in range(2))
    heir.advance(4.9)
    assert first not in heir.answers
    heir.advance(0.2)
    heir.granted(first)
    assert second not in heir.answers
    heir.advance(30)
    heir.granted(second)


def test_what_a_worker_does_not_name_has_ended_since_the_snapshot() -> None:
    """A place whose settle nobody heard is free with the first renewal, and not only after a lease."""
    limits = (slots("tool", 2),)
    desk = Desk(*limits)
    kept, gone = (desk.permit(desk.acquire("tool")) for _ in range(2))
    heir = follow(desk, desk.governor.snapshot(desk.now), 2.0, *limits)
    assert heir.limit("tool").in_use == 2
    assert renew(heir, "w", kept) == Renewed(lost=(), epoch=2)
    assert heir.limit("tool").in_use == 1
    heir.advance(1.1)
    heir.wake()
    heir.granted(heir.acquire("tool"))
    assert renew(heir, "w", kept, gone) == Renewed(lost=(), epoch=2)


def test_only_as_many_places_are_held_back_as_could_have_been_granted() -> None:
    """A rate bounds what happened since the snapshot: of 100 places a handful may be in use."""
    limits = (Limit(key="llm", requests="60/min", concurrency=100),)
    desk = Desk(*limits)
    heir = follow(desk, desk.governor.snapshot(desk.now), 2.0, *limits)
    held_back = next(one for one in heir.limit("llm").dimensions if one.dimension == "concurrency").reserved
    assert held_back is not None
    assert 3 <= held_back <= 5


def test_a_key_that_nobody_knew_is_learned_as_well() -> None:
    """A tenant's first permit may have been granted just before the kill."""
    limits = (Limit(key="tenant/{tenant_id}", concurrency=1, requests="60/min"),)
    desk = Desk(*limits)
    heir = follow(desk, desk.governor.snapshot(desk.now), 2.0, *limits)
    assert heir.waits(heir.acquire("tenant/new")).reason in ("learning", "requests")
    heir.advance(2.5)
    heir.wake()
    heir.granted(heir.acquire("tenant/new"))


def test_a_clean_stop_teaches_nothing_new() -> None:
    """All that was granted is in the snapshot."""
    limits = (slots("tool", 2), rpm("llm", 60))
    desk = Desk(*limits)
    desk.granted(desk.acquire("tool"))
    heir = follow(desk, desk.governor.snapshot(desk.now, clean=True), 0.5, *limits)
    assert not heir.governor.learning
    heir.granted(heir.acquire("tool"))
    heir.granted(heir.acquire("llm"))


def test_after_a_predecessor_of_whom_nothing_is_known_no_place_is_given_twice() -> None:
    """All places may be in use, whoever the workers are: those that they name stay taken, the others are free in time."""
    rules = Rules(relearn_s=5.0)
    limits = (
        slots("tool", 2),
        Limit(key="run/{run_id}", concurrency=1),
        Limit(key="llm", requests="60/min", concurrency=9),
    )
    heir = Desk(*limits, epoch=2, now=50.0, rules=rules)
    heir.governor.distrust()
    heir.wake()
    assert heir.governor.learning
    for key in ("tool", "run/7", "llm"):
        assert heir.waits(heir.acquire(key)).reason == "learning"
    waiting = [heir.acquire("tool", wait_s=60) for _ in range(2)]
    renew(heir, "unseen", "1-9")
    heir.advance(4.5)
    assert not heir.answers.keys() & set(waiting)
    heir.advance(1.0)
    heir.granted(waiting[0])
    assert waiting[1] not in heir.answers
    assert heir.limit("tool").in_use == 2
    heir.granted(heir.acquire("run/7"))


def test_rates_need_no_learning_and_lose_only_the_gap() -> None:
    """After a kill under full load, starts go on at the paced rate at once."""
    limits = (rpm("llm", 600),)
    desk = Desk(*limits)
    for _ in range(700):
        desk.acquire("llm", wait_s=5)
        desk.advance(0.1)
    heir = follow(desk, desk.governor.snapshot(desk.now), 3.0, *limits)
    for _ in range(20):
        heir.acquire("llm", wait_s=5)
    heir.advance(2.2)
    starts = sorted(heir.starts.values())
    assert starts[0] <= 50.0 + 0.5
    assert len(starts) >= 18


def test_what_was_learned_of_the_provider_outlives_a_governor() -> None:
    """Pauses, exhaustion, breakers, factors and caps, less the time that passed."""
    limits = tuple(rpm(key, 6000) for key in ("paused", "empty", "broken", "forced", "lower"))
    desk = Desk(*limits)
    desk.settle(desk.acquire("paused"), "throttled", retry_after_s=30.0)
    desk.settle(desk.acquire("empty"), "quota", retry_after_s=500.0)
    desk.operate("forced", "open")
    for _ in range(5):
        desk.settle(desk.acquire("broken", wait_s=1), "fault")
        desk.advance(0.1)
    desk.settle(desk.acquire("lower"), "ramp", retry_after_s=0.0)
    lowered = desk.effective("lower")
    assert lowered < 6000
    heir = follow(desk, desk.governor.snapshot(desk.now), 2.0, *limits)
    assert heir.limit("paused").paused_for_s == pytest.approx(27.5, abs=0.1)
    assert (heir.limit("empty").paused_reason, heir.limit("broken").paused_reason) == ("exhausted", "broken")
    assert heir.limit("paused").paused_why == "the provider asked for 30 s"
    assert heir.limit("empty").paused_why == "its quota is used up; the provider asked for 8 min 20 s"
    assert heir.limit("forced").paused_why == "forced open by an operator"
    assert (heir.limit("forced").breaker, heir.limit("broken").breaker) == ("forced_open", "open")
    assert heir.effective("lower") == pytest.approx(lowered)
    assert not heir.gate("paused").open


def test_what_an_operator_closed_stays_closed() -> None:
    """Through a change of the configuration and a change of the governor, where no breaker is configured as well."""
    limits = (Limit(key="llm", requests="600/min", breaker=False),)
    desk = Desk(*limits)
    desk.operate("llm", "open")
    desk.governor.configure(read([Limit(key="llm", requests="60/min", breaker=False)]), {}, desk.now)
    assert not desk.gate("llm").open
    heir = follow(desk, desk.governor.snapshot(desk.now), 2.0, *limits)
    assert heir.limit("llm").breaker == "forced_open"
    heir.operate("llm", "auto")
    assert heir.gate("llm").open


def test_a_snapshot_holds_what_is_in_use_and_nothing_else() -> None:
    """Ten thousand keys of which three are in use make a small snapshot."""
    limits = tuple(rpm(f"k{number}", 60) for number in range(1000))
    desk = Desk(*limits)
    for key in ("k1", "k2", "k3"):
        desk.acquire(key, worker=f"of-{key}")
    saved = desk.governor.snapshot(desk.now)
    assert [key.key for key in saved.keys] == ["k1", "k2", "k3"]
    assert [permit.keys for permit in saved.permits] == [("k1",), ("k2",), ("k3",)]
    assert saved.workers == ("of-k1", "of-k2", "of-k3")
