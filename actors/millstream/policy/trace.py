"""Trace context as W3C defines it, parsed by hand: a bad one starts a new trace and never fails a task."""

import hashlib
import re
from dataclasses import dataclass

from millstream_schemas.envelope import MAX_TEXT_CHARS, TraceContext

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
_TRACE_ID = re.compile(r"[0-9a-f]{32}\Z")
_SPAN_ID = re.compile(r"[0-9a-f]{16}\Z")


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace id, the span to be the parent of what follows (empty: none) and the sampled flag."""

    trace_id: str
    parent_span_id: str
    sampled: bool
    tracestate: str = ""


def parse_traceparent(text: str) -> Trace | None:
    """The W3C header as a trace, letter case ignored; None where it is not valid."""
    found = _TRACEPARENT.match(text.strip().lower())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not _nonzero(trace_id) or not _nonzero(span_id):
        return None
    return Trace(trace_id, span_id, bool(int(flags, 16) & 1))


def resolve_trace(given: TraceContext | None, traceparent: str | None, tracestate: str | None, seed: str) -> Trace:
    """The trace of a task: from its envelope, else from the message's headers, else a new one made from `seed`.

    A `tracestate` of the headers that is longer than an envelope may hold is left out: nobody could read it again.
    """
    if given is not None:
        if given.traceparent is not None:
            trace = parse_traceparent(given.traceparent)
            if trace is not None:
                return Trace(trace.trace_id, trace.parent_span_id, trace.sampled, given.tracestate or "")
        trace_id = (given.trace_id or "").lower()
        if _TRACE_ID.match(trace_id) and _nonzero(trace_id):
            span_id = (given.parent_span_id or "").lower()
            known = _SPAN_ID.match(span_id) is not None and _nonzero(span_id)
            return Trace(trace_id, span_id if known else "", sampled=True)
    if traceparent is not None:
        trace = parse_traceparent(traceparent)
        if trace is not None:
            state = tracestate or ""
            kept = state if len(state) <= MAX_TEXT_CHARS else ""
            return Trace(trace.trace_id, trace.parent_span_id, trace.sampled, kept)
    return Trace(hashlib.sha256(b"trace:" + seed.encode()).hexdigest()[:32], "", sampled=True)


def traceparent(trace: Trace) -> str:
    """The W3C header of a trace; a trace without a parent span gets one made from its id."""
    span_id = trace.parent_span_id or hashlib.sha256(b"span:" + trace.trace_id.encode()).hexdigest()[:16]
    return f"00-{trace.trace_id}-{span_id}-{'01' if trace.sampled else '00'}"


def _nonzero(hexadecimal: str) -> bool:
    return hexadecimal.strip("0") != ""
