"""What the rate-governor shows of its limits."""

from typing import Literal

import msgspec

Dimension = Literal["requests", "tokens", "tokens_in", "tokens_out", "concurrency", "cost"]
BreakerState = Literal["closed", "open", "half_open", "forced_open", "disabled"]


class DimensionState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One dimension of a limit now. Amounts per `window_s`; None where that does not apply."""

    dimension: Dimension
    configured: float
    effective: float
    used: float
    """In the last window; of `concurrency`, in use now; of `cost`, spent in this period."""
    window_s: float | None = None
    reserved: float | None = None
    period: str | None = None
    estimate_error: float | None = None
    """Average of used over reserved, minus one: 0.2 says that calls take 20 % more than estimated."""


class LimitState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One limit now: as configured, as in effect, in use, and counted since the governor began to lead."""

    key: str
    dimensions: tuple[DimensionState, ...]
    in_use: int
    waiting: int
    granted_total: int
    throttled_total: int
    paused_for_s: float | None = None
    """Until something may start again; None while nothing stands in the way, or where nobody knows how long it will."""
    paused_reason: str = ""
    """`paused`, `broken`, `exhausted` or `budget_exhausted`; empty while something may start."""
    paused_why: str = ""
    """What has led to it, in words: what the provider said, which budget is used up, who closed it."""
    breaker: BreakerState = "closed"
    shadow: bool = False
    would_have_waited: int = 0
    """In shadow mode: how many were let through that the limit would have held."""
    template: str = ""
    """The configured key that this one comes from, where that is a template."""


class PriceState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the tokens of one model are charged at; US dollars per million."""

    model: str
    tokens_in: float
    tokens_out: float
    version: str = ""
    """Of the price list, as whoever configured it calls it."""
