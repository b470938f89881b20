"""One rate of a limit: the amount configured, how much of it is in effect, and the meter that enforces it."""

from typing import Literal

from millstream.policy.adapt import Factor, Steps
from millstream.policy.limits import Adaptive, Rate
from millstream.policy.pacing import Meter

RateName = Literal["requests", "tokens", "tokens_in", "tokens_out"]
RATES: tuple[RateName, ...] = ("requests", "tokens", "tokens_in", "tokens_out")
"""The order of a need's amounts."""


class Bound:
    """One rate of a limit: as configured, its meter, and what refusals and headers made of it."""

    __slots__ = ("_adaptive", "cap", "factor", "meter", "name", "rate")

    def __init__(self, name: RateName, rate: Rate, meter: Meter, adaptive: Adaptive | None, now: float) -> None:
        self.name: RateName = name
        self.rate = rate
        self.meter = meter
        self._adaptive = adaptive
        self.factor = Factor(Steps.for_rate(adaptive or Adaptive(), rate.window_s), now)
        self.cap: float | None = None
        """The part of what is configured that the provider says is its limit, where that is less."""

    @property
    def adaptive(self) -> bool:
        """Whether refusals lower it."""
        return self._adaptive is not None

    @property
    def effective(self) -> float:
        """The amount in effect per window: what is configured, cut by refusals and by the provider's own word."""
        part = self.factor.value if self.cap is None else min(self.factor.value, self.cap)
        return self.rate.amount * part

    def apply(self) -> None:
        """Set the meter to the amount in effect."""
        self.meter.set_limit(self.effective)

    def set_rate(self, rate: Rate, adaptive: Adaptive | None, now: float) -> None:
        """Take the amount configured now, in the same window; what was learned about a different amount is forgotten."""
        self._adaptive = adaptive
        self.factor.set_steps(Steps.for_rate(adaptive or Adaptive(), rate.window_s))
        if rate != self.rate or adaptive is None:
            self.factor.reset(now)
        if rate != self.rate:
            self.cap = None
        self.rate = rate
        self.apply()
