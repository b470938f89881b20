"""Names are built and read in one place, and nothing but tokens gets into one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_schemas.keys import derive_key
from millstream_schemas.names import NOBODY, EventAddress, Names, SubmitAddress, is_token, token_or_nobody

NAMES = Names()
KEY = derive_key("key", "acme", "1")
TOKENS = st.text("ABCxyz019_-", min_size=1, max_size=64)

BAD_TOKENS = {
    "empty": "",
    "star": "*",
    "rest": ">",
    "dot": "a.b",
    "dots": "..",
    "space before": " a",
    "space within": "a b",
    "line break after": "a\n",
    "protocol": "a\r\nPUB x 0",
    "tab": "a\tb",
    "NUL": "a\x00",
    "slash": "../a",
    "server": "$JS",
    "system": "$SYS",
    "inbox": "_INBOX.a",
    "emoji": "🌊",
    "other direction": "a\u202eb",
    "composed": "é",
    "decomposed": "e\u0301",
    "full width digit": "\uff11",
    "lone surrogate": "\ud800",
    "65 characters": "a" * 65,
    "5,000 characters": "a" * 5000,
}


BUILDERS: dict[str, Callable[[str], list[Callable[[], object]]]] = {
    "submit": lambda bad: [lambda: NAMES.submit(bad, "q"), lambda: NAMES.submit("t", bad)],
    "event": lambda bad: [
        lambda: NAMES.event(bad, KEY, "q", "queued"),
        lambda: NAMES.event("t", bad, "q", "queued"),
        lambda: NAMES.event("t", KEY, bad, "queued"),
        lambda: NAMES.event("t", KEY, "q", bad),
    ],
    "life": lambda bad: [lambda: NAMES.life(bad, KEY), lambda: NAMES.life("t", bad), lambda: NAMES.any_life(bad)],
    "info": lambda bad: [
        lambda: NAMES.info(bad, KEY, "q", "progress"),
        lambda: NAMES.info("t", bad, "q", "progress"),
        lambda: NAMES.info("t", KEY, bad, "progress"),
        lambda: NAMES.info("t", KEY, "q", bad),
    ],
    "kind": lambda bad: [lambda: NAMES.events_of_kind(bad)],
    "work": lambda bad: [
        lambda: NAMES.work(bad, "high", KEY),
        lambda: NAMES.work("q", bad, KEY),
        lambda: NAMES.work("q", "high", bad),
        lambda: NAMES.work_class(bad, "high"),
        lambda: NAMES.work_class("q", bad),
        lambda: NAMES.work_of_key(bad),
        lambda: NAMES.work_consumer(bad, "high"),
        lambda: NAMES.work_consumer("q", bad),
    ],
    "later": lambda bad: [
        lambda: NAMES.later(bad, KEY, 1),
        lambda: NAMES.later("q", bad, 1),
        lambda: NAMES.later_of_key(bad),
    ],
    "dlq": lambda bad: [
        lambda: NAMES.dlq(bad, "q", KEY, 1),
        lambda: NAMES.dlq("t", bad, KEY, 1),
        lambda: NAMES.dlq("t", "q", bad, 1),
        lambda: NAMES.dlq_of_key(bad, KEY),
        lambda: NAMES.dlq_of_key("t", bad),
    ],
    "control": lambda bad: [lambda: NAMES.control(bad, "t"), lambda: NAMES.control("cancel", bad)],
    "core": lambda bad: [lambda: NAMES.governor(bad), lambda: NAMES.bell(bad), lambda: NAMES.advisories(bad)],
    "prefix": lambda bad: [lambda: Names(bad)],
}


@pytest.mark.parametrize("bad", BAD_TOKENS.values(), ids=BAD_TOKENS.keys())
@pytest.mark.parametrize("builder", BUILDERS)
def test_no_name_is_built_from_text_that_is_no_token(builder: str, bad: str) -> None:
    """A wildcard from unchecked text would widen a filter, a purge or a grant."""
    assert not is_token(bad)
    assert token_or_nobody(bad) == NOBODY
    for build in BUILDERS[builder](bad):
        with pytest.raises(ValueError, match="may not stand in a subject"):
            build()


@given(tenant=TOKENS, queue=TOKENS)
def test_a_submit_subject_is_read_as_it_was_built(tenant: str, queue: str) -> None:
    """Tenant and queue of a task come from its subject."""
    assert NAMES.parse_submit(NAMES.submit(tenant, queue)) == SubmitAddress(tenant, queue)


@given(tenant=TOKENS, queue=TOKENS, value=st.text(), kind=st.sampled_from(["queued", "attempt_failed"]))
def test_event_and_info_subjects_are_read_as_they_were_built(tenant: str, queue: str, value: str, kind: str) -> None:
    """Whatever its producer calls a task, its key fits into a subject."""
    key = derive_key("key", tenant, value)
    address = EventAddress(tenant, key, queue, kind)
    assert NAMES.parse_event(NAMES.event(tenant, key, queue, kind)) == address
    assert NAMES.parse_event(NAMES.info(tenant, key, queue, kind)) == address


@given(queue=TOKENS, priority=st.sampled_from(["high", "normal", "low"]))
def test_a_work_subject_is_read_as_it_was_built(queue: str, priority: str) -> None:
    """A worker knows queue and priority from the subject alone."""
    assert NAMES.parse_work(NAMES.work(queue, priority, KEY)) == (queue, priority, KEY)


@given(queue=TOKENS, other=TOKENS)
def test_two_queues_never_share_a_consumer(queue: str, other: str) -> None:
    """Hyphens are allowed in both parts of a consumer's name, and stay unambiguous."""
    classes = [(q, p) for q in {queue, other} for p in ("high", "normal", "low")]
    assert len({NAMES.work_consumer(*each) for each in classes}) == len(classes)


def test_the_parts_of_a_submit_that_are_no_tokens_become_nobody() -> None:
    """The server lets subjects pass that we never build into another one."""
    assert NAMES.parse_submit("mill.submit.$JS.a b") == SubmitAddress(NOBODY, NOBODY)
    assert NAMES.parse_submit("mill.submit.acme.é") == SubmitAddress("acme", NOBODY)
    assert NAMES.parse_submit("mill.submit." + "a" * 5000 + ".q") == SubmitAddress(NOBODY, "q")
    assert NAMES.parse_submit("mill.submit.acme") == SubmitAddress("acme", NOBODY)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "mill",
        "mill.event.a.b.c",
        "mill.event.a.b.c.d.e",
        "other.event.a.b.c.d",
        "mill.work.a.b.c.d",
        "mill.step.a.b.c.d",
    ],
)
def test_a_foreign_subject_is_no_event(subject: str) -> None:
    """A reader of EVENTS says so, instead of reading the parts as something else."""
    with pytest.raises(ValueError, match="not an event subject"):
        NAMES.parse_event(subject)


@pytest.mark.parametrize(
    "subject", ["", "mill.work.q.high", "mill.later.q.k.7", "other.work.q.high.k", "mill.work.q.high.k.x"]
)
def test_a_foreign_subject_is_no_work(subject: str) -> None:
    """Schedules lie in the same stream and are not work."""
    with pytest.raises(ValueError, match="not a work subject"):
        NAMES.parse_work(subject)


def test_the_prefix_is_on_every_name() -> None:
    """One server holds many environments, which share nothing."""
    here, there = Names("mill"), Names("staging")
    for name, member in vars(Names).items():
        if isinstance(member, property):
            ours, theirs = member.__get__(here), member.__get__(there)
            assert str(ours).replace("mill", "staging").replace("MILL", "STAGING") == str(theirs), name
            assert ours != theirs, name


def test_subjects_are_those_that_the_documents_name() -> None:
    """Producers and operators write these by hand."""
    assert NAMES.submit("acme", "agent-run") == "mill.submit.acme.agent-run"
    assert NAMES.event("acme", KEY, "agent-run", "queued") == f"mill.event.acme.{KEY}.agent-run.queued"
    assert NAMES.life("acme", KEY) == f"mill.event.acme.{KEY}.*.*"
    assert NAMES.work("agent-run", "normal", KEY) == f"mill.work.agent-run.normal.{KEY}"
    assert NAMES.dlq("acme", "agent-run", KEY, 1) == f"mill.dlq.acme.agent-run.{KEY}.1"
    assert NAMES.control("cancel", "acme") == "mill.control.cancel.acme"
    assert NAMES.request_submit == "mill.request.submit"
    assert NAMES.inbox_stream == "MILL_INBOX"
    assert NAMES.work_consumer("agent-run", "normal") == "work-agent-run-normal"
