"""Budgets: money reserved before a call and spent after it, per key and period; whole micro-dollars throughout.

A call is paid from the period in which it was granted, however late it is settled. The sums outlive the state of their
key in the `Ledger`, whose beginnings are read from what earlier governors spent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from math import ceil, inf
from zoneinfo import ZoneInfo

from millstream.policy.limits import Price, Spending
from millstream_schemas.keys import derive_key

MICRO = 1_000_000


def micro(usd: float) -> int:
    """Dollars in micro-dollars, to the nearest."""
    return round(usd * MICRO)


def priced(price: Price | None, tokens_in: int, tokens_out: int) -> int:
    """What tokens cost in micro-dollars, rounded up; prices are dollars per million, so micro-dollars per token."""
    return 0 if price is None else ceil(tokens_in * price.tokens_in + tokens_out * price.tokens_out)


@dataclass(frozen=True, slots=True)
class Spend:
    """To be added to the durable sum of a key and period, once per permit."""

    key: str
    period: str
    micro_usd: int
    permit: str


@dataclass(frozen=True, slots=True)
class SoftPassed:
    """A budget passed its soft threshold while `task` was paid from it; dollars."""

    key: str
    period: str
    spent: float
    hard: float
    task: str
    price_version: str = ""
    """Of the price that the task's cost was reckoned by, where it was."""


class Account:
    """What one key has reserved and spent in one period, in micro-dollars."""

    __slots__ = ("key", "period", "reserved", "spent", "warned")

    def __init__(self, key: str, period: str, spent: int) -> None:
        self.key = key
        self.period = period
        self.spent = spent
        self.reserved = 0
        self.warned = False


class Ledger:
    """All accounts by key and period, with the earlier sums that an account starts from when it is first used."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, str], Account] = {}
        self._loaded: Mapping[tuple[str, str], float] = {}

    def load(self, spent: Mapping[tuple[str, str], float]) -> None:
        """Start from sums spent earlier: US dollars by key (or its hash, as subjects carry it) and period."""
        self._loaded = {**self._loaded, **spent}
        for account in self._accounts.values():
            account.spent = max(account.spent, self._known(account.key, account.period))

    def account(self, key: str, period: str) -> Account:
        """The account, made where there is none."""
        account = self._accounts.get((key, period))
        if account is None:
            account = self._accounts[key, period] = Account(key, period, self._known(key, period))
        return account

    def correct(self, key: str, period: str, micro_usd: int) -> None:
        """Set an open account to the durable sum, which counts each permit once, whichever governor settled it."""
        account = self._accounts.get((key, period))
        if account is not None:
            account.spent = micro_usd

    def drop(self, account: Account) -> None:
        """Forget a period that is over and fully settled."""
        self._accounts.pop((account.key, account.period), None)

    def _known(self, key: str, period: str) -> int:
        if not self._loaded:
            return 0
        hashed = derive_key("limit", "", key)
        return micro(max(self._loaded.get((hashed, period), 0.0), self._loaded.get((key, period), 0.0)))


class Budget:
    """What one key may spend per period. Amounts are micro-dollars, `wall` is Unix seconds."""

    __slots__ = ("_account", "_ledger", "_until", "_zone", "hard", "key", "soft", "spending")

    def __init__(self, key: str, spending: Spending, soft: float, ledger: Ledger) -> None:
        self.key = key
        self._ledger = ledger
        self._account: Account | None = None
        self.set_limit(spending, soft)

    def set_limit(self, spending: Spending, soft: float) -> None:
        """Change what may be spent; what was spent in the period stays."""
        self.spending = spending
        self.hard = micro(spending.usd)
        self.soft = int(self.hard * soft)
        self._zone = UTC if spending.zone == "UTC" else ZoneInfo(spending.zone)
        self._until = -inf

    def account(self, wall: float) -> Account:
        """The account of the present period."""
        if self._account is not None and wall < self._until:
            return self._account
        period, self._until = period_at(self.spending, self._zone, wall)
        past = self._account
        if past is None or past.period != period:
            if past is not None and not past.reserved and self.spending.period != "total":
                self._ledger.drop(past)
            self._account = self._ledger.account(self.key, period)
            self._account.warned = self._account.spent >= self.soft
        assert self._account is not None
        return self._account

    def admits(self, amount: int, wall: float) -> bool:
        """True where `amount` more may be reserved; nothing is once all is spent."""
        account = self.account(wall)
        return account.spent + account.reserved + amount <= self.hard and account.spent < self.hard

    def may_admit_later(self, amount: int, wall: float) -> bool:
        """True where only what is set aside, and may come back, stands in the way of `amount`."""
        account = self.account(wall)
        return account.spent + amount <= self.hard and account.spent < self.hard

    def used_up(self, wall: float) -> bool:
        """True once all is spent."""
        return self.account(wall).spent >= self.hard

    def left_s(self, wall: float) -> float | None:
        """Seconds until the period ends; None for the life of the key."""
        self.account(wall)
        return None if self._until == inf else max(0.0, self._until - wall)

    def reserve(self, amount: int, wall: float) -> Account:
        """Reserve `amount`; returns the account that holds it."""
        account = self.account(wall)
        account.reserved += amount
        return account

    def release(self, account: Account, amount: int) -> None:
        """Free `amount`, which was reserved and not spent."""
        account.reserved -= amount
        self._forget_past(account)

    def settle(
        self, account: Account, reserved: int, amount: int, task: str, price_version: str = ""
    ) -> SoftPassed | None:
        """Replace what was reserved by `amount` spent; returns a warning when that passes the soft threshold."""
        account.reserved -= reserved
        account.spent += amount
        self._forget_past(account)
        if account.warned or account.spent < self.soft:
            return None
        account.warned = True
        return SoftPassed(self.key, account.period, account.spent / MICRO, self.hard / MICRO, task, price_version)

    def _forget_past(self, account: Account) -> None:
        if account is not self._account and not account.reserved and account.period != "total":
            self._ledger.drop(account)

    def idle(self, wall: float) -> bool:
        """True where nothing is reserved; what is spent stays in the ledger."""
        return self.account(wall).reserved == 0


def period_at(spending: Spending, zone: tzinfo, wall: float) -> tuple[str, float]:
    """The name of the period that `wall` lies in (a date or a month in its zone) and when it ends."""
    if spending.period == "total":
        return "total", inf
    today = datetime.fromtimestamp(wall, zone).date()
    if spending.period == "day":
        return today.isoformat(), _midnight(today + timedelta(days=1), zone)
    following = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    return f"{today:%Y-%m}", _midnight(following, zone)


def _midnight(day: date, zone: tzinfo) -> float:
    return datetime.combine(day, time(), zone).timestamp()
