"""An application that sets an OpenTelemetry SDK before its worker runs; its handlers tell the span they run in."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from millstream import App

trace.set_tracer_provider(TracerProvider())

app = App("traced")


def _current_span() -> dict[str, Any]:
    current = trace.get_current_span()
    own = current.get_span_context()
    parent = current.parent if isinstance(current, ReadableSpan) else None
    return {
        "recording": current.is_recording(),
        "trace_id": f"{own.trace_id:032x}",
        "span_id": f"{own.span_id:016x}",
        "parent_span_id": None if parent is None else f"{parent.span_id:016x}",
        "name": current.name if isinstance(current, ReadableSpan) else None,
    }


@app.task("span", queue="agent-run")
async def span() -> dict[str, Any]:
    """The span of an async handler."""
    return _current_span()


@app.task("span.sync", queue="agent-run")
def span_sync() -> dict[str, Any]:
    """The span of a handler that runs in a thread."""
    return _current_span()
