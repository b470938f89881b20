"""The topology as data: every limit is stated, and every name that we build has exactly one home."""

from __future__ import annotations

import re

import msgspec
import pytest

from millstream_schemas.keys import derive_key
from millstream_schemas.names import PRIORITIES, Names
from millstream_schemas.topology import (
    DAY_S,
    REVISION,
    BucketSpec,
    ConsumerSpec,
    Lifetimes,
    StreamSpec,
    Topology,
    topology,
    work_consumer,
)

NAMES = Names()
TIMES = Lifetimes()
TOPOLOGY = topology(NAMES, TIMES)
STREAMS = {stream.name: stream for stream in TOPOLOGY.streams}
KEY = derive_key("key", "acme", "1")


def _matches(pattern: str, subject: str) -> bool:
    wanted = re.escape(pattern).replace(r"\*", r"[^.]+").replace(">", ".+")
    return re.fullmatch(wanted, subject) is not None


def _home(subject: str) -> list[str]:
    return [name for name, stream in STREAMS.items() if any(_matches(filter_, subject) for filter_ in stream.subjects)]


@pytest.mark.parametrize("kind", [Topology, StreamSpec, ConsumerSpec])
def test_no_limit_has_a_default(kind: type[msgspec.Struct]) -> None:
    """A limit that nobody wrote down is one that nobody chose."""
    assert [field.name for field in msgspec.structs.fields(kind) if not field.required] == []


def test_a_bucket_states_how_long_its_values_live() -> None:
    """Locks and worker entries must end by themselves; what operators configured stays, and what the governor knows."""
    assert [field.name for field in msgspec.structs.fields(BucketSpec) if field.required] == ["name", "ttl_s"]
    lasting = {bucket.name for bucket in TOPOLOGY.buckets if bucket.ttl_s <= 0}
    assert lasting == {NAMES.config_bucket, NAMES.governor_bucket}


def test_the_revision_is_part_of_the_topology() -> None:
    """What is declared on a server tells which version declared it."""
    assert TOPOLOGY.revision == REVISION >= 1


def test_the_inbox_gives_producers_no_power_over_it() -> None:
    """Who may publish into a stream with schedules or per-message TTL can redirect or erase what lies there."""
    inbox = STREAMS[NAMES.inbox_stream]
    assert not inbox.allow_msg_schedules
    assert not inbox.allow_msg_ttl
    assert inbox.deny_purge
    assert inbox.retention == "workqueue"
    assert inbox.duplicate_window_s <= 0.1  # a producer's message id must not swallow another tenant's task


def test_the_inbox_refuses_before_anything_else_runs_out_of_room() -> None:
    """A full store shows as a refused submit, never as a lost outcome."""
    inbox = STREAMS[NAMES.inbox_stream]
    assert (inbox.discard, inbox.store_share) == ("new", 0.25)
    assert sum(stream.store_share for stream in TOPOLOGY.streams) < 0.5


def test_nothing_that_a_limit_could_push_out_has_such_a_limit() -> None:
    """`discard: old` stands only where nothing but age removes a message, so it never discards."""
    for stream in TOPOLOGY.streams:
        if stream.discard == "old":
            assert (stream.max_msgs, stream.store_share) == (-1, 0.0), stream.name


def test_only_work_takes_schedules() -> None:
    """Its one writer is the dispatcher."""
    assert [name for name, stream in STREAMS.items() if stream.allow_msg_schedules] == [NAMES.work_stream]


def test_history_outlives_every_wait() -> None:
    """The last event of a task must be there when the task comes back from its longest wait."""
    assert TIMES.event_ttl_s >= TIMES.history_s + TIMES.max_wait_s
    events = STREAMS[NAMES.events_stream]
    assert events.allow_msg_ttl
    assert events.max_age_s == 0.0
    assert STREAMS[NAMES.dlq_stream].max_age_s == 30 * DAY_S


@pytest.mark.parametrize("consumer", TOPOLOGY.consumers, ids=lambda consumer: consumer.durable)
def test_every_consumer_reads_what_its_stream_holds(consumer: ConsumerSpec) -> None:
    """Ack deadline, deliveries and outstanding messages are bounded; filters lie inside the stream's subjects."""
    assert consumer.ack_wait_s == TIMES.lease_s
    assert consumer.max_deliver > 0
    assert consumer.max_ack_pending > 0
    assert consumer.max_waiting > 0
    for filter_ in consumer.filters:
        assert any(filter_ == subject or _matches(subject, filter_) for subject in STREAMS[consumer.stream].subjects)


def test_no_two_consumers_share_a_name() -> None:
    """A durable is one mailbox."""
    durables = [consumer.durable for consumer in TOPOLOGY.consumers]
    assert len(set(durables)) == len(durables)


def test_advisories_of_every_work_queue_stream_are_kept() -> None:
    """A message that reached its last delivery is noticed wherever it lay."""
    kept = STREAMS[NAMES.advisory_stream].subjects
    for stream in TOPOLOGY.streams:
        if stream.retention == "workqueue":
            assert set(NAMES.advisories(stream.name)) <= set(kept)


@pytest.mark.parametrize(
    ("subject", "stream"),
    [
        (NAMES.submit("acme", "q"), NAMES.inbox_stream),
        (NAMES.event("acme", KEY, "q", "queued"), NAMES.events_stream),
        (NAMES.info("acme", KEY, "q", "progress"), NAMES.events_stream),
        (NAMES.work("q", "high", KEY), NAMES.work_stream),
        (NAMES.later("q", KEY, 7), NAMES.work_stream),
        (NAMES.dlq("acme", "q", KEY, 1), NAMES.dlq_stream),
        (NAMES.control("cancel", "acme"), NAMES.control_stream),
    ],
)
def test_every_stored_subject_has_one_home(subject: str, stream: str) -> None:
    """Two streams that overlap are refused by the server; none at all loses the message."""
    assert _home(subject) == [stream]


@pytest.mark.parametrize("subject", [NAMES.bell("q"), NAMES.governor("acquire"), NAMES.request_submit])
def test_core_subjects_are_stored_nowhere(subject: str) -> None:
    """Their loss costs nothing, so their keeping would cost for nothing."""
    assert _home(subject) == []


def test_purging_one_task_touches_no_other() -> None:
    """The filters of a cancel name one key."""
    other = derive_key("key", "acme", "2")
    assert _matches(NAMES.work_of_key(KEY), NAMES.work("q", "high", KEY))
    assert _matches(NAMES.later_of_key(KEY), NAMES.later("q", KEY, 7))
    assert not _matches(NAMES.work_of_key(KEY), NAMES.work("q", "high", other))
    assert not _matches(NAMES.later_of_key(KEY), NAMES.later("q", other, 7))
    assert _matches(NAMES.life("acme", KEY), NAMES.event("acme", KEY, "q", "queued"))
    assert not _matches(NAMES.life("acme", KEY), NAMES.info("acme", KEY, "q", "progress"))


def test_work_consumers_part_the_queue_by_priority() -> None:
    """Every work subject is read by exactly one of them; schedules that still wait by none."""
    specs = [work_consumer(NAMES, TIMES, "q", priority, max_ack_pending=64) for priority in PRIORITIES]
    for priority in PRIORITIES:
        readers = [spec for spec in specs if any(_matches(f, NAMES.work("q", priority, KEY)) for f in spec.filters)]
        assert [spec.durable for spec in readers] == [NAMES.work_consumer("q", priority)]
        assert readers[0].max_ack_pending == 64
    assert not any(_matches(f, NAMES.later("q", KEY, 7)) for spec in specs for f in spec.filters)


def test_prefixes_keep_environments_apart() -> None:
    """Two of them on one server share no stream, subject or bucket."""
    other = topology(Names("staging"), TIMES)
    for ours, theirs in zip(TOPOLOGY.streams, other.streams, strict=True):
        assert ours.name != theirs.name
        assert not {s for s in ours.subjects if not s.startswith("$JS")} & set(theirs.subjects)
    assert not {bucket.name for bucket in TOPOLOGY.buckets} & {bucket.name for bucket in other.buckets}
