"""What providers say steers the shared limits: pauses, factors, breakers, caps; and repeated attempts are rationed."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest

from millstream.policy.limit_state import Rules
from millstream.policy.limits import Adaptive, BreakerRules, Limit
from millstream_schemas.permits import Acquire, Denied, Granted, Observed, OutcomeClass, Report, Settle, Wait
from tests.support.permit_desk import Desk, rpm


def report(
    desk: Desk, key: str, outcome: OutcomeClass, *observed: Observed, retry_after_s: float | None = None
) -> None:
    """A provider's answer, told at once."""
    desk.send(Report(keys=(key,), outcome=outcome, observed=observed, retry_after_s=retry_after_s))


# --- refusals ----------------------------------------------------------------------------------------


def test_a_refusal_lowers_what_is_in_effect_once_a_flight() -> None:
    """Ten refusals of calls that began together are one; the limit as configured stays what it is."""
    desk = Desk(rpm("llm", 6000))
    names = [desk.acquire("llm", wait_s=2) for _ in range(10)]
    desk.advance(1)
    for name in names:
        desk.settle(name, "throttled", retry_after_s=1.0)
    (state,) = desk.limit("llm").dimensions
    assert state.configured == 6000
    assert 2990 <= state.effective <= 4800
    assert desk.limit("llm").throttled_total == 10


def test_a_limit_that_does_not_adapt_only_pauses() -> None:
    """`adaptive = false` keeps the configured rate through refusals."""
    desk = Desk(Limit(key="llm", requests="6000/min", adaptive=False))
    desk.settle(desk.acquire("llm"), "throttled", retry_after_s=2.0)
    assert desk.effective("llm") == 6000
    assert desk.limit("llm").paused_reason == "paused"


def test_what_was_lowered_grows_back_while_it_is_used() -> None:
    """Not while nobody asks."""
    desk = Desk(Limit(key="llm", requests="600/min", adaptive=Adaptive(increase=0.1, increase_every_s=5.0)))
    desk.settle(desk.acquire("llm"), "throttled", retry_after_s=0.0)
    lowered = desk.effective("llm")
    desk.advance(300)
    assert desk.effective("llm") == lowered
    for _ in range(600):
        name = desk.acquire("llm", wait_s=5)
        desk.advance(1.0)
        desk.settle(name)
    assert desk.effective("llm") == lowered
    for _ in range(600):
        names = [desk.acquire("llm", wait_s=0.1) for _ in range(3)]
        desk.advance(0.2)
        for name in names:
            if isinstance(desk.answers[name], Granted):
                desk.settle(name)
    assert desk.effective("llm") > lowered


def test_the_dimension_that_is_used_up_is_the_one_that_is_lowered() -> None:
    """By the provider's headers where they say so, else by use."""
    limit = Limit(key="llm", requests="600/min", tokens="100_000/min")
    desk = Desk(limit)
    desk.settle(desk.acquire("llm", tokens=60_000), "throttled", retry_after_s=1.0)
    assert (desk.effective("llm"), desk.effective("llm", "tokens") < 100_000) == (600, True)
    other = Desk(limit)
    permit = other.permit(other.acquire("llm", tokens=60_000))
    gone = (Observed(dimension="requests", limit=600, remaining=0),)
    other.send(Settle(permit=permit, outcome="throttled", retry_after_s=1.0, observed=gone))
    assert (other.effective("llm", "tokens"), other.effective("llm") < 600) == (100_000, True)


def test_growing_too_fast_halves_the_rate_and_bounds_its_growth() -> None:
    """A ramp refusal is no limit that was reached."""
    desk = Desk(rpm("llm", 6000))
    desk.settle(desk.acquire("llm"), "ramp")
    assert desk.effective("llm") == 3000
    assert desk.limit("llm").paused_for_s == 1.0


@pytest.mark.parametrize(("hint_s", "closed_s"), [(None, 3600.0), (120.0, 120.0)])
def test_a_quota_that_is_used_up_closes_the_key(hint_s: float | None, closed_s: float) -> None:
    """For as long as the provider says, else an hour; an operator may resume it before."""
    desk = Desk(rpm("llm", 600))
    desk.settle(desk.acquire("llm"), "quota", retry_after_s=hint_s)
    wait = desk.waits(desk.acquire("llm", wait_s=2))
    assert (wait.reason, wait.limiting_key) == ("exhausted", "llm")
    assert wait.retry_after_ms == pytest.approx(closed_s * 1000, rel=0.01)
    assert desk.limit("llm").paused_reason == "exhausted"
    desk.operate("llm", "resume")
    desk.granted(desk.acquire("llm"))


def test_nobody_is_held_through_a_pause_that_outlasts_them() -> None:
    """Those who wait when it begins are told at once, each another time to come back."""
    desk = Desk(rpm("llm", 60))
    first = desk.acquire("llm")
    waiting = [desk.acquire("llm", wait_s=30) for _ in range(5)]
    desk.settle(first, "throttled", retry_after_s=40.0)
    waits = [desk.waits(name) for name in waiting]
    assert {wait.reason for wait in waits} == {"paused"}
    quotes = [wait.retry_after_ms for wait in waits]
    assert min(quotes) >= 39_900
    assert all(later - earlier >= 900 for earlier, later in pairwise(quotes))


def test_a_crowd_after_a_pause_is_paced() -> None:
    """When it ends, starts are as far apart as ever: nobody rushes in."""
    desk = Desk(rpm("llm", 600))
    desk.settle(desk.acquire("llm"), "throttled", retry_after_s=5.0)
    waiting = [desk.acquire("llm", wait_s=30) for _ in range(60)]
    desk.advance(35)
    starts = sorted(at for permit, at in desk.starts.items() if permit != "1-1")
    assert len(starts) == len(waiting)
    assert starts[0] >= 1005.0
    assert all(later - earlier >= 0.09 for earlier, later in pairwise(starts))


def test_what_was_told_before_is_not_told_again_by_the_settle() -> None:
    """A report during the call, then a settle of the whole: one refusal, and the amounts count."""
    desk = Desk(Limit(key="llm", requests="600/min", tokens="60_000/min"))
    permit = desk.permit(desk.acquire("llm", tokens=1000))
    report(desk, "llm", "throttled", retry_after_s=5.0)
    desk.send(Settle(permit=permit, outcome="throttled", retry_after_s=50.0, tokens_in=10, reported=True))
    state = desk.limit("llm")
    assert (state.throttled_total, state.paused_for_s) == (1, 5.0)
    assert {one.dimension: one.used for one in state.dimensions}["tokens"] == 10


@pytest.mark.parametrize("outcome", ["client", "error", "too_large", "unknown"])
def test_what_says_nothing_of_the_limit_changes_nothing(outcome: OutcomeClass) -> None:
    """Wrong credentials, a bug in a handler, a lost connection: the key stays as it is."""
    desk = Desk(rpm("llm", 6000))
    for _ in range(30):
        report(desk, "llm", outcome)
    assert desk.gate("llm").open
    assert desk.effective("llm") == 6000


# --- the provider's headers --------------------------------------------------------------------------


def test_headers_can_only_tighten() -> None:
    """A lower limit of the provider is taken, and dropped when it says a higher one; ours is never raised."""
    desk = Desk(Limit(key="llm", requests="600/min", tokens="1000/s"))
    report(desk, "llm", "ok", Observed(dimension="requests", limit=300))
    assert desk.effective("llm") == 300
    report(desk, "llm", "ok", Observed(dimension="requests", limit=450), Observed(dimension="tokens", limit=30_000))
    assert (desk.effective("llm"), desk.effective("llm", "tokens")) == (450, 500)
    report(desk, "llm", "ok", Observed(dimension="requests", limit=10_000))
    assert desk.effective("llm") == 600


def test_junk_in_headers_is_passed_over() -> None:
    """No limit at all, a limit of zero, dimensions that are not ours."""
    desk = Desk(rpm("llm", 600))
    for seen in (
        Observed(dimension="requests", limit=0, remaining=0),
        Observed(dimension="requests", remaining=0, reset_s=86_400),
        Observed(dimension="tokens_in", limit=1, remaining=0),
        Observed(dimension="cost", limit=1, remaining=0),
    ):
        report(desk, "llm", "ok", seen)
    assert desk.effective("llm") == 600
    assert desk.start_in_ms(desk.acquire("llm")) == 0


def test_when_little_is_left_the_next_start_waits_for_the_refill() -> None:
    """Others use the same account: what is nearly gone there is left to come back."""
    desk = Desk(rpm("llm", 600))
    report(desk, "llm", "ok", Observed(dimension="requests", limit=600, remaining=0))
    assert 5_900 <= desk.waits(desk.acquire("llm")).retry_after_ms <= 6_200
    near = Desk(rpm("llm", 600))
    report(near, "llm", "ok", Observed(dimension="requests", limit=600, remaining=30, reset_s=1.0))
    assert near.start_in_ms(near.acquire("llm")) == 0  # thirty last until the provider begins anew
    report(near, "llm", "ok", Observed(dimension="requests", limit=600, remaining=200, reset_s=50.0))
    assert near.start_in_ms(near.acquire("llm")) <= 200


# --- the breaker -------------------------------------------------------------------------------------


def broken(key: str = "llm", **more: object) -> Desk:
    """A desk whose key has just broken."""
    desk = Desk(Limit(key=key, requests="6000/min", breaker=BreakerRules(consecutive=3, open_s=5.0), **more))  # type: ignore[arg-type]
    for _ in range(3):
        desk.settle(desk.acquire(key, wait_s=1), "fault")
        desk.advance(0.1)
    assert desk.limit(key).breaker == "open"
    return desk


def test_faults_open_the_breaker_and_a_few_probes_close_it() -> None:
    """One call, then two, then four; only then all others, at a quarter of the rate."""
    desk = broken()
    assert desk.waits(desk.acquire("llm", wait_s=1)).reason == "broken"
    desk.advance(6)
    for probes in (1, 2, 4):
        names = [desk.acquire("llm", wait_s=0) for _ in range(probes + 2)]
        desk.advance(0.3)
        granted = [name for name in names if isinstance(desk.answers[name], Granted)]
        assert len(granted) == probes
        assert desk.limit("llm").breaker == "half_open"
        for name in granted:
            desk.settle(name)
    assert (desk.limit("llm").breaker, desk.effective("llm")) == ("closed", 1500)


def test_a_probe_that_fails_opens_it_again_for_longer() -> None:
    """Those who waited for the probe are sent away."""
    desk = broken()
    desk.advance(6)
    probe = desk.acquire("llm")
    waiting = desk.acquire("llm", wait_s=4)
    assert waiting not in desk.answers
    desk.settle(probe, "fault")
    assert desk.waits(waiting).reason == "broken"
    assert desk.limit("llm").breaker == "open"
    wait = desk.waits(desk.acquire("llm"))
    assert 9_000 <= wait.retry_after_ms <= 11_500


def test_a_probe_whose_worker_died_counts_as_a_failure() -> None:
    """Else the key would stay half open for ever."""
    desk = broken()
    desk.advance(6)
    desk.granted(desk.acquire("llm"))
    desk.advance(31)
    assert desk.limit("llm").breaker == "open"


def test_a_probe_that_was_not_used_lets_another_try() -> None:
    """So does one whose outcome speaks of another key."""
    desk = broken()
    desk.advance(6)
    unused = desk.acquire("llm")
    waiting = desk.acquire("llm", wait_s=5)
    desk.send(Settle(permit=desk.permit(unused), outcome="throttled", keys=("other",)))
    desk.granted(waiting)


def test_refusals_for_rate_never_open_the_breaker() -> None:
    """The provider works, and says so."""
    desk = Desk(Limit(key="llm", requests="6000/min", breaker=BreakerRules(consecutive=1, min_calls=1)))
    outcomes: tuple[OutcomeClass, ...] = ("throttled", "quota", "ramp")
    for outcome in outcomes:
        report(desk, "llm", outcome, retry_after_s=0.0)
    assert desk.limit("llm").breaker == "closed"


def test_overload_lets_fewer_run_at_once() -> None:
    """And more again while they are used and go well."""
    desk = Desk(Limit(key="llm", concurrency=10, breaker=False))
    names = [desk.acquire("llm") for _ in range(10)]
    desk.settle(names[0], "overloaded")
    assert desk.effective("llm", "concurrency") == 7
    assert desk.waits(desk.acquire("llm")).reason == "concurrency"
    assert desk.limit("llm").breaker == "disabled"


def test_an_operator_overrules_the_breaker() -> None:
    """Switched off it lets everything through; forced open nothing; a limit without one can be forced as well."""
    desk = broken()
    desk.operate("llm", "disable")
    desk.granted(desk.acquire("llm"))
    assert desk.limit("llm").breaker == "disabled"
    plain = Desk(Limit(key="llm", requests="600/min", breaker=False))
    plain.operate("llm", "open")
    waiting = plain.waits(plain.acquire("llm", wait_s=2))
    assert waiting.reason == "broken"
    assert 29_000 <= waiting.retry_after_ms <= 31_000
    plain.operate("llm", "auto")
    plain.granted(plain.acquire("llm"))


# --- repeated attempts -------------------------------------------------------------------------------


def test_repeated_attempts_get_a_bounded_share() -> None:
    """With `retry_ratio = 0.2`, about one grant in five, whatever the demand; first attempts pass them by."""
    desk = Desk(Limit(key="llm", requests="60_000/min", retry_ratio=0.2))
    granted = {True: 0, False: 0}
    for _ in range(200):
        for retry in (True, True, True, False):
            name = desk.acquire("llm", wait_s=1, retry=retry)
            desk.advance(0.002)
            reply = desk.answers[name]
            granted[retry] += isinstance(reply, Granted)
            if isinstance(reply, Wait):
                assert (retry, reply.reason, reply.limiting_key) == (True, "retry_budget", "llm")
    assert granted[False] == 200
    assert 45 <= granted[True] <= 60


def test_one_repeated_attempt_a_second_is_let_in_where_there_are_no_others() -> None:
    """After an outage there are only repeated attempts: they must not wait for ever."""
    desk = Desk(Limit(key="llm", requests="6000/min", retry_ratio=0.1))
    names = [desk.acquire("llm", retry=True) for _ in range(5)]
    assert [isinstance(desk.answers[name], Granted) for name in names] == [True, False, False, False, False]
    quotes = [desk.waits(name).retry_after_ms for name in names[1:]]
    assert all(later - earlier >= 900 for earlier, later in pairwise(quotes))
    desk.advance(1.1)
    desk.granted(desk.acquire("llm", retry=True))


def test_a_repeated_attempt_that_gave_up_waiting_costs_nothing() -> None:
    """What was set aside for it is there for the next one."""
    desk = Desk(Limit(key="llm", concurrency=1, retry_ratio=0.1), rules=Rules(lease_s=100.0))
    first = desk.acquire("llm")
    waiting = desk.acquire("llm", retry=True, wait_s=0.5)
    assert desk.waits(desk.acquire("llm", retry=True)).reason == "retry_budget"
    desk.advance(0.6)
    assert desk.waits(waiting).reason == "concurrency"
    desk.settle(first)
    desk.granted(desk.acquire("llm", retry=True))


# --- several at once -----------------------------------------------------------------------------------


def test_several_permits_begin_one_after_the_other() -> None:
    """As many as can be booked ahead, each with its own start; the rest is asked for again."""
    desk = Desk(rpm("llm", 1200))
    reply = desk.granted(desk.acquire("llm", n=16))
    starts = [lease.start_in_ms for lease in reply.leases]
    assert starts[0] == 0
    assert 4 <= len(starts) <= 6
    assert all(40 <= later - earlier <= 52 for earlier, later in pairwise(starts[1:]))
    assert max(starts) <= 201
    assert desk.limit("llm").granted_total == len(starts)


def test_several_permits_share_the_places_that_are_left() -> None:
    """None beyond them; of those who wait, the oldest takes what it asked for first."""
    desk = Desk(Limit(key="tool", concurrency=5))
    first = desk.acquire("tool", n=4)
    second = desk.acquire("tool", n=4)
    assert (len(desk.permits(first)), len(desk.permits(second))) == (4, 1)
    third, fourth = desk.acquire("tool", n=3, wait_s=5), desk.acquire("tool", n=3, wait_s=5)
    desk.settle(first)
    assert (len(desk.permits(third)), fourth in desk.answers) == (1, True)
    assert desk.limit("tool").in_use <= 5


def test_a_repeated_request_gets_the_permits_that_are_still_open() -> None:
    """And is refused when all of them have ended."""
    desk = Desk(Limit(key="tool", concurrency=5))
    permits = desk.permits(desk.acquire("tool", n=3, name="once"))
    desk.send(Settle(permit=permits[1], outcome="ok"))
    again = desk.governor.handle(request_again("once"), desk.now).reply
    assert isinstance(again, Granted)
    assert [lease.permit for lease in again.leases] == [permits[0], permits[2]]
    for permit in permits:
        desk.send(Settle(permit=permit, outcome="ok"))
    assert desk.governor.handle(request_again("once"), desk.now).reply == Denied(reason="spent", epoch=1)


def request_again(name: str) -> Acquire:
    """The same request once more."""
    return Acquire(id=name, worker="w", keys=("tool",), n=3)


# --- a limit that is set too high ----------------------------------------------------------------------


@pytest.mark.parametrize("says_when", [True, False])
def test_a_limit_set_twice_too_high_finds_the_true_one(says_when: bool) -> None:
    """Against a provider that keeps a log of the last minute: after the first one, almost no refusals and little lost."""
    desk, true, log = Desk(rpm("llm", 600)), 300, deque[float]()
    began, waiting, running = desk.now, set[str](), list[tuple[float, str, bool, float | None]]()
    accepted, refused = 0, 0
    while desk.now < began + 300:
        while len(waiting) + len(running) < 30:
            waiting.add(desk.acquire("llm", wait_s=2))
        for name in [name for name in waiting if name in desk.answers]:
            waiting.remove(name)
            if not isinstance(desk.answers[name], Granted):
                continue
            permit = desk.permit(name)
            at = desk.starts[permit]
            while log and log[0] <= at - 60:
                log.popleft()
            fits, late = len(log) < true, at > began + 60
            accepted, refused = accepted + (fits and late), refused + (not fits and late)
            if fits:
                log.append(at)
            hint_s = log[0] + 60 - at if says_when and not fits else None
            running.append((at + (1.0 if fits else 0.05), permit, fits, hint_s))
        desk.advance(0.05)
        for one in [one for one in running if one[0] <= desk.now]:
            running.remove(one)
            desk.send(Settle(permit=one[1], outcome="ok" if one[2] else "throttled", retry_after_s=one[3]))
    assert accepted >= 0.97 * true * 4
    assert refused <= 0.01 * accepted
