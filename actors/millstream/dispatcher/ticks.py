"""Timers that fired: a task that has become due is held; one whose deadline passed while it was held ends."""

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.dispatcher.context import Context, Standing, together
from millstream.errors import BrokerError
from millstream.journal import Last
from millstream.policy import ticks as policy
from millstream.ports import Delivery, Refused, Stored
from millstream_schemas.codec import UnknownMessage, decode_deadline, decode_work_item
from millstream_schemas.events import Cause, Deadline, Held, WorkItem


@dataclass(frozen=True, slots=True)
class Due:
    """A `hold` tick: its task has become due and is to be held."""

    delivery: Delivery
    item: WorkItem

    @property
    def cause(self) -> Cause:
        return _cause(self.delivery)


@dataclass(frozen=True, slots=True)
class Late:
    """An `expire` tick: the deadline of a task has passed."""

    delivery: Delivery
    deadline: Deadline


@dataclass(frozen=True)
class Ticker:
    """Acts on batches of ticks: event first, then publish, then ack. Stateless."""

    context: Context

    async def handle(self, deliveries: Sequence[Delivery]) -> None:
        """Act on a batch and ack it; what could not be finished is left for redelivery."""
        self.context.broker.ack(await self._finish(deliveries))

    async def tick_one(self, delivery: Delivery) -> bool:
        """Act on a single tick outside of the mailbox, for the advisories; True once nothing is left to do."""
        return bool(await self._finish([delivery]))

    async def _finish(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        read = [one for delivery in deliveries if (one := self._read(delivery)) is not None]
        standing = await self._hold([one for one in read if isinstance(one, Due)])
        done = await self.context.publish_onward(standing, "decision.unanswered")
        late = [one for one in read if isinstance(one, Late)]
        ended = await together(self._expire, late)
        return done + [one.delivery for one, is_done in zip(late, ended, strict=True) if is_done]

    def _read(self, delivery: Delivery) -> Due | Late | None:
        kind, _, _ = self.context.names.parse_tick(delivery.subject)
        fault = f"ticks of kind {kind!r} are not known here"
        try:
            match kind:
                case "hold":
                    return Due(delivery, decode_work_item(delivery.body))
                case "expire":
                    return Late(delivery, decode_deadline(delivery.body))
                case _:
                    pass
        except UnknownMessage as error:
            fault = str(error)
        self.context.telemetry.emit("message.unknown", stream=delivery.stream, seq=delivery.seq, error=fault)
        return None

    async def _hold(self, due: Sequence[Due]) -> list[Standing]:
        """Append `held` to every task that is due; where that is refused, something else has happened to the task."""
        if not due:
            return []
        journal = self.context.journal
        first = [policy.first_hold(one.item, one.cause) for one in due]
        answers = await self.context.broker.publish_all([journal.entry(one.event, one.expect_seq) for one in first])
        standing: list[Standing] = []
        for one, append, answer in zip(due, first, answers, strict=True):
            found = _standing(one, append, answer.seq) if isinstance(answer, Stored) else await self._settle(one)
            if found is not None:
                standing.append(found)
        return standing

    async def _settle(self, one: Due) -> Standing | None:
        """Find out from the last event what to do for a tick whose append was not stored; None leaves it for redelivery."""
        while (last := await self._last(one.item.card.tenant_id, one.item.card.key)) is not None:
            verdict = policy.hold(one.item, one.cause, last.event, last.seq)
            match verdict:
                case policy.GoOn(event, fence):
                    return Standing(one.delivery, policy.follow_up(event, fence, one.item))
                case policy.Done():
                    return Standing(one.delivery, None)
                case policy.Append():
                    pass
            answer = await self.context.journal.append(verdict.event, verdict.expect_seq)
            if isinstance(answer, Stored):
                return _standing(one, verdict, answer.seq)
            if isinstance(answer, Refused):
                self.context.telemetry.emit("broker.trouble", answer=answer.description)
                break
        return None

    async def _expire(self, one: Late) -> bool:
        """End a task that is still held at its deadline; True once nothing is left to do."""
        while (last := await self._last(one.deadline.tenant_id, one.deadline.key)) is not None:
            verdict = policy.expire(one.deadline, _cause(one.delivery), last.event, last.seq)
            if isinstance(verdict, policy.Done):
                return True
            answer = await self.context.journal.append(verdict.event, verdict.expect_seq)
            if isinstance(answer, Stored):
                return True
            if isinstance(answer, Refused):
                self.context.telemetry.emit("broker.trouble", answer=answer.description)
                break
        return False

    async def _last(self, tenant: str, key: str) -> Last | None:
        """The last event, or None where it cannot be read now: the tick then waits for its redelivery."""
        try:
            return await self.context.journal.last(tenant, key)
        except (BrokerError, UnknownMessage) as error:
            self.context.telemetry.emit("decision.unanswered", key=key, error=str(error))
            return None


def _cause(delivery: Delivery) -> Cause:
    return Cause(stream=delivery.stream, seq=delivery.seq)


def _standing(one: Due, append: policy.Append, seq: int) -> Standing:
    """What follows the event that a tick appended: an entry in HELD after `held`; after any other the decider acts on it."""
    event = append.event
    return Standing(one.delivery, policy.follow_up(event, seq, one.item) if isinstance(event, Held) else None)
