"""The steps of a release: event first, then publish, then remove; pipelined, and each of them repeatable."""

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
"""Beyond every sequence: what is on a subject that belongs to one event goes whenever it came."""


@dataclass(frozen=True, slots=True)
class Step:
    """An entry, and the event that is to be appended on its held one."""

    entry: Entry
    event: Written


@dataclass(frozen=True, slots=True)
class _Stood:
    """The event of an entry stands; `item` and `outgoing` are what follows from it, if anything does."""

    entry: Entry
    item: WorkItem | None = None
    outgoing: Outgoing | None = None


@dataclass(frozen=True, slots=True)
class Performed:
    """How many tasks of a batch went to WORK, and the entries that could not be finished and have to wait again."""

    released: int
    unfinished: Sequence[Entry]


@dataclass
class Releasing:
    """Carries out what was chosen. `removed` is told of entries that are gone from HELD."""

    context: Context
    depth: Depth
    removed: Callable[[Entry], None]
    _done: deque[Entry] = field(default_factory=deque[Entry])
    _some: asyncio.Event = field(default_factory=asyncio.Event)

    async def perform(self, steps: Sequence[Step]) -> Performed:
        """Carry out a batch. An entry whose task a newer peer wrote to is left alone, for a newer releaser."""
        stood, unfinished = await self._append(steps)
        done, unpublished = await self._publish(stood)
        self._done.extend(one.entry for one in done)
        if done:
            self._some.set()
        return Performed(sum(one.item is not None for one in done), unfinished + unpublished)

    async def _append(self, steps: Sequence[Step]) -> tuple[list[_Stood], list[Entry]]:
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
        """What an append that was not stored means; None lets the entry wait again."""
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
            except UnknownMessage as error:  # it would hold up its lane each time that its turn comes
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
        """What follows from an event; a released task counts from here on as one that has not begun."""
        if isinstance(event, Released):
            item = policy.work_item(entry, event, fence)
            self.depth.released(item)
            return _Stood(entry, item, self.context.journal.work(item, None))
        if isinstance(event, Failed):
            letter = policy.dead_letter(entry, event, self.context.clock.now())
            return _Stood(entry, None, self.context.journal.dead_letter(letter))
        return _Stood(entry)

    async def _publish(self, stood: Sequence[_Stood]) -> tuple[list[_Stood], list[Entry]]:
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
        """Remove from HELD what is done, behind the releases, until cancelled. Raises BrokerClosed."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._done:
                some = [self._done.popleft() for _ in range(min(REMOVALS_AT_ONCE, len(self._done)))]
                await self._delete(some)

    async def _delete(self, entries: Iterable[Entry]) -> None:
        """Delete by sequence; what is left over by a fault is found again and only removed then."""
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
        """Delete an entry; before it the timer of its deadline, which could end nothing any more."""
        broker, names, item = self.context.broker, self.context.names, entry.item
        if entry.has_timer:
            timer = names.later(item.card.queue, item.card.key, item.fence)
            await broker.purge(names.work_stream, timer, EVER)
        await broker.delete(entry.stream, entry.seq)
