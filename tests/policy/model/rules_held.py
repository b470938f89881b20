"""What the real policy functions say of HELD: ticks, and the releaser's entries. In the model's numbers, as `rules` has it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from millstream.policy import release, ticks
from millstream.policy.stops import Stop
from millstream_schemas.events import Cause, Deadline, Failed, Held, Released
from tests.policy.model.numbers import ACK, DEADLINE, DECIDED_AT, HELD, WORK, Messages, Next

if TYPE_CHECKING:
    from tests.policy.model.rules import Rules


class HeldRules:
    """What concerns HELD: ticks, and the releaser's entries.

    With `deadline` a releaser may come to an entry before or after it, with `too_long` also when it has waited for as
    long as a task may.
    """

    def __init__(self, rules: Rules, *, deadline: bool, too_long: bool) -> None:
        self._rules = rules
        self._moments = [DECIDED_AT] + [DEADLINE + 1.0] * deadline
        self._too_long = too_long
        self.has_lane = lru_cache(None)(self._has_lane)
        self.first_tick = lru_cache(None)(self._first_tick)
        self.tick = lru_cache(None)(self._tick)
        self.after_tick = lru_cache(None)(self._after_tick)
        self.choices = lru_cache(None)(self._choices)
        self.entry = lru_cache(None)(self._entry)
        self.after_release = lru_cache(None)(self._after_release)

    def _has_lane(self, item: int) -> bool:
        return bool(self._rules.items.message(item).lane)

    # --- ticks ----------------------------------------------------------------------------------

    def _first_tick(self, seq: int, item: int) -> Next:
        """What a dispatcher does first with a tick: hold what is due, or look at a task whose deadline has passed."""
        if item < 0:
            return ("read", 0, 0)
        first = ticks.first_hold(self._rules.items.message(item), Cause(stream=WORK, seq=seq))
        return ("append", self._rules.events.number(first.event), first.expect_seq)

    def _tick(self, seq: int, item: int, last: int, last_seq: int) -> Next:
        cause, event = Cause(stream=WORK, seq=seq), self._rules.events.message(last) if last else None
        verdict: ticks.Verdict
        if item < 0:
            deadline = Deadline(tenant_id="acme", key="", fence=-item)
            verdict = self._rules.policy.expire(deadline, cause, event, last_seq)
        else:
            verdict = self._rules.policy.hold(self._rules.items.message(item), cause, event, last_seq)
        match verdict:
            case ticks.Append(event, expect_seq):
                return ("append", self._rules.events.number(event), expect_seq)
            case ticks.GoOn(event, fence):
                return ("follow", self._rules.events.number(event), fence)
            case ticks.Done():
                return ACK

    def _after_tick(self, item: int, event: int, fence: int) -> Messages:
        held = self._rules.events.message(event)
        if not isinstance(held, Held):
            return ()
        return self._rules.messages(ticks.follow_up(held, fence, self._rules.items.message(item)))

    # --- the releaser ---------------------------------------------------------------------------

    def _read(self, seq: int, item: int) -> release.Entry:
        return release.Entry("lane", HELD, seq, DECIDED_AT, self._rules.items.message(item))

    def _choices(self, seq: int, item: int) -> list[Next]:
        """What a releaser may want to write on an entry."""
        entry = self._read(seq, item)
        wanted: list[release.Written | None] = [release.chosen(entry, now) for now in self._moments]
        if self._too_long:
            wanted.append(release.overdue(entry, DECIDED_AT + 9.0, 5.0, Stop(0.0, DECIDED_AT, "limit llm: paused")))
        return [("append", self._rules.events.number(event), entry.item.fence) for event in wanted if event is not None]

    def _entry(self, seq: int, item: int, wanted: int, chain: tuple[int, ...]) -> Next:
        event, last, entry = self._rules.events.message(wanted), self._rules.last(chain), self._read(seq, item)
        assert isinstance(event, release.Written)
        past = self._rules.past(chain) if release.is_overtaken(entry, last) else []
        match self._rules.policy.entry(entry, event, last, len(chain), past):
            case release.Append(event, expect_seq):
                return ("append", self._rules.events.number(event), expect_seq)
            case release.GoOn(event, fence):
                return ("follow", self._rules.events.number(event), fence)
            case release.Remove():
                return ("remove", 0, 0)

    def _after_release(self, seq: int, item: int, event: int, fence: int) -> tuple[str, int] | None:
        written = self._rules.events.message(event)
        match written:
            case Released():
                return ("work", self._rules.items.number(release.work_item(self._read(seq, item), written, fence)))
            case Failed():
                return ("letter", written.card.generation)
            case _:
                return None
