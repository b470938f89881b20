"""Why a task is where it is: one sentence for each state, and where it was read."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from millstream.policy.durations import duration
from millstream.policy.why_held import Lane, Pool, Waiting, stopped, waiting
from millstream_schemas.lifecycle import State

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST = 253_402_300_799.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a task and of those who could run it. Times are Unix seconds."""

    state: State
    now: float
    task_type: str
    queue: str
    attempt: int = 1
    max_attempts: int = 0
    since: float = 0.0
    due_at: float | None = None
    waits_for: str = ""
    worker_id: str = ""
    progress: float | None = None
    reason: str = ""
    error: str = ""
    generation: int = 1
    served: bool = True
    """Whether a live worker has announced the task's type."""
    workers: int = 0
    ahead: int = 0
    """Tasks that are ready in the same queue, this one among them."""
    limits: tuple[str, ...] = ()
    metered: bool = False
    """Whether the releaser let it out of a lane, or is to."""
    lane: Lane | None = None
    """Where it stands while it is held."""
    pool: Pool | None = None
    """What the governor says of its limits; None where it has none, or nothing was asked."""


@dataclass(frozen=True, slots=True)
class Why:
    """The answer: a sentence for people, and where what it says was read."""

    sentence: str
    source: str
    waiting: Waiting | None = None
    """For a metered task: the limit in the way, and how long that may take."""


def explain(known: Known) -> Why:
    """What the task waits for, or how it ended."""
    match known.state:
        case "queued":
            return _queued(known)
        case "held":
            return _held(known)
        case "scheduled":
            return _scheduled(known)
        case "processing":
            return _processing(known)
        case "retrying":
            return _retrying(known)
        case "completed":
            return Why(f"It completed in attempt {known.attempt}, {_ago(known)}.", "event `completed`")
        case "failed":
            cause = f": {known.error}" if known.error else ""
            return Why(_said(f"It failed for good ({known.reason or 'error'}), {_ago(known)}{cause}"), "event `failed`")
        case "cancelled":
            note = f": {known.error}" if known.error else ""
            return Why(_said(f"It was cancelled {_ago(known)}{note}"), "event `cancelled`")
        case "expired":
            note = f": {known.error}" if known.error else ""
            return Why(_said(f"Its deadline passed before a start, {_ago(known)}{note}"), "event `expired`")


def _unserved(known: Known) -> Why | None:
    if not known.workers:
        return Why("It is ready, but no worker is alive.", "worker registry: it is empty")
    if known.served:
        return None
    sentence = (
        f"It is ready, but none of {_plural(known.workers, 'live worker')} serves its type `{known.task_type}` "
        f"in queue `{known.queue}`."
    )
    return Why(sentence, "worker registry: announced task types")


def _held(known: Known) -> Why:
    unserved = _unserved(known)
    if unserved is not None:
        return unserved
    lane = known.lane or Lane(1, 1)
    limits = f" for {', '.join(known.limits)}" if known.limits else " for its turn"
    found = waiting(lane, (known.pool or Pool()) if known.limits else None)
    source = "event `held`, lanes of the read model"
    if known.limits:
        silent = known.pool is None or known.pool.gate is None
        source += "; the governor is silent" if silent else ", gate of the governor"
    return Why(_said(f"It is held{limits}: {found.text}"), source, found)


def _queued(known: Known) -> Why:
    unserved = _unserved(known)
    if unserved is not None:
        return unserved
    limits = f" and for a permit of {', '.join(known.limits)}" if known.limits else ""
    others = f"; {_plural(known.ahead, 'task')} ready in queue `{known.queue}`" if known.ahead > 1 else ""
    how = "It was released from its lane" if known.metered else "It is ready"
    source = "event `released`, worker registry" if known.metered else "event `queued`, worker registry"
    stop = stopped(known.pool) if known.pool is not None else None
    now = f". Now {stop.text}" if stop is not None else ""
    return Why(_said(f"{how} and waits for a free slot of a worker{limits}{others}{now}"), source, stop)


def _scheduled(known: Known) -> Why:
    match known.waits_for.partition(":")[0]:
        case "throttled":
            what = "A limit or the called service made it wait"
        case "snoozed":
            what = "Its handler asked to be run later"
        case "no_handler":
            what = f"No live worker served its type `{known.task_type}` when it was its turn"
        case _:
            what = "Its producer asked for a later start"
    detail = known.waits_for.partition(": ")[2]
    stop = stopped(known.pool) if known.pool is not None else None
    now = f". Now {stop.text}" if stop is not None else ""
    return Why(
        _said(f"{what}{f' ({detail})' if detail else ''}; it is due {_due(known)}{now}"),
        "event `scheduled`: `due_at`, `why`",
        stop,
    )


def _retrying(known: Known) -> Why:
    tries = f" of {known.max_attempts}" if known.max_attempts else ""
    cause = f" after: {known.error}" if known.error else ""
    if known.due_at is None:
        return Why(
            _said(f"An attempt failed{f': {known.error}' if known.error else ''}; the dispatcher has not decided yet"),
            "event `attempt_failed`",
        )
    return Why(
        _said(f"It waits for attempt {known.attempt}{tries}, due {_due(known)}{cause}"), "event `retrying`: `due_at`"
    )


def _processing(known: Known) -> Why:
    done = f", {known.progress:.0%} done" if known.progress is not None else ""
    who = f"worker `{known.worker_id}`" if known.worker_id else "a worker"
    for_s = duration(known.now - known.since)
    return Why(
        f"It has been running on {who} for {for_s}, attempt {known.attempt}{done}.", "event `started`, info `progress`"
    )


def _due(known: Known) -> str:
    if known.due_at is None:
        return "at an unknown time"
    when = (_EPOCH + timedelta(seconds=round(min(max(known.due_at, 0.0), _LAST)))).strftime("%Y-%m-%dT%H:%M:%SZ")
    left = known.due_at - known.now
    return f"in {duration(left)} ({when})" if left > 0 else f"now (since {duration(-left)})"


def _ago(known: Known) -> str:
    return f"{duration(known.now - known.since)} ago"


def _said(text: str) -> str:
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", "…")) else text + "."


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
