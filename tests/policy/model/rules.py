"""The real policy functions, asked in the model's numbers. Each question is asked once and its answer kept.

The answers are what an actor does next, as (phase, event, sequence): append the event on the sequence, follow the
event that stands at the sequence with a message, run the handler, ack, or stay silent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import msgspec

from millstream.policy import admit, control, decide
from millstream.policy import claim as claims
from millstream_schemas.codec import encode
from millstream_schemas.commands import Cancel
from millstream_schemas.envelope import Budget, Envelope, RetryPolicy, Unique
from millstream_schemas.events import (
    Cancelled,
    Cause,
    Completed,
    Event,
    Failure,
    Interrupted,
    Parked,
    Queued,
    Scheduled,
    WorkItem,
)

Next = tuple[str, int, int]
Past = Sequence[tuple[int, Event]]
Message = TypeVar("Message", bound=msgspec.Struct)

ACK: Next = ("ack", 0, 0)
COMMITTED: Next = ("committed", 0, 0)
SILENT: Next = ("silent", 0, 0)

INBOX, EVENTS, WORK, CONTROL = "INBOX", "EVENTS", "WORK", "CONTROL"
DECIDED_AT = 2000.0
MAX_ATTEMPTS = 2


@dataclass(frozen=True)
class Policy:
    """The functions under test; a mutant takes the place of one to show that the model notices."""

    standing: Callable[[admit.Admission, Event | None, int, float], admit.Standing] = admit.standing
    first_claim: Callable[[claims.Hold], claims.Claim] = claims.first_claim
    claim: Callable[[claims.Hold, Event | None, int], claims.ClaimVerdict] = claims.claim
    commit: Callable[[claims.Hold, Event | None, int], claims.CommitVerdict] = claims.commit
    hand_back: Callable[[claims.Hold, Event | None, int], claims.CommitVerdict] = claims.hand_back
    decided: Callable[[decide.Seen, Event | None, int, Past], decide.Decide | decide.GoOn | decide.Done] = (
        decide.decided
    )
    cancel: Callable[[Cancel, Cause, Event | None, int, Sequence[Event]], control.Verdict] = control.cancel


class Grip(NamedTuple):
    """A WORK delivery in the model's numbers."""

    seq: int
    item: int
    delivery: int
    resets: int

    @property
    def execution_id(self) -> str:
        """Fresh for every delivery, also for two that carry the same count."""
        return f"{self.seq}.{self.delivery}.{self.resets}"


class Pool(Generic[Message]):
    """Numbers for messages, from 1; equal messages share one."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._messages: list[Message] = []

    def number(self, message: Message) -> int:
        """The number of `message`."""
        key = encode(message)
        if key not in self._numbers:
            self._messages.append(message)
            self._numbers[key] = len(self._messages)
        return self._numbers[key]

    def message(self, number: int) -> Message:
        """The message of `number`."""
        return self._messages[number - 1]


def _event_at(seq: int) -> float:
    """The time stamp of an event: the model's clock ticks with the chain."""
    return 1000.0 + seq


class Rules:
    """Answers for one exploration. `delay_s` delays the submits, `unique` is what they say of their key."""

    def __init__(self, policy: Policy, *, delay_s: float | None = None, unique: Unique | None = None) -> None:
        self.policy = policy
        self.events: Pool[Event] = Pool()
        self.items: Pool[WorkItem] = Pool()
        self._envelope = Envelope(
            task_type="agent.run",
            idempotency_key="one",
            unique=unique,
            delay_seconds=delay_s,
            budget=Budget(max_attempts=MAX_ATTEMPTS),
            retry_policy=RetryPolicy(strategy="fixed", jitter=False),
        )
        self.admission = lru_cache(None)(self._admission)
        self.decision = lru_cache(None)(self._decision)
        self.standing = lru_cache(None)(self._standing)
        self.decided = lru_cache(None)(self._decided)
        self.release = lru_cache(None)(self._release)
        self.consequence = lru_cache(None)(self._consequence)
        self.first_claim = lru_cache(None)(self._first_claim)
        self.claim = lru_cache(None)(self._claim)
        self.outcome = lru_cache(None)(self._outcome)
        self.commit = lru_cache(None)(self._commit)
        self.hand_back = lru_cache(None)(self._hand_back)
        self.cancel = lru_cache(None)(self._cancel)
        self.kind = lru_cache(None)(self._kind)

    def _kind(self, event: int) -> str:
        return str(self.events.message(event).__struct_config__.tag)

    def last(self, chain: tuple[int, ...]) -> Event | None:
        """The last event of a chain."""
        return self.events.message(chain[-1]) if chain else None

    def _past(self, chain: tuple[int, ...]) -> list[Event]:
        return [self.events.message(event) for event in chain]

    # --- admission ------------------------------------------------------------------------------

    def _admission(self, seq: int, events_before: int) -> admit.Admission:
        accepted_at = _event_at(events_before) + 0.5
        where = admit.Submit(self._envelope, "acme", "agent-run", INBOX, seq, accepted_at)
        return admit.admit(where, admit.QueueDefaults())

    def first_event(self, seq: int, events_before: int) -> Next:
        """What a dispatcher tries first with a submit, before it reads anything."""
        return ("append", self.events.number(self.admission(seq, events_before).event), 0)

    def _standing(self, seq: int, events_before: int, last: int, last_seq: int) -> Next:
        admission = self.admission(seq, events_before)
        event = self.events.message(last) if last else None
        match self.policy.standing(admission, event, last_seq, _event_at(last_seq)):
            case admit.AppendFirst():
                return self.first_event(seq, events_before)
            case admit.GoOn(fence, event):
                return ("follow", self.events.number(event), fence)
            case admit.NewGeneration(expect_seq, generation):
                return ("append", self.events.number(admit.in_generation(admission, generation)), expect_seq)
            case admit.Done() | admit.Again():
                return ACK

    # --- decisions ------------------------------------------------------------------------------

    def _seen(self, event: int, seq: int) -> decide.Seen:
        message = self.events.message(event)
        assert isinstance(message, decide.Undecided)
        return decide.Seen(message, EVENTS, seq, DECIDED_AT)

    def _decision(self, event: int, seq: int) -> Next:
        decision = decide.decide(self._seen(event, seq), 0.5, decide.DecideSettings())
        return ("append", self.events.number(decision), seq)

    def _decided(self, chain: tuple[int, ...], seq: int) -> Next:
        event, last = chain[seq - 1], self.last(chain)
        seen = self._seen(event, seq)
        past = list(enumerate(self._past(chain), 1)) if decide.is_overtaken(seen, last) else []
        match self.policy.decided(seen, last, len(chain), past):
            case decide.Decide():
                return self.decision(event, seq)
            case decide.GoOn(decision, fence):
                return ("follow", self.events.number(decision), fence)
            case decide.Done():
                return ACK

    def _release(self, seq: int, events_before: int, first: int, fence: int) -> tuple[str, int] | None:
        """The message that follows the first event of a submit, as `consequence`."""
        event = self.events.message(first)
        if not isinstance(event, Queued | Scheduled):
            return None
        item = WorkItem(fence=fence, card=event.card, envelope=self.admission(seq, events_before).envelope)
        return ("later" if isinstance(event, Scheduled) else "work", self.items.number(item))

    def _consequence(self, seq: int, seen: int, decision: int, fence: int) -> tuple[str, int] | None:
        """The message that follows a decision: ("work" or "later", item), ("letter", generation) or None."""
        event = self.events.message(decision)
        match decide.follow_up(event, fence, self._seen(seen, seq)):
            case decide.ToWork(item, due_at):
                return ("work" if due_at is None else "later", self.items.number(item))
            case decide.ToDlq(letter):
                return ("letter", letter.card.generation)
            case decide.Nothing():
                return None

    # --- workers --------------------------------------------------------------------------------

    def hold(self, grip: Grip) -> claims.Hold:
        """The real delivery."""
        return claims.Hold(self.items.message(grip.item), grip.execution_id, "worker", WORK, grip.seq, grip.delivery)

    def fence(self, item: int) -> int:
        """The release that a WORK item belongs to."""
        return self.items.message(item).fence

    def _first_claim(self, grip: Grip) -> Next:
        first = self.policy.first_claim(self.hold(grip))
        return ("claim", self.events.number(first.event), first.expect_seq)

    def _claim(self, grip: Grip, last: int, last_seq: int) -> Next:
        match self.policy.claim(self.hold(grip), self.events.message(last) if last else None, last_seq):
            case claims.Claim(event, expect_seq):
                return ("claim", self.events.number(event), expect_seq)
            case claims.Claimed(fence, event):
                return ("run", self.events.number(event), fence)
            case claims.HistoryLost(event):
                return ("back", self.events.number(event), 0)
            case claims.Silence():
                return SILENT
            case claims.Superseded():
                return ACK

    def _outcome(self, grip: Grip, started: int, name: str) -> int:
        """The event of an outcome; `started` is the claim that it stands on, 0 without one."""
        hold = self.hold(grip)
        crashes = self.events.message(started).card.crashes if started else hold.item.card.crashes
        card = claims.card_of(hold, crashes)
        match name:
            case "completed":
                return self.events.number(Completed(card=card))
            case "cancelled":
                return self.events.number(Cancelled(card=card))
            case "parked":
                return self.events.number(Parked(card=card, until=3000.0, reason="throttled", item=hold.item))
            case "interrupted":
                return self.events.number(Interrupted(card=card, item=hold.item))
            case "error":
                return self.events.number(claims.failed(hold, crashes, Failure(reason="error")))
            case _:
                return self.events.number(claims.failed(hold, crashes, Failure(reason="fatal")))

    def _commit(self, grip: Grip, outcome: int, last: int, last_seq: int) -> Next:
        verdict = self.policy.commit(self.hold(grip), self.events.message(last) if last else None, last_seq)
        return self._committed("commit", outcome, verdict)

    def _hand_back(self, grip: Grip, outcome: int, last: int, last_seq: int) -> Next:
        verdict = self.policy.hand_back(self.hold(grip), self.events.message(last) if last else None, last_seq)
        return self._committed("back", outcome, verdict)

    def _committed(self, phase: str, outcome: int, verdict: claims.CommitVerdict) -> Next:
        match verdict:
            case claims.Append(expect_seq, crashes):
                event = self.events.message(outcome)
                assert isinstance(event, claims.Outcome)
                return (phase, self.events.number(claims.with_crashes(event, crashes)), expect_seq)
            case claims.Committed():
                return COMMITTED
            case claims.Silence():
                return SILENT
            case claims.Superseded():
                return ACK

    # --- the canceller --------------------------------------------------------------------------

    def _cancel(self, chain: tuple[int, ...]) -> Next:
        command = Cancel(tenant_id="acme", task_id="one", key=self.admission(1, 0).key)
        last = self.last(chain)
        past = self._past(chain) if control.is_later_generation(last) else []
        match self.policy.cancel(command, Cause(stream=CONTROL, seq=1), last, len(chain), past):
            case control.Append(event, expect_seq):
                return ("append", self.events.number(event), expect_seq)
            case control.GoOn(event, fence):
                return ("purge", self.events.number(event), fence)
            case control.TooLate():
                return ACK
