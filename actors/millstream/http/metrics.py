"""`/metrics` in Prometheus' text format: few series, whatever producers do."""

from collections.abc import Callable, Iterable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from millstream._version import __version__
from millstream.errors import BrokerError
from millstream.http import asking
from millstream.http.context import Context
from millstream.http.problems import Problem
from millstream.tracker.model import Counts
from millstream_schemas.limit_states import DimensionState, LimitState

MAX_QUEUES: Final = 100
MAX_LIMITS: Final = 100
"""Keys made from templates come from producers, too."""
OTHERS: Final = "_others"
"""Stands for all queues beyond the largest hundred: queue names come from producers."""

Labels = dict[str, str]
Sample = tuple[Labels, float]


class Metrics:
    """What the tracker measures: queues, dead letters, limits as the governor tells them, and itself."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def get(self, _request: Request) -> Response | Problem:
        parts = [*self._queues(), *await self._ages(), *await self._dead_letters(), *await self._limits(), *self._own()]
        text = "".join(parts)
        return Response(
            text, headers={"Cache-Control": "no-store"}, media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def _queues(self) -> Iterable[str]:
        merged: dict[tuple[str, str], int] = {}
        named = self._named()
        for queue, states in self._context.view.queues().items():
            for state, count in states.items():
                key = (queue if queue in named else OTHERS, state)
                merged[key] = merged.get(key, 0) + count
        samples = [({"queue": queue, "state": state}, float(count)) for (queue, state), count in merged.items()]
        yield _metric("millstream_queue_tasks", "gauge", "Tasks in the read model by queue and state.", samples)

    async def _ages(self) -> Iterable[str]:
        now, samples = self._context.clock.now(), list[Sample]()
        counted = self._context.view.queues()
        for queue in self._named():
            since = await self._context.reader.ready_since(queue) if counted[queue].get("queued") else None
            samples.append(({"queue": queue}, 0.0 if since is None else max(now - since, 0.0)))
        about = "Age of the task that has been ready longest, by queue."
        return [_metric("millstream_queue_oldest_ready_age_seconds", "gauge", about, samples)]

    async def _dead_letters(self) -> Iterable[str]:
        try:
            info = await self._context.broker.stream_info(self._context.names.dlq_stream)
        except (BrokerError, TimeoutError):
            return []
        samples = [] if info is None else [(Labels(), float(info.messages))]
        return [_metric("millstream_dlq_messages", "gauge", "Dead letters in the DLQ stream.", samples)]

    async def _limits(self) -> Iterable[str]:
        """What the governor says of the limits that are used most; nothing where none answers."""
        listing = await asking.limits(self._context, wait_s=asking.GLANCE_S)
        if listing is None:
            return []
        states = sorted(listing.items, key=lambda state: (-state.waiting, -state.in_use, state.key))[:MAX_LIMITS]
        whole = [(Labels(limit=state.key), state) for state in states]
        each = [(Labels(limit=state.key, dimension=one.dimension), one) for state in states for one in state.dimensions]
        return [
            _metric(name, kind, about, [(labels, float(read(state))) for labels, state in whole])
            for name, kind, about, read in _OF_LIMIT
        ] + [
            _metric(name, "gauge", about, [(labels, float(read(one))) for labels, one in each])
            for name, about, read in _OF_DIMENSION
        ]

    def _own(self) -> Iterable[str]:
        view, hub, none = self._context.view, self._context.hub, Labels()
        behind = self._context.clock.now() - view.position.at if view.lag and view.position.at else 0.0
        yield _metric(
            "millstream_tracker_lag_events", "gauge", "Sequences of EVENTS not folded yet.", [(none, view.lag)]
        )
        yield _metric(
            "millstream_tracker_lag_seconds",
            "gauge",
            "Age of the last folded event while behind.",
            [(none, max(behind, 0.0))],
        )
        results = [({"result": name}, float(getattr(view.counts, name))) for name in Counts.__struct_fields__]
        yield _metric(
            "millstream_tracker_events_total", "counter", "Events and infos by what folding made of them.", results
        )
        yield _metric("millstream_sse_clients", "gauge", "Open event streams.", [(none, hub.streams)])
        yield _metric(
            "millstream_sse_dropped_total",
            "counter",
            "Streams closed because the client was too slow.",
            [(none, hub.dropped)],
        )
        yield _metric("millstream_build_info", "gauge", "Version of Millstream.", [({"version": __version__}, 1.0)])

    def _named(self) -> list[str]:
        sized = sorted(self._context.view.queues().items(), key=lambda each: (-sum(each[1].values()), each[0]))
        return sorted(name for name, _ in sized[:MAX_QUEUES])


_OF_LIMIT: Final[tuple[tuple[str, str, str, Callable[[LimitState], float]], ...]] = (
    ("millstream_limit_in_use", "gauge", "Permits out, by limit.", lambda state: state.in_use),
    ("millstream_limit_waiting", "gauge", "Requests that wait at the governor, by limit.", lambda state: state.waiting),
    (
        "millstream_limit_closed",
        "gauge",
        "1 while a limit is paused, used up or broken.",
        lambda state: bool(state.paused_why),
    ),
    (
        "millstream_limit_granted_total",
        "counter",
        "Permits since the governor leads.",
        lambda state: state.granted_total,
    ),
    (
        "millstream_limit_throttled_total",
        "counter",
        "Refusals of the provider since the governor leads.",
        lambda state: state.throttled_total,
    ),
)
_OF_DIMENSION: Final[tuple[tuple[str, str, Callable[[DimensionState], float]], ...]] = (
    ("millstream_limit_configured", "What a limit allows, in its window or period.", lambda one: one.configured),
    ("millstream_limit_effective", "What refusals have left of that.", lambda one: one.effective),
    ("millstream_limit_used", "What was used in the last window, or spent in this period.", lambda one: one.used),
)


def _metric(name: str, kind: str, about: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {value:.15g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
