"""One limit and all that the governor knows about it: pace, window, places, money, pauses, breaker, what was learned."""

from typing import TypeVar

import msgspec

from millstream.policy import causes
from millstream.policy.adapt import Factor, Steps
from millstream.policy.bounds import RATES, Bound, RateName
from millstream.policy.breaker import Breaker
from millstream.policy.budgets import Budget, Ledger
from millstream.policy.limits import Adaptive, BreakerRules, Compiled, Rate
from millstream.policy.pacing import Clock, Meter
from millstream.policy.rations import RetryRation
from millstream.policy.window_log import Charge
from millstream_schemas.permits import WaitReason

T = TypeVar("T")

FOREVER_S = float("inf")
LONG_PAUSE_S = 1.0
"""A pause of this length is given as the reason even where all places are taken; no start is booked so far ahead."""
_GOLDEN = 0.6180339887
"""Its multiples spread evenly over the unit interval."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How the governor grants, in seconds unless the name says otherwise.

    The window bound rests on `use_by_s` and `network_s`: a call starts at most their sum after its place.
    """

    tolerance_s: float = 0.005
    """How far a start may run ahead of the even pace."""
    use_by_s: float = 0.300
    """How long after its start a permit may still be used."""
    network_s: float = 0.100
    """How long a call may be on its way to the provider."""
    book_s: float = 0.200
    """How far ahead a start may be booked; a booked start cannot be revoked."""
    lease_s: float = 30.0
    remember_s: float = 60.0
    """How long an acquire's id gets the same answer, and a settled permit is known as settled."""
    place_retry_s: float = 1.0
    """What a `Wait` says when places free up at no known time."""
    forced_retry_s: float = 30.0
    """What it says while an operator keeps a key closed."""
    relearn_s: float = 15.0
    """How long a governor that follows a killed one holds back places, unless all workers renew before."""
    relearn_least_s: float = 1.0
    """How long it does so in any case."""
    worker_s: float = 60.0
    """How long a worker stays in snapshots after it was last heard of: a successor waits for those to renew."""
    unseen_s: float = 3.0
    """How old the last snapshot of a killed governor is assumed to be at the least."""
    line_s: float = 60.0
    """How far ahead those who are turned away are given times to ask again, one after the other."""
    throttle_base_s: float = 1.0
    """The pause after a refusal without a hint; it doubles with each in a row, up to `throttle_cap_s`."""
    throttle_cap_s: float = 60.0
    exhausted_s: float = 3600.0
    """How long a key whose quota is used up stays closed where the provider does not say."""
    recent_s: float = 5.0
    """Over how long use is looked at before a limit may grow back."""
    sweep_s: float = 1.0
    """How often idle keys are looked for."""
    max_waiting_per_key: int = 1024
    max_waiting: int = 8192

    @property
    def jitter_s(self) -> float:
        """How much later than its place a call may start."""
        return self.use_by_s + self.network_s


class Need(msgspec.Struct, frozen=True, gc=False):
    """What one permit takes from each of its keys: amounts in the order of `RATES`, and micro-dollars."""

    amounts: tuple[int, int, int, int]
    micro_usd: int = 0


class KeyState:
    """The state of one key. Times are those of the shared clock."""

    __slots__ = (
        "assumed", "barred", "bounds", "breaker", "budget", "causes", "clock", "compiled", "exhausted_until",
        "gate_said", "granted_total", "in_use", "key", "left", "line_until", "meters", "paused_until", "places",
        "places_factor", "ration", "recent", "rules", "shadow", "template", "throttled_total", "throttles_in_a_row",
        "turned_away", "waiting", "would_have_waited",
    )  # fmt: skip

    def __init__(self, key: str, compiled: Compiled, rules: Rules, clock: Clock, ledger: Ledger) -> None:
        self.key = key
        self.rules = rules
        self.clock = clock
        self.bounds: tuple[Bound, ...] = ()
        self.meters: tuple[Meter, ...] = ()
        self.budget: Budget | None = None
        self.breaker: Breaker | None = None
        self.places: int | None = None
        self.places_factor: Factor | None = None
        self.ration: RetryRation | None = None
        self.in_use = 0
        self.assumed = 0  # places that a killed predecessor may have granted, until learning is over
        self.waiting = 0
        self.left = 0  # how many have stopped waiting, ever
        self.paused_until = self.exhausted_until = 0.0
        self.causes = causes.Causes()
        self.barred = False  # a pause or a breaker may stand in the way
        self.gate_said = ""  # why its gate is closed, as last reported; empty while it is open
        self.throttles_in_a_row = 0
        self.granted_total = self.throttled_total = self.would_have_waited = 0
        self.line_until = 0.0  # the last time at which somebody who was turned away was told to come back
        self.turned_away = 0
        self.recent: tuple[float, tuple[float, ...]] = (-FOREVER_S, ())  # when use was measured last, and how much
        self.shadow = False
        self.template = ""
        self.set_limit(compiled, ledger)

    def set_limit(self, compiled: Compiled, ledger: Ledger) -> None:
        """Change what the key allows; debt, window, pause, places in use and money spent stay."""
        self.compiled = compiled
        limit, now = compiled.limit, self.clock.time()
        self.template = limit.key if limit.key != self.key else ""
        adaptive = _rules_of(limit.adaptive, Adaptive)
        known = {bound.name: bound for bound in self.bounds}
        bounds: list[Bound] = []
        for name in RATES:
            rate = compiled.rates.get(name)
            if rate is None:
                continue
            bound = known.get(name)
            if bound is None or bound.rate.window_s != rate.window_s:
                bound = self._other_window(bound, Bound(name, rate, self._meter(name, rate), adaptive, now), now)
            bound.set_rate(rate, adaptive, now)
            bounds.append(bound)
        self.bounds = tuple(bounds)
        self.meters = tuple(bound.meter for bound in bounds)
        self._set_places(compiled, adaptive, now)
        self._set_money_and_breaker(compiled, ledger)
        ratio = limit.retry_ratio
        self.ration = None if ratio is None or ratio >= 1 else RetryRation(ratio, self.ration, now)
        self.shadow = limit.shadow

    def _meter(self, name: RateName, rate: Rate) -> Meter:
        rules = self.rules
        return Meter(
            rate.amount,
            self.clock,
            window_s=rate.window_s,
            tolerance_s=rules.tolerance_s,
            jitter_s=rules.jitter_s,
            index=RATES.index(name),
        )

    def _other_window(self, old: Bound | None, new: Bound, now: float) -> Bound:
        """A rate over another window begins with what is known of the old one."""
        if old is not None:
            for age_s, amount in old.meter.log.ages(now):
                if age_s < new.meter.log.span_s:
                    new.meter.log.add(now - age_s, amount)
            new.meter.pace.restore(min(old.meter.pace.snapshot(), new.meter.window_s))
            new.meter.largest = old.meter.largest
        return new

    def _set_places(self, compiled: Compiled, adaptive: Adaptive | None, now: float) -> None:
        if compiled.concurrency is None or adaptive is None:
            self.places_factor = None
        elif self.places_factor is None:
            self.places_factor = Factor(Steps.for_places(adaptive), now)
        else:
            self.places_factor.set_steps(Steps.for_places(adaptive))
        self.apply_places()

    def apply_places(self) -> None:
        """Set the number of places to what is in effect of the configured concurrency."""
        concurrency, factor = self.compiled.concurrency, self.places_factor
        if concurrency is None or factor is None:
            self.places = concurrency
        else:
            self.places = max(1, int(concurrency * factor.value + 1e-9))

    def _set_money_and_breaker(self, compiled: Compiled, ledger: Ledger) -> None:
        if compiled.cost is None:
            self.budget = None
        elif self.budget is None:
            self.budget = Budget(self.key, compiled.cost, compiled.limit.soft, ledger)
        else:
            self.budget.set_limit(compiled.cost, compiled.limit.soft)
        breaker = _rules_of(compiled.limit.breaker, BreakerRules)
        if breaker is None:
            if not self.forced_open:  # an operator's word outlives a change of the configuration
                self.breaker = None
        elif self.breaker is None:
            self.breaker = Breaker(breaker)
        else:
            self.breaker.set_rules(breaker)

    def fits(self, need: Need) -> bool:
        """False where one permit asks for more than a whole window allows."""
        return self.shadow or all(need.amounts[bound.meter.index] <= bound.rate.amount for bound in self.bounds)

    # --- what stands in the way ------------------------------------------------------------------

    def closed(self, now: float) -> tuple[float, WaitReason] | None:
        """For how many seconds (infinite: nobody knows) and why nothing may start at all; None where something may."""
        if not self.barred:
            return None
        seconds: float = 0.0
        reason: WaitReason = "paused"
        if self.paused_until > now:
            seconds = self.paused_until - now
        if self.exhausted_until - now > seconds:
            seconds, reason = self.exhausted_until - now, "exhausted"
        if self.forced_open:
            return max(seconds, self.rules.forced_retry_s), "broken"
        if self.breaker is not None and self.breaker.state(now) in ("open", "half_open"):
            broken_s = self.breaker.wait_s(now)
            if broken_s > seconds:
                return broken_s, "broken"
        elif seconds <= 0:
            self.barred = False
        return (seconds, reason) if seconds > 0 else None

    @property
    def forced_open(self) -> bool:
        """True while an operator keeps the key closed, which holds in shadow mode as well."""
        return self.breaker is not None and self.breaker.forced_open

    @property
    def lets_all_through(self) -> bool:
        """True in shadow mode, where all is counted and nothing is held up."""
        return self.shadow and not self.forced_open

    def cause(self, reason: str, now: float) -> str:
        """What has led to a closure for this reason, in words."""
        if reason == "broken":
            is_open = self.breaker is not None and self.breaker.state(now) == "open"
            return self.causes.forced if self.forced_open else causes.broken(is_open)
        return self.causes.pause if reason == "paused" else self.causes.quota

    def obstacle(self, need: Need, now: float) -> tuple[float, WaitReason]:
        """Seconds until `need` can be taken (infinite: once a place is free), and what takes longest until then."""
        if not self.shadow:
            return self._obstacle(need, now)
        return (self.rules.forced_retry_s, "broken") if self.forced_open else (0.0, self.usual_reason)

    def _obstacle(self, need: Need, now: float) -> tuple[float, WaitReason]:
        longest_s = 0.0
        reason: WaitReason | None = None
        if self.barred and (closed := self.closed(now)) is not None:
            longest_s, reason = closed
        if longest_s < LONG_PAUSE_S and self.places is not None and self.in_use + self.assumed >= self.places:
            return FOREVER_S, "concurrency" if self.in_use >= self.places else "learning"
        for meter in self.meters:
            seconds = meter.delay(need.amounts[meter.index])
            if seconds > longest_s:
                longest_s, reason = seconds, RATES[meter.index]
        return longest_s, reason or self.usual_reason

    @property
    def usual_reason(self) -> WaitReason:
        """The reason that is told where only older acquires stand in the way."""
        return RATES[self.meters[0].index] if self.meters else "concurrency"

    def leaves(self, need: Need, ahead_s: float, older: Need, within_s: float) -> bool:
        """True when `need`, taken in `ahead_s`, leaves room for `older`, which waits for another key, in `within_s`."""
        if self.shadow:
            return True
        if self.places is not None and self.in_use + self.assumed + 2 > self.places:  # a place for each of the two
            return False
        return all(
            meter.leaves(need.amounts[meter.index], ahead_s, older.amounts[meter.index], within_s)
            for meter in self.meters
        )

    def interval_s(self, need: Need) -> float:
        """Seconds between two such needs at the paced rate."""
        return max((need.amounts[meter.index] / meter.pace.rate for meter in self.meters), default=0.0)

    def place_in_line(self, now: float, earliest: float, interval_s: float) -> float:
        """When the next one that is turned away should ask again: an interval after the one before.

        No place is promised further ahead than `line_s`, since a limit may be raised or a pause may end: whoever is
        beyond that is told to ask again within its second half.
        """
        self.turned_away += 1
        longest_s = self.rules.line_s
        back_at = max(earliest, self.line_until + interval_s)
        if back_at <= max(earliest, now + longest_s):
            self.line_until = back_at
            return back_at
        return max(earliest, now + longest_s * (0.5 + spread(self.turned_away) / 2))

    def assume_places(self, gap_s: float) -> None:
        """Hold back the places that a predecessor may have granted in the last `gap_s` seconds."""
        if self.places is not None:
            started = [self.bounds[0].meter.pace.rate * gap_s + 1] if self.meters and not self.meters[0].index else []
            self.assumed = max(0, int(min([self.places - self.in_use, *started])))

    # --- grants ----------------------------------------------------------------------------------

    def take(self, need: Need, ahead_s: float, since: float, charges: list[Charge]) -> None:
        """Take a place and charge `need` for a permit that begins in `ahead_s`; adds one charge per meter to `charges`.

        `since` is when its acquire began to wait.
        """
        if self.shadow:
            now = self.clock.time()
            if self._obstacle(need, now)[0] > self.rules.book_s:
                self.would_have_waited += 1
                for meter in self.meters:
                    meter.forget_debt_over(meter.window_s)
        self.in_use += 1
        self.granted_total += 1
        since = max(since, self.paused_until, self.exhausted_until)  # a pause is no time that was lost
        charges += [meter.take(need.amounts[meter.index], ahead_s, since) for meter in self.meters]

    def forgettable(self, now: float, wall: float) -> bool:
        """True where a snapshot may leave the key out: it is idle, and no call was larger than 1."""
        sized = not self.template and any(meter.largest > 1 for meter in self.meters)
        return not sized and self.idle(now, wall)

    def idle(self, now: float, wall: float) -> bool:
        """True where a new state would behave the same; what was spent is in the ledger."""
        if self.in_use or self.assumed or self.waiting or self.closed(now) is not None or self.gate_said:
            return False
        if self.breaker is not None and self.breaker.state(now) != "closed":
            return False
        if self.budget is not None and not self.budget.idle(wall):
            return False
        learned = any(bound.cap is not None or bound.factor.value < 1 for bound in self.bounds)
        return not learned and all(meter.idle() for meter in self.meters)


def spread(count: int) -> float:
    """A number in [0, 1) for the `count`th of a series, evenly spread over the interval for every length of it."""
    return (count * _GOLDEN) % 1.0


def _rules_of(value: T | bool, make: type[T]) -> T | None:
    """The rules that a setting stands for: True is the defaults, False none."""
    if isinstance(value, bool):
        return make() if value else None
    return value
