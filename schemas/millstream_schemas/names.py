"""Every subject, stream, consumer, bucket and header name of Millstream, built in one place."""

import re
from dataclasses import dataclass

TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
"""What a tenant, queue or priority may look like: the only text that ever reaches a subject unhashed."""

NOBODY = "_"
"""Stands in a subject for a tenant or queue whose own name must not be used (it failed `TOKEN`)."""

DEFAULT_PREFIX = "mill"
DEFAULT_TENANT = "default"
DEFAULT_QUEUE = "default"
PRIORITIES = ("high", "normal", "low")

# Headers. The server owns the first group, W3C the second.
MSG_ID = "Nats-Msg-Id"
TTL = "Nats-TTL"
INCREMENT = "Nats-Incr"
SCHEDULE = "Nats-Schedule"
SCHEDULE_TARGET = "Nats-Schedule-Target"
EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
SERVER_HEADER_PREFIX = "nats-"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"


def is_token(text: str) -> bool:
    """True when `text` may stand in a subject as it is."""
    return TOKEN.match(text) is not None


def token_or_nobody(text: str) -> str:
    """`text` where it may stand in a subject, else `NOBODY`."""
    return text if is_token(text) else NOBODY


def _token(text: str) -> str:
    # The last gate before a subject: a wildcard or dot from unchecked text would widen a filter, a purge or a grant.
    if TOKEN.match(text) is None:
        raise ValueError(f"may not stand in a subject: {text[:80]!r}")
    return text


@dataclass(frozen=True, slots=True)
class SubmitAddress:
    """Tenant and queue as the subject of a submit names them."""

    tenant: str
    queue: str


@dataclass(frozen=True, slots=True)
class HeldAddress:
    """Where a held task waits: its queue, its priority, and the lane of its pool and tenant."""

    queue: str
    priority: str
    lane: str


@dataclass(frozen=True, slots=True)
class EventAddress:
    """The parts of an event's or info's subject."""

    tenant: str
    key: str
    queue: str
    kind: str


@dataclass(frozen=True, slots=True)
class Names:
    """Builds all names under one prefix, so that one server can hold many environments.

    Whatever reaches a name is a token: the prefix and all arguments. Raises ValueError for any other text.
    """

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        _token(self.prefix)

    # --- streams -----------------------------------------------------------------------------

    def _stream(self, name: str) -> str:
        return f"{self.prefix.upper()}_{name}"

    @property
    def inbox_stream(self) -> str:  # MILL_INBOX
        return self._stream("INBOX")

    @property
    def events_stream(self) -> str:  # MILL_EVENTS
        return self._stream("EVENTS")

    @property
    def work_stream(self) -> str:  # MILL_WORK
        return self._stream("WORK")

    @property
    def dlq_stream(self) -> str:  # MILL_DLQ
        return self._stream("DLQ")

    @property
    def control_stream(self) -> str:  # MILL_CONTROL
        return self._stream("CONTROL")

    @property
    def advisory_stream(self) -> str:  # MILL_ADVISORY
        return self._stream("ADVISORY")

    @property
    def held_stream(self) -> str:  # MILL_HELD
        return self._stream("HELD")

    @property
    def spent_stream(self) -> str:  # MILL_SPENT
        return self._stream("SPENT")

    # --- INBOX -------------------------------------------------------------------------------

    def submit(self, tenant: str, queue: str) -> str:  # mill.submit.acme.agent-run
        return f"{self.prefix}.submit.{_token(tenant)}.{_token(queue)}"

    @property
    def submit_filter(self) -> str:  # mill.submit.*.*
        return f"{self.prefix}.submit.*.*"

    def parse_submit(self, subject: str) -> SubmitAddress:
        """Tenant and queue of a submit's subject; a part that is no token becomes `NOBODY`."""
        parts = subject[len(self.prefix) + len(".submit.") :].split(".")
        tenant, queue = [*parts, NOBODY, NOBODY][:2]
        return SubmitAddress(token_or_nobody(tenant), token_or_nobody(queue))

    # --- EVENTS ------------------------------------------------------------------------------

    def event(self, tenant: str, key: str, queue: str, kind: str) -> str:  # mill.event.acme.<key>.agent-run.queued
        return f"{self.prefix}.event.{_token(tenant)}.{_token(key)}.{_token(queue)}.{_token(kind)}"

    def life(self, tenant: str, key: str) -> str:  # mill.event.acme.<key>.*.*
        """The one filter of every compare-and-set on a task's life; differing filters do not exclude each other."""
        return f"{self.prefix}.event.{_token(tenant)}.{_token(key)}.*.*"

    def any_life(self, key: str) -> str:  # mill.event.*.<key>.*.*
        return f"{self.prefix}.event.*.{_token(key)}.*.*"

    def info(self, tenant: str, key: str, queue: str, kind: str) -> str:  # mill.info.acme.<key>.agent-run.progress
        return f"{self.prefix}.info.{_token(tenant)}.{_token(key)}.{_token(queue)}.{_token(kind)}"

    def events_of_kind(self, kind: str) -> str:  # mill.event.*.*.*.attempt_failed
        return f"{self.prefix}.event.*.*.*.{_token(kind)}"

    def events_of_queue(self, queue: str, kind: str) -> str:  # mill.event.*.*.agent-run.started
        return f"{self.prefix}.event.*.*.{_token(queue)}.{_token(kind)}"

    @property
    def event_filter(self) -> str:  # mill.event.>
        return f"{self.prefix}.event.>"

    @property
    def info_filter(self) -> str:  # mill.info.>
        return f"{self.prefix}.info.>"

    def parse_event(self, subject: str) -> EventAddress:
        """The parts of an event's or info's subject; raises ValueError for any other subject."""
        prefix, *parts = subject.split(".")
        if prefix != self.prefix or len(parts) != 5 or parts[0] not in ("event", "info"):
            raise ValueError(f"not an event subject: {subject!r}")
        return EventAddress(*parts[1:])

    # --- WORK --------------------------------------------------------------------------------

    def work(self, queue: str, priority: str, key: str) -> str:  # mill.work.agent-run.normal.<key>
        return f"{self.prefix}.work.{_token(queue)}.{_token(priority)}.{_token(key)}"

    def work_class(self, queue: str, priority: str) -> str:  # mill.work.agent-run.normal.*
        return f"{self.prefix}.work.{_token(queue)}.{_token(priority)}.*"

    def work_of_key(self, key: str) -> str:  # mill.work.*.*.<key>
        return f"{self.prefix}.work.*.*.{_token(key)}"

    def later(self, queue: str, key: str, fence: int) -> str:  # mill.later.agent-run.<key>.4711
        return f"{self.prefix}.later.{_token(queue)}.{_token(key)}.{fence}"

    def later_of_key(self, key: str) -> str:  # mill.later.*.<key>.>
        return f"{self.prefix}.later.*.{_token(key)}.>"

    def tick(self, kind: str, queue: str, key: str) -> str:  # mill.tick.hold.agent-run.<key>
        """Where a timer of the dispatcher's fires: `hold` when a metered task is due, `expire` at a deadline."""
        return f"{self.prefix}.tick.{_token(kind)}.{_token(queue)}.{_token(key)}"

    def ticks_of_key(self, key: str) -> str:  # mill.tick.*.*.<key>
        return f"{self.prefix}.tick.*.*.{_token(key)}"

    @property
    def tick_filter(self) -> str:  # mill.tick.*.*.*
        return f"{self.prefix}.tick.*.*.*"

    def parse_tick(self, subject: str) -> tuple[str, str, str]:
        """Kind, queue and key of a tick's subject; raises ValueError for any other subject."""
        parts = subject.split(".")
        if len(parts) != 5 or parts[:2] != [self.prefix, "tick"]:
            raise ValueError(f"not a tick subject: {subject!r}")
        return parts[2], parts[3], parts[4]

    @property
    def work_filters(self) -> tuple[str, ...]:
        return (f"{self.prefix}.work.*.*.*", f"{self.prefix}.later.*.*.*", self.tick_filter)

    def parse_work(self, subject: str) -> tuple[str, str, str]:
        """Queue, priority and key of a WORK subject; raises ValueError for any other subject."""
        parts = subject.split(".")
        if len(parts) != 5 or parts[:2] != [self.prefix, "work"]:
            raise ValueError(f"not a work subject: {subject!r}")
        return parts[2], parts[3], parts[4]

    # --- HELD, SPENT ---------------------------------------------------------------------------

    def held(self, queue: str, priority: str, lane: str) -> str:  # mill.held.agent-run.normal.<lane>
        return f"{self.prefix}.held.{_token(queue)}.{_token(priority)}.{_token(lane)}"

    @property
    def held_filter(self) -> str:  # mill.held.*.*.*
        return f"{self.prefix}.held.*.*.*"

    def parse_held(self, subject: str) -> HeldAddress:
        """Queue, priority and lane of a HELD subject; raises ValueError for any other subject."""
        parts = subject.split(".")
        if len(parts) != 5 or parts[:2] != [self.prefix, "held"]:
            raise ValueError(f"not a held subject: {subject!r}")
        return HeldAddress(*parts[2:])

    def spent(self, key: str, period: str) -> str:  # mill.spent.<hash of the limit's key>.2026-11-30
        return f"{self.prefix}.spent.{_token(key)}.{_token(period)}"

    def spent_in(self, period: str) -> str:  # mill.spent.*.2026-11-30
        return f"{self.prefix}.spent.*.{_token(period)}"

    @property
    def spent_filter(self) -> str:  # mill.spent.*.*
        return f"{self.prefix}.spent.*.*"

    def parse_spent(self, subject: str) -> tuple[str, str]:
        """Hash of the limit's key and period of a SPENT subject; raises ValueError for any other subject."""
        parts = subject.split(".")
        if len(parts) != 4 or parts[:2] != [self.prefix, "spent"]:
            raise ValueError(f"not a spent subject: {subject!r}")
        return parts[2], parts[3]

    # --- DLQ, CONTROL, ADVISORY --------------------------------------------------------------

    def dlq(self, tenant: str, queue: str, key: str, generation: int) -> str:  # mill.dlq.acme.agent-run.<key>.1
        return f"{self.prefix}.dlq.{_token(tenant)}.{_token(queue)}.{_token(key)}.{generation}"

    def dlq_of_key(self, tenant: str, key: str) -> str:  # mill.dlq.acme.*.<key>.*
        return f"{self.prefix}.dlq.{_token(tenant)}.*.{_token(key)}.*"

    @property
    def dlq_filter(self) -> str:  # mill.dlq.*.*.*.*
        return f"{self.prefix}.dlq.*.*.*.*"

    def control(self, verb: str, tenant: str) -> str:  # mill.control.cancel.acme
        return f"{self.prefix}.control.{_token(verb)}.{_token(tenant)}"

    @property
    def control_filter(self) -> str:  # mill.control.*.*
        return f"{self.prefix}.control.*.*"

    def advisories(self, stream: str) -> tuple[str, str]:
        """The max-delivery and terminated advisories of all consumers of one stream."""
        root = "$JS.EVENT.ADVISORY.CONSUMER"
        return (f"{root}.MAX_DELIVERIES.{_token(stream)}.*", f"{root}.MSG_TERMINATED.{_token(stream)}.*")

    # --- consumers ---------------------------------------------------------------------------

    inbox_consumer = "dispatcher"
    decisions_consumer = "dispatcher-decisions"
    control_consumer = "dispatcher-control"
    advisory_consumer = "dispatcher-advisories"
    ticks_consumer = "dispatcher-ticks"

    def work_consumer(self, queue: str, priority: str) -> str:  # work-agent-run-normal
        return f"work-{_token(queue)}-{_token(priority)}"

    # --- core subjects: nothing durable --------------------------------------------------------

    @property
    def request_submit(self) -> str:  # mill.request.submit
        return f"{self.prefix}.request.submit"

    def governor(self, verb: str) -> str:  # mill.governor.acquire
        return f"{self.prefix}.governor.{_token(verb)}"

    @property
    def governor_said(self) -> str:  # mill.governor.said
        """What the governor tells everybody: that it leads now, that a gate has changed."""
        return f"{self.prefix}.governor.said"

    def bell(self, queue: str) -> str:  # mill.bell.agent-run
        return f"{self.prefix}.bell.{_token(queue)}"

    @property
    def held_bell(self) -> str:  # mill.held-bell
        """Tells the releaser which lanes (HELD subjects, one a line) have something new."""
        return f"{self.prefix}.held-bell"

    # --- buckets -----------------------------------------------------------------------------

    @property
    def workers_bucket(self) -> str:  # mill_workers
        return f"{self.prefix}_workers"

    @property
    def leaders_bucket(self) -> str:  # mill_leaders
        return f"{self.prefix}_leaders"

    @property
    def governor_bucket(self) -> str:  # mill_governor
        return f"{self.prefix}_governor"

    @property
    def config_bucket(self) -> str:  # mill_config
        return f"{self.prefix}_config"

    governor_lock = "governor"
    releaser_lock = "releaser"
    config_key = "config"
