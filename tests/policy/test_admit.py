"""Admission: the same submit gives the same answer, contradictions are refused with their path, keys mean what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy import admit
from millstream.policy.admit import Admission, QueueDefaults, Submit, alias_blocks, in_generation, standing
from millstream.policy.metering import Metered, lane_of
from millstream_schemas.codec import InvalidEnvelope, decode_envelope, decode_work_item, encode
from millstream_schemas.envelope import MAX_ATTEMPTS_CAP, MAX_WAIT_S, RetryPolicy
from millstream_schemas.events import (
    Alias,
    Cancelled,
    Card,
    Cause,
    Completed,
    Expired,
    Held,
    Queued,
    Scheduled,
    WorkItem,
)
from tests.support.source import REPOSITORY

NOW = 1_778_320_000.0  # 2026-05-09T09:46:40Z
SAMPLES = REPOSITORY / "schemas" / "wire-samples" / "v1"


def submit(seq: int = 1, at: float = NOW, tenant: str = "acme", **fields: Any) -> Submit:
    """A submit as a producer would send it."""
    envelope, _ = decode_envelope(msgspec.json.encode({"task_type": "agent.run", **fields}))
    return Submit(envelope, tenant, "agent-run", "INBOX", seq, at)


def admitted(seq: int = 1, at: float = NOW, **fields: Any) -> Admission:
    """What it becomes, with the defaults of a plain queue."""
    return admit.admit(submit(seq, at, **fields), QueueDefaults())


def refused(**fields: Any) -> str:
    """The path of the fault."""
    with pytest.raises(InvalidEnvelope) as caught:
        admitted(**fields)
    return caught.value.path


fields = st.fixed_dictionaries(
    {},
    optional={
        "task_id": st.text("abc", min_size=1, max_size=3),
        "idempotency_key": st.text("abc", min_size=1, max_size=3),
        "unique": st.sampled_from(["history", "in_flight"]),
        "payload": st.none() | st.integers() | st.dictionaries(st.text("ab", max_size=2), st.integers(0, 3)),
        "delay_seconds": st.floats(0, MAX_WAIT_S),
        "priority": st.sampled_from(["high", "normal", "low"]),
    },
)


@given(fields, st.integers(1, 2**53), st.floats(0, 4e9))
def test_the_same_submit_always_gives_the_same_answer(given_fields: dict[str, Any], seq: int, at: float) -> None:
    """A redelivery decides nothing anew: key, event, due time and trace are those of the first time."""
    assert admitted(seq, at, **given_fields) == admitted(seq, at, **given_fields)


@given(fields, st.integers(1, 9), st.integers(10, 99))
def test_a_key_of_the_producers_holds_over_submits_and_without_one_each_is_a_task_of_its_own(
    given_fields: dict[str, Any], seq: int, other_seq: int
) -> None:
    """Idempotency key, content or id say "the same task"; nothing says "another"."""
    named = bool(given_fields.keys() & {"task_id", "idempotency_key", "unique"})
    one, other = admitted(seq, **given_fields), admitted(other_seq, **given_fields)
    assert (one.key == other.key) is named


def test_the_idempotency_key_decides_before_content_and_content_before_the_id() -> None:
    """And the id then gets an alias, to be found by."""
    by_key = admitted(idempotency_key="k", task_id="t", unique="in_flight", payload={"n": 1})
    assert by_key.key == admitted(idempotency_key="k").key
    by_content = admitted(task_id="t", unique="history", payload={"n": 1})
    assert by_content.key == admitted(unique="history", payload={"n": 1}).key != by_key.key
    by_id = admitted(task_id="t")
    assert by_key.alias_key == by_content.alias_key == by_id.key
    assert by_id.alias_key is None
    assert admitted(idempotency_key="k").alias_key is None


def test_tenants_share_no_key() -> None:
    """Whatever their producers choose."""
    named: list[dict[str, Any]] = [{"task_id": "t"}, {"idempotency_key": "k"}, {"unique": "history"}, {}]
    for given_fields in named:
        assert admitted(**given_fields).key != admit.admit(submit(tenant="other", **given_fields), QueueDefaults()).key


def test_content_is_the_same_whatever_its_spacing_and_order() -> None:
    """Same context and same operation, same task (origins B); any difference in them makes another."""
    one, _ = decode_envelope(b'{"task_type":"a","unique":"history","payload":{"x":1,"y":[2]},"context":{"c":1}}')
    two, _ = decode_envelope(b'{"unique":"history","context":{ "c" :1},"payload": {"y":[2],"x":1},"task_type":"a"}')
    keys = {admit.task_key(envelope, "acme", "INBOX", seq, NOW) for seq, envelope in enumerate((one, two))}
    assert len(keys) == 1
    for change in ({"payload": msgspec.Raw(b"{}")}, {"context": msgspec.Raw(b"{}")}, {"task_type": "b"}):
        other = msgspec.structs.replace(one, **change)
        assert admit.task_key(other, "acme", "INBOX", 1, NOW) not in keys


def test_an_alias_of_another_task_blocks_and_ones_own_does_not() -> None:
    """A task id belongs to one task of a tenant."""
    mine = admitted(task_id="t", idempotency_key="k")
    other = admitted(task_id="t", idempotency_key="other")
    alias = Alias(card=msgspec.structs.replace(mine.card, key=mine.alias_key or ""), points_to=mine.key)
    assert not alias_blocks(alias, mine)
    assert alias_blocks(alias, other)
    assert alias_blocks(admitted(task_id="t").event, mine)


def test_fields_that_contradict_the_subject_or_each_other_are_refused_with_their_path() -> None:
    """The subject is what permissions guard; two answers to one question are none."""
    assert refused(tenant_id="other") == "$.tenant_id"
    assert refused(queue="other") == "$.queue"
    assert refused(payload=1, payload_ref="s3://a/b") == "$.payload_ref"
    assert refused(context=1, context_ref="s3://a/b") == "$.context_ref"
    assert refused(delay_seconds=1, not_before="2026-05-09T10:00:00Z") == "$.delay_seconds"
    assert refused(approval={"required": True}) == "$.approval.required"
    assert admitted(tenant_id="acme", queue="agent-run", approval={"required": False}).event


@pytest.mark.parametrize("field", ["deadline_at", "not_before"])
@pytest.mark.parametrize("instant", ["9999-12-31T23:59:59-14:00", "9999-01-01T00:00:00Z", "1969-12-31T23:59:59Z"])
def test_an_instant_at_the_edge_of_the_calendar_is_refused_with_its_path(field: str, instant: str) -> None:
    """Year 9999 in a western zone overflows a datetime in UTC: it is refused before it can."""
    assert refused(**{field: instant}) == f"$.{field}"


@pytest.mark.parametrize("instant", ["9998-12-31T00:00:00-14:00", "0001-01-01T00:00:00+14:00"])
def test_no_instant_of_the_calendar_overflows(instant: str) -> None:
    """It is a deadline, or an error of ours with a path."""
    if instant.startswith("9998"):
        assert isinstance(admitted(deadline_at=instant).event, Queued)
    else:
        assert refused(deadline_at=instant) == "$.deadline_at"


def test_a_wait_beyond_the_limit_is_refused_with_its_path() -> None:
    """Ninety days by default, less where an operator says so."""
    assert refused(not_before="2027-05-09T10:00:00Z") == "$.not_before"
    with pytest.raises(InvalidEnvelope) as caught:
        admit.admit(submit(delay_seconds=61), QueueDefaults(), max_wait_s=60)
    assert caught.value.path == "$.delay_seconds"


@given(st.floats(0, MAX_WAIT_S, exclude_min=True))
def test_a_delay_counts_from_the_acceptance_by_the_server(delay: float) -> None:
    """Not from when the dispatcher came round to it."""
    due_at = admitted(delay_seconds=delay).due_at
    assert due_at == NOW + delay
    event = admitted(delay_seconds=delay).event
    assert isinstance(event, Scheduled if due_at > NOW else Queued)


def test_a_start_in_the_past_is_now() -> None:
    """Also at the very beginning of Unix time."""
    for past in ("2026-05-09T09:00:00Z", "1970-01-01T00:00:00Z"):
        admission = admitted(not_before=past)
        assert (admission.due_at, type(admission.event)) == (NOW, Queued)


def test_a_deadline_before_the_earliest_start_is_expired_at_once() -> None:
    """Zones are counted; at the deadline itself nothing starts."""
    assert isinstance(admitted(deadline_at="2026-05-09T09:46:40Z").event, Expired)
    assert isinstance(admitted(deadline_at="2026-05-09T09:46:41Z").event, Queued)
    assert isinstance(admitted(deadline_at="2026-05-09T10:46:41+01:00").event, Queued)
    assert isinstance(admitted(deadline_at="2026-05-09T10:46:39+01:00").event, Expired)
    assert isinstance(admitted(deadline_at="2026-05-09T09:47:00Z", delay_seconds=60).event, Expired)


def test_defaults_of_the_queue_fill_what_is_not_said_and_caps_are_told() -> None:
    """What the producer says wins; its `attempt` is ignored."""
    defaults = QueueDefaults(max_attempts=7, max_cost_usd=1.5, retry_policy=RetryPolicy(strategy="fixed"))
    plain = admit.admit(submit(attempt=9), defaults)
    assert (plain.envelope.budget.max_attempts, plain.envelope.budget.max_cost_usd) == (7, 1.5)
    assert (plain.envelope.retry_policy, plain.envelope.attempt, plain.card.attempt) == (defaults.retry_policy, None, 1)
    assert plain.clamped == ()
    said = admit.admit(submit(budget={"max_attempts": 5000, "max_cost_usd": 0}), defaults)
    assert (said.envelope.budget.max_attempts, said.envelope.budget.max_cost_usd) == (MAX_ATTEMPTS_CAP, 0)
    assert said.clamped == ("budget.max_attempts",)


def test_both_envelopes_of_the_reference_design_are_admitted() -> None:
    """The first is long past its deadline and expires; the second keeps its trace and is queued."""
    kinds: list[type] = []
    for name in ("origins-c-resume.json", "origins-c-run.json"):
        envelope, unknown = decode_envelope((SAMPLES / name).read_bytes())
        tenant = envelope.tenant_id or "acme"
        late = 1_778_400_000.0
        admission = admit.admit(Submit(envelope, tenant, "agent-run", "INBOX", 1, late), QueueDefaults())
        kinds.append(type(admission.event))
        assert unknown == []
        assert admission.alias_key is not None
        if envelope.trace_context is not None:
            assert admission.card.trace_id == envelope.trace_context.trace_id
    assert kinds == [Expired, Queued]


# --- metered --------------------------------------------------------------------------------------

LIMITED = (Metered(limits=("tenant/{tenant_id}",)),)


def metered(seq: int = 1, at: float = NOW, **fields: Any) -> Admission:
    """What a submit becomes in a queue with a limit for each tenant."""
    return admit.admit(submit(seq, at, **fields), QueueDefaults(), kinds=LIMITED)


def test_a_metered_task_that_is_due_is_held_in_the_lane_of_its_pool() -> None:
    """For the first time: it goes before nobody."""
    event = metered(limits=["x"]).event
    assert isinstance(event, Held)
    assert (event.limits, event.reason, event.again) == (["tenant/acme", "x"], "limits", False)
    assert event.lane == lane_of("acme", ["tenant/acme", "x"])
    assert event.task is not None
    assert isinstance(admitted(limits=["x"]).event, Held), "the envelope's own limits are enough"


def test_a_metered_task_that_is_not_due_says_where_it_will_be_held() -> None:
    """And a plain one beside it says nothing."""
    event = metered(delay_seconds=5).event
    assert isinstance(event, Scheduled)
    assert (event.lane, event.limits) == (lane_of("acme", ["tenant/acme"]), ["tenant/acme"])
    plain = admitted(delay_seconds=5).event
    assert isinstance(plain, Scheduled)
    assert (plain.lane, plain.limits) == ("", [])


def test_a_metered_task_past_its_deadline_expires_like_any_other() -> None:
    """It never comes to a lane."""
    assert isinstance(metered(deadline_at="2026-05-09T09:46:40Z").event, Expired)


def test_a_redelivered_metered_submit_goes_on_with_the_event_that_stands() -> None:
    """Also where it would be metered otherwise by now; once it was released, only the ack is missing."""
    mine, plain_by_now = metered(idempotency_key="k"), admitted(idempotency_key="k")
    assert isinstance(mine.event, Held)
    assert standing(plain_by_now, mine.event, 4) == admit.GoOn(4, mine.event)
    held_again = msgspec.structs.replace(
        mine.event, card=msgspec.structs.replace(mine.card, cause=Cause(stream="WORK", seq=7)), again=True
    )
    assert standing(mine, held_again, 8) == admit.Done()
    assert standing(metered(2, idempotency_key="k"), mine.event, 4) == admit.Again(conflict=False)


def test_a_later_generation_is_metered_as_the_first() -> None:
    """By its own submit."""
    event = in_generation(metered(idempotency_key="k"), 2)
    assert isinstance(event, Held)
    assert (event.card.generation, event.limits) == (2, ["tenant/acme"])


# --- the task is there already --------------------------------------------------------------------


def completed(card: Card) -> Completed:
    """The task of `card`, over."""
    return Completed(card=msgspec.structs.replace(card, cause=Cause(stream="WORK", seq=5)))


def test_a_redelivered_submit_goes_on_where_it_stopped() -> None:
    """No event: append. Its own first event: release again. Anything beyond: only the ack is missing."""
    mine = admitted(idempotency_key="k")
    assert standing(mine, None, 0) == admit.AppendFirst()
    assert standing(mine, mine.event, 4) == admit.GoOn(4, mine.event)  # type: ignore[arg-type]
    assert standing(mine, completed(mine.card), 9) == admit.Done()
    handed_back = Queued(card=msgspec.structs.replace(mine.card, cause=Cause(stream="EVENTS", seq=7)))
    assert standing(mine, handed_back, 8) == admit.Done()


def test_another_submit_of_the_key_is_a_duplicate_or_with_other_input_a_conflict() -> None:
    """The first task is not touched."""
    first = admitted(1, idempotency_key="k", payload={"n": 1})
    same = admitted(2, idempotency_key="k", payload={"n": 1})
    other = admitted(2, idempotency_key="k", payload={"n": 2})
    assert standing(same, first.event, 1) == admit.Again(conflict=False)
    assert standing(other, first.event, 1) == admit.Again(conflict=True)
    assert standing(other, completed(first.card), 9) == admit.Again(conflict=True)


def test_a_submit_that_a_cancel_overtook_is_no_conflict() -> None:
    """The cancel knew no payload to differ from."""
    mine = admitted(idempotency_key="k", payload={"n": 1})
    unseen = msgspec.structs.replace(mine.card, payload_hash="", origin=Cause(stream="CONTROL", seq=3))
    assert standing(mine, Cancelled(card=unseen), 1, NOW + 1) == admit.Again(conflict=False)


def test_a_key_unique_in_flight_is_free_for_submits_that_come_after_the_end() -> None:
    """One accepted before the end stays a duplicate, however often and late it is looked at."""
    first = admitted(1, idempotency_key="k")
    over = completed(first.card)
    during = admitted(2, NOW + 10, idempotency_key="k", unique="in_flight")
    after = admitted(3, NOW + 30, idempotency_key="k", unique="in_flight")
    assert standing(during, first.event, 1, NOW) == admit.Again(conflict=False)
    assert standing(during, over, 9, NOW + 20) == admit.Again(conflict=False)
    assert standing(after, over, 9, NOW + 20) == admit.NewGeneration(9, 2)
    assert standing(replace(after, unique_in_flight=False), over, 9, NOW + 20) == admit.Again(conflict=False)
    second = in_generation(after, 2)
    assert second.card.generation == 2
    assert standing(after, second, 10, NOW + 31) == admit.GoOn(10, second)  # type: ignore[arg-type]
    assert standing(during, completed(second.card), 15, NOW + 40) == admit.Again(conflict=False)


@pytest.mark.parametrize("length", [10, 1024, 1025, 100_000])
def test_whatever_the_headers_hold_a_worker_can_read_the_admitted_task(length: int) -> None:
    """What is filled in has the bounds of the envelope, or the task would be delivered in vain until its limit."""
    parent, state = f"00-{'a' * 32}-{'b' * 16}-01", "v=" + "x" * (length - 2)
    traced = replace(submit(), headers_traceparent=parent, headers_tracestate=state)
    admission = admit.admit(traced, QueueDefaults())
    item = decode_work_item(encode(WorkItem(fence=1, card=admission.card, envelope=admission.envelope)))
    assert item.card.trace_id == "a" * 32
