"""What follows an attempt without a result: decides in batches; event first, then publish, then ack."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from millstream.dispatcher.context import Context
from millstream.errors import BrokerError
from millstream.policy import decide as policy
from millstream.policy.decide import Decision, Seen
from millstream.policy.holding import ToHeld, ToWork
from millstream.ports import Delivery, Outgoing, Refused, Stored
from millstream_schemas.codec import UnknownMessage, decode_event
from millstream_schemas.events import AttemptFailed, Interrupted, Parked


@dataclass(frozen=True, slots=True)
class Asked:
    """An event that waits for a decision, and its delivery."""

    delivery: Delivery
    seen: Seen


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision stands in the stream; `follow_up` is to be published."""

    delivery: Delivery
    follow_up: policy.FollowUp


@dataclass(frozen=True)
class Decider:
    """Decides batches of failed, parked and interrupted attempts. Stateless."""

    context: Context

    async def handle(self, deliveries: Sequence[Delivery]) -> None:
        """Decide a batch and ack it; what could not be finished is left for redelivery."""
        self.context.broker.ack(await self._finish(deliveries))

    async def decide_one(self, delivery: Delivery) -> bool:
        """Decide a single event outside of the mailbox, for the advisories; True once nothing is left to do."""
        return bool(await self._finish([delivery]))

    async def _finish(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        asked = [one for delivery in deliveries if (one := self._read(delivery)) is not None]
        decided = await self._append(asked)
        return await self._publish(decided)

    def _read(self, delivery: Delivery) -> Asked | None:
        try:
            event = decode_event(delivery.body)
        except UnknownMessage as error:
            self.context.telemetry.emit("message.unknown", stream=delivery.stream, seq=delivery.seq, error=str(error))
            return None
        if not isinstance(event, AttemptFailed | Parked | Interrupted):
            return None
        seen = Seen(event, delivery.stream, delivery.seq, delivery.at)
        if isinstance(event, Parked) and event.reason == "no_handler":
            seen = replace(seen, served=self.context.is_served(seen))
        elif isinstance(event, Parked) and event.reason == "throttled":
            seen = replace(seen, metered=self.context.metering(event.item.envelope))
        return Asked(delivery, seen)

    async def _append(self, asked: Sequence[Asked]) -> list[Decided]:
        journal = self.context.journal
        decisions = [self._decide(one.seen) for one in asked]
        entries = [journal.entry(decision, one.seen.seq) for one, decision in zip(asked, decisions, strict=True)]
        answers = await self.context.broker.publish_all(entries) if entries else []
        decided: list[Decided] = []
        for one, decision, answer in zip(asked, decisions, answers, strict=True):
            if isinstance(answer, Stored):
                decided.append(Decided(one.delivery, policy.follow_up(decision, answer.seq, one.seen)))
            else:
                found = await self._settle(one, decision)
                if found is not None:
                    decided.append(found)
        return decided

    def _decide(self, seen: Seen) -> Decision:
        return policy.decide(seen, self.context.ids.uniform(), self.context.decide_settings)

    async def _settle(self, one: Asked, decision: Decision) -> Decided | None:
        """Find out from the last event what to do for a decision that was not stored; None leaves it for redelivery."""
        card = one.seen.event.card
        while True:
            try:
                last = await self.context.journal.last(card.tenant_id, card.key)
                overtaken = policy.is_overtaken(one.seen, last.event)
                past = await self.context.journal.past(card.tenant_id, card.key) if overtaken else ()
            except (BrokerError, UnknownMessage) as error:
                self.context.telemetry.emit("decision.unanswered", key=card.key, error=str(error))
                return None
            match policy.decided(one.seen, last.event, last.seq, past):
                case policy.GoOn(event, fence):
                    return Decided(one.delivery, policy.follow_up(event, fence, one.seen))
                case policy.Done():
                    return Decided(one.delivery, policy.Nothing())
                case policy.Decide():
                    pass
            answer = await self.context.journal.append(decision, one.seen.seq)
            if isinstance(answer, Stored):
                return Decided(one.delivery, policy.follow_up(decision, answer.seq, one.seen))
            if isinstance(answer, Refused):
                self.context.telemetry.emit("broker.trouble", answer=answer.description)
                return None

    async def _publish(self, decided: Sequence[Decided]) -> list[Delivery]:
        """Publish what follows; returns the deliveries that are finished."""
        missing = await self.context.publish([self._outgoing(one.follow_up) for one in decided])
        done: list[Decided] = []
        for one, answer in zip(decided, missing, strict=True):
            if answer is None:
                done.append(one)
            else:
                self.context.telemetry.emit("decision.unanswered", seq=one.delivery.seq, answer=repr(answer))
        self.context.bells.announce(one.follow_up for one in done if isinstance(one.follow_up, ToWork | ToHeld))
        return [one.delivery for one in done]

    def _outgoing(self, follow_up: policy.FollowUp) -> Sequence[Outgoing]:
        match follow_up:
            case ToWork() | ToHeld():
                return self.context.journal.onward(follow_up)
            case policy.ToDlq(letter):
                return (self.context.journal.dead_letter(letter),)
            case policy.Nothing():
                return ()
            case _:
                assert_never(follow_up)
