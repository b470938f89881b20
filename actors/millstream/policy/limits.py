"""What limits allow, as people write it and as the governor reads it: rates, places, budgets, templates of keys."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from msgspec import Meta

from millstream.policy.durations import seconds
from millstream_schemas.permits import LimitKey

T = TypeVar("T")
R = TypeVar("R")

Positive = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Part = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(ge=0.01, le=86_400)]

_RATE = re.compile(r"\s*([\d_]+)\s*/\s*(.+?)\s*\Z")
_COST = re.compile(r"\s*([\d_]+(?:\.\d+)?)\s*USD\s*(?:/\s*(day|month)\s*(?:@\s*(\S+))?)?\s*\Z")
_UNITS = {
    "s": 1.0, "sec": 1.0, "second": 1.0,
    "min": 60.0, "minute": 60.0, "m": 60.0,
    "h": 3600.0, "hour": 3600.0,
    "d": 86400.0, "day": 86400.0,
}  # fmt: skip
_FIELD = re.compile(r"\{([a-z_]+(?:\.[A-Za-z0-9_-]+)?)\}")
MAX_WINDOW_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `amount` in any window of `window_s` seconds."""

    amount: int
    window_s: float


@dataclass(frozen=True, slots=True)
class Spending:
    """At most `usd` per `period` in a zone; `total` is for the life of the key."""

    usd: float
    period: Literal["day", "month", "total"]
    zone: str = "UTC"


class Adaptive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a limit follows what the provider refuses: `effective = configured x factor`, per dimension."""

    min: Part = 0.05
    decrease: Part = 0.8
    increase: Part = 0.02
    increase_every_s: Seconds = 10.0
    used_at_least: Annotated[float, Meta(ge=0, le=1)] = 0.7
    """Grow only while so much of what is allowed is used."""
    ramp: Part | None = None
    """At most so much growth per `ramp_every_s`, after a `ramp` refusal; None: half."""
    ramp_every_s: Seconds = 900.0


class BreakerRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a key's breaker opens and how it recovers."""

    ratio: Part = 0.5
    min_calls: Annotated[int, Meta(ge=1)] = 20
    window_s: Seconds = 30.0
    consecutive: Annotated[int, Meta(ge=1)] = 5
    open_s: Seconds = 5.0
    open_max_s: Seconds = 120.0
    recover_at: Part = 0.25
    """The factor of the rate to begin with once it is closed again."""


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a key allows; None does not limit. A call counts from its start.

    Rates are texts such as "600/min" or "50/10s"; cost is "50 USD/day@Europe/Zurich", "900 USD/month", or "5 USD" for
    the life of the key. A key with fields of the envelope in braces (`tenant/{tenant_id}`) is a template: each value has
    a limit of its own. In a table of limits the key is its name.
    """

    key: Annotated[str, Meta(max_length=128)] = ""
    requests: str | None = None
    tokens: str | None = None
    tokens_in: str | None = None
    tokens_out: str | None = None
    concurrency: Positive | None = None
    cost: str | None = None
    requests_per_minute: Positive | None = None
    """The same as `requests = "N/min"`."""
    tokens_per_minute: Positive | None = None
    enforce_window: str | float | None = None
    """The window in which the provider really looks, where it is shorter than the rate's: "1s", "10s"."""
    soft: Part = 0.8
    """The part of `cost` from which on a warning is recorded."""
    adaptive: Adaptive | bool = True
    breaker: BreakerRules | bool = True
    retry_ratio: Part | None = None
    """The part of the grants that repeated attempts may take; None: no bound."""
    on_governor_down: Literal["fail_closed", "safe_rate"] = "fail_closed"
    safe_rate: str | None = None
    """What each worker may start by itself while no governor answers, where `on_governor_down` says so."""
    shadow: bool = False
    """Count, and hold nothing up."""


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """US dollars per million tokens of one model."""

    tokens_in: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    tokens_out: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    version: str = ""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A limit as the governor reads it: the bounds by dimension, windows cut to what the provider enforces."""

    limit: Limit
    rates: Mapping[str, Rate]
    """By `requests`, `tokens`, `tokens_in`, `tokens_out`."""
    concurrency: int | None
    cost: Spending | None
    safe_rate: Rate | None

    @property
    def key(self) -> str:
        return self.limit.key


def rate(text: str) -> Rate:
    """The rate that a text such as "600/min" or "50/10s" names; raises ValueError."""
    match = _RATE.match(text)
    if match is None:
        raise ValueError(f"Expected a rate such as `600/min` or `50/10s`, got `{text[:80]}`")
    amount, per = int(match[1].replace("_", "") or 0), match[2].lower()
    window_s = _UNITS.get(per) or seconds(per)
    if not 1 <= amount <= 1_000_000_000:
        raise ValueError(f"Expected 1 to 1_000_000_000 in a rate, got `{text[:80]}`")
    if not 0.1 <= window_s <= MAX_WINDOW_S:
        raise ValueError(f"Expected a period from 0.1 seconds to 7 days in a rate, got `{text[:80]}`")
    return Rate(amount, window_s)


def spending(text: str) -> Spending:
    """The budget that a text such as "50 USD/day@UTC" names; raises ValueError."""
    match = _COST.match(text)
    if match is None:
        raise ValueError(f"Expected a cost such as `50 USD/day@UTC`, `900 USD/month` or `5 USD`, got `{text[:80]}`")
    usd = float(match[1].replace("_", ""))
    zone = match[3] or "UTC"
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"Expected a time zone such as `Europe/Zurich`, got `{zone[:80]}`") from None
    period: Literal["day", "month", "total"] = "total" if match[2] is None else "day" if match[2] == "day" else "month"
    return Spending(usd, period, zone)


def compiled(limit: Limit) -> Compiled:
    """The limit as the governor reads it; raises ValueError with the field's name at the end."""
    rates: dict[str, Rate] = {}
    for name in ("requests", "tokens", "tokens_in", "tokens_out"):
        text: str | None = getattr(limit, name)
        if text is not None:
            rates[name] = _at(name, rate, text)
    for name, per_minute in (("requests", limit.requests_per_minute), ("tokens", limit.tokens_per_minute)):
        if per_minute is not None:
            if name in rates:
                raise ValueError(f"Expected `{name}` or `{name}_per_minute`, got both - at `{name}_per_minute`")
            rates[name] = Rate(per_minute, 60.0)
    if limit.enforce_window is not None:
        window_s = _at("enforce_window", seconds, limit.enforce_window)
        rates = {name: _cut(one, window_s) for name, one in rates.items()}
    safe = None if limit.safe_rate is None else _at("safe_rate", rate, limit.safe_rate)
    if limit.on_governor_down == "safe_rate" and safe is None:
        raise ValueError("`on_governor_down` is `safe_rate`, but `safe_rate` is not set - at `safe_rate`")
    cost = None if limit.cost is None else _at("cost", spending, limit.cost)
    check_template(limit.key)
    return Compiled(limit, rates, limit.concurrency, cost, safe)


def _at(name: str, read: Callable[[T], R], value: T) -> R:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{error} - at `{name}`") from None


def _cut(whole: Rate, window_s: float) -> Rate:
    """The rate over a shorter window; a provider that slices gives each slice its even part."""
    if window_s >= whole.window_s:
        return whole
    amount = int(whole.amount * window_s / whole.window_s)
    if amount < 1:
        raise ValueError(
            f"{whole.amount} in {whole.window_s:g} s leave nothing for a window of {window_s:g} s - at `enforce_window`"
        )
    return Rate(amount, window_s)


# --- keys ------------------------------------------------------------------------------------------


FIELDS = frozenset({"tenant_id", "queue", "task_type", "run_id", "session_id", "parent_id", "step", "priority", "mode"})
"""Fields of the envelope that a template may name, beside `pins.<name>`."""
ABSENT = "-"
"""Stands in a key for a field that the task does not have."""


def is_template(key: str) -> bool:
    """True for a key with fields in braces."""
    return "{" in key


def check_template(key: str) -> None:
    """Raises ValueError for a key whose braces name no field of the envelope."""
    rest = _FIELD.sub("", key)
    if "{" in rest or "}" in rest:
        raise ValueError(f"Expected fields as `{{tenant_id}}` or `{{pins.model}}`, got `{key[:80]}` - at the key")
    for name in _FIELD.findall(key):
        if name not in FIELDS and not name.startswith("pins."):
            raise ValueError(f"A key cannot be made from `{name}`: expected {', '.join(sorted(FIELDS))}, pins.<name>")


def fill(template: str, fields: Mapping[str, str | None]) -> str:
    """The key that a template stands for; `fields` are the envelope's, pins as `pins.<name>`."""
    if "{" not in template:
        return template
    return _FIELD.sub(lambda found: (fields.get(found[1]) or ABSENT)[:64], template)[:128]


def matcher(template: str) -> Callable[[str], bool]:
    """Tells whether a key may come from a template: its texts in their order, with something in the place of each field.

    Takes time in proportion to the key, whatever producers put into it.
    """
    first, *between, last = _FIELD.split(template)[::2] if is_template(template) else (template, template)
    fields = len(between) + 1

    def fits(key: str) -> bool:
        end = len(key) - len(last)
        if end < len(first) + fields or not key.startswith(first) or not key.endswith(last):
            return False
        at = len(first)
        for text in between:
            found = key.find(text, at + 1, end)
            if found < 0:
                return False
            at = found + len(text)
        return end > at

    return fits


class ByKey(Generic[T]):
    """What is configured for a key: by its exact name, else by the first template that it fits, in the table's order."""

    __slots__ = ("exact", "templates")

    def __init__(self, entries: Iterable[tuple[str, T]] = ()) -> None:
        self.exact: dict[str, T] = {}
        self.templates: list[tuple[Callable[[str], bool], T]] = []
        for key, value in entries:
            if is_template(key):
                self.templates.append((matcher(key), value))
            else:
                self.exact[key] = value

    def find(self, key: str) -> T | None:
        """The value for a key; None where it is not configured."""
        exact = self.exact.get(key)
        if exact is not None:
            return exact
        return next((value for fits, value in self.templates if fits(key)), None)


def named(limits: Mapping[str, Limit]) -> tuple[Limit, ...]:
    """The limits of a table, each with its name as its key."""
    return tuple(msgspec.structs.replace(limit, key=key) for key, limit in limits.items())


def faults(limits: Iterable[Limit]) -> list[str]:
    """What is wrong with limits that decode, each with its path."""
    found: list[str] = []
    for limit in limits:
        try:
            msgspec.convert(limit.key, LimitKey)  # as permits and snapshots carry it
        except msgspec.ValidationError as error:
            found.append(f"{error} - at the key of `limits.{limit.key[:40]!r}`")
            continue
        try:
            compiled(limit)
        except ValueError as error:
            text, _, where = str(error).partition(" - at ")
            found.append(f"{text} - at `limits.{limit.key}{'.' + where.strip('`') if where.startswith('`') else ''}`")
    return found
