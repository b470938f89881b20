"""Trace context: what is valid is kept, what is not starts a new trace and fails nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.trace import Trace, parse_traceparent, resolve_trace, traceparent
from millstream_schemas.envelope import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"
hexadecimal = st.text("0123456789abcdef", min_size=32, max_size=32).filter(lambda text: text.strip("0") != "")
contexts = st.builds(
    TraceContext,
    trace_id=st.none() | st.text(max_size=40) | hexadecimal,
    parent_span_id=st.none() | st.text(max_size=20),
    traceparent=st.none() | st.text(max_size=60) | st.just(HEADER),
    tracestate=st.none() | st.text(max_size=20),
)


@pytest.mark.parametrize("text", [HEADER, HEADER.upper(), f"  {HEADER}\t", HEADER.replace("4bf9", "4BF9")])
def test_letter_case_and_outer_space_do_not_matter(text: str) -> None:
    """Some producers write capitals."""
    assert parse_traceparent(text) == Trace(TRACE, SPAN, sampled=True)


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("fe", False), ("ff", True)]
)
def test_sampled_is_one_bit_of_the_flags(flags: str, sampled: bool) -> None:
    """The other bits belong to others."""
    trace = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert trace is not None
    assert trace.sampled is sampled


def test_a_later_version_may_say_more_and_this_one_may_not() -> None:
    """As W3C asks of a parser; version ff is never valid."""
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings") is not None
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-01-more") is None
    assert parse_traceparent(f"ff-{TRACE}-{SPAN}-01") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE}-{SPAN}-01\n-",
        f"0-{TRACE}-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        HEADER.replace("4", "٤", 1),
        "\ud800",
    ],
)
def test_garbage_is_no_trace(text: str) -> None:
    """And raises nothing."""
    assert parse_traceparent(text) is None


@given(contexts | st.none(), st.none() | st.text(max_size=60), st.none() | st.text(max_size=20), st.text(max_size=30))
def test_whatever_is_given_a_task_has_a_valid_trace(
    given_context: TraceContext | None, header: str | None, state: str | None, seed: str
) -> None:
    """The same input gives the same trace, and its header can be parsed again."""
    try:
        seed.encode()
    except UnicodeEncodeError:  # seeds are keys of ours
        seed = "key"
    trace = resolve_trace(given_context, header, state, seed)
    assert trace == resolve_trace(given_context, header, state, seed)
    again = parse_traceparent(traceparent(trace))
    assert again is not None
    assert (again.trace_id, again.sampled) == (trace.trace_id, trace.sampled)
    assert not trace.parent_span_id or again.parent_span_id == trace.parent_span_id


def test_the_envelope_wins_over_the_headers_and_the_headers_over_nothing() -> None:
    """In both forms of the envelope."""
    other = f"00-{'a' * 32}-{'b' * 16}-00"
    by_header = Trace("a" * 32, "b" * 16, sampled=False, tracestate="x=1")
    assert resolve_trace(None, other, "x=1", "seed") == by_header
    by_text = TraceContext(traceparent=HEADER, tracestate="y=2")
    assert resolve_trace(by_text, other, "x=1", "seed") == Trace(TRACE, SPAN, sampled=True, tracestate="y=2")
    by_ids = TraceContext(trace_id=TRACE.upper(), parent_span_id=SPAN.upper())
    assert resolve_trace(by_ids, other, "x=1", "seed") == Trace(TRACE, SPAN, sampled=True)
    assert resolve_trace(TraceContext(trace_id="nonsense"), other, "x=1", "seed") == by_header


def test_a_trace_without_span_keeps_its_id_and_gets_a_made_up_parent() -> None:
    """A bad span id does not cost the trace id."""
    trace = resolve_trace(TraceContext(trace_id=TRACE, parent_span_id="zz"), None, None, "seed")
    assert trace == Trace(TRACE, "", sampled=True)
    assert traceparent(trace).startswith(f"00-{TRACE}-")
