"""Is the process alive, and can it do its work?"""

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from millstream.errors import BrokerError
from millstream.http.context import Context
from millstream.http.problems import Problem, json_response

ROUND_TRIP_S: Final = 2.0
READY_LAG: Final = 1_000
"""Sequences behind the stream at which the answers are still good enough."""


class Health:
    """`/healthz` and `/readyz`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def alive(self, _request: Request) -> Response | Problem:
        """The event loop answers."""
        return json_response({"status": "ok"}, headers={"Cache-Control": "no-store"})

    async def ready(self, _request: Request) -> Response | Problem:
        """The broker answers a round trip, and folding is close behind the stream."""
        context = self._context
        answered = False
        if context.broker.connected:
            try:
                async with asyncio.timeout(ROUND_TRIP_S):
                    await context.broker.flush()
                    info = await context.broker.stream_info(context.names.events_stream)
                answered = info is not None
                if info is not None:
                    context.view.stream_end = max(info.last_seq, context.view.position.seq)
            except (BrokerError, TimeoutError):
                answered = False
        lag = context.view.lag
        told = {"broker": answered, "lag_events": lag, "position": context.view.position.seq}
        if not answered or lag > READY_LAG:
            detail = "The broker does not answer" if not answered else f"Folding is {lag} events behind"
            return Problem(503, "not_ready", detail, retry_after_s=1, more=told)
        return json_response({"status": "ready", **told}, headers={"Cache-Control": "no-store"})
