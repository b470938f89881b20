"""Cancel and replay: what operators ask for, appended to the task's life and then carried out."""

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.dispatcher.context import Context
from millstream.errors import BrokerError
from millstream.policy import control as policy
from millstream.policy.holding import onward
from millstream.policy.metering import Metering
from millstream.ports import Delivery, Record, Refused, Stored
from millstream_schemas.codec import UnknownMessage, decode_command, decode_dead_letter
from millstream_schemas.commands import Cancel, Command, Replay
from millstream_schemas.events import Alias, Cancelled, Cause, DeadLetter, Event, Held, Queued


@dataclass(frozen=True, slots=True)
class Found:
    """Where a command's task lives, its last event, its dead letter if there is one, its past where that is needed."""

    key: str
    last: Event | None
    seq: int
    letter: DeadLetter | None
    letter_seq: int
    past: Sequence[Event] = ()


@dataclass(frozen=True)
class Commander:
    """Carries out commands, each by itself. Stateless."""

    context: Context

    async def handle(self, delivery: Delivery) -> None:
        """Carry out one command and ack it; what the broker did not answer is left for redelivery."""
        try:
            command = decode_command(delivery.body)
        except UnknownMessage as error:
            self.context.telemetry.emit("message.unknown", stream=delivery.stream, seq=delivery.seq, error=str(error))
            return
        try:
            await self._carry_out(command, Cause(stream=delivery.stream, seq=delivery.seq))
        except (BrokerError, UnknownMessage) as error:
            self.context.telemetry.emit("broker.trouble", error=str(error))
            return
        self.context.control.ack([delivery])

    async def _carry_out(self, command: Command, cause: Cause) -> None:
        while True:
            end_of_work = await self._end_of_work()  # before the task is read: a late purge must spare what follows
            found = await self._find(command)
            verdict = self._judge(command, cause, found)
            if isinstance(verdict, policy.TooLate):
                self.context.telemetry.emit("command.ignored", task_id=command.task_id, why=verdict.why)
                return
            fence = await self._stand(verdict)
            if fence is not None:
                break
        await self._follow(verdict.event, fence, found, end_of_work)
        kind = str(verdict.event.__struct_config__.tag)
        self.context.telemetry.emit("command.done", task_id=command.task_id, kind=kind)

    async def _stand(self, verdict: policy.Append | policy.GoOn) -> int | None:
        """The sequence at which the command's event stands; None: the task has moved, judge again."""
        if isinstance(verdict, policy.GoOn):
            return verdict.fence
        answer = await self.context.journal.append(verdict.event, verdict.expect_seq)
        if isinstance(answer, Refused):
            raise BrokerError(answer.description)
        return answer.seq if isinstance(answer, Stored) else None

    async def _find(self, command: Command) -> Found:
        """The task that a command names: by key, by id, or through the alias of its id."""
        tenant = command.tenant_id
        keys = policy.keys_of(tenant, command.task_id, command.key)
        for candidate in keys:
            key = candidate
            last = await self.context.journal.last(tenant, key)
            if isinstance(last.event, Alias):
                key = last.event.points_to
                last = await self.context.journal.last(tenant, key)
            if last.event is not None:
                letter = await self._letter(tenant, key) if isinstance(command, Replay) else None
                decoded = decode_dead_letter(letter.body) if letter is not None else None
                later = policy.is_later_generation(last.event)
                past = [event for _, event in await self.context.journal.past(tenant, key)] if later else []
                return Found(key, last.event, last.seq, decoded, letter.seq if letter is not None else 0, past)
        return Found(keys[0], None, 0, None, 0)

    async def _letter(self, tenant: str, key: str) -> Record | None:
        return await self.context.broker.last(self.context.names.dlq_stream, self.context.names.dlq_of_key(tenant, key))

    async def _end_of_work(self) -> int:
        info = await self.context.broker.stream_info(self.context.names.work_stream)
        return 0 if info is None else info.last_seq

    def _judge(self, command: Command, cause: Cause, found: Found) -> policy.Verdict:
        match command:
            case Cancel():
                return policy.cancel(command, cause, found.last, found.seq, found.past)
            case Replay():
                metered = self._metering(found.letter)
                return policy.replay(cause, found.last, found.seq, found.letter, found.past, metered)

    def _metering(self, letter: DeadLetter | None) -> Metering | None:
        return None if letter is None or letter.envelope is None else self.context.metering(letter.envelope)

    async def _follow(self, event: Cancelled | Queued | Held, fence: int, found: Found, end_of_work: int) -> None:
        """Remove what a cancelled task left in WORK; release or hold a replayed one and remove its dead letter.

        The entry of a cancelled task in HELD counts for nothing: the releaser removes it when it comes to it.
        """
        broker, names = self.context.broker, self.context.names
        if isinstance(event, Cancelled):
            for of_key in (names.work_of_key, names.later_of_key, names.ticks_of_key):
                await broker.purge(names.work_stream, of_key(found.key), end_of_work)
            return
        letter = found.letter
        if letter is None or letter.envelope is None:  # released before a crash; the letter is gone
            return
        follow_up = onward(event, fence, 0.0, envelope=letter.envelope, history=letter.history)
        (missing,) = await self.context.publish([self.context.journal.onward(follow_up)])
        if missing is not None:
            raise BrokerError(f"a replayed task could not be released: {missing}")
        self.context.bells.announce([follow_up])
        await broker.delete(names.dlq_stream, found.letter_seq)
