"""The worker's side of the governor, against a governor whose every answer the test decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import msgspec
import pytest

from millstream import permit_link, permits_client
from millstream.clock import SystemClock
from millstream.memory import MemoryServer
from millstream.permits_client import DeniedPermit, Need, Permit, PermitClient, Settlement, WaitFor
from millstream.ports import Broker
from millstream.settings import Settings, build
from millstream_schemas.names import Names
from millstream_schemas.permits import (
    MAX_AMOUNT,
    TOLD,
    VERBS,
    Acquire,
    Cancel,
    Denied,
    Granted,
    HeldPermit,
    Lease,
    Observed,
    PermitReply,
    PermitRequest,
    Renew,
    Renewed,
    Report,
    Return,
    Said,
    Settle,
    Settled,
    Wait,
)
from tests.support.waiting import wait_until

NAMES = Names("t")
KEYS = ("llm",)
T = TypeVar("T")


def granted(request: Acquire, count: int | None = None, *, start_ms: int = 0, epoch: int = 1) -> Granted:
    """Leases for an acquire, named after it."""
    leases = tuple(Lease(f"{request.id}/{at}", start_ms) for at in range(request.n if count is None else count))
    return Granted(leases=leases, use_by_ms=300, lease_ms=30_000, epoch=epoch)


@dataclass
class Governor:
    """Answers as it is told, and keeps what it was asked."""

    broker: Broker
    on_acquire: Callable[[Acquire], PermitReply | None] = granted
    on_other: Callable[[PermitRequest], PermitReply | None] = lambda request: (
        Renewed(lost=(), epoch=1) if isinstance(request, Renew) else Settled(ended=1, epoch=1)
    )
    received: list[PermitRequest] = field(default_factory=list[PermitRequest])
    raw: list[bytes] = field(default_factory=list[bytes])
    """Given as they are, one for each request, before anything else is answered."""
    told: list[PermitRequest] = field(default_factory=list[PermitRequest])
    held: dict[str, asyncio.Future[PermitReply]] = field(default_factory=dict[str, "asyncio.Future[PermitReply]"])

    async def open(self) -> None:
        """Answer from here on."""
        for verb in VERBS:
            await self.broker.serve(NAMES.governor(verb), self._answer)
        await self.broker.listen(
            NAMES.governor(TOLD), lambda _, body: self.told.append(msgspec.json.decode(body, type=PermitRequest))
        )

    async def _answer(self, body: bytes) -> bytes | None:
        request = msgspec.json.decode(body, type=PermitRequest)
        self.received.append(request)
        if self.raw:
            return self.raw.pop(0)
        reply = self.on_acquire(request) if isinstance(request, Acquire) else self.on_other(request)
        if reply is None and isinstance(request, Acquire) and request.id in self.held:
            reply = await self.held[request.id]
        return None if reply is None else msgspec.json.encode(reply)

    def hold(self, request: Acquire) -> None:
        """Keep a request until the test answers it by `held`."""
        self.held[request.id] = asyncio.get_running_loop().create_future()

    def of(self, kind: type[T]) -> list[T]:
        """What came of one kind, asked and told."""
        return [each for each in (*self.received, *self.told) if isinstance(each, kind)]

    def say(self, said: Said) -> None:
        """Tell everybody."""
        self.broker.tell(NAMES.governor_said, msgspec.json.encode(said))


@dataclass
class Site:
    """A governor, a client of it that runs, and the group that it runs in."""

    governor: Governor
    client: PermitClient
    group: asyncio.TaskGroup
    stop: asyncio.Event
    running: asyncio.Task[None]

    async def permit(self, need: Need | None = None, wait_s: float = 2.0) -> Permit:
        """One permit that must be granted."""
        answer = await self.client.acquire(KEYS, need or Need(), wait_s)
        assert isinstance(answer, Permit), answer
        return answer

    def many(self, count: int, wait_s: float = 2.0) -> list[asyncio.Task[Permit | WaitFor | DeniedPermit]]:
        """Acquires that begin in one turn of the loop."""
        return [self.group.create_task(self.client.acquire(KEYS, Need(), wait_s)) for _ in range(count)]


def _settings() -> Settings:
    return build({"limits": {"llm": {"requests": "600/min"}}})


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """Everything on one broker in memory."""
    server = MemoryServer(SystemClock())
    governor = Governor(server.connect())
    await governor.open()
    client = PermitClient(server.connect(), NAMES, "w-1", settings=_settings)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(client.run(stop))
        await wait_until(lambda: client.ready, "the client to run")
        yield Site(governor, client, group, stop, running)
        running.cancel()
    await governor.broker.close()


# --- asking together ----------------------------------------------------------------------------


async def test_a_lone_acquire_is_sent_at_once_and_alone(site: Site) -> None:
    """With all that the governor must know."""
    need = Need(2, 10, 20, 0.5, "m-1")
    answer = await site.client.acquire(("llm", "tool", "llm"), need, 1.0, "task", retry=True)
    assert isinstance(answer, Permit)
    assert (answer.keys, answer.need, answer.epoch) == (("llm", "tool"), need, 1)
    [asked] = site.governor.of(Acquire)
    assert 900 <= asked.wait_ms <= 1000
    expected = Acquire(
        id=asked.id,
        worker="w-1",
        keys=("llm", "tool"),
        requests=2,
        tokens_in=10,
        tokens_out=20,
        cost_usd=0.5,
        model="m-1",
        wait_ms=asked.wait_ms,
        task="task",
        retry=True,
        epoch=1,
    )
    assert asked == expected


async def test_acquires_of_one_kind_are_asked_for_as_one(site: Site) -> None:
    """Those that begin in one turn of the loop; each gets a lease of its own."""
    permits = await asyncio.gather(*site.many(16))
    assert len({permit.id for permit in permits if isinstance(permit, Permit)}) == 16
    assert [asked.n for asked in site.governor.of(Acquire)] == [16]


async def test_acquires_of_different_kinds_are_not_mixed(site: Site) -> None:
    """Other keys, other needs, a repeated attempt, another patience: each has a request of its own."""
    client = site.client
    answers = await asyncio.gather(
        client.acquire(("a",), Need(), 1.0),
        client.acquire(("b",), Need(), 1.0),
        client.acquire(("a",), Need(tokens_in=1), 1.0),
        client.acquire(("a",), Need(), 1.0, retry=True),
        client.acquire(("a",), Need(), 0.5),
        client.acquire(("a",), Need(), 1.0),
    )
    assert all(isinstance(answer, Permit) for answer in answers)
    assert sorted(asked.n for asked in site.governor.of(Acquire)) == [1, 1, 1, 1, 2]


async def test_a_flood_is_cut_into_requests_of_the_largest_size(site: Site) -> None:
    """64 permits a request; nobody is forgotten."""
    permits = await asyncio.gather(*site.many(150))
    assert all(isinstance(permit, Permit) for permit in permits)
    assert [asked.n for asked in site.governor.of(Acquire)] == [64, 64, 22]


async def test_those_who_come_while_one_is_held_are_asked_for_together_beside_it(site: Site) -> None:
    """They do not wait for its answer, only a moment for each other."""
    site.governor.on_acquire = site.governor.hold
    first = site.many(1)
    await wait_until(lambda: site.governor.held, "the first to be held")
    later = site.many(3)
    await wait_until(lambda: len(site.governor.held) == 2, "the others to be held")
    assert [asked.n for asked in site.governor.of(Acquire)] == [1, 3]
    for asked in site.governor.of(Acquire):
        site.governor.held[asked.id].set_result(granted(asked))
    assert all(isinstance(answer, Permit) for answer in await asyncio.gather(*first, *later))


async def test_what_a_partial_grant_left_out_is_asked_for_again(site: Site) -> None:
    """First come, first served; until all have a permit."""
    order: list[int] = []
    site.governor.on_acquire = lambda request: granted(request, min(2, request.n))

    async def one(number: int) -> None:
        assert isinstance(await site.client.acquire(KEYS, Need(), 5.0), Permit)
        order.append(number)

    await asyncio.gather(*(one(number) for number in range(7)))
    assert [asked.n for asked in site.governor.of(Acquire)] == [7, 5, 3, 1]
    assert order == list(range(7))
    assert len({asked.id for asked in site.governor.of(Acquire)}) == 4


async def test_everybody_hears_that_they_must_wait_or_are_denied(site: Site) -> None:
    """With the reason, the key and the time."""
    site.governor.on_acquire = lambda _: Wait(retry_after_ms=1500, limiting_key="llm", reason="tokens", epoch=1)
    assert await asyncio.gather(*site.many(3)) == [WaitFor(1.5, "llm", "tokens")] * 3
    site.governor.on_acquire = lambda _: Denied(reason="budget_exhausted", key="llm", epoch=1, until_s=60.0, detail="d")
    assert await asyncio.gather(*site.many(3)) == [DeniedPermit("budget_exhausted", "llm", 60.0, "d")] * 3


# --- what is not used -----------------------------------------------------------------------------


async def test_a_lease_that_nobody_waits_for_any_more_is_returned(site: Site) -> None:
    """One of three gave up while the request was held: two leases are used, the third goes back."""
    site.governor.on_acquire = site.governor.hold
    tasks = site.many(3)
    await wait_until(lambda: site.governor.held, "the request to be held")
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert site.governor.of(Cancel) == []
    [asked] = site.governor.of(Acquire)
    site.governor.held[asked.id].set_result(granted(asked))
    await asyncio.gather(tasks[0], tasks[2])
    await wait_until(lambda: site.governor.of(Return), "the third lease to be returned")
    assert site.governor.of(Return) == [Return(permits=(f"{asked.id}/2",))]


async def test_a_request_that_all_have_given_up_is_cancelled(site: Site) -> None:
    """So that it takes no place in the queue."""
    site.governor.on_acquire = site.governor.hold
    tasks = site.many(2)
    await wait_until(lambda: site.governor.held, "the request to be held")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    [asked] = site.governor.of(Acquire)
    await wait_until(lambda: site.governor.of(Cancel) == [Cancel(id=asked.id)], "the cancel")


async def test_one_who_gives_up_in_the_moment_of_asking_leaves_nothing_behind(site: Site) -> None:
    """After any number of turns of the loop; whoever asked with it has its permit all the same."""
    for turns in range(8):
        first, second = site.many(2)
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        permit = await second
        assert isinstance(permit, Permit)
        site.client.give_back(permit)
        await asyncio.wait([first])
        if not first.cancelled():
            answer = first.result()
            assert isinstance(answer, Permit)
            site.client.give_back(answer)
    await wait_until(lambda: not site.client.held, "nothing to be held")
    given = {lease.permit for asked in site.governor.of(Acquire) for lease in granted(asked).leases}
    site.stop.set()
    await site.running
    back = [permit for each in site.governor.of(Return) for permit in each.permits]
    assert len(back) == len(set(back))
    assert set(back) == given


async def test_one_who_gives_up_before_the_start_returns_the_permit(site: Site) -> None:
    """It was granted and would have begun later."""
    site.governor.on_acquire = lambda request: granted(request, start_ms=20_000)
    [task] = site.many(1)
    await wait_until(lambda: site.governor.of(Acquire), "the acquire")
    await wait_until(lambda: site.client.held, "the grant")
    task.cancel()
    await asyncio.wait([task])
    await wait_until(lambda: site.governor.of(Return), "the return")
    assert site.client.held == 0


async def test_a_permit_begins_at_its_time(site: Site) -> None:
    """Not earlier, and it may be used for as long as the governor said, from the request on."""
    site.governor.on_acquire = lambda request: granted(request, start_ms=200)
    began = time.monotonic()
    permit = await site.permit()
    assert time.monotonic() - began >= 0.2
    assert began + 0.5 <= permit.use_by <= time.monotonic() + 0.3


async def test_a_grant_that_comes_too_late_is_returned_and_asked_for_again(site: Site) -> None:
    """Its age counts from the moment the request was sent: the way there may have taken most of it."""
    site.governor.on_acquire = site.governor.hold
    [task] = site.many(1, wait_s=5.0)
    await wait_until(lambda: site.governor.held, "the request to be held")
    [asked] = site.governor.of(Acquire)
    site.governor.on_acquire = granted
    await asyncio.sleep(0.35)
    site.governor.held[asked.id].set_result(granted(asked))
    answer = await task
    assert isinstance(answer, Permit)
    assert answer.id != f"{asked.id}/0"
    await wait_until(lambda: site.governor.of(Return) == [Return(permits=(f"{asked.id}/0",))], "the return")


async def test_time_that_the_governor_held_a_request_does_not_make_its_grant_old(site: Site) -> None:
    """It says how long that was."""
    site.governor.on_acquire = site.governor.hold
    [task] = site.many(1)
    await wait_until(lambda: site.governor.held, "the request to be held")
    [asked] = site.governor.of(Acquire)
    await asyncio.sleep(0.35)
    site.governor.held[asked.id].set_result(msgspec.structs.replace(granted(asked), held_ms=350))
    answer = await task
    assert isinstance(answer, Permit)
    assert answer.id == f"{asked.id}/0"


async def test_a_permit_whose_gate_closes_before_its_start_is_returned_and_asked_for_again(site: Site) -> None:
    """What a provider refuses to one worker must not be asked of it by another."""
    site.governor.on_acquire = lambda request: granted(request, start_ms=300)
    [task] = site.many(1, wait_s=5.0)
    await wait_until(lambda: site.client.held == 1, "the grant")
    site.governor.on_acquire = granted
    site.governor.say(Said(epoch=1, keys=("llm", "tool"), closed=("llm",)))
    answer = await task
    assert isinstance(answer, Permit)
    first = site.governor.of(Acquire)[0]
    assert site.governor.of(Return) == [Return(permits=(f"{first.id}/0",))]
    assert answer.id != f"{first.id}/0"


async def test_a_call_must_not_begin_once_its_gate_has_closed(site: Site) -> None:
    """Between the grant and the call lies the claim; other keys do not matter, nor that the gate opens again."""
    permit = await site.permit()
    site.governor.say(Said(epoch=1, keys=("tool",), closed=("tool",)))
    site.governor.say(Said(epoch=1, keys=("llm",)))
    other = await site.permit()
    assert (site.client.may_begin(permit), site.client.may_begin(other)) == (True, True)
    site.governor.say(Said(epoch=1, keys=("llm",), closed=("llm",)))
    await wait_until(lambda: not site.client.may_begin(permit), "the word to arrive")
    assert not site.client.may_begin(other)
    later = await site.permit()
    assert site.client.may_begin(later)


# --- ending -----------------------------------------------------------------------------------------


async def test_a_permit_ends_once(site: Site) -> None:
    """Whatever else is said of it: the first word counts."""
    permit, other = await site.permit(), await site.permit()
    site.client.settle(permit, Settlement("ok", tokens_in=5, cost_usd=0.25, retry_after_s=1.5, keys=("llm",)))
    site.client.settle(permit, Settlement("error"))
    site.client.give_back(permit)
    site.client.give_back(other)
    site.client.settle(other, Settlement("ok"))
    await wait_until(lambda: bool(site.governor.of(Return)) and bool(site.governor.of(Settle)), "both ends")
    site.stop.set()
    await site.running
    expected = Settle(permit=permit.id, outcome="ok", tokens_in=5, cost_usd=0.25, retry_after_s=1.5, keys=("llm",))
    assert site.governor.of(Settle) == [expected]
    assert site.governor.of(Return) == [Return(permits=(other.id,))]


async def test_a_settlement_is_sent_until_it_is_answered(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same words again; later ones do not wait for it."""
    monkeypatch.setattr(permits_client, "SETTLE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(permits_client, "RETRY_EVERY_S", 0.02)
    silent, heard = await site.permit(), await site.permit()
    answering = site.governor.on_other
    deaf = 3

    def on_other(request: PermitRequest) -> PermitReply | None:
        nonlocal deaf
        if isinstance(request, Settle) and request.permit == silent.id and deaf:
            deaf -= 1
            return None
        return answering(request)

    site.governor.on_other = on_other
    site.client.settle(silent, Settlement("ok", tokens_in=5))
    site.client.settle(heard, Settlement("ok"))
    site.stop.set()
    await site.running
    settled = site.governor.of(Settle)
    assert [each for each in settled if each.permit == silent.id] == [
        Settle(permit=silent.id, outcome="ok", tokens_in=5, keys=KEYS)
    ] * 4
    assert settled.index(Settle(permit=heard.id, outcome="ok", keys=KEYS)) <= 2


async def test_a_settlement_says_all_that_a_governor_needs_who_does_not_know_the_permit(site: Site) -> None:
    """Its keys, and the estimate where nothing else tells what it cost."""
    need = Need(tokens_in=5, cost_usd=0.5)
    plain, told, priced = [await site.permit(need), await site.permit(need), await site.permit(need)]
    site.client.settle(plain, Settlement("unknown"))
    site.client.settle(told, Settlement("ok", cost_usd=0.75, keys=("other",)))
    site.client.settle(priced, Settlement("ok", tokens_in=7, model="m-1"))
    await wait_until(lambda: len(site.governor.of(Settle)) == 3, "all to be settled")
    assert site.governor.of(Settle) == [
        Settle(permit=plain.id, outcome="unknown", cost_usd=0.5, keys=KEYS),
        Settle(permit=told.id, outcome="ok", cost_usd=0.75, keys=("other",)),
        Settle(permit=priced.id, outcome="ok", tokens_in=7, model="m-1", keys=KEYS),
    ]


async def test_amounts_beyond_the_contract_are_cut_to_it(site: Site) -> None:
    """A request that states more would be refused as a whole, and its place stay taken."""
    permit = await site.permit(Need(0, -5, 10**12, float("nan"), "m" * 500))
    [asked] = site.governor.of(Acquire)
    assert (asked.requests, asked.tokens_in, asked.tokens_out, asked.cost_usd) == (1, 0, MAX_AMOUNT, 0.0)
    assert len(asked.model) == 128
    observed = [Observed(dimension="requests", remaining=n) for n in range(20)]
    settlement = Settlement("throttled", -1, 10**12, -3, float("inf"), "m" * 500, float("nan"), observed)
    site.client.settle(permit, settlement)
    await wait_until(lambda: site.governor.of(Settle), "the settle")
    [settled] = site.governor.of(Settle)
    assert (settled.requests, settled.tokens_in, settled.tokens_out) == (0, MAX_AMOUNT, 0)
    assert (settled.cost_usd, settled.retry_after_s, len(settled.observed)) == (1e9, 0.0, 8)


async def test_an_answer_of_the_provider_is_told_at_once(site: Site) -> None:
    """Without waiting for an answer, and without ending anything."""
    permit = await site.permit()
    observed = (Observed(dimension="tokens", remaining=0, reset_s=5.0),)
    site.client.report(["llm"], "throttled", 10.0**9, observed, 0.25)
    await wait_until(lambda: site.governor.told, "the report")
    assert site.governor.told == [
        Report(keys=KEYS, outcome="throttled", retry_after_s=86_400.0, observed=observed, started_ms_ago=250)
    ]
    assert site.client.held == 1
    site.client.give_back(permit)


async def test_a_client_that_stops_waits_for_what_is_held(site: Site) -> None:
    """It renews and settles to the end; one that is cut short tells the rest."""
    permit = await site.permit()
    site.stop.set()
    await asyncio.sleep(0.05)
    assert not site.running.done()
    site.client.settle(permit, Settlement("ok"))
    await site.running
    assert isinstance(await site.client.acquire(KEYS, Need(), 0.1), WaitFor)


async def test_a_client_that_is_cut_short_tells_what_was_not_answered(site: Site) -> None:
    """A place that nobody gives back would stay taken for a whole lease."""
    permit = await site.permit()
    site.governor.on_other = lambda _: None
    site.client.settle(permit, Settlement("ok"))
    await wait_until(lambda: site.governor.of(Settle), "the settle to be sent")
    site.running.cancel()
    await asyncio.wait([site.running])
    await wait_until(lambda: site.governor.told, "the settle to be told")
    assert site.governor.told == [Settle(permit=permit.id, outcome="ok", keys=KEYS)]


# --- who leads ----------------------------------------------------------------------------------------


async def test_a_governor_that_begins_hears_at_once_what_is_held(site: Site) -> None:
    """With what it costs; also that nothing is held."""
    assert site.governor.of(Renew) == [Renew(worker="w-1", permits=())]  # to begin with: it knows of no governor
    site.governor.on_other = lambda request: Renewed(lost=(), epoch=2) if isinstance(request, Renew) else None
    site.governor.say(Said(epoch=2, began=True))
    await wait_until(lambda: len(site.governor.of(Renew)) == 3, "two renewals without permits")
    # The reply to the first tells who leads; a governor passes over what was told to its predecessor.
    assert site.governor.of(Renew)[1:] == [Renew(worker="w-1", permits=(), epoch=epoch) for epoch in (1, 2)]
    site.governor.on_acquire = lambda request: granted(request, epoch=2)
    permit = await site.permit(Need(cost_usd=0.5))
    before = len(site.governor.of(Renew))
    site.governor.say(Said(epoch=2, began=True))
    await wait_until(lambda: len(site.governor.of(Renew)) > before, "a renewal with the permit")
    held = HeldPermit(permit=permit.id, keys=KEYS, cost_usd=0.5)
    assert site.governor.of(Renew)[-1] == Renew(worker="w-1", permits=(held,), epoch=2)


async def test_what_was_asked_of_a_predecessor_is_asked_of_the_governor_that_begins(site: Site) -> None:
    """At once, since no answer will come, and with the patience that is left; the old request is cancelled."""
    site.governor.on_acquire = site.governor.hold
    tasks = site.many(3, wait_s=10.0)
    await wait_until(lambda: site.governor.held, "the request to be held")
    site.governor.on_acquire = lambda request: granted(request, epoch=2)
    began = time.monotonic()
    site.governor.say(Said(epoch=2, began=True))
    answers = await asyncio.gather(*tasks)
    assert time.monotonic() - began < 5.0
    assert [answer.epoch for answer in answers if isinstance(answer, Permit)] == [2, 2, 2]
    first, second = site.governor.of(Acquire)
    assert (first.n, second.n) == (3, 3)
    assert second.wait_ms < first.wait_ms
    assert site.governor.of(Cancel) == [Cancel(id=first.id)]


async def test_a_governor_that_takes_nothing_asked_of_its_predecessor_is_asked_anew(site: Site) -> None:
    """At once: the asker hears nothing of it."""
    await site.permit()
    site.governor.on_acquire = lambda request: (
        granted(request, epoch=2)
        if request.epoch == 2
        else Wait(retry_after_ms=60_000, limiting_key="llm", reason="learning", epoch=2)
    )
    answers = await asyncio.gather(*site.many(3))
    assert [answer.epoch for answer in answers if isinstance(answer, Permit)] == [2, 2, 2]
    assert [(asked.n, asked.epoch) for asked in site.governor.of(Acquire)] == [(1, 1), (3, 1), (3, 2)]
    assert site.governor.of(Cancel) == []


async def test_a_new_epoch_is_noticed_by_any_reply(site: Site) -> None:
    """What the governor told everybody may be lost."""
    await site.permit()
    await wait_until(lambda: site.governor.of(Renew), "the first renewal")
    before = len(site.governor.of(Renew))
    site.governor.on_acquire = lambda request: granted(request, epoch=7)
    site.governor.on_other = lambda request: Renewed(lost=(), epoch=7) if isinstance(request, Renew) else None
    await site.permit()
    await wait_until(lambda: len(site.governor.of(Renew)) > before, "a renewal")
    assert len(site.governor.of(Renew)[-1].permits) == 2


async def test_replies_of_an_earlier_leader_do_not_count(site: Site) -> None:
    """They come from a process that was stopped while another took over; what it granted is returned."""
    site.governor.on_other = lambda request: Renewed(lost=(), epoch=5) if isinstance(request, Renew) else None
    site.governor.say(Said(epoch=5, began=True))
    await wait_until(lambda: Renew(worker="w-1", permits=(), epoch=5) in site.governor.of(Renew), "the renewal")
    site.governor.on_acquire = lambda request: granted(request, epoch=4)
    answer = await site.client.acquire(KEYS, Need(), 0.1)
    assert isinstance(answer, WaitFor)
    assert answer.reason == "governor_unreachable"
    await wait_until(lambda: site.governor.of(Return), "the return")
    assert site.client.held == 0
    site.governor.on_acquire = lambda request: granted(request, epoch=5)
    assert (await site.permit()).epoch == 5


@pytest.mark.parametrize("began", [False, True])
async def test_a_word_of_a_later_epoch_is_asked_about_and_not_believed(site: Site, began: bool) -> None:
    """Anybody could have said it; who leads, its replies tell."""
    await site.permit()
    before = len(site.governor.of(Renew))
    site.governor.say(Said(epoch=999_999_999, began=began))
    await wait_until(lambda: len(site.governor.of(Renew)) > before, "a renewal")
    assert (await site.permit()).epoch == 1


async def test_a_governor_that_was_set_up_anew_counts_from_one_again(site: Site) -> None:
    """Its first word and its reply to the renewal agree on a lower epoch; that is no late word of a predecessor."""
    site.governor.on_other = lambda request: Renewed(lost=(), epoch=5)
    site.governor.on_acquire = lambda request: granted(request, epoch=5)
    assert (await site.permit()).epoch == 5
    site.governor.on_other = lambda request: Renewed(lost=(), epoch=1)
    site.governor.on_acquire = granted
    site.governor.say(Said(epoch=1, began=True))
    assert (await site.permit()).epoch == 1


async def test_who_alone_answers_for_long_leads_though_its_epoch_is_lower(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its first word was lost; what it grants before that is returned."""
    monkeypatch.setattr(permit_link, "LOWER_FOR_S", 0.5)
    site.governor.on_acquire = lambda request: granted(request, epoch=5)
    assert (await site.permit()).epoch == 5
    site.governor.on_acquire = granted
    assert (await site.permit(wait_s=20.0)).epoch == 1
    assert site.governor.of(Return)


# --- what cannot be asked or read -------------------------------------------------------------------


async def test_a_request_that_cannot_be_written_is_denied_to_its_asker_alone(site: Site) -> None:
    """No other request, and no renewal, ends with it."""
    for keys, need in ((("t/\ud800",), Need()), (KEYS, Need(model="\ud800"))):
        answer = await site.client.acquire(keys, need, 1.0)
        assert isinstance(answer, DeniedPermit)
        assert answer.reason == "bad_request"
        answer.key.encode()
    permit = await site.permit()
    site.client.settle(permit, Settlement("ok", model="\ud800"))
    await site.permit()
    assert not site.running.done()


async def test_a_reply_that_cannot_be_read_is_no_reply(site: Site) -> None:
    """Nested beyond what a decoder follows, or no text at all; the same goes for what is told to everybody."""
    deep = b'{"v":2,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    bodies = [deep, b"\xff\xfe", b""]
    for body in bodies:
        site.governor.broker.tell(NAMES.governor_said, body)
    site.governor.raw = list(bodies)
    answer = await site.client.acquire(KEYS, Need(), 0.1)
    assert isinstance(answer, WaitFor)
    assert answer.reason == "governor_unreachable"
    await site.permit(wait_s=20.0)
    assert site.governor.raw == []
    assert not site.running.done()


async def test_a_lost_permit_is_settled_all_the_same(site: Site) -> None:
    """It is not renewed any more; what its call cost is still worth telling, once."""
    permit = await site.permit()
    site.governor.on_other = lambda request: (
        Renewed(lost=(permit.id,), epoch=2) if isinstance(request, Renew) else Settled(ended=0, epoch=2)
    )
    site.governor.say(Said(epoch=2, began=True))
    await wait_until(lambda: site.client.lost_total == 1, "the loss")
    assert site.client.held == 0
    site.client.settle(permit, Settlement("ok"))
    site.client.settle(permit, Settlement("ok"))
    site.stop.set()
    await site.running
    assert site.governor.of(Settle) == [Settle(permit=permit.id, outcome="ok", keys=KEYS)]


# --- without a governor -----------------------------------------------------------------------------


async def _alone(limits: dict[str, object], keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When permits were had within a second without any governor."""
    monkeypatch.setattr(permits_client, "SAFE_AFTER_S", 0.1)
    settings = build({"limits": limits})
    client = PermitClient(MemoryServer(SystemClock()).connect(), NAMES, "w", settings=lambda: settings)
    starts: list[float] = []
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(client.run(asyncio.Event()))
        while time.monotonic() - began < 1.5:
            answer = await client.acquire(keys, Need(), 0.6)
            if isinstance(answer, Permit):
                assert answer.local
                assert answer.use_by >= time.monotonic()
                starts.append(time.monotonic())
                client.settle(answer, Settlement("ok"))
            else:
                assert isinstance(answer, WaitFor)
                assert answer.reason == "governor_unreachable"
        running.cancel()
    return starts


SAFE = {"on_governor_down": "safe_rate", "requests": "600/min", "safe_rate": "10/s"}


async def test_without_a_governor_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed, not open; also where only one of the keys insists on it, or is not configured."""
    assert await _alone({"llm": {"requests": "600/min"}}, ("llm",), monkeypatch) == []
    assert await _alone({"llm": SAFE, "tool": {"concurrency": 1}}, ("llm", "tool"), monkeypatch) == []
    assert await _alone({"llm": SAFE}, ("llm", "other"), monkeypatch) == []


async def test_a_safe_rate_is_kept_by_each_worker_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly, the slowest key counts, and only once the governor has been silent for a while."""
    slow = SAFE | {"safe_rate": "5/s"}
    starts = await _alone({"llm": SAFE, "tenant/{tenant_id}": slow}, ("llm", "tenant/acme"), monkeypatch)
    assert 3 <= len(starts) <= 8
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert min(gaps) >= 0.15
