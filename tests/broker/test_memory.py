"""What the in-memory broker has beyond the port: time moved by hand, faults on demand, matching of subjects."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.clock import SystemClock, SystemIds
from millstream.errors import InvalidName
from millstream.memory import MemoryServer
from millstream.memory_subjects import SubjectIndex, matches, overlap
from millstream.ports import Broker, Clock, Ids, Outgoing, Refused, Schedule, Stored
from millstream_schemas.names import Names
from millstream_schemas.topology import Lifetimes, topology, work_consumer
from tests.support.clock import CountingIds, VirtualClock

NAMES = Names()
LIFETIMES = Lifetimes(lease_s=30.0)

token = st.sampled_from(["a", "b", "ab", "c"])
subjects = st.lists(token, min_size=1, max_size=4).map(".".join)
patterns = st.tuples(st.lists(token | st.just("*"), min_size=1, max_size=4), st.booleans()).map(
    lambda drawn: ".".join([*drawn[0], *([">"] if drawn[1] else [])])
)


def as_expression(pattern: str) -> re.Pattern[str]:
    """The same pattern for `re`, as a second opinion."""
    return re.compile(re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+") + r"\Z")


async def begin(server: MemoryServer) -> tuple[Broker, str]:
    """A connected broker with the topology and one work consumer declared."""
    broker: Broker = server.connect()
    await broker.declare(topology(NAMES, LIFETIMES))
    spec = work_consumer(NAMES, LIFETIMES, "q", "normal", max_ack_pending=100)
    await broker.declare_consumer(spec)
    return broker, spec.durable


@given(patterns, subjects)
def test_wildcards_match_whole_tokens(pattern: str, subject: str) -> None:
    """`*` is one token, `>` one or more."""
    assert matches(pattern, subject) == bool(as_expression(pattern).match(subject))


@given(patterns, patterns, subjects)
def test_patterns_that_share_a_subject_overlap(a: str, b: str, subject: str) -> None:
    """In both directions; the other way round is shown by the conflicts of the conformance tests."""
    if matches(a, subject) and matches(b, subject):
        assert overlap(a, b)
        assert overlap(b, a)


@given(st.lists(subjects, max_size=30), st.data(), patterns)
def test_the_index_finds_what_matching_finds(stored: list[str], data: st.DataObject, pattern: str) -> None:
    """After any removals, too."""
    index = SubjectIndex()
    for seq, subject in enumerate(stored, 1):
        index.add(subject, seq)
    gone = data.draw(st.sets(st.integers(1, len(stored)))) if stored else set[int]()
    for seq in gone:
        index.remove(stored[seq - 1], seq)
    expected = [seq for seq, subject in enumerate(stored, 1) if seq not in gone and matches(pattern, subject)]
    assert index.all(pattern) == expected
    assert index.last(pattern) == max(expected, default=0)


async def test_a_clock_moved_by_hand_wakes_who_waits() -> None:
    """A mailbox sees a schedule fire as soon as the test has moved the time."""
    clock = VirtualClock()
    broker, consumer = await begin(MemoryServer(clock))
    due = clock.now() + 3600.0
    await broker.publish(
        Outgoing(NAMES.later("q", "k", 1), b"", schedule=Schedule(due, NAMES.work("q", "normal", "k")))
    )
    mailbox = await broker.mailbox(NAMES.work_stream, consumer, 1)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(mailbox.take(1))
        await asyncio.sleep(0)
        clock.advance(3599.0)
        assert await broker.pull(NAMES.work_stream, consumer, 1) == []
        clock.advance(10.0)
    (delivery,) = waiting.result()
    assert delivery.at == due


async def test_a_schedule_can_be_made_to_fire_twice() -> None:
    """As a server that was killed in the act may do."""
    clock = VirtualClock()
    broker, consumer = await begin(MemoryServer(clock, fire_twice=True))
    target = NAMES.work("q", "normal", "k")
    await broker.publish(
        Outgoing(NAMES.later("q", "k", 1), b"", schedule=Schedule(clock.now() + 1, target), msg_id="7")
    )
    clock.advance(1.0)
    assert len(await broker.pull(NAMES.work_stream, consumer, 10)) == 2


async def test_a_closed_broker_beats_no_more() -> None:
    """Its leases run out, as those of a dead process do."""
    clock = VirtualClock()
    server = MemoryServer(clock)
    broker, consumer = await begin(server)
    other = server.connect()
    await broker.publish(Outgoing(NAMES.work("q", "normal", "k"), b""))
    (delivery,) = await broker.pull(NAMES.work_stream, consumer, 1)
    heart = broker.heart()
    heart.start(delivery, LIFETIMES.lease_s)
    clock.advance(10 * LIFETIMES.lease_s)
    assert await other.pull(NAMES.work_stream, consumer, 1) == []
    await broker.close()
    assert not heart.alive(delivery)
    assert await other.pull(NAMES.work_stream, consumer, 1) == []
    clock.advance(LIFETIMES.lease_s)
    (again,) = await other.pull(NAMES.work_stream, consumer, 1)
    assert again.delivery == 2


async def test_a_full_store_refuses_everything() -> None:
    """Whatever the stream's own limit."""
    broker, _ = await begin(MemoryServer(VirtualClock(), store_bytes=10_000))
    outgoing = Outgoing(NAMES.work("q", "normal", "k"), b"x" * 4000)
    results = await broker.publish_all([outgoing] * 5)
    assert [type(each) for each in results] == [Stored] * 3 + [Refused] * 2
    info = await broker.server_info()
    assert info.store_used_bytes >= info.store_bytes


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nb", "a\0"])
async def test_a_text_that_is_no_subject_is_refused_locally(subject: str) -> None:
    """It would break the protocol."""
    broker, _ = await begin(MemoryServer(VirtualClock()))
    with pytest.raises(InvalidName):
        await broker.publish(Outgoing(subject, b""))


def test_the_real_clock_and_ids_fit_the_ports() -> None:
    """Time goes on, ids are fresh and may stand in a subject."""
    clock: Clock = SystemClock()
    ids: Ids = SystemIds()
    assert clock.now() > 1_700_000_000
    assert clock.monotonic() <= clock.monotonic()
    fresh = {ids.new() for _ in range(100)}
    assert len(fresh) == 100
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in fresh)
    assert all(0 <= ids.uniform() < 1 for _ in range(100))


def test_the_virtual_clock_and_ids_fit_the_ports() -> None:
    """They stand still until a test moves them."""
    moved = VirtualClock(100.0)
    clock: Clock = moved
    ids: Ids = CountingIds()
    moved.advance(1.5)
    moved.step(-10.0)
    assert (clock.now(), clock.monotonic()) == (91.5, 1.5)
    assert [ids.new(), ids.new(), ids.uniform()] == ["id-1", "id-2", 0.5]
