"""A limit set too high, through the whole governor: a fleet at a refusing provider, in virtual time."""

from __future__ import annotations

import heapq
import math
import random
from itertools import count
from typing import Literal

import pytest

from millstream.policy.limits import Limit, compiled, named
from millstream.policy.permits import Governor, Verdict
from millstream_schemas.permits import Acquire, Granted, PermitReply, Report, Settle, Wait
from tests.support.enforcing import Enforcer, Rule

Event = tuple[Literal["ask", "call", "passed", "refused"], str, float, float]
BEGIN = 1000.0


class Fleet:
    """Askers that always want one more call; each call arrives, is let through or refused, and is settled."""

    def __init__(self, limit: Limit, provider: Enforcer, latency_s: float, askers: int) -> None:
        self.now = BEGIN
        self.governor = Governor([compiled(one) for one in named({"k": limit})], epoch=1, now=BEGIN)
        self.arrivals: list[tuple[float, bool]] = []
        self._provider = provider
        self._latency_s = latency_s
        self._random = random.Random(1)
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()
        self._wake_at: float | None = None
        for _ in range(askers):
            self._later(self._random.uniform(0, 0.05), ("ask", "", 0.0, 0.0))

    def _later(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run(self, seconds: float) -> None:
        """Go on for so long."""
        end = self.now + seconds
        while self.now < end:
            if self._wake_at is not None and (not self._events or self._wake_at <= self._events[0][0]):
                self.now = max(self.now, self._wake_at)
                self._take_in(self.governor.due(self.now), "")
            else:
                at, _, event = heapq.heappop(self._events)
                self.now = max(self.now, at)
                self._happen(event)

    def _happen(self, event: Event) -> None:
        kind, permit, began, wait_s = event
        if kind == "ask":
            name = f"a{next(self._numbers)}"
            request = Acquire(id=name, worker="w", keys=("k",), wait_ms=2000)
            self._take_in(self.governor.handle(request, self.now), name)
        elif kind == "call":
            wait_s = self._provider.arrive(self.now, 0)
            self.arrivals.append((self.now - BEGIN, wait_s <= 0))
            if wait_s <= 0:
                self._later(self._latency_s * self._random.uniform(0.5, 1.5), ("passed", permit, self.now, 0.0))
            else:
                self._later(self._latency_s * 0.2, ("refused", permit, self.now, wait_s))
        else:
            self._settle(permit, began, max(1.0, math.ceil(wait_s)) if kind == "refused" else None)
            self._happen(("ask", "", 0.0, 0.0))

    def _settle(self, permit: str, began: float, retry_after_s: float | None) -> None:
        refused = retry_after_s is not None
        if refused:
            ago_ms = round((self.now - began) * 1000)
            told = Report(keys=("k",), outcome="throttled", retry_after_s=retry_after_s, started_ms_ago=ago_ms)
            self._take_in(self.governor.handle(told, self.now), "")
        settled = Settle(permit=permit, outcome="throttled" if refused else "ok", reported=refused)
        self._take_in(self.governor.handle(settled, self.now), "")

    def _take_in(self, verdict: Verdict, own: str) -> None:
        self._wake_at = verdict.wake_at
        answers: dict[str, PermitReply] = {answer.acquire: answer.reply for answer in verdict.answers}
        if own and verdict.reply is not None:
            answers[own] = verdict.reply
        for reply in answers.values():
            if isinstance(reply, Granted):
                for lease in reply.leases:
                    late_s = self._random.uniform(0.001, 0.020)
                    self._later(lease.start_in_ms / 1000 + late_s, ("call", lease.permit, 0.0, 0.0))
            elif isinstance(reply, Wait):
                self._later(reply.retry_after_ms / 1000, ("ask", "", 0.0, 0.0))


@pytest.mark.parametrize("latency_s", [0.05, 1.0])
@pytest.mark.parametrize(
    ("true", "window_s", "configured"),
    [(600, 60.0, "1200/min"), (3000, 60.0, "6000/min"), (100, 10.0, "200/10s")],
)
def test_a_limit_set_twice_too_high_keeps_its_goodput(
    true: int, window_s: float, configured: str, latency_s: float
) -> None:
    """Five minutes after a minute of warm-up: at least 97 % of what the provider allows, at most 1 % refused."""
    provider = Enforcer([Rule("requests", true, window_s)])
    fleet = Fleet(Limit(requests=configured), provider, latency_s, askers=20 + int(true / window_s * latency_s * 2.5))
    fleet.run(360.0)
    results = [passed for at, passed in fleet.arrivals if 60.0 <= at < 360.0]
    goodput = sum(results) / (true * 300.0 / window_s)
    refused = 1 - sum(results) / len(results)
    print(f"{configured}, {latency_s} s: goodput {goodput:.4f}, refused {refused:.4f}")
    assert goodput >= 0.97
    assert refused <= 0.01
