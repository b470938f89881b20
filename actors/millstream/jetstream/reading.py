"""Reading, purging and counting streams by request."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from millstream.errors import BrokerError
from millstream.jetstream.protocol import (
    API,
    CONSUMER_NOT_FOUND,
    MESSAGE_NOT_FOUND,
    NO_RESPONDERS,
    STREAM_NOT_FOUND,
    ApiError,
    decode_get,
    headers_of,
    parse_headers,
    status_of,
    unix_seconds,
)
from millstream.jetstream.requests import API_TIMEOUT_S, Answer, Requests
from millstream.ports import ConsumerInfo, Record, StreamInfo

_PAGE = 500
_PAGE_BYTES = 16 * 1024 * 1024
_ONE_PAGE_BYTES = 2 * 1024 * 1024


class _State(msgspec.Struct, frozen=True):
    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    first_ts: datetime


class _Config(msgspec.Struct, frozen=True):
    name: str
    max_bytes: int = -1


class _StreamAnswer(msgspec.Struct, frozen=True):
    config: _Config
    state: _State
    created: datetime
    ts: datetime | None = None


class _Subjects(msgspec.Struct, frozen=True):
    subjects: dict[str, int] | None = None


class _SubjectsAnswer(msgspec.Struct, frozen=True):
    state: _Subjects
    total: int = 0


class _ConsumerConfig(msgspec.Struct, frozen=True):
    durable_name: str = ""
    max_ack_pending: int = 0


class _Consumer(msgspec.Struct, frozen=True):
    name: str
    config: _ConsumerConfig
    num_pending: int = 0
    num_ack_pending: int = 0
    num_redelivered: int = 0


class _ConsumersAnswer(msgspec.Struct, frozen=True):
    total: int = 0
    consumers: list[_Consumer] | None = None


class _Done(msgspec.Struct, frozen=True):
    success: bool = False
    purged: int = 0


class Reader:
    """Reads by request. `last` and `get` ask the stream's leader; `scan` may ask any replica."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    async def last(self, stream: str, filter: str) -> Record | None:
        """The last message on `filter`."""
        return await self._get(stream, {"last_by_subj": filter})

    async def get(self, stream: str, seq: int) -> Record | None:
        """The message at `seq`, None where there is none any more."""
        return await self._get(stream, {"seq": seq}) if seq > 0 else None

    async def _get(self, stream: str, query: dict[str, Any]) -> Record | None:
        answer = await self._requests.api(f"STREAM.MSG.GET.{stream}", query)
        if isinstance(answer, ApiError):
            if answer.err_code == MESSAGE_NOT_FOUND:
                return None
            raise BrokerError(f"reading {stream}: {answer.description} ({answer.err_code or answer.code})")
        found = decode_get(answer).message
        if found is None:
            return None
        return Record(found.subject, found.data, found.seq, found.time.timestamp(), headers_of(found.hdrs))

    async def history(self, stream: str, filter: str, limit: int) -> list[Record]:
        """Up to `limit` messages on `filter`, oldest first; the end of them read from the leader."""
        records = await self.scan(stream, filter, limit)
        while len(records) < limit:  # what a lagging replica did not have yet: mostly one request, answered "none"
            start = records[-1].seq + 1 if records else 1
            record = await self._get(stream, {"seq": start, "next_by_subj": filter})
            if record is None:
                break
            records.append(record)
        return records

    async def scan(self, stream: str, filter: str, limit: int | None = None) -> list[Record]:
        """All messages on `filter`, or the first `limit`, oldest first, in pages by direct get."""
        records: list[Record] = []
        start = 1
        while limit is None or len(records) < limit:
            batch = _PAGE if limit is None else min(_PAGE, limit - len(records))
            page, pending = await self._page(stream, filter, start, batch, _PAGE_BYTES)
            records += page
            if not page or not pending:
                break
            start = page[-1].seq + 1
        return records

    async def page(self, stream: str, filter: str, after_seq: int, limit: int) -> list[Record]:
        """Up to `limit` messages on `filter` beyond a sequence, oldest first; fewer where they are large."""
        if limit < 1:
            return []
        return (await self._page(stream, filter, after_seq + 1, min(limit, _PAGE), _ONE_PAGE_BYTES))[0]

    async def _page(
        self, stream: str, filter: str, start: int, batch: int, max_bytes: int
    ) -> tuple[list[Record], bool]:
        """One direct get of many, and whether there is more beyond."""
        query = {"seq": start, "batch": batch, "max_bytes": max_bytes, "next_by_subj": filter}
        answers = await self._requests.ask_many(
            f"{API}DIRECT.GET.{stream}", msgspec.json.encode(query), API_TIMEOUT_S, _ends_batch
        )
        end = answers[-1].header or b""
        if status_of(end) == NO_RESPONDERS:
            raise BrokerError(f"reading {stream}: no such stream, or it allows no direct get")
        records = [_record(one) for one in answers if one.header is not None and status_of(one.header) is None]
        return records, parse_headers(end).get("Nats-Num-Pending", "0") != "0"

    async def subjects(self, stream: str, filter: str) -> dict[str, int]:
        """How many messages each subject on `filter` holds, asked of the stream's leader in pages."""
        found: dict[str, int] = {}
        while True:
            answer = await self._requests.api(
                f"STREAM.INFO.{stream}", {"subjects_filter": filter, "offset": len(found)}
            )
            if isinstance(answer, ApiError):
                raise BrokerError(f"{stream}: {answer.description} ({answer.err_code})")
            page = msgspec.json.decode(answer, type=_SubjectsAnswer)
            subjects = page.state.subjects or {}
            found |= subjects
            if not subjects or len(found) >= page.total:
                return found

    async def purge(self, stream: str, filter: str, up_to_seq: int) -> int:
        """Remove what is on `filter` up to and with a sequence; returns how many."""
        request = {"filter": filter, "seq": up_to_seq + 1}  # the server keeps what it is given
        answer = await self._requests.command(f"STREAM.PURGE.{stream}", request)
        return msgspec.json.decode(answer, type=_Done).purged

    async def delete(self, stream: str, seq: int) -> bool:
        """Remove one message; False where there was none."""
        answer = await self._requests.api(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
        if not isinstance(answer, ApiError):
            return msgspec.json.decode(answer, type=_Done).success
        if answer.err_code == STREAM_NOT_FOUND or "denied" in answer.description:
            raise BrokerError(f"deleting from {stream}: {answer.description} ({answer.err_code})")
        return False

    async def stream_info(self, stream: str) -> StreamInfo | None:
        """Counts of one stream, None where there is none."""
        answer = await self._requests.api(f"STREAM.INFO.{stream}")
        if isinstance(answer, ApiError):
            if answer.err_code == STREAM_NOT_FOUND:
                return None
            raise BrokerError(f"{stream}: {answer.description} ({answer.err_code})")
        found = msgspec.json.decode(answer, type=_StreamAnswer)
        state = found.state
        first_at = state.first_ts.timestamp() if state.messages else 0.0
        return StreamInfo(
            name=stream,
            messages=state.messages,
            bytes=state.bytes,
            first_seq=state.first_seq,
            last_seq=state.last_seq,
            first_at=first_at,
            max_bytes=found.config.max_bytes,
            created_at=found.created.timestamp(),
            told_at=found.ts.timestamp() if found.ts else 0.0,
        )

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        """Counts of all durable consumers of `stream`; none where there is no such stream."""
        infos: list[ConsumerInfo] = []
        offset = 0
        while True:
            answer = await self._requests.api(f"CONSUMER.LIST.{stream}", {"offset": offset})
            if isinstance(answer, ApiError):
                if answer.err_code in (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND):
                    return infos
                raise BrokerError(f"{stream}: {answer.description} ({answer.err_code})")
            page = msgspec.json.decode(answer, type=_ConsumersAnswer)
            found = page.consumers or []
            infos += [_info(one) for one in found if one.config.durable_name]
            offset += len(found)
            if not found or offset >= page.total:
                return infos


def _info(one: _Consumer) -> ConsumerInfo:
    return ConsumerInfo(one.name, one.num_pending, one.num_ack_pending, one.num_redelivered, one.config.max_ack_pending)


def _ends_batch(answer: Answer) -> bool:
    return status_of(answer.header) is not None


def _record(answer: Answer) -> Record:
    headers = parse_headers(answer.header or b"")
    subject = headers.pop("Nats-Subject", "")
    seq = int(headers.pop("Nats-Sequence", "0"))
    at = unix_seconds(headers.pop("Nats-Time-Stamp", "1970-01-01T00:00:00Z"))
    for name in ("Nats-Stream", "Nats-Num-Pending", "Nats-Last-Sequence"):
        headers.pop(name, None)
    return Record(subject, answer.body, seq, at, headers)
