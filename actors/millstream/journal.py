"""How actors write and read the life of tasks: events by compare-and-set, infos without waiting."""

from dataclasses import dataclass

from millstream.policy.holding import Onward, ToHeld
from millstream.policy.metering import lane_token
from millstream.ports import Broker, Expect, Outgoing, Published, Schedule
from millstream_schemas.codec import decode_event, encode
from millstream_schemas.events import DeadLetter, Deadline, Event, WorkItem
from millstream_schemas.infos import Info
from millstream_schemas.names import Names

MOST_EVENTS = 10_000
"""Of one task, read at once."""


@dataclass(frozen=True, slots=True)
class Last:
    """The last event of a task, its sequence and the stream's time stamp of it; (None, 0, 0) where there is none."""

    event: Event | None
    seq: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Journal:
    """Builds and reads the messages of the chain. Owns nothing; every actor has one on its own connection."""

    broker: Broker
    names: Names
    event_ttl_s: float

    def entry(self, event: Event, expect_seq: int) -> Outgoing:
        """An event to append while `expect_seq` is the last sequence of its task."""
        card = event.card
        return Outgoing(
            subject=self.names.event(card.tenant_id, card.key, card.queue, str(event.__struct_config__.tag)),
            body=encode(event),
            expect=Expect(self.names.life(card.tenant_id, card.key), expect_seq),
            ttl_s=self.event_ttl_s,
        )

    async def append(self, event: Event, expect_seq: int) -> Published:
        """Append one event; a Conflict or Unanswered asks for `last` and a rule of `policy`."""
        return await self.broker.publish(self.entry(event, expect_seq))

    async def last(self, tenant: str, key: str) -> Last:
        """The last event of a task, from the stream's leader; raises UnknownMessage for a newer peer's."""
        record = await self.broker.last(self.names.events_stream, self.names.life(tenant, key))
        return Last(None, 0) if record is None else Last(decode_event(record.body), record.seq, record.at)

    async def past(self, tenant: str, key: str) -> list[tuple[int, Event]]:
        """The whole life of a task with sequences, oldest first; raises UnknownMessage for a newer peer's event."""
        records = await self.broker.history(self.names.events_stream, self.names.life(tenant, key), MOST_EVENTS)
        return [(record.seq, decode_event(record.body)) for record in records]

    def inform(self, info: Info, tenant: str, queue: str) -> None:
        """Tell something that moves nothing; it may be lost."""
        subject = self.names.info(tenant, info.key, queue, str(info.__struct_config__.tag))
        self.broker.inform(Outgoing(subject=subject, body=encode(info), ttl_s=self.event_ttl_s))

    def work(self, item: WorkItem, due_at: float | None) -> Outgoing:
        """The message that releases a task to WORK: at once, or at `due_at` by the server's own clock.

        What has a lane comes at `due_at` as a tick to the dispatcher, which holds it then.
        """
        card, names = item.card, self.names
        target = names.work(card.queue, card.priority, card.key)
        if due_at is None:
            return Outgoing(subject=target, body=encode(item), msg_id=str(item.fence))
        if item.lane:
            target = names.tick("hold", card.queue, card.key)
        return self._timer(item, encode(item), Schedule(due_at, target))

    def held(self, item: WorkItem, *, again: bool) -> Outgoing:
        """The entry of a task in HELD."""
        card = item.card
        subject = self.names.held(card.queue, card.priority, lane_token(item.lane, again=again))
        return Outgoing(subject=subject, body=encode(item), msg_id=str(item.fence))

    def expiry(self, item: WorkItem, deadline_at: float) -> Outgoing:
        """The timer that ends a held task at its deadline, by the server's own clock."""
        card = item.card
        body = encode(Deadline(tenant_id=card.tenant_id, key=card.key, fence=item.fence))
        return self._timer(item, body, Schedule(deadline_at, self.names.tick("expire", card.queue, card.key)))

    def onward(self, follow_up: Onward) -> tuple[Outgoing, ...]:
        """All messages that a task needs to go on."""
        item = follow_up.item
        if not isinstance(follow_up, ToHeld):
            return (self.work(item, follow_up.due_at),)
        entry = self.held(item, again=follow_up.again)
        return (entry,) if follow_up.deadline_at is None else (entry, self.expiry(item, follow_up.deadline_at))

    def _timer(self, item: WorkItem, body: bytes, schedule: Schedule) -> Outgoing:
        """A message that the server holds until it is due; its subject is the event's own, so that a second replaces it."""
        subject = self.names.later(item.card.queue, item.card.key, item.fence)
        return Outgoing(subject=subject, body=body, msg_id=str(item.fence), schedule=schedule)

    def dead_letter(self, letter: DeadLetter) -> Outgoing:
        """The message that keeps a failed task; a second one of the same generation is refused."""
        card = letter.card
        subject = self.names.dlq(card.tenant_id, card.queue, card.key, card.generation)
        return Outgoing(subject=subject, body=encode(letter), expect=Expect(subject, 0))
