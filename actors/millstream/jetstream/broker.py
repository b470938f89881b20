"""The broker over JetStream, put together from its parts; connection.py makes one."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Sequence

import nats.errors

from millstream.errors import BrokerClosed, BrokerUnreachable, NoAnswer
from millstream.jetstream.capacity import Capacity
from millstream.jetstream.core import CoreSubscription
from millstream.jetstream.declare import Declarer
from millstream.jetstream.deliveries import ack_frames, nak_frames
from millstream.jetstream.feed import JetStreamFeed
from millstream.jetstream.frames import core_frame, publish_frame
from millstream.jetstream.heartbeat import JetStreamHeart
from millstream.jetstream.kv import Buckets
from millstream.jetstream.link import Endpoint
from millstream.jetstream.mailbox import JetStreamMailbox
from millstream.jetstream.publisher import Publisher
from millstream.jetstream.pull import Pulls
from millstream.jetstream.reading import Reader
from millstream.jetstream.requests import Requests
from millstream.jetstream.wire import Wire
from millstream.ports import (
    Answering,
    ConsumerInfo,
    Delivery,
    KeyValue,
    Outgoing,
    Published,
    Record,
    ServerInfo,
    StreamInfo,
)
from millstream_schemas.names import Names
from millstream_schemas.topology import ConsumerSpec, Topology

_FLUSH_S = 10.0
_CLOSED = "the connection to the NATS server is closed"


class JetStreamBroker:
    """Implements `millstream.ports.Broker`. Belongs to the loop that made it, save for its heart."""

    def __init__(
        self, wire: Wire, names: Names, endpoint: Endpoint, *, publish_timeout_s: float, store_bytes: int | None
    ) -> None:
        inbox = endpoint.inbox_prefix
        self._wire = wire
        self._inbox_prefix = inbox
        self._requests = Requests(wire, inbox)
        self._publisher = Publisher(wire, inbox, publish_timeout_s)
        self._reader = Reader(self._requests)
        self._capacity = Capacity(self._requests, names, store_bytes)
        wire.on_reconnect(self._capacity.forget)
        self._declarer = Declarer(self._requests, self._capacity)
        self._buckets = Buckets(self._reader, self._publisher)
        self._pulls = Pulls(wire, inbox)
        self._heart = JetStreamHeart(endpoint)
        self._opened: weakref.WeakSet[JetStreamMailbox | JetStreamFeed | CoreSubscription] = weakref.WeakSet()
        self._ended = False
        self._closing = False

    # --- streams ---

    async def declare(self, topology: Topology) -> None:
        """Create or adapt all of it; raises TopologyConflict where that cannot be done."""
        await self._declarer.declare(topology)

    async def declare_consumer(self, spec: ConsumerSpec) -> None:
        """Create or adapt one consumer; raises TopologyConflict."""
        await self._declarer.consumer(spec)

    async def publish(self, outgoing: Outgoing) -> Published:
        """Store one message; raises MessageTooLarge before anything is sent, and BrokerClosed."""
        return (await self._publisher.publish_all((outgoing,)))[0]

    async def publish_all(self, outgoing: Sequence[Outgoing]) -> list[Published]:
        """Store many, pipelined; one result each, in their order."""
        return await self._publisher.publish_all(outgoing)

    def tell(self, subject: str, body: bytes = b"") -> None:
        """Send without storing; lost when nobody listens or there is no connection."""
        self._wire.send(core_frame(subject, "", body, self._max_payload))

    def inform(self, outgoing: Outgoing) -> None:
        """Have a message stored without waiting for the answer; it may be lost."""
        self._wire.send(publish_frame(outgoing, "", self._max_payload), keep=True)

    async def last(self, stream: str, filter: str) -> Record | None:
        """The last message on `filter`, read from the stream's leader."""
        return await self._reader.last(stream, filter)

    async def get(self, stream: str, seq: int) -> Record | None:
        """The message at `seq`, read from the stream's leader."""
        return await self._reader.get(stream, seq)

    async def history(self, stream: str, filter: str, limit: int = 1000) -> list[Record]:
        """The messages on `filter`, oldest first."""
        return await self._reader.history(stream, filter, limit)

    async def page(self, stream: str, filter: str, after_seq: int, limit: int) -> list[Record]:
        """Up to `limit` messages on `filter` beyond a sequence, oldest first; fewer where they are large."""
        return await self._reader.page(stream, filter, after_seq, limit)

    async def subjects(self, stream: str, filter: str) -> dict[str, int]:
        """How many messages each subject on `filter` holds."""
        return await self._reader.subjects(stream, filter)

    async def purge(self, stream: str, filter: str, up_to_seq: int) -> int:
        """Remove what is on `filter` up to and with a sequence; returns how many."""
        return await self._reader.purge(stream, filter, up_to_seq)

    async def delete(self, stream: str, seq: int) -> bool:
        """Remove one message; False where there was none."""
        return await self._reader.delete(stream, seq)

    # --- deliveries ---

    async def mailbox(self, stream: str, consumer: str, credit: int) -> JetStreamMailbox:
        """Deliveries pulled ahead; the consumer may come into being later."""
        self._check_open()
        mailbox = JetStreamMailbox(self._wire, self._inbox_prefix, stream, consumer, credit)
        self._opened.add(mailbox)
        return mailbox

    async def pull(self, stream: str, consumer: str, limit: int) -> list[Delivery]:
        """What is there now, up to `limit`; empty without a connection. Raises ConsumerMissing."""
        self._check_open()
        return await self._pulls.pull(stream, consumer, limit)

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Say done; a lost ack means a redelivery."""
        if deliveries:
            self._wire.send(ack_frames(deliveries), keep=True)

    def nak(self, delivery: Delivery, delay_s: float = 0.0) -> None:
        """Hand back for redelivery after `delay_s`."""
        self._wire.send(nak_frames((delivery.token.encode(),), delay_s), keep=True)

    def heart(self) -> JetStreamHeart:
        """The one heart of this broker."""
        return self._heart

    async def feed(self, stream: str, filters: Sequence[str], after_seq: int, *, bodies: bool = True) -> JetStreamFeed:
        """Read `stream` from behind `after_seq`; the stream may come into being later."""
        self._check_open()
        feed = JetStreamFeed(self._wire, self._requests, self._inbox_prefix, stream, filters, after_seq, bodies=bodies)
        self._opened.add(feed)
        return feed

    # --- core messages ---

    async def listen(self, subject: str, heard: Callable[[str, bytes], None]) -> CoreSubscription:
        """Call `heard` for each message on `subject`."""
        self._check_open()
        subscription = CoreSubscription(self._wire, subject)
        subscription.listen(heard)
        self._opened.add(subscription)
        return subscription

    async def request(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        """The first answer; raises NoAnswer after `timeout_s`, at once where nobody listens."""
        answer = await self._requests.ask(subject, body, timeout_s)
        if answer is None:
            raise NoAnswer(f"nobody listens on {subject}")
        return answer.body

    async def serve(self, subject: str, answer: Answering, group: str | None = None) -> CoreSubscription:
        """Answer requests on `subject`; those who share a `group` share the requests."""
        self._check_open()
        subscription = CoreSubscription(self._wire, subject)
        await subscription.serve(answer, group)
        self._opened.add(subscription)
        return subscription

    # --- buckets ---

    async def kv_get(self, bucket: str, key: str) -> KeyValue | None:
        """The value and its revision."""
        return await self._buckets.get(bucket, key)

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        """Write whatever is there; returns the revision."""
        return await self._buckets.put(bucket, key, value)

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int | None:
        """The revision, or None where the key exists."""
        return await self._buckets.create(bucket, key, value)

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int | None:
        """The new revision, or None where `revision` is no longer the last."""
        return await self._buckets.update(bucket, key, value, revision)

    async def kv_delete(self, bucket: str, key: str) -> None:
        """Delete `key`; fine where there is none."""
        await self._buckets.delete(bucket, key)

    async def kv_all(self, bucket: str) -> dict[str, bytes]:
        """Every key with its value."""
        return await self._buckets.all(bucket)

    # --- health ---

    async def stream_info(self, stream: str) -> StreamInfo | None:
        """Counts of one stream, None where there is none."""
        return await self._reader.stream_info(stream)

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        """Counts of all durable consumers of `stream`."""
        return await self._reader.consumers(stream)

    async def server_info(self) -> ServerInfo:
        """The server of the current connection; `store_bytes` is 0 where it cannot be found out."""
        store_bytes = await self._capacity.store_bytes()
        used_bytes = await self._capacity.used_bytes()
        info = self._wire.info
        connected = self._wire.client.connected_url
        return ServerInfo(
            name=str(info.get("server_name", "")),
            version=str(info.get("version", "")),
            max_payload_bytes=self._max_payload,
            store_bytes=store_bytes,
            store_used_bytes=used_bytes,
            url=f"{connected.scheme}://{connected.hostname}:{connected.port}" if connected else "",
        )

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._wire.connected

    async def flush(self) -> None:
        """Wait until all that was sent has reached the server; raises BrokerUnreachable after ten seconds."""
        ends = asyncio.get_running_loop().time() + _FLUSH_S
        while asyncio.get_running_loop().time() < ends:
            self._check_open()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._wire.wait_connected()
                    await self._wire.ping()
                    return
        raise BrokerUnreachable("the NATS server does not answer")

    async def close(self) -> None:
        """Close mailboxes, feeds, subscriptions and the connection; what was sent before is sent."""
        if self._closing:
            return
        self._closing = True
        for opened in tuple(self._opened):
            await opened.close()
        with contextlib.suppress(BrokerClosed, BrokerUnreachable):
            if self._wire.connected:
                await self.flush()
        self.end()
        await asyncio.to_thread(self._heart.close)
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._wire.client.close()

    def end(self) -> bool:
        """Fail all that waits with BrokerClosed; returns whether this came as a surprise."""
        surprise = not self._closing
        if not self._ended:
            self._ended = True
            self._requests.close()
            self._publisher.close()
            for opened in tuple(self._opened):
                opened.end()
        return surprise

    @property
    def _max_payload(self) -> int:
        return int(self._wire.info.get("max_payload", 1024 * 1024))

    def _check_open(self) -> None:
        if self._ended:
            raise BrokerClosed(_CLOSED)
