"""Processes that measure one thing: a bare nats-py echo, permits through our client, and bare permit requests.

`python -m bench.permits.probe KIND URL CONCURRENCY SECONDS [N]`; all but `serve` print one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable

import msgspec
import nats
from nats.aio.msg import Msg

from bench.loop import run
from millstream.connecting import open_broker
from millstream.permits_client import Need, Permit, PermitClient, Settlement
from millstream.settings import build
from millstream_schemas.permits import TOLD, Acquire, Granted, PermitReply, Return
from tests.support.windows import percentile

ECHO = "bench.echo"
KEY = "open"
WARM_S = 0.5

Once = Callable[[], Awaitable[tuple[int, float]]]
"""Do it once: how much was got, and after how many seconds."""


async def measured(once: Once, concurrency: int, seconds: float) -> None:
    """Do it again and again, so many at once, and print the rate and the times it took."""
    took: list[float] = []
    got = 0
    began = time.perf_counter() + WARM_S
    ends = began + seconds

    async def loop() -> None:
        nonlocal got
        while time.perf_counter() < ends:
            amount, after_s = await once()
            if time.perf_counter() > began:
                got += amount
                took.append(after_s * 1000)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(loop())
    figures = {"rate": got / seconds, "p50_ms": percentile(took, 0.5), "p99_ms": percentile(took, 0.99)}
    print(json.dumps(figures), flush=True)


async def serve(url: str) -> None:
    """Answer every request with its own body, until ended."""
    client = await nats.connect(url)

    async def answer(message: Msg) -> None:
        await message.respond(message.data)

    await client.subscribe(ECHO, cb=answer)
    await client.flush()
    print("ready", flush=True)
    await asyncio.sleep(600)


async def echo(url: str, concurrency: int, seconds: float) -> None:
    """Requests to the echo, of the size of a permit request."""
    client = await nats.connect(url)
    body = msgspec.json.encode(Acquire(id="0" * 32, worker="bench", keys=(KEY,), wait_ms=2000))

    async def once() -> tuple[int, float]:
        began = time.perf_counter()
        await client.request(ECHO, body, timeout=10)
        return 1, time.perf_counter() - began

    await measured(once, concurrency, seconds)
    await client.close()


async def permits(url: str, concurrency: int, seconds: float) -> None:
    """Acquire and settle through our client, as a worker does; the time is that of the acquire."""
    settings = build({"nats": {"url": url}})
    broker = await open_broker(settings, "bench")
    client = PermitClient(broker, settings.names, "bench")
    stop = asyncio.Event()
    need, settlement = Need(), Settlement(outcome="ok")

    async def once() -> tuple[int, float]:
        began = time.perf_counter()
        permit = await client.acquire((KEY,), need, 2.0)
        after_s = time.perf_counter() - began
        if not isinstance(permit, Permit):
            raise SystemExit(f"bench: expected a permit, got {permit}")
        client.settle(permit, settlement)
        return 1, after_s

    async with asyncio.TaskGroup() as group:
        group.create_task(client.run(stop))
        await measured(once, concurrency, seconds)
        stop.set()
    await broker.close()


async def bare(url: str, concurrency: int, seconds: float, n: int) -> None:
    """Acquires of `n` permits each, without our client; all of them are returned at once."""
    settings = build({"nats": {"url": url}})
    broker = await open_broker(settings, "bench")
    names = settings.names
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(PermitReply).decode
    number, own = 0, uuid.uuid4().hex

    async def once() -> tuple[int, float]:
        nonlocal number
        number += 1
        body = encode(Acquire(id=f"{own}-{number}", worker="bench", keys=(KEY,), n=n, wait_ms=2000))
        began = time.perf_counter()
        reply = decode(await broker.request(names.governor("acquire"), body, 10.0))
        after_s = time.perf_counter() - began
        if not isinstance(reply, Granted):
            raise SystemExit(f"bench: expected a grant, got {reply}")
        broker.tell(names.governor(TOLD), encode(Return(permits=tuple(lease.permit for lease in reply.leases))))
        return len(reply.leases), after_s

    await measured(once, concurrency, seconds)
    await broker.close()


if __name__ == "__main__":
    kind, address = sys.argv[1], sys.argv[2]
    if kind == "serve":
        run(serve(address))
    else:
        at_once, how_long = int(sys.argv[3]), float(sys.argv[4])
        match kind:
            case "echo":
                run(echo(address, at_once, how_long))
            case "permits":
                run(permits(address, at_once, how_long))
            case _:
                run(bare(address, at_once, how_long, int(sys.argv[5])))
