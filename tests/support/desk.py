"""Permits by decree: a test says which limits are open, which hold, and which refuse; all that workers do is noted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from millstream.permits_client import DeniedPermit, Need, Permit, Settlement, WaitFor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream_schemas.permits import Observed, OutcomeClass

USE_BY_S = 30.0
"""Far longer than a governor's: a busy machine is no subject of these tests."""


@dataclass(frozen=True)
class Asked:
    """One request."""

    keys: tuple[str, ...]
    need: Need
    wait_s: float
    task: str
    retry: bool


@dataclass(frozen=True)
class Report:
    """One report of an answer."""

    keys: tuple[str, ...]
    outcome: str
    retry_after_s: float | None
    observed: tuple[Observed, ...]
    started_ago_s: float


@dataclass
class Desk:
    """In the place of the governor. A limit that nothing is said of is open."""

    held: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    """Requests for such a key are held until its event is set, or until they may be held no longer."""
    answers: dict[str, WaitFor | DeniedPermit] = field(default_factory=dict[str, WaitFor | DeniedPermit])
    """Requests for such a key get this answer at once."""
    asked: list[Asked] = field(default_factory=list[Asked])
    settled: list[tuple[Permit, Settlement]] = field(default_factory=list[tuple[Permit, Settlement]])
    returned: list[Permit] = field(default_factory=list[Permit])
    reports: list[Report] = field(default_factory=list[Report])
    given_up: int = 0
    """Requests that were cancelled while they were held."""
    out: Counter[str] = field(default_factory=Counter[str])
    """Permits that are neither settled nor returned, by key."""
    use_by_s: float = USE_BY_S
    numbers: count[int] = field(default_factory=count)

    def hold(self, key: str) -> asyncio.Event:
        """Hold requests for a key until the event is set."""
        return self.held.setdefault(key, asyncio.Event())

    async def acquire(
        self, keys: Sequence[str], need: Need, wait_s: float, task: str = "", retry: bool = False
    ) -> Permit | WaitFor | DeniedPermit:
        self.asked.append(Asked(tuple(keys), need, wait_s, task, retry))
        for key in keys:
            if key in self.answers:
                return self.answers[key]
        for key in keys:
            if key in self.held:
                try:
                    async with asyncio.timeout(wait_s):
                        await self.held[key].wait()
                except TimeoutError:
                    return WaitFor(1.0, key, "requests")
                except asyncio.CancelledError:
                    self.given_up += 1
                    raise
        self.out.update(keys)
        now = time.monotonic()
        return Permit(str(next(self.numbers)), tuple(keys), need, now + self.use_by_s, 1)

    def may_begin(self, permit: Permit) -> bool:
        return time.monotonic() <= permit.use_by

    def settle(self, permit: Permit, settlement: Settlement) -> None:
        self.out.subtract(permit.keys)
        self.settled.append((permit, settlement))

    def give_back(self, permit: Permit) -> None:
        self.out.subtract(permit.keys)
        self.returned.append(permit)

    def report(
        self,
        keys: Sequence[str],
        outcome: OutcomeClass,
        retry_after_s: float | None = None,
        observed: Sequence[Observed] = (),
        started_ago_s: float = 0.0,
    ) -> None:
        self.reports.append(Report(tuple(keys), outcome, retry_after_s, tuple(observed), started_ago_s))

    @property
    def outstanding(self) -> int:
        """Permits that somebody still holds."""
        return sum(self.out.values())
