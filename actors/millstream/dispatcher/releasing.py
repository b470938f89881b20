"""The three steps of a release, for batches: append the event, publish to WORK, remove from HELD. Each can be repeated."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from millstream.dispatcher.context import Context
from millstream.dispatcher.depth import Depth
from millstream.errors import BrokerClosed, BrokerError
from millstream.policy import release as policy
from millstream.policy.release import Entry, Written
from millstream.ports import Conflict, Outgoing, Refused, Stored
from millstream_schemas.codec import UnknownMessage
from millstream_schemas.events import Failed, Released, WorkItem

REMOVALS_AT_ONCE = 128
AFTER_FAULT_S = 0.25
EVER = 2**62
"""Beyond every sequence: purges all of a subject, however late its message came."""


@dataclass(frozen=True, slots=True)
class Step:
    """An entry, and the event that is to be appended on its `held` event."""

    entry: Entry
    event: Written


@dataclass(frozen=True, slots=True)
class _Stood:
    """An entry whose event is in the stream.

    `outgoing` is the message that follows: to WORK, with its `item`, after a release; a dead letter after a failure;
    None where nothing follows, and the entry is only removed.
    """

    entry: Entry
    item: WorkItem | None = None
    outgoing: Outgoing | None = None


@dataclass(frozen=True, slots=True)
class Performed:
    """How many tasks of a batch went to WORK, and the entries that the broker did not let finish and that wait again."""

    released: int
    unfinished: Sequence[Entry]


@dataclass
class Releasing:
    """Performs the steps that a turn chose. `removed` is called for each entry that is gone from HELD."""

    context: Context
    depth: Depth
    removed: Callable[[Entry], None]
    _done: deque[Entry] = field(default_factory=deque[Entry])
    _some: asyncio.Event = field(default_factory=asyncio.Event)

    async def perform(self, steps: Sequence[Step]) -> Performed:
        """Perform a batch. An entry whose task has an event of a newer version is left alone, for a newer releaser."""
        stood, unfinished = await self._append(steps)
        done, unpublished = await self._publish(stood)
        self._done.extend(one.entry for one in done)
        if done:
            self._some.set()
        return Performed(sum(one.item is not None for one in done), unfinished + unpublished)

    async def _append(self, steps: Sequence[Step]) -> tuple[list[_Stood], list[Entry]]:
        """Append the events; returns what stands, and the entries that could not be finished."""
        journal = self.context.journal
        entries = [journal.entry(step.event, step.entry.item.fence) for step in steps]
        answers = await self.context.broker.publish_all(entries)
        stood: list[_Stood] = []
        doubtful: list[Step] = []
        unfinished: list[Entry] = []
        for step, answer in zip(steps, answers, strict=True):
            if isinstance(answer, Stored):
                stood.append(self._follow(step.entry, step.event, answer.seq))
            elif isinstance(answer, Refused):
                self.context.telemetry.emit("broker.trouble", answer=answer.description)
                unfinished.append(step.entry)
            else:
                doubtful.append(step)
        for step, found in zip(doubtful, await asyncio.gather(*map(self._settle, doubtful)), strict=True):
            if found is None:
                unfinished.append(step.entry)
            elif isinstance(found, _Stood):
                stood.append(found)
        return stood, unfinished

    async def _settle(self, step: Step) -> _Stood | UnknownMessage | None:
        """Find out from the last event what to do for an append that was not stored.

        None where the broker does not say: the entry waits again. UnknownMessage where the last event cannot be read:
        the entry is left alone.
        """
        card, journal, telemetry = step.entry.item.card, self.context.journal, self.context.telemetry
        while True:
            try:
                last = await journal.last(card.tenant_id, card.key)
                overtaken = policy.is_overtaken(step.entry, last.event)
                past = await journal.past(card.tenant_id, card.key) if overtaken else ()
            except BrokerClosed:
                raise
            except BrokerError as error:
                telemetry.emit("decision.unanswered", key=card.key, error=str(error))
                return None
            except UnknownMessage as error:  # put back, it would be the first of its lane again and hold up the others
                telemetry.emit("message.unknown", stream=step.entry.stream, seq=step.entry.seq, error=str(error))
                return error
            verdict = policy.standing(step.entry, step.event, last.event, last.seq, past)
            if isinstance(verdict, policy.GoOn):
                return self._follow(step.entry, verdict.event, verdict.fence)
            if isinstance(verdict, policy.Remove):
                return _Stood(step.entry)
            answer = await journal.append(verdict.event, verdict.expect_seq)
            if isinstance(answer, Stored):
                return self._follow(step.entry, verdict.event, answer.seq)
            if isinstance(answer, Refused):
                telemetry.emit("broker.trouble", answer=answer.description)
                return None

    def _follow(self, entry: Entry, event: Written, fence: int) -> _Stood:
        """What follows from an event that stands; a released task counts as not begun from here on."""
        if isinstance(event, Released):
            item = policy.work_item(entry, event, fence)
            self.depth.released(item)
            return _Stood(entry, item, self.context.journal.work(item, None))
        if isinstance(event, Failed):
            letter = policy.dead_letter(entry, event, self.context.clock.now())
            return _Stood(entry, None, self.context.journal.dead_letter(letter))
        return _Stood(entry)

    async def _publish(self, stood: Sequence[_Stood]) -> tuple[list[_Stood], list[Entry]]:
        """Publish what follows; returns what is done, and the entries that could not be finished."""
        outgoing = [one.outgoing for one in stood if one.outgoing is not None]
        answers = iter(await self.context.broker.publish_all(outgoing) if outgoing else ())
        done: list[_Stood] = []
        unpublished: list[Entry] = []
        for one in stood:
            if one.outgoing is not None:
                answer = next(answers)
                if not isinstance(answer, Stored | Conflict):
                    self.context.telemetry.emit(
                        "decision.unanswered", subject=one.outgoing.subject, answer=repr(answer)
                    )
                    unpublished.append(one.entry)
                    continue
            done.append(one)
        self.context.bells.ring(one.item for one in done if one.item is not None)
        return done, unpublished

    # --- removing --------------------------------------------------------------------------------

    async def remove(self) -> None:
        """Remove from HELD what is done, while further batches are performed, until cancelled. Raises BrokerClosed."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._done:
                some = [self._done.popleft() for _ in range(min(REMOVALS_AT_ONCE, len(self._done)))]
                await self._delete(some)

    async def _delete(self, entries: Iterable[Entry]) -> None:
        """Delete entries by sequence; where the broker fails, they are tried again after a pause.

        What is left over when the term ends, the next releaser finds, and only removes.
        """
        some = list(entries)
        ends = await asyncio.gather(*map(self._remove, some), return_exceptions=True)
        failed: list[Entry] = []
        for entry, end in zip(some, ends, strict=True):
            if isinstance(end, BrokerError) and not isinstance(end, BrokerClosed):
                failed.append(entry)
            elif isinstance(end, BaseException):
                raise end
            else:
                self.removed(entry)
        if failed:
            self.context.telemetry.emit("broker.trouble", error=f"{len(failed)} entries of HELD could not be removed")
            self._done.extend(failed)
            await asyncio.sleep(AFTER_FAULT_S)

    async def _remove(self, entry: Entry) -> None:
        """Delete an entry, and before it the timer of its deadline, which has nothing left to end."""
        broker, names, item = self.context.broker, self.context.names, entry.item
        if entry.has_timer:
            timer = names.later(item.card.queue, item.card.key, item.fence)
            await broker.purge(names.work_stream, timer, EVER)
        await broker.delete(entry.stream, entry.seq)
