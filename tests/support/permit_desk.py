"""The governor's core under a virtual clock, as tests drive it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from millstream.policy.limit_state import Rules
from millstream.policy.limits import Compiled, Limit, Price, compiled
from millstream.policy.permits import Effect, Governor, Verdict
from millstream_schemas.limit_states import LimitState
from millstream_schemas.permits import (
    Acquire,
    Gate,
    Gates,
    GatesListing,
    Granted,
    Limits,
    LimitsListing,
    Operate,
    Operation,
    OutcomeClass,
    PermitReply,
    PermitRequest,
    Pool,
    Settle,
    Wait,
)


def read(limits: Iterable[Limit]) -> tuple[Compiled, ...]:
    """Limits as the governor reads them."""
    return tuple(compiled(limit) for limit in limits)


def rpm(key: str, requests: int) -> Limit:
    """A limit of requests only."""
    return Limit(key=key, requests_per_minute=requests)


def slots(key: str, places: int) -> Limit:
    """A limit of concurrency only."""
    return Limit(key=key, concurrency=places)


class Desk:
    """A governor with a clock of its own that collects the answers to held acquires, and the effects."""

    def __init__(
        self,
        *limits: Limit,
        rules: Rules | None = None,
        epoch: int = 1,
        now: float = 1000.0,
        prices: Mapping[str, Price] | None = None,
        wall: float = 1_780_000_000.0,
    ) -> None:
        self.now = now
        self.governor = Governor(
            read(limits), epoch=epoch, now=now, rules=rules, prices=prices, wall_offset_s=wall - now
        )
        self.answers: dict[str, PermitReply] = {}
        self.starts: dict[str, float] = {}
        self.effects: list[Effect] = []
        self.wake_at: float | None = None
        self._ids = 0

    def _started(self, reply: PermitReply | None) -> None:
        if isinstance(reply, Granted):
            for lease in reply.leases:
                self.starts.setdefault(lease.permit, self.now + lease.start_in_ms / 1000)

    def _note(self, verdict: Verdict) -> None:
        self.wake_at = verdict.wake_at
        self.effects += verdict.effects
        for answer in verdict.answers:
            assert answer.acquire not in self.answers, "answered twice"
            self.answers[answer.acquire] = answer.reply
            self._started(answer.reply)

    def send(self, request: PermitRequest) -> PermitReply | None:
        """Hand over one request."""
        verdict = self.governor.handle(request, self.now)
        self._note(verdict)
        self._started(verdict.reply)
        return verdict.reply

    def acquire(
        self,
        *keys: str,
        n: int = 1,
        tokens: int = 0,
        tokens_out: int = 0,
        requests: int = 1,
        cost_usd: float = 0.0,
        model: str = "",
        wait_s: float = 0.0,
        name: str = "",
        task: str = "",
        retry: bool = False,
        worker: str = "w",
    ) -> str:
        """Ask, and return the id; what was answered at once is in `answers`."""
        self._ids += 1
        name = name or f"a{self._ids}"
        request = Acquire(
            id=name,
            worker=worker,
            keys=keys,
            n=n,
            tokens_in=tokens,
            tokens_out=tokens_out,
            requests=requests,
            cost_usd=cost_usd,
            model=model,
            wait_ms=round(wait_s * 1000),
            task=task,
            retry=retry,
        )
        reply = self.send(request)
        if reply is not None:
            self.answers.setdefault(name, reply)
        return name

    def settle(
        self,
        name: str,
        outcome: OutcomeClass = "ok",
        *,
        tokens_in: int | None = None,
        tokens_out: int | None = None,
        cost_usd: float | None = None,
        retry_after_s: float | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        """End every permit that an acquire got."""
        for permit in self.permits(name):
            self.send(
                Settle(
                    permit=permit,
                    outcome=outcome,
                    tokens_in=tokens_in,
                    tokens_out=tokens_out,
                    cost_usd=cost_usd,
                    retry_after_s=retry_after_s,
                    keys=tuple(keys),
                )
            )

    def wake(self) -> None:
        """Let the governor look out now."""
        self._note(self.governor.due(self.now))

    def advance(self, seconds: float) -> None:
        """Let time pass, waking the governor exactly when it asked for it."""
        end = self.now + seconds
        for _ in range(200_000):
            if self.wake_at is None or self.wake_at > end:
                break
            self.now = max(self.now, self.wake_at)
            before = self.wake_at
            self._note(self.governor.due(self.now))
            assert self.wake_at is None or self.wake_at > before - 1e-6, "it asks to be woken in the past"
        else:
            raise AssertionError("the governor spins")
        self.now = end

    def granted(self, name: str) -> Granted:
        """The grant that an acquire got."""
        reply = self.answers[name]
        assert isinstance(reply, Granted), reply
        return reply

    def permits(self, name: str) -> list[str]:
        """The permits that an acquire got."""
        return [lease.permit for lease in self.granted(name).leases]

    def permit(self, name: str) -> str:
        """The one permit that an acquire got."""
        (permit,) = self.permits(name)
        return permit

    def start_in_ms(self, name: str) -> int:
        """In how many milliseconds the first permit of an acquire begins."""
        return self.granted(name).leases[0].start_in_ms

    def waits(self, name: str) -> Wait:
        """The refusal for now that an acquire got."""
        reply = self.answers[name]
        assert isinstance(reply, Wait), reply
        return reply

    def limit(self, key: str) -> LimitState:
        """A limit as it is listed."""
        listing = self.send(Limits(key=key))
        assert isinstance(listing, LimitsListing)
        (state,) = listing.items
        return state

    def effective(self, key: str, dimension: str = "requests") -> float:
        """What is in effect of one dimension of a limit."""
        return next(one.effective for one in self.limit(key).dimensions if one.dimension == dimension)

    def operate(self, key: str, operation: Operation) -> None:
        """Do what an operator does."""
        assert isinstance(self.send(Operate(key=key, operation=operation)), LimitsListing)

    def gate(self, *keys: str, tokens_in: int = 0, tokens_out: int = 0) -> Gate:
        """The gate of one pool."""
        listing = self.send(Gates(pools=(Pool(keys=keys, tokens_in=tokens_in, tokens_out=tokens_out),)))
        assert isinstance(listing, GatesListing)
        (gate,) = listing.items
        return gate
