"""The streams of the in-memory broker: what a server does, as plain state with `now` as argument.

Nothing here waits. Whatever the passing of time brings (a lease that ran out, a schedule that is due, an old message)
is done by `settle(now)`, which the server calls before each operation.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from millstream.errors import BrokerError
from millstream.memory_consumers import MemoryConsumer
from millstream.memory_subjects import SubjectIndex, matches
from millstream.ports import (
    Conflict,
    Delivery,
    Outgoing,
    Published,
    Record,
    Refused,
    Schedule,
    Stored,
    StreamInfo,
)
from millstream_schemas.names import (
    EXPECTED_SEQUENCE,
    EXPECTED_SUBJECT,
    INCREMENT,
    MSG_ID,
    SCHEDULE,
    SCHEDULE_TARGET,
    SERVER_HEADER_PREFIX,
    TTL,
)
from millstream_schemas.topology import StreamSpec

MESSAGE_OVERHEAD_BYTES = 30

# Error codes of the server.
TOO_LARGE_FOR_STREAM = 10054
STREAM_FULL = 10077
TTL_DISABLED = 10166
COUNTERS_DISABLED = 10168
INCREMENT_MISSING = 10169
COUNTER_HAS_BODY = 10170
INCREMENT_INVALID = 10171
SCHEDULES_DISABLED = 10188
SCHEDULE_TARGET_INVALID = 10190


@dataclass(frozen=True, slots=True)
class _Held:
    record: Record
    size_bytes: int
    schedule: Schedule | None


class MemoryStream:
    """One stream. `max_bytes` is -1 without a limit; `fire_twice` has each schedule deliver its message twice."""

    def __init__(self, spec: StreamSpec, max_bytes: int, *, fire_twice: bool = False) -> None:
        self.spec = spec
        self.max_bytes = max_bytes
        self.consumers: dict[str, MemoryConsumer] = {}
        self.last_seq = 0
        self._fire_twice = fire_twice
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._index = SubjectIndex()
        self.size_bytes = 0
        self._timers: list[tuple[float, int]] = []
        self._ids: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def captures(self, subject: str) -> bool:
        return any(matches(each, subject) for each in self.spec.subjects)

    def append(self, outgoing: Outgoing, now: float) -> Published:
        """Store one message, or say why not, with the server's checks in the server's order."""
        refused = self._unsupported(outgoing)
        if refused is not None:
            return refused
        if outgoing.expect is not None and self._index.last(outgoing.expect.filter) != outgoing.expect.seq:
            return Conflict()
        if outgoing.msg_id is not None and outgoing.msg_id in self._ids:
            return Stored(self._ids[outgoing.msg_id][0], duplicate=True)
        size = MESSAGE_OVERHEAD_BYTES + message_bytes(outgoing)
        if not self._make_room(size):
            return Refused(STREAM_FULL, "maximum bytes or messages exceeded")
        if outgoing.schedule is not None:
            self._remove_all(self._index.all(outgoing.subject))  # a new schedule takes the place of the earlier one
        total = None if outgoing.increment is None else self._sum(outgoing.subject) + outgoing.increment
        body = outgoing.body if total is None else json.dumps({"val": str(total)}, separators=(",", ":")).encode()
        record = Record(outgoing.subject, body, self.last_seq + 1, now, wire_headers(outgoing))
        self._store(_Held(record, size, outgoing.schedule), outgoing.ttl_s)
        if self.spec.max_msgs_per_subject > 0:
            self._remove_all(self._index.all(outgoing.subject)[: -self.spec.max_msgs_per_subject])
        if outgoing.msg_id is not None:
            self._ids[outgoing.msg_id] = (record.seq, now)
        return Stored(record.seq, total=total)

    def settle(self, now: float) -> None:
        """Fire what is due, drop what is too old, forget old message ids; then look after the consumers' leases."""
        while self._timers and self._timers[0][0] <= now:
            due, seq = heapq.heappop(self._timers)
            held = self._held.get(seq)
            if held is None:
                continue
            self.remove(seq)
            if held.schedule is not None and held.schedule.at == due:
                self._fire(held, held.schedule)
        while self._ids and next(iter(self._ids.values()))[1] + self.spec.duplicate_window_s <= now:
            self._ids.popitem(last=False)
        for consumer in self.consumers.values():
            consumer.settle(now)

    def next_due(self) -> float:
        own = self._timers[0][0] if self._timers else math.inf
        return min([own, *(consumer.next_due() for consumer in self.consumers.values())])

    def add_consumer(self, consumer: MemoryConsumer) -> None:
        """Add it, to be offered all that the stream holds."""
        self.consumers[consumer.spec.durable] = consumer
        for seq, held in self._held.items():
            if consumer.wants(held.record.subject):
                consumer.offer(seq)

    def deliver(self, durable: str, limit: int, now: float) -> list[Delivery]:
        """What there is to lend; nothing while the consumer does not exist."""
        consumer = self.consumers.get(durable)
        if consumer is None:
            return []
        return [self._delivery(consumer, seq, count) for seq, count in consumer.take(limit, now)]

    def ack(self, durable: str, seq: int) -> None:
        """Late acks, double acks and acks of another's delivery are all taken, as the server does."""
        consumer = self.consumers.get(durable)
        if consumer is None or not consumer.delivered(seq):
            return
        consumer.forget(seq)
        if self.spec.retention == "workqueue":
            self.remove(seq)

    def nak(self, durable: str, seq: int, delay_s: float, now: float) -> None:
        if durable in self.consumers:
            self.consumers[durable].nak(seq, delay_s, now)

    def beat(self, durable: str, seq: int) -> None:
        if durable in self.consumers:
            self.consumers[durable].beat(seq)

    def rest(self, durable: str, seq: int, now: float) -> None:
        if durable in self.consumers:
            self.consumers[durable].rest(seq, now)

    def last(self, pattern: str) -> Record | None:
        return self.get(self._index.last(pattern))

    def get(self, seq: int) -> Record | None:
        held = self._held.get(seq)
        return held.record if held is not None else None

    def history(self, pattern: str, limit: int) -> list[Record]:
        return [self._held[seq].record for seq in self._index.all(pattern)[:limit]]

    def page(self, pattern: str, after_seq: int, limit: int) -> list[Record]:
        """Up to `limit` records under `pattern` after a position."""
        return [self._held[seq].record for seq in self._index.all(pattern) if seq > after_seq][: max(limit, 0)]

    def subjects(self, pattern: str) -> dict[str, int]:
        """How many records each subject under `pattern` holds."""
        return self._index.counts(pattern)

    def read(self, filters: Sequence[str], after_seq: int, limit: int) -> list[Record]:
        """Up to `limit` records after a position; no filters, no limit to what they are about."""
        found: list[Record] = []
        first = next(iter(self._held), self.last_seq + 1)
        for seq in range(max(after_seq + 1, first), self.last_seq + 1):
            held = self._held.get(seq)
            if held is None or (filters and not any(matches(each, held.record.subject) for each in filters)):
                continue
            found.append(held.record)
            if len(found) == limit:
                break
        return found

    def purge(self, pattern: str, up_to_seq: int) -> int:
        """Raises BrokerError where the stream denies it."""
        if self.spec.deny_purge:
            raise BrokerError(f"stream {self.spec.name!r} denies purge")
        return self._remove_all([seq for seq in self._index.all(pattern) if seq <= up_to_seq])

    def delete(self, seq: int) -> bool:
        """Raises BrokerError where the stream denies it."""
        if self.spec.deny_delete:
            raise BrokerError(f"stream {self.spec.name!r} denies delete")
        return self.remove(seq)

    def remove(self, seq: int) -> bool:
        held = self._held.pop(seq, None)
        if held is None:
            return False
        self._index.remove(held.record.subject, seq)
        self.size_bytes -= held.size_bytes
        for consumer in self.consumers.values():
            consumer.forget(seq)
        return True

    def info(self) -> StreamInfo:
        first = next(iter(self._held.values()), None)
        first_seq, first_at = (first.record.seq, first.record.at) if first else (self.last_seq + 1, 0.0)
        name, count = self.spec.name, len(self._held)
        return StreamInfo(name, count, self.size_bytes, first_seq, self.last_seq, first_at, self.max_bytes)

    def _unsupported(self, outgoing: Outgoing) -> Refused | None:
        if outgoing.ttl_s is not None and not self.spec.allow_msg_ttl:
            return Refused(TTL_DISABLED, "per-message TTL is disabled")
        if outgoing.schedule is not None:
            if not self.spec.allow_msg_schedules:
                return Refused(SCHEDULES_DISABLED, "message schedules is disabled")
            target = outgoing.schedule.target
            if target == outgoing.subject or not self.captures(target):
                return Refused(SCHEDULE_TARGET_INVALID, "message schedules target is invalid")
        if self.spec.allow_msg_counter or outgoing.increment is not None:
            return self._no_increment(outgoing)
        if 0 <= self.spec.max_msg_size_bytes < message_bytes(outgoing):
            return Refused(TOO_LARGE_FOR_STREAM, "message size exceeds maximum allowed")
        return None

    def _no_increment(self, outgoing: Outgoing) -> Refused | None:
        if not self.spec.allow_msg_counter:
            return Refused(COUNTERS_DISABLED, "message counters is disabled")
        if outgoing.increment is None:
            return Refused(INCREMENT_MISSING, "message counter increment is missing")
        if outgoing.expect is not None:
            return Refused(INCREMENT_INVALID, "message counter increment is invalid")
        return Refused(COUNTER_HAS_BODY, "message counter has payload") if outgoing.body else None

    def _sum(self, subject: str) -> int:
        """What the increments of a subject add up to."""
        last = self.last(subject)
        return int(json.loads(last.body)["val"]) if last is not None else 0

    def _make_room(self, size: int) -> bool:
        """True when a message of `size` fits, after dropping old ones where the stream does so."""
        while self._is_full(size):
            if self.spec.discard == "new" or not self._held:
                return False
            self.remove(next(iter(self._held)))
        return True

    def _is_full(self, size: int) -> bool:
        too_many = 0 < self.spec.max_msgs <= len(self._held)
        return too_many or 0 < self.max_bytes < self.size_bytes + size

    def _store(self, held: _Held, ttl_s: float | None) -> None:
        record = held.record
        self.last_seq = record.seq
        self._held[record.seq] = held
        self._index.add(record.subject, record.seq)
        self.size_bytes += held.size_bytes
        ends = [record.at + whole_seconds(ttl_s)] if ttl_s is not None else []
        ends += [record.at + self.spec.max_age_s] if self.spec.max_age_s > 0 and ttl_s is None else []
        ends += [held.schedule.at] if held.schedule is not None else []
        for end in ends:
            heapq.heappush(self._timers, (end, record.seq))
        for consumer in self.consumers.values():
            if consumer.wants(record.subject):
                consumer.offer(record.seq)

    def _fire(self, held: _Held, schedule: Schedule) -> None:
        """Store the scheduled message anew, without the server's headers and thus without its message id."""
        kept = {k: v for k, v in held.record.headers.items() if not k.lower().startswith(SERVER_HEADER_PREFIX)}
        at = max(schedule.at, held.record.at)  # one that was due when it came fires when it came
        for _ in range(2 if self._fire_twice else 1):
            record = Record(schedule.target, held.record.body, self.last_seq + 1, at, kept)
            self._store(_Held(record, held.size_bytes, None), None)

    def _remove_all(self, sequences: Sequence[int]) -> int:
        return sum(self.remove(seq) for seq in sequences)

    def _delivery(self, consumer: MemoryConsumer, seq: int, count: int) -> Delivery:
        record, durable = self._held[seq].record, consumer.spec.durable
        return Delivery(
            subject=record.subject,
            body=record.body,
            headers=record.headers,
            stream=self.spec.name,
            consumer=durable,
            seq=seq,
            delivery=count,
            at=record.at,
            pending=consumer.pending,
            token=f"{self.spec.name} {durable} {seq} {count}",
        )


def wire_headers(outgoing: Outgoing) -> dict[str, str]:
    """All headers of a message as they are sent: those that the server acts on, and the caller's own."""
    headers: dict[str, str] = {}
    if outgoing.expect is not None:
        headers |= {EXPECTED_SEQUENCE: str(outgoing.expect.seq), EXPECTED_SUBJECT: outgoing.expect.filter}
    if outgoing.msg_id is not None:
        headers[MSG_ID] = outgoing.msg_id
    if outgoing.ttl_s is not None:
        headers[TTL] = str(whole_seconds(outgoing.ttl_s))
    if outgoing.increment is not None:
        headers[INCREMENT] = str(outgoing.increment)
    if outgoing.schedule is not None:
        at = datetime.fromtimestamp(outgoing.schedule.at, tz=UTC)
        headers |= {SCHEDULE: f"@at {at.isoformat(timespec='milliseconds')}", SCHEDULE_TARGET: outgoing.schedule.target}
    return headers | dict(outgoing.headers)


def message_bytes(outgoing: Outgoing) -> int:
    """What the server counts against its limit: a version line, the header lines, an empty line, and the body."""
    headers = wire_headers(outgoing)
    lines = sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())
    return (12 + lines if headers else 0) + len(outgoing.body)


def whole_seconds(ttl_s: float) -> int:
    """A time to live as the server takes it."""
    return max(1, math.ceil(ttl_s))
