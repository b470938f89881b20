"""The sums of the read model, kept in memory by the event loop: how many tasks where, and how far folding has come."""

from millstream.tracker.folding import Folded
from millstream.tracker.model import Counts
from millstream.tracker.queries import Filter
from millstream.tracker.snapshot import Batch
from millstream.tracker.store import Position, Tally
from millstream_schemas.lifecycle import TERMINAL


class View:
    """What was folded so far, as of the last transaction."""

    def __init__(self, position: Position, tally: Tally, batches: dict[str, Batch]) -> None:
        self.position = position
        self.tally = tally
        self.batches = batches
        self.counts = Counts()
        self.stream_end = position.seq
        """The last sequence that the stream was seen to hold."""

    def take(self, folded: Folded) -> None:
        """Add what a batch changed."""
        self.position = folded.position
        self.stream_end = max(self.stream_end, folded.position.seq)
        self.batches.update(folded.batches)
        self.move(folded.moves)
        for name in Counts.__struct_fields__:
            setattr(self.counts, name, getattr(self.counts, name) + getattr(folded.counts, name))

    def move(self, moves: Tally) -> None:
        """Add differences to the tally."""
        for key, by in moves.items():
            left = self.tally.get(key, 0) + by
            if left:
                self.tally[key] = left
            else:
                self.tally.pop(key, None)

    @property
    def lag(self) -> int:
        """How many sequences of the stream are not folded yet, as far as is known."""
        return max(self.stream_end - self.position.seq, 0)

    def queues(self, tenant: str | None = None) -> dict[str, dict[str, int]]:
        """Counts by queue and state."""
        found: dict[str, dict[str, int]] = {}
        for (owner, queue, state), count in self.tally.items():
            if tenant in (None, owner):
                states = found.setdefault(queue, {})
                states[state] = states.get(state, 0) + count
        return dict(sorted(found.items()))

    def total(self, wanted: Filter) -> int | None:
        """How many tasks match, where the tally can tell; else None."""
        others = (
            wanted.task_type,
            wanted.run_id,
            wanted.tag,
            wanted.inbox_seq,
            wanted.since,
            wanted.until,
            wanted.text,
        )
        if any(each is not None for each in others):
            return None
        return sum(
            count
            for (tenant, queue, state), count in self.tally.items()
            if wanted.tenant in (None, tenant)
            and wanted.queue in (None, queue)
            and (not wanted.states or state in wanted.states)
        )


def active(states: dict[str, int]) -> int:
    """How many of these tasks have no outcome yet."""
    return sum(count for state, count in states.items() if state not in TERMINAL)
