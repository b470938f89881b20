"""One delivery from pull to ack: may it start, permit, claim, run, commit. Read it from top to bottom."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from millstream.app import AnyTask
from millstream.errors import BrokerError, MessageTooLarge
from millstream.journal import Last
from millstream.permits_client import Permit
from millstream.policy import claim as policy
from millstream.policy.claim import Hold, Outcome
from millstream.ports import Delivery, Refused, Stored
from millstream.worker import outcomes
from millstream.worker.context import Bench
from millstream.worker.executor import Stopped
from millstream.worker.running import Execution, Running
from millstream.worker.slots import Place
from millstream.worker.waits import HandBack, Waits
from millstream_schemas.codec import UnknownMessage, decode_work_item
from millstream_schemas.events import Event, Started, Usage
from millstream_schemas.infos import StaleOutcome

AGAIN_AFTER_S = 0.25
GIVE_UP_AFTER_S = 300.0

Judge = Callable[[Hold, Event | None, int], policy.CommitVerdict]


@dataclass(frozen=True)
class Hands:
    """Carries deliveries through. Holds no state but the executions that run."""

    bench: Bench
    running: Running
    stopping: asyncio.Event
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a suspect runs, a task that may be what kills workers: other suspects wait for it, unclaimed."""
    tasks: Mapping[str, AnyTask] = field(init=False)
    waits: Waits = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", self.bench.app.tasks)
        object.__setattr__(self, "waits", Waits(self.bench))

    async def handle(self, delivery: Delivery, place: Place) -> None:
        """The one boundary of a delivery: it is acked once the task's life says so, and else left alone."""
        try:
            item = decode_work_item(delivery.body)
        except UnknownMessage as error:
            self.bench.telemetry.emit("message.unknown", stream=delivery.stream, seq=delivery.seq, error=str(error))
            return
        bench = self.bench
        hold = Hold(item, bench.ids.new(), bench.worker_id, delivery.stream, delivery.seq, delivery.delivery)
        bench.heart.start(delivery, bench.settings.lease_s)
        try:
            if await self._carry(hold, delivery, place):
                bench.broker.ack([delivery])
        except (BrokerError, UnknownMessage) as error:
            bench.telemetry.emit("broker.trouble", key=item.card.key, error=str(error))
        except Exception as error:  # noqa: BLE001 - the boundary: the delivery comes again
            bench.telemetry.emit("message.faulty", key=item.card.key, error=repr(error))
        finally:
            bench.heart.stop(delivery)

    async def _carry(self, hold: Hold, delivery: Delivery, place: Place) -> bool:
        """May it start, and is there a handler? Returns True when the delivery is to be acked, False for silence."""
        task, bench = self.tasks.get(hold.item.card.task_type), self.bench
        refused = outcomes.before_start(hold, task, bench.clock.now(), bench.configured().prices)
        if refused is not None or task is None:
            return refused is not None and await self._commit(hold, refused, hold.item.fence, policy.hand_back)
        async with self.alone if policy.is_suspect(hold) else nullcontext():
            return await self._execute(hold, delivery, task, place)

    async def _execute(self, hold: Hold, delivery: Delivery, task: AnyTask, place: Place) -> bool:
        """Permit, claim, run, commit. Returns True when the delivery is to be acked, False for silence."""
        answer = await self.waits.permit(hold, task, place)
        if isinstance(answer, Outcome):
            return await self._commit(hold, answer, hold.item.fence, policy.hand_back)
        permit = answer if isinstance(answer, Permit) else None
        if isinstance(answer, HandBack) or self.stopping.is_set():
            self._give_back(permit)
            self.bench.broker.nak(delivery)
            return False
        place.begin()
        claimed = await self._claim(hold)
        if not isinstance(claimed, policy.Claimed):
            self._give_back(permit)
            return isinstance(claimed, policy.Superseded)
        outcome = await self._run(hold, claimed.event, task, permit)
        return await self._commit(hold, outcome, claimed.fence, policy.commit)

    def _give_back(self, permit: Permit | None) -> None:
        if permit is not None:
            self.bench.permits.give_back(permit)

    # --- claim -----------------------------------------------------------------------------------

    async def _claim(self, hold: Hold) -> policy.Claimed | policy.Silence | policy.Superseded:
        """Append `started` on the message's fence; the last event decides wherever that is refused."""
        claim = policy.first_claim(hold)
        while True:
            answer = await self.bench.journal.append(claim.event, claim.expect_seq)
            if isinstance(answer, Stored):
                self.bench.telemetry.emit("task.claimed", key=hold.item.card.key)
                return policy.Claimed(answer.seq, claim.event)
            if isinstance(answer, Refused):
                await asyncio.sleep(AGAIN_AFTER_S)
            last = await self._last(hold)
            match policy.claim(hold, last.event, last.seq):
                case policy.Claim() as claim:
                    given_up = policy.given_up(hold, claim)
                    if given_up is None:
                        continue
                    done = await self._commit(hold, given_up, claim.expect_seq, policy.hand_back)
                    return policy.Superseded() if done else policy.Silence()
                case policy.Claimed() as claimed:
                    return claimed
                case policy.HistoryLost(event):
                    done = await self._commit(hold, event, 0, policy.hand_back)
                    return policy.Superseded() if done else policy.Silence()
                case policy.Silence() | policy.Superseded() as verdict:
                    name = "task.silenced" if isinstance(verdict, policy.Silence) else "task.superseded"
                    self.bench.telemetry.emit(name, key=hold.item.card.key)
                    return verdict

    async def _last(self, hold: Hold) -> Last:
        """The last event of the task; asks again while the broker does not answer."""
        card, waited_s = hold.item.card, 0.0
        while True:
            try:
                return await self.bench.journal.last(card.tenant_id, card.key)
            except BrokerError as error:
                if waited_s >= GIVE_UP_AFTER_S:
                    raise
                self.bench.telemetry.emit("broker.trouble", key=card.key, error=str(error))
            await asyncio.sleep(AGAIN_AFTER_S)
            waited_s += AGAIN_AFTER_S

    # --- run -------------------------------------------------------------------------------------

    async def _run(self, hold: Hold, started: Started, task: AnyTask, permit: Permit | None) -> Outcome:
        """Run the handler and settle its permit; returns the outcome to commit."""
        crashes, now = started.card.crashes, self.bench.clock.now
        hold, refused = outcomes.taken_over(hold, crashes, now(), self.bench.configured().prices)
        if refused is not None:
            self._give_back(permit)
            return refused
        if permit is not None and not self.bench.permits.may_begin(permit):
            # A call that starts later than its permit says may be one too many in its window, and one that starts
            # after its gate was closed would be refused.
            permit = await self.waits.afresh(hold, permit)
            if permit is None:
                return outcomes.too_late(hold, crashes, now())
        if self.running.over:
            self._give_back(permit)
            return outcomes.outcome_of(hold, crashes, Stopped(), Usage(), now())
        execution = Execution(self.bench, hold, task, () if permit is None else permit.keys)
        with self.running.listed(hold, execution):
            ending = await execution.run()
        if permit is not None:
            self.bench.permits.settle(permit, outcomes.settlement(ending, execution.usage()))
        return outcomes.outcome_of(hold, crashes, ending, execution.usage(), now())

    # --- commit ----------------------------------------------------------------------------------

    async def _commit(self, hold: Hold, outcome: Outcome, expect_seq: int, judge: Judge) -> bool:
        """Append the outcome; True when the delivery is to be acked, False for silence."""
        while True:
            try:
                answer = await self.bench.journal.append(outcome, expect_seq)
            except MessageTooLarge as error:
                outcome = outcomes.too_large(hold, outcome, error)
                continue
            if isinstance(answer, Stored):
                self.bench.telemetry.emit("task.committed", key=hold.item.card.key)
                return True
            if isinstance(answer, Refused):
                self.bench.telemetry.emit("broker.trouble", key=hold.item.card.key, error=answer.description)
                await asyncio.sleep(AGAIN_AFTER_S)
            last = await self._last(hold)
            match judge(hold, last.event, last.seq):
                case policy.Append(expect_seq, crashes):
                    outcome = outcomes.recounted(outcome, crashes, self.bench.configured().prices)
                case policy.Committed():
                    return True
                case policy.Silence():
                    self._stale(hold, outcome)
                    return False
                case policy.Superseded():
                    self._stale(hold, outcome)
                    return True

    def _stale(self, hold: Hold, outcome: Outcome) -> None:
        card, kind = hold.item.card, str(outcome.__struct_config__.tag)
        self.bench.telemetry.emit("task.stale_outcome", key=card.key, outcome=kind)
        info = StaleOutcome(key=card.key, execution_id=hold.execution_id, outcome=kind)
        self.bench.journal.inform(info, card.tenant_id, card.queue)
