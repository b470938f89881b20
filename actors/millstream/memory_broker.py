"""One actor's connection to the in-memory server: the `Broker` port over its plain state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from millstream.errors import BrokerClosed, ConsumerMissing, InvalidName, MessageTooLarge, NoAnswer
from millstream.memory_reading import (
    Answers,
    Heard,
    Listener,
    MemoryFeed,
    MemoryHeart,
    MemoryMailbox,
    MemorySubscription,
)
from millstream.memory_streams import message_bytes
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
from millstream_schemas.topology import ConsumerSpec, Topology

if TYPE_CHECKING:
    from millstream.memory import MemoryServer

MAX_SUBJECT_BYTES = 4000


class MemoryBroker:
    """One actor's connection to a `MemoryServer`; a `Broker`, whose promises stand in the port."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._heart = MemoryHeart(server)
        self._open: list[MemoryMailbox | MemoryFeed | MemorySubscription] = []
        self._connected = True

    # --- streams ---

    async def declare(self, topology: Topology) -> None:
        self._reach().declare(topology)

    async def declare_consumer(self, spec: ConsumerSpec) -> None:
        self._reach().declare_consumer(spec)

    async def publish(self, outgoing: Outgoing) -> Published:
        return (await self.publish_all([outgoing]))[0]

    async def publish_all(self, outgoing: Sequence[Outgoing]) -> list[Published]:
        server = self._reach()
        for each in outgoing:
            self._check(each)
        await asyncio.sleep(0)  # others get their turn between the decision and the append, as with a real server
        return [server.append(each) for each in outgoing]

    def tell(self, subject: str, body: bytes = b"") -> None:
        self.inform(Outgoing(subject, body))

    def inform(self, outgoing: Outgoing) -> None:
        self._check(outgoing)
        if self._connected:
            self._server.append(outgoing)

    async def last(self, stream: str, filter: str) -> Record | None:
        return self._reach().stream(stream).last(filter)

    async def get(self, stream: str, seq: int) -> Record | None:
        return self._reach().stream(stream).get(seq)

    async def history(self, stream: str, filter: str, limit: int = 1000) -> list[Record]:
        return self._reach().stream(stream).history(filter, limit)

    async def page(self, stream: str, filter: str, after_seq: int, limit: int) -> list[Record]:
        await asyncio.sleep(0)
        return self._reach().stream(stream).page(filter, after_seq, limit)

    async def subjects(self, stream: str, filter: str) -> dict[str, int]:
        return self._reach().stream(stream).subjects(filter)

    async def purge(self, stream: str, filter: str, up_to_seq: int) -> int:
        return self._reach().stream(stream).purge(filter, up_to_seq)

    async def delete(self, stream: str, seq: int) -> bool:
        return self._reach().stream(stream).delete(seq)

    # --- deliveries ---

    async def mailbox(self, stream: str, consumer: str, credit: int) -> MemoryMailbox:
        self._reach()
        self._open.append(mailbox := MemoryMailbox(self._server, stream, consumer, credit))
        return mailbox

    async def pull(self, stream: str, consumer: str, limit: int) -> list[Delivery]:
        server = self._reach()
        if not server.lends(stream, consumer):
            raise ConsumerMissing(f"{consumer}: there is no such consumer of {stream}")
        return server.deliver(stream, consumer, limit)

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        if self._connected:
            for delivery in deliveries:
                self._server.ack(delivery)

    def nak(self, delivery: Delivery, delay_s: float = 0.0) -> None:
        if self._connected:
            self._server.nak(delivery, delay_s)

    def heart(self) -> MemoryHeart:
        return self._heart

    async def feed(self, stream: str, filters: Sequence[str], after_seq: int, *, bodies: bool = True) -> MemoryFeed:
        self._reach()
        self._open.append(feed := MemoryFeed(self._server, stream, filters, after_seq, bodies=bodies))
        return feed

    # --- core messages ---

    async def listen(self, subject: str, heard: Heard) -> MemorySubscription:
        return self._subscribe(Listener(subject, heard=heard))

    async def request(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        server = self._reach()
        first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def reply(answer: bytes) -> None:
            if not first.done():
                first.set_result(answer)

        if not server.tell(subject, body, reply):
            raise NoAnswer(f"nobody listens on {subject}")
        try:
            async with asyncio.timeout(timeout_s):
                return await first
        except TimeoutError:
            raise NoAnswer(f"no answer on {subject} within {timeout_s:g} s") from None

    async def serve(self, subject: str, answer: Answering, group: str | None = None) -> MemorySubscription:
        answers = Answers(answer)
        await answers.open()
        return self._subscribe(Listener(subject, answers=answers, group=group))

    # --- buckets ---

    async def kv_get(self, bucket: str, key: str) -> KeyValue | None:
        record = self._reach().bucket(bucket).last(key)
        return KeyValue(record.body, record.seq) if record is not None else None

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        revision = self._reach().put(bucket, key, value, None)
        assert revision is not None, "a put without a condition is stored"
        return revision

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int | None:
        await asyncio.sleep(0)
        return self._reach().put(bucket, key, value, 0)

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int | None:
        await asyncio.sleep(0)
        return self._reach().put(bucket, key, value, revision)

    async def kv_delete(self, bucket: str, key: str) -> None:
        self._reach().bucket(bucket).purge(key, 2**63)

    async def kv_all(self, bucket: str) -> dict[str, bytes]:
        kept = self._reach().bucket(bucket)
        return {record.subject: record.body for record in kept.read((), 0, kept.last_seq + 1)}

    # --- health ---

    async def stream_info(self, stream: str) -> StreamInfo | None:
        found = self._reach().stream_or_none(stream)
        return found.info() if found is not None else None

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        found = self._reach().stream_or_none(stream)
        return [consumer.info() for consumer in found.consumers.values()] if found is not None else []

    async def server_info(self) -> ServerInfo:
        server = self._reach()
        limits = (server.max_payload_bytes, server.store_bytes, server.used_bytes())
        return ServerInfo("memory", "memory", *limits, url="memory:")

    @property
    def connected(self) -> bool:
        return self._connected

    async def flush(self) -> None:
        self._reach()
        await asyncio.sleep(0)

    async def close(self) -> None:
        self._connected = False
        self._heart.stop_all()
        for each in self._open:
            await each.close()

    # --- inside ---

    def _reach(self) -> MemoryServer:
        if not self._connected:
            raise BrokerClosed("the connection to the in-memory server is closed")
        return self._server

    def _check(self, outgoing: Outgoing) -> None:
        subject, message = len(outgoing.subject.encode()), message_bytes(outgoing)
        if subject > MAX_SUBJECT_BYTES:
            raise MessageTooLarge("the subject", subject, MAX_SUBJECT_BYTES)
        if not outgoing.subject or any(each.isspace() or each == "\0" for each in outgoing.subject):
            raise InvalidName("subject", outgoing.subject)
        if message > self._server.max_payload_bytes:
            raise MessageTooLarge("the message", message, self._server.max_payload_bytes)

    def _subscribe(self, listener: Listener) -> MemorySubscription:
        server = self._reach()
        server.listeners.append(listener)

        async def end() -> None:
            server.listeners.remove(listener)
            if listener.answers is not None:
                await listener.answers.close()

        subscription = MemorySubscription(end)
        self._open.append(subscription)
        return subscription
