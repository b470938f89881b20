"""Histories of tasks as the stream would hold them, for the tracker's tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from millstream.policy.metering import lane_of
from millstream.ports import Record
from millstream_schemas.codec import encode
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import (
    Alias,
    AttemptFailed,
    Card,
    Cause,
    Completed,
    Event,
    Failed,
    Failure,
    Held,
    HeldReason,
    Queued,
    Released,
    Retrying,
    Started,
    TaskInfo,
    Usage,
    WorkItem,
)
from millstream_schemas.infos import Info
from millstream_schemas.keys import derive_key
from millstream_schemas.names import Names

NAMES = Names("mill")
START = 1_790_000_000.0


def card(task_id: str, **more: Any) -> Card:
    """A card of the default tenant and queue, with whatever else is given."""
    tenant = more.pop("tenant_id", "default")
    origin = Cause(stream=NAMES.inbox_stream, seq=more.pop("inbox_seq", 1))
    values: dict[str, Any] = {
        "key": derive_key("id", tenant, task_id),
        "tenant_id": tenant,
        "task_id": task_id,
        "queue": "notes",
        "task_type": "notes.summarize",
        "payload_hash": "hash",
        "origin": origin,
        "cause": origin,
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    }
    return Card(**(values | more))


def item(of: Card, fence: int = 1) -> WorkItem:
    """The work message of a card."""
    return WorkItem(fence=fence, card=of, envelope=Envelope(task_type=of.task_type))


@dataclass
class Stream:
    """Gives events their sequences and times, one hundredth of a second apart."""

    at: float = START
    records: list[Record] = field(default_factory=list[Record])
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, message: Event | Info, of: Card) -> Record:
        """Append one message of the task of `of`."""
        kind = str(message.__struct_config__.tag)
        life = hasattr(message, "card")
        build = NAMES.event if life else NAMES.info
        return self.raw(build(of.tenant_id, of.key, of.queue, kind), encode(message))

    def raw(self, subject: str, body: bytes) -> Record:
        """Append bytes on a subject."""
        self.at += 0.01
        record = Record(subject, body, next(self.numbers), self.at, {})
        self.records.append(record)
        return record

    def alias(self, of: Card, task_id: str) -> None:
        """Let another id point to a task."""
        pointing = msgspec.structs.replace(of, key=derive_key("id", of.tenant_id, task_id), task_id=task_id)
        self.add(Alias(card=pointing, points_to=of.key), pointing)

    def completed(self, of: Card, result: Any = None, **info: Any) -> None:
        """A whole good life: queued, started, completed."""
        self.add(Queued(card=of, task=TaskInfo(**info)), of)
        self.started(of)
        usage = Usage(tokens_in=10, runtime_s=0.5)
        self.add(Completed(card=of, result=msgspec.Raw(msgspec.json.encode(result)), usage=usage), of)

    def held(self, of: Card, *limits: str, lane: str = "", again: bool = False) -> None:
        """A metered task takes its place in a lane, by default that of its tenant and limits."""
        reason: HeldReason = "limits" if limits else "fairness"
        place = lane or lane_of(of.tenant_id, limits)
        task = None if again else TaskInfo(limits=list(limits))
        held = Held(card=of, reason=reason, lane=place, limits=list(limits), task=task, again=again)
        self.add(held, of)

    def released(self, of: Card) -> None:
        self.add(Released(card=of), of)

    def started(self, of: Card, execution: str = "x1") -> None:
        claim = msgspec.structs.replace(of, execution_id=execution)
        self.add(Started(card=claim, worker_id="worker-1"), of)

    def failed(self, of: Card, message: str = "no", attempts: int = 1, **info: Any) -> None:
        """A life that ends as a dead letter after so many error attempts."""
        failure = Failure(reason="error", error_type="ValueError", message=message, fingerprint="f00d")
        self.add(Queued(card=of, task=TaskInfo(**info)), of)
        for attempt in range(1, attempts + 1):
            tried = msgspec.structs.replace(of, attempt=attempt, errors=attempt)
            self.started(tried, f"x{attempt}")
            self.add(AttemptFailed(card=tried, failure=failure, item=item(tried), worker_id="worker-1"), of)
            if attempt < attempts:
                again = msgspec.structs.replace(tried, attempt=attempt + 1)
                self.add(Retrying(card=again, due_at=self.at + 1), of)
            else:
                self.add(Failed(card=tried, reason="max_attempts", failure=failure), of)
