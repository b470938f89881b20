"""Spans around handlers, by the OpenTelemetry API; without an SDK they cost little and go nowhere."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import context as api
from opentelemetry import trace
from opentelemetry.context import Context

from millstream_schemas.envelope import TraceContext
from millstream_schemas.events import WorkItem
from millstream_schemas.names import Names

_tracer = trace.get_tracer("millstream")
_EMPTY = Context()
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_NOT_SAMPLED = trace.TraceFlags(trace.TraceFlags.DEFAULT)


def parent_context(given: TraceContext | None) -> Context:
    """The OpenTelemetry context whose current span is the task's parent; the dispatcher has checked the header."""
    header = given.traceparent if given is not None else None
    if header is None or len(header) < len("00-") + 32 + len("-") + 16 + len("-01"):
        return _EMPTY
    _, trace_id, span_id, flags = header.split("-")[:4]
    remote = trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), True, _SAMPLED if int(flags, 16) & 1 else _NOT_SAMPLED
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), _EMPTY)


@dataclass
class Spans:
    """Whether spans are recorded: looked up now and then, since asking OpenTelemetry on every task costs too much."""

    recording: bool = False

    def look(self) -> None:
        """See whether an SDK is set by now: only then is a span worth its price on every task."""
        self.recording = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@contextmanager
def process_span(item: WorkItem, names: Names, spans: Spans) -> Generator[None]:
    """Run the block in the span of one execution, child of the task's trace context.

    Without an SDK the task's own context is current, so that what the handler calls carries it on.
    """
    parent = parent_context(item.envelope.trace_context)
    if not spans.recording:
        token = api.attach(parent)
        try:
            yield
        finally:
            api.detach(token)
        return
    with _tracer.start_as_current_span(
        f"process {item.card.task_type}",
        context=parent,
        kind=trace.SpanKind.CONSUMER,
        attributes=_attributes(item, names),
    ):
        yield


def _attributes(item: WorkItem, names: Names) -> dict[str, str | int]:
    card = item.card
    return {
        "messaging.system": "nats",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": names.work_class(card.queue, card.priority),
        "messaging.message.id": card.task_id,
        "millstream.task.type": card.task_type,
        "millstream.task.attempt": card.attempt,
        "millstream.tenant": card.tenant_id,
    }
