"""The ports of the actors: a broker, a clock and a source of ids, as Protocols; nothing here knows NATS.

What a broker can expect to happen comes back as a value (`Stored`, `Conflict`, `Unanswered`, `Refused`), in the
order of what was asked; what cannot be helped is raised as a `BrokerError`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

from millstream_schemas.topology import ConsumerSpec, Topology


class Expect(msgspec.Struct, frozen=True, gc=False):
    """Compare-and-set: the append succeeds only while `seq` is the last sequence on `filter` (0: none yet)."""

    filter: str
    seq: int


class Schedule(msgspec.Struct, frozen=True, gc=False):
    """Deliver to `target` (in the same stream) at `at`, Unix seconds."""

    at: float
    target: str


class Outgoing(msgspec.Struct, frozen=True):
    """One message to be stored. `ttl_s` is rounded up to whole seconds, at least one."""

    subject: str
    body: bytes
    expect: Expect | None = None
    msg_id: str | None = None
    ttl_s: float | None = None
    schedule: Schedule | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    increment: int | None = None
    """In a stream of counters: what to add to the sum on `subject`; the body is then the server's."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """The broker has stored the message. `duplicate`: an equal message id was there before, at `seq`.

    `total` is the sum after an increment; None where it was a duplicate, or none.
    """

    seq: int
    duplicate: bool = False
    total: int | None = None


class Conflict(msgspec.Struct, frozen=True, gc=False):
    """The expected last sequence was another one: read the last event and decide."""


class Unanswered(msgspec.Struct, frozen=True, gc=False):
    """No answer within the time limit: the message may be stored, now or later."""


class Refused(msgspec.Struct, frozen=True, gc=False):
    """The broker answered with an error that says the message is not stored."""

    code: int
    description: str


Published = Stored | Conflict | Unanswered | Refused


class Record(msgspec.Struct, frozen=True):
    """A message as a stream holds it. `at` is the server's time stamp, Unix seconds."""

    subject: str
    body: bytes
    seq: int
    at: float
    headers: Mapping[str, str]


class Delivery(msgspec.Struct, frozen=True):
    """A message lent for an ack deadline. `delivery` counts from 1, and may start anew after a server crash."""

    subject: str
    body: bytes
    headers: Mapping[str, str]
    stream: str
    consumer: str
    seq: int
    delivery: int
    at: float
    pending: int
    token: str
    """Names this delivery towards the broker; opaque."""


Answering: TypeAlias = Callable[[bytes], Awaitable[bytes | None] | bytes | None]
"""Answers one request: at once, which spares a task, or with something to await."""


class Mailbox(Protocol):
    """Deliveries of one durable consumer, pulled ahead up to a credit."""

    async def take(self, limit: int) -> list[Delivery]:
        """Up to `limit` deliveries, at least one; waits for it. Returns an empty list once closed."""
        ...

    async def close(self) -> None:
        """Stop pulling; what was pulled and not taken is handed back for redelivery."""
        ...


class Feed(Protocol):
    """A stream read in order from a position, without acks; it resumes by itself after any disconnect."""

    async def take(self, limit: int, wait_s: float) -> list[Record]:
        """Up to `limit` records in order of sequence, without gap or repetition; empty when none came within `wait_s`."""
        ...

    async def close(self) -> None: ...


class Heart(Protocol):
    """Renews ack deadlines from outside the event loop of the handlers."""

    def start(self, delivery: Delivery, lease_s: float) -> None:
        """Renew until `stop`, or until the lease was lost for lack of time."""
        ...

    def stop(self, delivery: Delivery) -> None: ...

    def alive(self, delivery: Delivery) -> bool:
        """False once more time than the lease has passed since the last renewal went out."""
        ...


class Subscription(Protocol):
    """Something heard or served until it is closed."""

    async def close(self) -> None: ...


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """A value of a bucket and the revision that compare-and-set works on."""

    value: bytes
    revision: int


class StreamInfo(msgspec.Struct, frozen=True, gc=False):
    """Counts of one stream. Sizes in bytes."""

    name: str
    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    first_at: float
    max_bytes: int
    created_at: float = 0.0
    """When it was made: a stream that was deleted and made anew has another time."""
    told_at: float = 0.0
    """The server's clock when it answered; 0 where it does not say."""


class ConsumerInfo(msgspec.Struct, frozen=True, gc=False):
    """Counts of one durable consumer."""

    name: str
    pending: int
    ack_pending: int
    redelivered: int
    max_ack_pending: int


class ServerInfo(msgspec.Struct, frozen=True, gc=False):
    """The server that the broker is connected to."""

    name: str
    version: str
    max_payload_bytes: int
    store_bytes: int
    store_used_bytes: int
    url: str


class Broker(Protocol):
    """Streams with compare-and-set, work-queue consumers, requests and buckets."""

    # --- streams ---
    async def declare(self, topology: Topology) -> None:
        """Create or adapt all of it; raises TopologyConflict where the server holds something that cannot be adapted."""
        ...

    async def declare_consumer(self, spec: ConsumerSpec) -> None: ...

    async def publish(self, outgoing: Outgoing) -> Published:
        """Store one message; raises MessageTooLarge before anything is sent, and BrokerClosed."""
        ...

    async def publish_all(self, outgoing: Sequence[Outgoing]) -> list[Published]:
        """Store many, pipelined; one result each, in their order."""
        ...

    def tell(self, subject: str, body: bytes = b"") -> None:
        """Send without storing and without an answer; lost when nobody listens or there is no connection."""
        ...

    def inform(self, outgoing: Outgoing) -> None:
        """Have a message stored without waiting for the answer; it may be lost."""
        ...

    async def last(self, stream: str, filter: str) -> Record | None:
        """The last message on `filter`, read from the stream's leader."""
        ...

    async def get(self, stream: str, seq: int) -> Record | None: ...

    async def history(self, stream: str, filter: str, limit: int = 1000) -> list[Record]:
        """The messages on `filter`, oldest first."""
        ...

    async def page(self, stream: str, filter: str, after_seq: int, limit: int) -> list[Record]:
        """Up to `limit` messages on `filter` beyond sequence `after_seq`, oldest first, by direct get in one request.

        Fewer where they are large, but one at least where there is one. May lag behind on a replica: what is missing
        comes with a later call.
        """
        ...

    async def subjects(self, stream: str, filter: str) -> dict[str, int]:
        """How many messages each subject on `filter` holds, for those that hold any."""
        ...

    async def purge(self, stream: str, filter: str, up_to_seq: int) -> int:
        """Remove what is on `filter` up to and with sequence `up_to_seq`; returns how much that was.

        Callers build the filter from checked tokens and derived keys only, and take the bound before they decide:
        a purge that is late must not remove what came after.
        """
        ...

    async def delete(self, stream: str, seq: int) -> bool: ...

    # --- deliveries ---
    async def mailbox(self, stream: str, consumer: str, credit: int) -> Mailbox: ...

    async def pull(self, stream: str, consumer: str, limit: int) -> list[Delivery]:
        """What is there now, up to `limit`; never waits for more and leaves no pull behind. Raises ConsumerMissing."""
        ...

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Say done; a lost ack means a redelivery."""
        ...

    def nak(self, delivery: Delivery, delay_s: float = 0.0) -> None:
        """Hand back for redelivery."""
        ...

    def heart(self) -> Heart: ...

    async def feed(self, stream: str, filters: Sequence[str], after_seq: int, *, bodies: bool = True) -> Feed:
        """Read a stream in order from behind `after_seq`; without `bodies`, every record's body is empty."""
        ...

    # --- core messages ---
    async def listen(self, subject: str, heard: Callable[[str, bytes], None]) -> Subscription:
        """Call `heard(subject, body)` for each message; `heard` must be quick and must not raise."""
        ...

    async def request(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        """The first answer; raises NoAnswer after `timeout_s`, at once where nobody listens."""
        ...

    async def serve(self, subject: str, answer: Answering, group: str | None = None) -> Subscription:
        """Answer requests on `subject`; None gives no answer. Those that are awaited run beside each other.

        Every server gets every request, unless they share a `group`: then one of them gets it.
        """
        ...

    # --- buckets ---
    async def kv_get(self, bucket: str, key: str) -> KeyValue | None: ...

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int: ...

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int | None:
        """The revision, or None where the key exists."""
        ...

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int | None:
        """The new revision, or None where `revision` is no longer the last."""
        ...

    async def kv_delete(self, bucket: str, key: str) -> None: ...

    async def kv_all(self, bucket: str) -> dict[str, bytes]: ...

    # --- health ---
    async def stream_info(self, stream: str) -> StreamInfo | None: ...

    async def consumers(self, stream: str) -> list[ConsumerInfo]: ...

    async def server_info(self) -> ServerInfo: ...

    @property
    def connected(self) -> bool: ...

    async def flush(self) -> None:
        """Wait until all that was sent has reached the server."""
        ...

    async def close(self) -> None: ...


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> float:
        """Unix seconds."""
        ...

    def monotonic(self) -> float:
        """Seconds that never step back."""
        ...


class Ids(Protocol):
    """The source of all chance."""

    def new(self) -> str:
        """A fresh id, safe in subjects and logs."""
        ...

    def uniform(self) -> float:
        """A random number in [0, 1)."""
        ...
