"""Streams, consumers and buckets as data, every limit explicit; the adapter declares them, nothing here does I/O."""

from typing import Literal

import msgspec

from millstream_schemas.lifecycle import DECISION_KINDS
from millstream_schemas.names import Names

REVISION = 2
"""Raised with every change of what is declared; stands in each stream's metadata."""

DAY_S = 86400.0
MAX_DELIVER = 50
NO_LIMIT = -1


class Lifetimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times that shape the topology, all in seconds."""

    lease_s: float = 30.0
    """Ack deadline of every work-queue consumer; a heartbeat renews it."""
    history_s: float = 7 * DAY_S
    max_wait_s: float = 90 * DAY_S
    dlq_s: float = 30 * DAY_S
    dedupe_s: float = 120.0

    @property
    def event_ttl_s(self) -> float:
        """Every event of a task lives equally long, so that the last one never expires before an earlier one."""
        return self.history_s + self.max_wait_s


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One stream. Sizes in bytes, times in seconds; -1 is no limit."""

    name: str
    subjects: tuple[str, ...]
    retention: Literal["limits", "workqueue"]
    discard: Literal["old", "new"]
    store_share: float
    """Part of the server's file store that the stream may fill; 0 is no limit of its own."""
    max_age_s: float
    max_msgs: int
    max_msg_size_bytes: int
    max_consumers: int
    duplicate_window_s: float
    allow_msg_ttl: bool
    allow_msg_schedules: bool
    deny_delete: bool
    deny_purge: bool
    allow_direct: bool
    max_msgs_per_subject: int
    allow_msg_counter: bool
    """Messages are increments without a body; the last one on a subject holds the sum."""


class ConsumerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One durable pull consumer with explicit acks. Times in seconds."""

    stream: str
    durable: str
    filters: tuple[str, ...]
    ack_wait_s: float
    max_deliver: int
    max_ack_pending: int
    max_waiting: int


class BucketSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One key-value bucket; every value expires `ttl_s` after it was last written, or never where that is 0."""

    name: str
    ttl_s: float
    history: int = 1


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """All that must exist on the server before an actor runs."""

    revision: int
    streams: tuple[StreamSpec, ...]
    consumers: tuple[ConsumerSpec, ...]
    buckets: tuple[BucketSpec, ...]


SERVER_MIN_DUPLICATE_WINDOW_S = 0.1
WORKER_ENTRY_TTL_S = 15.0
SPENT_S = 70 * DAY_S
"""How long a budget's sums are kept after the last change: more than two of the longest periods."""
SPENT_DEDUPE_S = 120.0
"""So long the same spending may be stored again, by a governor or by its successor, and counts once."""
LEADER_TTL_S = 3.0


def _stream(
    name: str,
    subjects: tuple[str, ...],
    *,
    retention: Literal["limits", "workqueue"],
    discard: Literal["old", "new"] = "old",
    store_share: float = 0.0,
    max_age_s: float = 0.0,
    duplicate_window_s: float = SERVER_MIN_DUPLICATE_WINDOW_S,
    ttl: bool = False,
    schedules: bool = False,
    deny_purge: bool = False,
    counter: bool = False,
) -> StreamSpec:
    return StreamSpec(
        name=name,
        subjects=subjects,
        retention=retention,
        discard=discard,
        store_share=store_share,
        max_age_s=max_age_s,
        max_msgs=NO_LIMIT,
        max_msg_size_bytes=NO_LIMIT,
        max_consumers=NO_LIMIT,
        duplicate_window_s=duplicate_window_s,
        allow_msg_ttl=ttl,
        allow_msg_schedules=schedules,
        deny_delete=False,
        deny_purge=deny_purge,
        allow_direct=True,
        max_msgs_per_subject=1 if counter else NO_LIMIT,  # the sum stays, and repetitions are still known
        allow_msg_counter=counter,
    )


def _consumer(
    stream: str, durable: str, filters: tuple[str, ...], ack_wait_s: float, *, max_ack_pending: int
) -> ConsumerSpec:
    return ConsumerSpec(
        stream=stream,
        durable=durable,
        filters=filters,
        ack_wait_s=ack_wait_s,
        max_deliver=MAX_DELIVER,
        max_ack_pending=max_ack_pending,
        max_waiting=512,
    )


def work_consumer(
    names: Names, lifetimes: Lifetimes, queue: str, priority: str, *, max_ack_pending: int
) -> ConsumerSpec:
    """The consumer of one queue and priority; `max_ack_pending` bounds the executions of the whole fleet."""
    return _consumer(
        names.work_stream,
        names.work_consumer(queue, priority),
        (names.work_class(queue, priority),),
        lifetimes.lease_s,
        max_ack_pending=max_ack_pending,
    )


def topology(names: Names, lifetimes: Lifetimes) -> Topology:
    """What every installation declares; consumers of WORK are added per queue."""
    inbox, events, work = names.inbox_stream, names.events_stream, names.work_stream
    control, advisory = names.control_stream, names.advisory_stream
    decisions = tuple(names.events_of_kind(kind) for kind in DECISION_KINDS)
    watched = (inbox, work, control, events)
    advisories = tuple(subject for stream in watched for subject in names.advisories(stream))
    return Topology(
        revision=REVISION,
        streams=(
            _stream(
                inbox, (names.submit_filter,), retention="workqueue", discard="new", store_share=0.25, deny_purge=True
            ),
            _stream(events, (names.event_filter, names.info_filter), retention="limits", ttl=True),
            _stream(
                work,
                names.work_filters,
                retention="workqueue",
                duplicate_window_s=lifetimes.dedupe_s,
                ttl=True,
                schedules=True,
            ),
            _stream(names.dlq_stream, (names.dlq_filter,), retention="limits", max_age_s=lifetimes.dlq_s),
            _stream(control, (names.control_filter,), retention="workqueue", discard="new", store_share=0.01),
            _stream(names.held_stream, (names.held_filter,), retention="limits", duplicate_window_s=lifetimes.dedupe_s),
            _stream(
                names.spent_stream,
                (names.spent_filter,),
                retention="limits",
                max_age_s=SPENT_S,
                duplicate_window_s=SPENT_DEDUPE_S,
                counter=True,
            ),
            _stream(advisory, advisories, retention="limits", max_age_s=lifetimes.history_s),
        ),
        consumers=(
            # No filter: a stream takes `mill.submit.acme.>` as a literal, which no filter would ever deliver.
            _consumer(inbox, names.inbox_consumer, (), lifetimes.lease_s, max_ack_pending=10_000),
            _consumer(events, names.decisions_consumer, decisions, lifetimes.lease_s, max_ack_pending=10_000),
            _consumer(work, names.ticks_consumer, (names.tick_filter,), lifetimes.lease_s, max_ack_pending=10_000),
            _consumer(control, names.control_consumer, (), lifetimes.lease_s, max_ack_pending=1000),
            _consumer(advisory, names.advisory_consumer, advisories, lifetimes.lease_s, max_ack_pending=1000),
        ),
        buckets=(
            BucketSpec(name=names.workers_bucket, ttl_s=WORKER_ENTRY_TTL_S),
            BucketSpec(name=names.leaders_bucket, ttl_s=LEADER_TTL_S),
            # What the governor keeps must outlast any standstill: a breaker that was forced open, a quota that is used up.
            BucketSpec(name=names.governor_bucket, ttl_s=0.0),
            BucketSpec(name=names.config_bucket, ttl_s=0.0),
        ),
    )


def split_control(declared: Topology, names: Names) -> tuple[Topology, Topology]:
    """The topology without CONTROL, and CONTROL alone: for an installation that keeps it in an account of its own."""
    control = names.control_stream
    return (
        msgspec.structs.replace(
            declared,
            streams=tuple(spec for spec in declared.streams if spec.name != control),
            consumers=tuple(spec for spec in declared.consumers if spec.stream != control),
        ),
        msgspec.structs.replace(
            declared,
            streams=tuple(spec for spec in declared.streams if spec.name == control),
            consumers=tuple(spec for spec in declared.consumers if spec.stream == control),
            buckets=(),
        ),
    )
