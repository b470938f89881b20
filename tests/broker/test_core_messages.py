"""Messages that nobody stores: tell and listen, request and serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from millstream.errors import NoAnswer
from tests.broker.setups import Setup


async def test_whoever_listens_hears(setup: Setup) -> None:
    """On every connection, by wildcard too, until the subscription is closed."""
    bell = setup.names.bell("q")
    other = await setup.connect()
    heard: list[tuple[str, str, bytes]] = []
    exact = await other.listen(bell, lambda subject, body: heard.append(("exact", subject, body)))
    wild = await setup.broker.listen(
        bell.removesuffix("q") + "*", lambda subject, body: heard.append(("wild", subject, body))
    )
    await other.flush()
    setup.broker.tell(bell, b"1")
    setup.broker.tell(setup.names.bell("r"))

    async def all_heard() -> bool:
        return len(heard) == 3

    await setup.until(all_heard, "three calls")
    assert sorted(heard) == [("exact", bell, b"1"), ("wild", bell, b"1"), ("wild", setup.names.bell("r"), b"")]
    await exact.close()
    await exact.close()
    setup.broker.tell(bell, b"2")

    async def heard_again() -> bool:
        return len(heard) == 4

    await setup.until(heard_again, "the fourth call")
    assert heard[-1] == ("wild", bell, b"2")
    await wild.close()


async def test_a_request_gets_its_answer(setup: Setup) -> None:
    """Many at once, each its own."""
    subject = setup.names.governor("acquire")
    other = await setup.connect()

    async def answer(body: bytes) -> bytes | None:
        return body + b"!"

    serving = await other.serve(subject, answer)
    await other.flush()
    answers = await asyncio.gather(*(setup.broker.request(subject, b"%d" % i, 5.0) for i in range(50)))
    assert answers == [b"%d!" % i for i in range(50)]
    await serving.close()


async def test_a_request_may_be_answered_without_waiting(setup: Setup) -> None:
    """At once, later or not at all, as the request is; a fault in one concerns no other."""
    subject = setup.names.governor("acquire")
    other = await setup.connect()

    async def later() -> bytes:
        await asyncio.sleep(0.05)
        return b"later"

    def answer(body: bytes) -> Awaitable[bytes | None] | bytes | None:
        if body == b"fault":
            raise ValueError("a fault of the server of requests")
        return later() if body == b"later" else b"now" if body == b"now" else None

    serving = await other.serve(subject, answer)
    await other.flush()

    async def silent(body: bytes) -> None:
        with pytest.raises(NoAnswer):
            await setup.broker.request(subject, body, 0.3)

    bodies = (b"now", b"later") * 10
    answers, *_ = await asyncio.gather(
        asyncio.gather(*(setup.broker.request(subject, body, 5.0) for body in bodies)),
        silent(b"never"),
        silent(b"fault"),
    )
    assert answers == list(bodies)
    await serving.close()
    with pytest.raises(NoAnswer):
        await setup.broker.request(subject, b"now", 0.3)


async def test_nobody_there_is_said_at_once(setup: Setup) -> None:
    """Without waiting for the whole time limit."""
    start = time.monotonic()
    with pytest.raises(NoAnswer):
        await setup.broker.request(setup.names.governor("acquire"), b"", 10.0)
    assert time.monotonic() - start < 5.0


async def test_a_silent_server_is_no_answer_after_the_time_limit(setup: Setup) -> None:
    """None means silence."""
    subject = setup.names.governor("acquire")

    async def silent(body: bytes) -> bytes | None:
        return None

    await setup.broker.serve(subject, silent)
    await setup.broker.flush()
    start = time.monotonic()
    with pytest.raises(NoAnswer):
        await setup.broker.request(subject, b"", 0.2)
    assert time.monotonic() - start >= 0.19


async def test_a_slow_answer_holds_up_no_other(setup: Setup) -> None:
    """Answers run beside each other."""
    subject = setup.names.governor("acquire")
    gate = asyncio.Event()

    async def answer(body: bytes) -> bytes | None:
        if body == b"slow":
            await gate.wait()
        return body

    await setup.broker.serve(subject, answer)
    await setup.broker.flush()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(setup.broker.request(subject, b"slow", 9.0))
        assert await setup.broker.request(subject, b"fast", 5.0) == b"fast"
        assert not slow.done()
        gate.set()
    assert slow.result() == b"slow"


async def test_every_server_gets_every_request_and_the_first_answer_counts(setup: Setup) -> None:
    """A standby may stay silent while the leader answers."""
    subject = setup.names.governor("acquire")
    other = await setup.connect()
    asked: list[str] = []

    async def standby(body: bytes) -> bytes | None:
        asked.append("standby")
        return None

    async def leader(body: bytes) -> bytes | None:
        asked.append("leader")
        return b"granted"

    await setup.broker.serve(subject, standby)
    await other.serve(subject, leader)
    await setup.broker.flush()
    await other.flush()
    assert await setup.broker.request(subject, b"", 5.0) == b"granted"

    async def both() -> bool:
        return sorted(asked) == ["leader", "standby"]

    await setup.until(both, "both to be asked")


async def test_a_closed_service_is_nobody(setup: Setup) -> None:
    """After the close, requests find no one."""
    subject = setup.names.governor("acquire")

    async def answer(body: bytes) -> bytes | None:
        return b""

    serving = await setup.broker.serve(subject, answer)
    await setup.broker.flush()
    assert await setup.broker.request(subject, b"", 5.0) == b""
    await serving.close()
    await setup.broker.flush()
    with pytest.raises(NoAnswer):
        await setup.broker.request(subject, b"", 2.0)


async def test_a_group_shares_the_requests(setup: Setup) -> None:
    """One member gets each; who is in no group gets all of them beside it."""
    subject = setup.names.governor("acquire")
    other = await setup.connect()
    asked: list[tuple[str, bytes]] = []

    def member(name: str, reply: bytes | None) -> Callable[[bytes], Awaitable[bytes | None]]:
        async def answer(body: bytes) -> bytes | None:
            asked.append((name, body))
            return reply

        return answer

    await setup.broker.serve(subject, member("one", b"1"), "pair")
    await other.serve(subject, member("two", b"2"), "pair")
    await other.serve(subject, member("alone", None))
    await setup.broker.flush()
    await other.flush()
    requests = [b"%d" % i for i in range(40)]
    answers = [await setup.broker.request(subject, body, 5.0) for body in requests]
    assert set(answers) == {b"1", b"2"}

    async def all_asked() -> bool:
        return len(asked) == 80

    await setup.until(all_asked, "each request to reach the lone server and one of the pair")
    assert sorted(body for name, body in asked if name != "alone") == sorted(requests)
    assert sorted(body for name, body in asked if name == "alone") == sorted(requests)
