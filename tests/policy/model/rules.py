"""The real policy functions, asked in the model's numbers. Each question is asked once and its answer kept.

The answers are what an actor does next, as (phase, event, sequence): append the event on the sequence, follow the
event that stands at the sequence with a message, run the handler, ack, or stay silent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import msgspec

from millstream.policy import admit, control, decide, release, ticks
from millstream.policy import claim as claims
from millstream.policy.holding import Onward, ToHeld, ToWork, onward
from millstream.policy.metering import Metered
from millstream_schemas.codec import encode
from millstream_schemas.commands import Cancel
from millstream_schemas.envelope import Budget, Envelope, RetryPolicy, Unique
from millstream_schemas.events import (
    Cancelled,
    Cause,
    Completed,
    Deadline,
    Event,
    Expired,
    Failure,
    Interrupted,
    Parked,
    WorkItem,
)
from tests.policy.model.numbers import (
    ACK,
    COMMITTED,
    CONTROL,
    DEADLINE,
    DECIDED_AT,
    EVENTS,
    INBOX,
    SILENT,
    WORK,
    Messages,
    Next,
)
from tests.policy.model.rules_held import HeldRules

Past = Sequence[tuple[int, Event]]
Message = TypeVar("Message", bound=msgspec.Struct)

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
    decide: Callable[[decide.Seen, float, decide.DecideSettings], decide.Decision] = decide.decide
    hold: Callable[[WorkItem, Cause, Event | None, int], ticks.Verdict] = ticks.hold
    expire: Callable[[Deadline, Cause, Event | None, int], ticks.Append | ticks.Done] = ticks.expire
    entry: Callable[[release.Entry, release.Written, Event | None, int, Past], release.Standing] = release.standing


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
    """Answers for one exploration.

    `delay_s` delays the submits, `unique` is what they say of their key, `metered` gives their queue a limit, with
    `deadline` they have one.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        delay_s: float | None = None,
        unique: Unique | None = None,
        metered: bool = False,
        deadline: bool = False,
        too_long: bool = False,
    ) -> None:
        self.policy = policy
        self.metered = metered
        self.events: Pool[Event] = Pool()
        self.items: Pool[WorkItem] = Pool()
        self._envelope = Envelope(
            task_type="agent.run",
            idempotency_key="one",
            unique=unique,
            delay_seconds=delay_s,
            deadline_at=datetime.fromtimestamp(DEADLINE, UTC) if deadline else None,
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
        self.held = HeldRules(self, deadline=deadline, too_long=too_long)

    def _kind(self, event: int) -> str:
        return str(self.events.message(event).__struct_config__.tag)

    def last(self, chain: tuple[int, ...]) -> Event | None:
        """The last event of a chain."""
        return self.events.message(chain[-1]) if chain else None

    def past(self, chain: tuple[int, ...]) -> list[tuple[int, Event]]:
        """A chain with its sequences."""
        return list(enumerate(self._past(chain), 1))

    def _past(self, chain: tuple[int, ...]) -> list[Event]:
        return [self.events.message(event) for event in chain]

    # --- admission ------------------------------------------------------------------------------

    def _admission(self, seq: int, events_before: int) -> admit.Admission:
        accepted_at = _event_at(events_before) + 0.5
        where = admit.Submit(self._envelope, "acme", "agent-run", INBOX, seq, accepted_at)
        kinds = (Metered(limits=("model",)),) if self.metered else ()
        return admit.admit(where, admit.QueueDefaults(), kinds=kinds)

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
        decision = self.policy.decide(self._seen(event, seq), 0.5, decide.DecideSettings())
        return ("append", self.events.number(decision), seq)

    def _decided(self, chain: tuple[int, ...], seq: int) -> Next:
        event, last = chain[seq - 1], self.last(chain)
        seen = self._seen(event, seq)
        past = self.past(chain) if decide.is_overtaken(seen, last) else []
        match self.policy.decided(seen, last, len(chain), past):
            case decide.Decide():
                return self.decision(event, seq)
            case decide.GoOn(decision, fence):
                return ("follow", self.events.number(decision), fence)
            case decide.Done():
                return ACK

    def _release(self, seq: int, events_before: int, first: int, fence: int) -> Messages:
        """What follows the first event of a submit."""
        event = self.events.message(first)
        assert isinstance(event, admit.FirstEvent)
        if isinstance(event, Expired):
            return ()
        admission = self.admission(seq, events_before)
        return self.messages(onward(event, fence, admission.accepted_at, envelope=admission.envelope))

    def _consequence(self, seq: int, seen: int, decision: int, fence: int) -> Messages:
        """What follows a decision."""
        event = self.events.message(decision)
        match decide.follow_up(event, fence, self._seen(seen, seq)):
            case ToWork() | ToHeld() as follow_up:
                return self.messages(follow_up)
            case decide.ToDlq(letter):
                return (("letter", letter.card.generation),)
            case decide.Nothing():
                return ()

    def messages(self, follow_up: Onward) -> Messages:
        """What the journal makes of it."""
        item = self.items.number(follow_up.item)
        if isinstance(follow_up, ToWork):
            return (("work" if follow_up.due_at is None else "later", item),)
        entry = ("held", item)
        return (entry,) if follow_up.deadline_at is None else (entry, ("timer", follow_up.item.fence))

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
