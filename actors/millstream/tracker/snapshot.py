"""The active batch of a queue: what a person watches. It begins anew some seconds after its last active task ended."""

from typing import Final, Literal

import msgspec

from millstream.tracker.model import TaskRow
from millstream_schemas.lifecycle import TERMINAL, State

Bucket = Literal["queued", "processing", "completed", "failed"]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of one batch. `ended_at` is when its last task so far ended, 0 before any has."""

    began_at: float
    queued: int = 0
    processing: int = 0
    completed: int = 0
    failed: int = 0
    ended_at: float = 0.0

    @property
    def active(self) -> int:
        return self.queued + self.processing

    @property
    def total(self) -> int:
        return self.active + self.completed + self.failed


_BUCKETS: Final[dict[State, Bucket]] = {
    "queued": "queued",
    "held": "queued",
    "scheduled": "queued",
    "retrying": "queued",
    "processing": "processing",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "failed",
    "expired": "failed",
}


def bucket_of(state: State) -> Bucket:
    """The four sums that are shown: all that waits is queued; cancelled and expired count as failed."""
    return _BUCKETS[state]


def moved(batch: Batch | None, before: TaskRow | None, after: TaskRow, ends_after_s: float) -> Batch:
    """The batch after a task of its queue went from `before` (None: it is new here) to `after`."""
    at = after.since
    if batch is None or is_over(batch, at, ends_after_s):
        batch = Batch(began_at=at)
    changed: dict[str, float] = {}
    if before is not None and _counted(batch, before):
        left = bucket_of(before.state)
        changed[left] = max(getattr(batch, left) - 1, 0)
    entered = bucket_of(after.state)
    changed[entered] = (changed[entered] if entered in changed else getattr(batch, entered)) + 1
    if after.state in TERMINAL:
        changed["ended_at"] = at
    return msgspec.structs.replace(batch, **changed)


def _counted(batch: Batch, before: TaskRow) -> bool:
    if before.state in TERMINAL:
        return before.ended_at is not None and before.ended_at >= batch.began_at
    return True


def is_over(batch: Batch, now: float, ends_after_s: float) -> bool:
    """True once nothing is active and the last end lies `ends_after_s` back."""
    return not batch.queued and not batch.processing and now - batch.ended_at >= ends_after_s


def shown(batch: Batch | None, now: float, ends_after_s: float) -> Batch:
    """The batch as it is shown at `now`: empty where it is over."""
    if batch is None or is_over(batch, now, ends_after_s):
        return Batch(began_at=now)
    return batch
