"""The text of an event or info on its line of a timeline, and what an info changes in its task's row."""

from typing import Any, assert_never

from millstream.tracker.model import TaskProgress, TaskRow, short
from millstream_schemas.events import (
    AttemptFailed,
    Cancelled,
    Completed,
    Expired,
    Failed,
    Failure,
    Held,
    Interrupted,
    LifeEvent,
    Parked,
    Queued,
    Released,
    Retrying,
    Scheduled,
    Started,
)
from millstream_schemas.infos import BudgetWarning, Conflict, Duplicate, Info, Progress, StaleOutcome, UnknownFields

Fields = dict[str, Any]


def detail_of(event: LifeEvent) -> str:
    """The text of an event on the timeline, beside its kind."""
    match event:
        case Queued() | Released() | Completed() | Retrying() | Interrupted():
            return ""
        case Held():
            return f"waits for {', '.join(event.limits)}" if event.limits else "waits for its turn"
        case Started():
            return event.worker_id
        case AttemptFailed():
            return _sentence(event.failure)
        case Failed():
            return f"{event.reason}: {_sentence(event.failure)}"
        case Parked():
            return f"{event.reason}: {event.detail}" if event.detail else event.reason
        case Scheduled():
            return event.why
        case Expired():
            return event.detail
        case Cancelled():
            return ": ".join(part for part in (event.by, event.note) if part)
        case _:
            assert_never(event)


def _sentence(failure: Failure) -> str:
    return ": ".join(part for part in (failure.error_type or failure.reason, failure.message) if part)


def on_info(row: TaskRow, info: Info, at: float) -> tuple[Fields, str]:
    """The fields of a row that an info changes, and its text on the timeline."""
    match info:
        case Progress():
            said = short(info.message)
            told = f"{info.fraction:.0%} {said}".rstrip()
            if row.state != "processing":
                return {}, told
            return {"progress": TaskProgress(fraction=info.fraction, message=said, at=at)}, told
        case Duplicate():
            return {"duplicates": row.duplicates + 1}, f"submit {info.inbox_seq} was dropped"
        case Conflict():
            return {"conflicts": row.conflicts + 1}, f"submit {info.inbox_seq} was dropped: {info.detail}"
        case StaleOutcome():
            return {"stale_outcomes": row.stale_outcomes + 1}, f"{info.outcome} of {info.execution_id}"
        case UnknownFields():
            names = list(dict.fromkeys([*row.unknown_fields, *(short(name, 128) for name in info.names)]))[:64]
            clamped = list(dict.fromkeys([*row.clamped, *info.clamped]))[:64]
            return {"unknown_fields": names, "clamped": clamped}, ", ".join([*info.names, *info.clamped])
        case BudgetWarning():
            priced = f" (by price list {info.price_version})" if info.price_version else ""
            return {}, f"{info.budget} in {info.period}: {info.spent:.2f} of {info.hard:.2f} USD are spent{priced}"
        case _:
            assert_never(info)
