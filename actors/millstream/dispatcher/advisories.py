"""Messages at their delivery limit: the server never delivers them again, so the dispatcher ends what they stand for."""

from dataclasses import dataclass

import msgspec

from millstream.dispatcher.admission import Admitter
from millstream.dispatcher.context import Context
from millstream.dispatcher.decisions import Decider
from millstream.dispatcher.ticks import Ticker
from millstream.errors import BrokerError
from millstream.policy import sweep as policy
from millstream.ports import Conflict, Delivery, Record, Refused, Stored
from millstream_schemas.codec import InvalidEnvelope, UnknownMessage, decode_work_item
from millstream_schemas.events import Cause, Failed, WorkItem


class _Advisory(msgspec.Struct, frozen=True):
    """What the server says when a message was delivered as often as it may be."""

    stream: str
    consumer: str
    stream_seq: int
    deliveries: int = 0
    type: str = ""


@dataclass(frozen=True)
class Sweeper:
    """Acts on max-delivery advisories. Stateless."""

    context: Context
    admitter: Admitter
    decider: Decider
    ticker: Ticker

    async def handle(self, delivery: Delivery) -> None:
        """Take care of the message that an advisory names, then ack the advisory."""
        try:
            advisory = msgspec.json.decode(delivery.body, type=_Advisory)
        except (msgspec.MsgspecError, ValueError):
            self.context.broker.ack([delivery])
            return
        try:
            if await self._take_care(advisory):
                self.context.broker.ack([delivery])
        except (BrokerError, UnknownMessage) as error:
            self.context.telemetry.emit("broker.trouble", error=str(error))

    async def _take_care(self, advisory: _Advisory) -> bool:
        names = self.context.names
        record = await self.context.broker.get(advisory.stream, advisory.stream_seq)
        if record is None:
            return True
        self.context.telemetry.emit("advisory.handled", stream=advisory.stream, seq=advisory.stream_seq)
        if advisory.stream == names.work_stream and advisory.consumer == names.ticks_consumer:
            done = await self.ticker.tick_one(_as_delivery(record, advisory))
            return done and await self.context.broker.delete(advisory.stream, record.seq)
        if advisory.stream == names.work_stream:
            return await self._end_work(record)
        if advisory.stream == names.events_stream:
            return await self.decider.decide_one(_as_delivery(record, advisory))
        if advisory.stream == names.inbox_stream:
            kept = await self.admitter.quarantine(_as_delivery(record, advisory), _too_often(advisory))
            return kept and await self.context.broker.delete(advisory.stream, record.seq)
        return await self.context.broker.delete(advisory.stream, record.seq)

    async def _end_work(self, record: Record) -> bool:
        """A task whose executions never came to an end fails as crashed, with its dead letter."""
        names, journal = self.context.names, self.context.journal
        item = decode_work_item(record.body)
        cause = Cause(stream=names.work_stream, seq=record.seq)
        while True:
            last = await journal.last(item.card.tenant_id, item.card.key)
            overtaken = policy.is_overtaken(item, last.event)
            past = await journal.past(item.card.tenant_id, item.card.key) if overtaken else ()
            verdict = policy.end_of_work(item, cause, last.event, last.seq, past)
            if isinstance(verdict, policy.Nothing):
                break
            if isinstance(verdict, policy.End):
                answer = await journal.append(verdict.event, verdict.expect_seq)
                if isinstance(answer, Refused):
                    raise BrokerError(answer.description)
                if not isinstance(answer, Stored):
                    continue
            await self._bury(verdict.event, item)
            break
        return await self.context.broker.delete(names.work_stream, record.seq)

    async def _bury(self, event: Failed, item: WorkItem) -> None:
        letter = policy.dead_letter(event, item, self.context.clock.now())
        answer = await self.context.broker.publish(self.context.journal.dead_letter(letter))
        if not isinstance(answer, Stored | Conflict):
            raise BrokerError(f"a dead letter could not be stored: {answer}")


def _too_often(advisory: _Advisory) -> InvalidEnvelope:
    return InvalidEnvelope(f"could not be admitted in {advisory.deliveries} deliveries")


def _as_delivery(record: Record, advisory: _Advisory) -> Delivery:
    """A message outside of any mailbox: it has no token, so it must never be acked."""
    return Delivery(
        subject=record.subject,
        body=record.body,
        headers=record.headers,
        stream=advisory.stream,
        consumer=advisory.consumer,
        seq=record.seq,
        delivery=advisory.deliveries,
        at=record.at,
        pending=0,
        token="",
    )
