"""Why a task is where it is, in one answer: put together from the read model, the registry of workers and the governor."""

import asyncio

from millstream.errors import BrokerError
from millstream.http import asking
from millstream.http.context import Context
from millstream.http.views import Json
from millstream.policy.metering import lane_token
from millstream.policy.why import Known, Why, explain
from millstream.policy.why_held import Lane, Pool
from millstream.tracker.model import TaskRow
from millstream_schemas.codec import decode_work_item
from millstream_schemas.commands import WorkerInfo
from millstream_schemas.permits import MAX_KEYS

WAITS_FOR_LIMITS = frozenset({"held", "queued", "scheduled"})


async def why(context: Context, row: TaskRow) -> Json:
    """The answer for a task: a sentence and its source; for a metered task also its place and the limit in the way."""
    workers, pool, lane = await asyncio.gather(asking.workers(context), _pool(context, row), _lane(context, row))
    found = explain(_known(context, row, workers, pool, lane))
    answer: Json = {"task_id": row.task_id, "state": row.state, "why": found.sentence, "source": found.source}
    return answer | _details(row, found, lane)


async def _pool(context: Context, row: TaskRow) -> Pool | None:
    """What the governor says now of the limits of a task; None where it cannot be limits that it waits for."""
    keys = tuple(row.limits)[:MAX_KEYS]
    throttled = row.state != "scheduled" or row.waits_for.startswith("throttled")
    if not keys or row.state not in WAITS_FOR_LIMITS or not throttled:
        return None
    gate = await asking.gate(context, keys, *await _tokens(context, row))
    if gate is None:
        return Pool()
    listing = await asking.limits(context, gate.limiting_key, asking.GLANCE_S) if gate.limiting_key else None
    items = listing.items if listing is not None else ()
    return Pool(gate, next((state for state in items if state.key == gate.limiting_key), None))


async def _tokens(context: Context, row: TaskRow) -> tuple[int, int]:
    """Tokens in and out that the first task of the lane is estimated to take; the others are taken to need as much."""
    if row.state != "held":
        return 0, 0
    try:
        subject = context.names.held(row.queue, row.priority, lane_token(row.lane, again=row.again))
        first = await context.broker.page(context.names.held_stream, subject, 0, 1)
        estimate = decode_work_item(first[0].body).envelope.usage_estimate if first else None
    except (BrokerError, TimeoutError, ValueError):
        return 0, 0
    return (0, 0) if estimate is None else (estimate.tokens_in or 0, estimate.tokens_out or 0)


async def _lane(context: Context, row: TaskRow) -> Lane | None:
    if row.state != "held":
        return None
    found = await context.reader.place(row)
    return Lane(found.place, found.of, found.lanes, found.waiting)


def _known(context: Context, row: TaskRow, workers: list[WorkerInfo], pool: Pool | None, lane: Lane | None) -> Known:
    return Known(
        state=row.state,
        now=context.clock.now(),
        task_type=row.task_type,
        queue=row.queue,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        since=row.since,
        due_at=row.due_at,
        waits_for=row.waits_for,
        worker_id=row.worker_id,
        progress=None if row.progress is None else row.progress.fraction,
        reason=row.reason or (row.error.reason if row.error else ""),
        error="" if row.error is None else row.error.message or row.error.type,
        generation=row.generation,
        served=any(_serves(worker, row) for worker in workers),
        workers=len(workers),
        ahead=context.view.queues().get(row.queue, {}).get("queued", 0),
        limits=tuple(row.limits),
        metered=bool(row.lane),
        lane=lane,
        pool=pool,
    )


def _serves(worker: WorkerInfo, row: TaskRow) -> bool:
    return row.queue in worker.queues and any(info.task_type == row.task_type for info in worker.handlers)


def _details(row: TaskRow, found: Why, lane: Lane | None) -> Json:
    told: Json = {}
    if row.limits:
        told["limits"] = row.limits
    if lane is not None:
        told |= {"lane": row.lane, "place": lane.place, "of": lane.of, "lanes": lane.lanes}
    if found.waiting is not None:
        expected_s = found.waiting.expected_s
        told |= {
            "limiting_key": found.waiting.limiting_key or None,
            "reason": found.waiting.reason or None,
            "expected_wait_s": None if expected_s is None else round(expected_s, 3),
        }
    return told
