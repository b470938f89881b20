"""With an OpenTelemetry SDK in the application, every execution is a recorded span within the producer's trace."""

from __future__ import annotations

import re

from tests.support.fleet import READY, Fleet

TRACED = "tests.support.traced:app"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_SPAN_ID = "00f067aa0ba902b7"


async def test_handlers_run_in_a_recorded_span_below_the_producers(fleet: Fleet) -> None:
    """Async or in a thread: a span of its own, child of the envelope's span, in the envelope's trace."""
    fleet.dispatcher()
    tracker = fleet.start("tracker")
    fleet.worker(app=TRACED)
    tracker.wait_for_log(READY)
    context = {"trace_id": TRACE_ID, "parent_span_id": PARENT_SPAN_ID}
    seen: set[str] = set()
    async with fleet.plain() as client:
        for kind in ("span", "span.sync"):
            await fleet.submit(client, {"task_id": kind, "task_type": kind, "trace_context": context})
            found = await fleet.wait_for(kind, "completed", "failed")
            assert found["state"] == "completed", found["error"]
            told = found["result"]
            assert told["recording"] is True, kind
            assert (told["trace_id"], told["parent_span_id"]) == (TRACE_ID, PARENT_SPAN_ID), kind
            assert told["name"] == f"process {kind}"
            assert re.fullmatch("[0-9a-f]{16}", told["span_id"])
            seen.add(told["span_id"])
    assert len(seen) == 2
    assert not seen & {PARENT_SPAN_ID, "0" * 16}
