"""An in-memory broker with the behaviour of the real server, for tests: one process, no NATS, time by argument.

Actors share one `MemoryServer`; each gets its own `MemoryBroker` by `connect()`. A clock that a test moves by hand
works as well as the machine's: what is due by then is done before the next operation.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence

from millstream.errors import BrokerError, TopologyConflict
from millstream.memory_broker import MemoryBroker
from millstream.memory_consumers import MemoryConsumer
from millstream.memory_reading import Listener
from millstream.memory_streams import MemoryStream
from millstream.memory_subjects import REST, matches, overlap
from millstream.ports import Clock, Delivery, Expect, Outgoing, Published, Record, Refused, Stored, Unanswered
from millstream_schemas.names import Names
from millstream_schemas.topology import NO_LIMIT, BucketSpec, ConsumerSpec, StreamSpec, Topology

POLL_S = 0.01
"""How soon a waiting reader notices that a clock was moved by hand; in real time."""

STORE_FULL = 10047
_FIXED = ("retention", "allow_msg_counter")


class MemoryServer:
    """Holds the streams, buckets and subscriptions of all brokers. Sizes in bytes.

    `fire_twice` has every schedule deliver its message twice, as a server killed in the act may do.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        max_payload_bytes: int = 1024 * 1024,
        store_bytes: int = 1024**3,
        fire_twice: bool = False,
    ) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.store_bytes = store_bytes
        self.listeners: list[Listener] = []
        self._clock = clock
        self._fire_twice = fire_twice
        self._streams: dict[str, MemoryStream] = {}
        self._buckets: dict[str, MemoryStream] = {}
        self._changed = asyncio.Event()
        self._turn = 0
        self._revision = 0

    def connect(self) -> MemoryBroker:
        return MemoryBroker(self)

    # --- what is declared ---

    def declare(self, topology: Topology) -> None:
        newest = topology.revision >= self._revision  # what a newer peer has declared is left as it is
        for stream in topology.streams:
            self._declare_stream(stream, adapt=newest)
        self._revision = max(self._revision, topology.revision)
        for bucket in topology.buckets:
            self._declare_bucket(bucket)
        for consumer in topology.consumers:
            self.declare_consumer(consumer)

    def declare_consumer(self, spec: ConsumerSpec) -> None:
        stream = self.stream(spec.stream)
        for other in stream.consumers.values():
            if other.spec.durable != spec.durable and stream.spec.retention == "workqueue":
                for a, b in ((a, b) for a in spec.filters for b in other.spec.filters if overlap(a, b)):
                    name = f"consumer {spec.durable} of {spec.stream}"
                    raise TopologyConflict(name, f"{other.spec.durable} on {b}", f"{a} for itself")
        existing = stream.consumers.get(spec.durable)
        if existing is not None and existing.spec.filters == spec.filters:
            existing.spec = spec
        else:
            stream.add_consumer(MemoryConsumer(spec, self._exhausted))
        self.wake()

    def _declare_stream(self, spec: StreamSpec, *, adapt: bool) -> None:
        for other in self._streams.values():
            shared = [b for a in spec.subjects for b in other.spec.subjects if overlap(a, b)]
            if other.spec.name != spec.name and shared:
                raise TopologyConflict(f"stream {spec.name}", f"{shared[0]} in {other.spec.name}", "it for itself")
        max_bytes = int(spec.store_share * self.store_bytes) if spec.store_share > 0 else NO_LIMIT
        existing = self._streams.get(spec.name)
        if existing is None:
            self._streams[spec.name] = MemoryStream(spec, max_bytes, fire_twice=self._fire_twice)
            return
        for part in (*_FIXED, "deny_delete", "deny_purge", "allow_msg_schedules", "allow_msg_ttl"):
            found, wanted = getattr(existing.spec, part), getattr(spec, part)
            if found != wanted and (part in _FIXED or found):  # what is switched on stays on
                raise TopologyConflict(f"stream {spec.name}", f"{part} {found}", f"{part} {wanted}")
        if adapt:
            existing.spec, existing.max_bytes = spec, max_bytes

    def _declare_bucket(self, spec: BucketSpec) -> None:
        if spec.name not in self._buckets:
            self._buckets[spec.name] = MemoryStream(_bucket_stream(spec), NO_LIMIT)

    # --- time ---

    def settle(self) -> float:
        """Do what is due by now; returns now."""
        now = self._clock.now()
        for each in (*self._streams.values(), *self._buckets.values()):
            each.settle(now)
        return now

    def wake(self) -> None:
        """Let every waiting reader look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Return once there may be something new to read, be it by the passing of time."""
        due = min((stream.next_due() for stream in self._streams.values()), default=math.inf)
        changed = self._changed
        try:
            async with asyncio.timeout(None if due == math.inf else POLL_S):
                await changed.wait()
        except TimeoutError:
            pass

    # --- streams ---

    def stream(self, name: str) -> MemoryStream:
        """A stream as it is now. Raises BrokerError where there is none."""
        self.settle()
        if name not in self._streams:
            raise BrokerError(f"no stream {name!r}")
        return self._streams[name]

    def bucket(self, name: str) -> MemoryStream:
        """A bucket as it is now. Raises BrokerError where there is none."""
        self.settle()
        if name not in self._buckets:
            raise BrokerError(f"no bucket {name!r}")
        return self._buckets[name]

    def stream_or_none(self, name: str) -> MemoryStream | None:
        self.settle()
        return self._streams.get(name)

    def used_bytes(self) -> int:
        return sum(stream.size_bytes for stream in self._streams.values())

    def append(self, outgoing: Outgoing) -> Published:
        """Store a message in the stream that captures its subject, and tell it to those who listen."""
        now = self.settle()
        self.tell(outgoing.subject, outgoing.body)
        for stream in self._streams.values():
            if stream.captures(outgoing.subject):
                if self.used_bytes() >= self.store_bytes:
                    return Refused(STORE_FULL, "insufficient storage resources available")
                result = stream.append(outgoing, now)
                self.wake()
                return result
        return Unanswered()  # no stream: nobody who could answer

    def put(self, bucket: str, key: str, value: bytes, revision: int | None) -> int | None:
        """The new revision, None where `revision` is not the last one (0: the key is not there)."""
        expect = Expect(key, revision) if revision is not None else None
        kept = self.bucket(bucket)
        result = kept.append(Outgoing(key, value, expect=expect), self.settle())
        if not isinstance(result, Stored):
            return None
        for older in kept.history(key, kept.last_seq)[:-1]:
            kept.remove(older.seq)
        return result.seq

    # --- deliveries ---

    def lends(self, stream: str, consumer: str) -> bool:
        """Whether there is such a consumer."""
        return stream in self._streams and consumer in self._streams[stream].consumers

    def deliver(self, stream: str, consumer: str, limit: int) -> list[Delivery]:
        """What there is to lend; stream and consumer may come into being later."""
        now = self.settle()
        return self._streams[stream].deliver(consumer, limit, now) if stream in self._streams else []

    def read(self, stream: str, filters: Sequence[str], after_seq: int, limit: int) -> list[Record]:
        """The next records behind a position; the stream may come into being later."""
        self.settle()
        return self._streams[stream].read(filters, after_seq, limit) if stream in self._streams else []

    def ack(self, delivery: Delivery) -> None:
        self.stream(delivery.stream).ack(delivery.consumer, delivery.seq)
        self.wake()

    def nak(self, delivery: Delivery, delay_s: float) -> None:
        now = self.settle()
        self.stream(delivery.stream).nak(delivery.consumer, delivery.seq, delay_s, now)
        self.wake()

    def beat(self, delivery: Delivery) -> None:
        self.stream(delivery.stream).beat(delivery.consumer, delivery.seq)

    def rest(self, delivery: Delivery) -> None:
        now = self.settle()
        self.stream(delivery.stream).rest(delivery.consumer, delivery.seq, now)
        self.wake()

    def _exhausted(self, stream: str, consumer: str, seq: int, deliveries: int) -> None:
        """Send the advisory, which a stream may capture."""
        subject = Names().advisories(stream)[0].removesuffix("*") + consumer
        body = json.dumps({"stream": stream, "consumer": consumer, "stream_seq": seq, "deliveries": deliveries})
        now = self._clock.now()
        for each in self._streams.values():
            if each.captures(subject):
                each.append(Outgoing(subject, body.encode()), now)
        self.tell(subject, body.encode())
        self.wake()

    # --- core messages ---

    def tell(self, subject: str, body: bytes, reply: Callable[[bytes], None] | None = None) -> bool:
        """Give a message to all who listen on or serve its subject, of each group to one, in turn; False: to nobody."""
        self._turn += 1
        chosen: list[Listener] = []
        groups: dict[tuple[str, str], list[Listener]] = {}
        for each in self.listeners:
            if matches(each.subject, subject):
                members = chosen if each.group is None else groups.setdefault((each.subject, each.group), [])
                members.append(each)
        chosen += [members[self._turn % len(members)] for members in groups.values()]
        for each in chosen:
            if each.heard is not None:
                asyncio.get_running_loop().call_soon(each.heard, subject, body)
            if each.answers is not None:
                each.answers.begin(body, reply or _unheard)
        return bool(chosen)


def _unheard(_answer: bytes) -> None:
    """Where nobody asked, the answer goes nowhere."""


def _bucket_stream(spec: BucketSpec) -> StreamSpec:
    """A bucket is a stream with one message for each key, the key as its subject, the revision as its sequence."""
    return StreamSpec(
        name=spec.name,
        subjects=(REST,),
        retention="limits",
        discard="new",
        store_share=0.0,
        max_age_s=spec.ttl_s,
        max_msgs=NO_LIMIT,
        max_msg_size_bytes=NO_LIMIT,
        max_consumers=NO_LIMIT,
        duplicate_window_s=0.0,
        allow_msg_ttl=False,
        allow_msg_schedules=False,
        deny_delete=False,
        deny_purge=False,
        allow_direct=True,
        max_msgs_per_subject=NO_LIMIT,  # the bucket itself drops what was replaced
        allow_msg_counter=False,
    )
