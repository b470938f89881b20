"""How a delivery gets its permit: it waits without a slot for as long as it may, and is parked beyond that."""

import asyncio
from dataclasses import dataclass
from math import inf

from millstream.app import AnyTask
from millstream.permits_client import DeniedPermit, Need, Permit, WaitFor
from millstream.policy import claim
from millstream.policy import waiting as policy
from millstream.policy.admit import instant
from millstream.policy.claim import Hold, Outcome
from millstream.policy.metering import limit_keys
from millstream.policy.start import model_of
from millstream.settings import Settings
from millstream.worker import outcomes
from millstream.worker.context import Bench
from millstream.worker.slots import Place
from millstream_schemas.envelope import UsageEstimate
from millstream_schemas.events import WorkItem
from millstream_schemas.permits import MAX_CALLS, MAX_KEYS

SLOT_GRACE_S = 0.05
"""How long a delivery keeps its slot while it asks: most grants come sooner, and it need not find a slot again."""
IN_HAND_S = 0.5
"""How long it keeps a slot that it had to stand in line for, while it asks again for the permit that it gave back."""


@dataclass(frozen=True, slots=True)
class HandBack:
    """The worker stops: the delivery is to be handed back as it came."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a delivery asks of the governor."""

    keys: tuple[str, ...]
    need: Need
    task: str
    retry: bool


Answer = Permit | Outcome | HandBack | None
"""None where the task has no limits and needs no permit; an outcome to commit where no permit will come."""


def keys_of(item: WorkItem, task: AnyTask, settings: Settings) -> tuple[str, ...]:
    """The limit keys of a task: those that the dispatcher found, its own, its handler's, and what is configured."""
    card, templates = item.card, list(task.limits)
    for kind in settings.metered(card.queue, card.task_type, card.tenant_id):
        templates += kind.limits
    if not templates and not item.limits and not item.envelope.limits:
        return ()
    return tuple(sorted({*item.limits, *limit_keys(item.envelope, templates)}))


def need_of(item: WorkItem) -> Need:
    """What to reserve for one attempt: its producer's estimate."""
    estimate = item.envelope.usage_estimate or UsageEstimate()
    return Need(
        requests=min(max(estimate.requests or 1, 1), MAX_CALLS),
        tokens_in=estimate.tokens_in or 0,
        tokens_out=estimate.tokens_out or 0,
        cost_usd=estimate.cost_usd or 0.0,
        model=model_of(item),
    )


@dataclass(frozen=True)
class Waits:
    """Gets deliveries their permits. Holds no state."""

    bench: Bench

    async def permit(self, hold: Hold, task: AnyTask, place: Place) -> Answer:
        """Get a delivery its permit, with a slot to use it in; or say what becomes of the delivery instead."""
        keys = keys_of(hold.item, task, self.bench.configured())
        if not keys:
            return None
        if len(keys) > MAX_KEYS:
            return claim.failed(hold, hold.item.card.crashes, policy.too_many_keys(len(keys), MAX_KEYS).failure)
        asked = self._asked(hold, keys)
        with place.wait() as until_stopped:
            try:
                async with until_stopped:
                    return await self._wait(hold, asked, place)
            except TimeoutError:
                if not until_stopped.expired():
                    raise
                return HandBack()

    async def afresh(self, hold: Hold, permit: Permit) -> Permit | None:
        """Give back a permit that must not be used any more, and ask for another; None where none comes at once."""
        self.bench.permits.give_back(permit)
        asked = self._asked(hold, permit.keys)
        answer = await self.bench.permits.acquire(asked.keys, asked.need, IN_HAND_S, asked.task, asked.retry)
        return answer if isinstance(answer, Permit) else None

    async def _wait(self, hold: Hold, asked: Asked, place: Place) -> Permit | Outcome:
        """Ask until there are both a permit and a slot, or until the delivery has waited for as long as it may.

        A permit that comes while every slot is taken goes back; the delivery stands in line for a slot, and asks again
        with that in hand.
        """
        permits, clock = self.bench.permits, self.bench.clock
        began, grace_s, least_s = clock.monotonic(), SLOT_GRACE_S, 0.0
        while True:
            asked_at = clock.monotonic()
            waited = self._waited(hold, place, asked_at - began)
            if waited.left_s <= 0:
                return outcomes.expired(hold)
            hold_s = max(least_s, policy.hold_s(waited))
            with place.yielding(grace_s):
                answer = await permits.acquire(asked.keys, asked.need, hold_s, asked.task, asked.retry)
            now = clock.monotonic()
            waited = self._waited(hold, place, now - began)
            if not isinstance(answer, Permit):
                step = self._turned_away(hold, answer, waited, now - asked_at)
                if not isinstance(step, policy.Again):
                    return step
                place.leave_slot()
                await asyncio.sleep(step.pause_s)
                grace_s, least_s = SLOT_GRACE_S, 0.0
            elif await self._has_slot(place, answer):
                return answer
            elif await place.next_slot(max(policy.HOLD_S, waited.patience_s)):
                grace_s, least_s = IN_HAND_S, IN_HAND_S
            else:
                return outcomes.parked(hold, 0.0, "every slot of the worker was taken", clock.now())

    async def _has_slot(self, place: Place, permit: Permit) -> bool:
        """Whether a slot is free, or soon is, to use a permit in; else the permit goes back before it runs out unused."""
        took = False
        try:
            took = await place.next_slot(SLOT_GRACE_S)
        finally:
            if not took:
                self.bench.permits.give_back(permit)
        return took

    def _turned_away(
        self, hold: Hold, answer: WaitFor | DeniedPermit, waited: policy.Waited, held_s: float
    ) -> policy.Again | Outcome:
        """What to do after an answer that is no permit: ask again, or commit an outcome that parks or fails the task."""
        step: policy.Again | policy.Park | policy.Fail
        if isinstance(answer, WaitFor):
            step = policy.after_wait(waited, answer.seconds, answer.limiting_key, answer.reason, held_s)
        else:
            step = policy.after_denial(answer.reason, answer.key, answer.detail)
        match step:
            case policy.Again():
                return step
            case policy.Park(after_s, detail):
                self.bench.telemetry.emit("task.parked", key=hold.item.card.key, answer=repr(answer))
                return outcomes.parked(hold, after_s, detail, self.bench.clock.now())
            case policy.Fail(failure):
                return claim.failed(hold, hold.item.card.crashes, failure)

    def _asked(self, hold: Hold, keys: tuple[str, ...]) -> Asked:
        card = hold.item.card
        return Asked(keys, need_of(hold.item), card.key, card.attempt > 1)

    def _waited(self, hold: Hold, place: Place, waited_s: float) -> policy.Waited:
        deadline = instant(hold.item.envelope.deadline_at, "$.deadline_at")
        left_s = inf if deadline is None else deadline - self.bench.clock.now()
        return policy.Waited(waited_s, self.bench.settings.lease_s, left_s, place.crowded)
