"""Buckets: key-value entries as the last messages of subjects, with compare-and-set on their sequence."""

from __future__ import annotations

from millstream.errors import BrokerError, NoAnswer
from millstream.jetstream.protocol import KV_DELETE, KV_OPERATION, KV_STREAM, KV_SUBJECT
from millstream.jetstream.publisher import Publisher
from millstream.jetstream.reading import Reader
from millstream.ports import Conflict, Expect, KeyValue, Outgoing, Record, Refused, Stored


class Buckets:
    """Reads come from the stream's leader, except for `all`."""

    def __init__(self, reader: Reader, publisher: Publisher) -> None:
        self._reader = reader
        self._publisher = publisher

    async def get(self, bucket: str, key: str) -> KeyValue | None:
        """The value of `key`, None where it was deleted, has expired or never was."""
        record = await self._reader.last(KV_STREAM + bucket, _subject(bucket, key))
        return None if record is None or _deleted(record) else KeyValue(record.body, record.seq)

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        """Write whatever is there; returns the revision."""
        revision = await self._store(Outgoing(_subject(bucket, key), value))
        assert revision is not None
        return revision

    async def create(self, bucket: str, key: str, value: bytes) -> int | None:
        """The revision, or None where the key exists."""
        revision = await self.update(bucket, key, value, 0)
        if revision is not None:
            return revision
        record = await self._reader.last(KV_STREAM + bucket, _subject(bucket, key))
        if record is None or not _deleted(record):
            # None: it has just expired; the caller sees a key that was there, and may ask again.
            return None
        return await self.update(bucket, key, value, record.seq)

    async def update(self, bucket: str, key: str, value: bytes, revision: int) -> int | None:
        """The new revision, or None where `revision` is no longer the last."""
        subject = _subject(bucket, key)
        return await self._store(Outgoing(subject, value, expect=Expect(subject, revision)))

    async def delete(self, bucket: str, key: str) -> None:
        """Mark `key` as deleted; the mark expires as a value would."""
        await self._store(Outgoing(_subject(bucket, key), b"", headers={KV_OPERATION: KV_DELETE}))

    async def all(self, bucket: str) -> dict[str, bytes]:
        """Every key with its value."""
        skip = len(KV_SUBJECT) + len(bucket) + 1
        records = await self._reader.scan(KV_STREAM + bucket, f"{KV_SUBJECT}{bucket}.>")
        return {record.subject[skip:]: record.body for record in records if not _deleted(record)}

    async def _store(self, outgoing: Outgoing) -> int | None:
        result = (await self._publisher.publish_all((outgoing,)))[0]
        match result:
            case Stored(seq=seq):
                return seq
            case Conflict():
                return None
            case Refused(code=code, description=description):
                raise BrokerError(f"{outgoing.subject}: {description} ({code})")
            case _:
                raise NoAnswer(f"no answer for {outgoing.subject}; it may be stored")


def _subject(bucket: str, key: str) -> str:
    return f"{KV_SUBJECT}{bucket}.{key}"


def _deleted(record: Record) -> bool:
    return record.headers.get(KV_OPERATION) in (KV_DELETE, "PURGE") or "Nats-Marker-Reason" in record.headers
