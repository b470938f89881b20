"""The yardstick: a bare loop in nats-py, one process that publishes and one that fetches and acks."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import nats
from nats.errors import TimeoutError as NothingYet
from nats.js import api

from bench.loop import run

STREAM, SUBJECT, DURABLE = "BARE", "bare.task", "bare"
IN_FLIGHT = 256
BATCH = 100


async def produce(url: str, count: int, body: bytes) -> None:
    """Publish `count` messages, 256 in flight, and print when it began and ended."""
    client = await nats.connect(url)
    stream = client.jetstream()
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one() -> None:
        try:
            await stream.publish(SUBJECT, body)
        finally:
            slots.release()

    began = time.time()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            await slots.acquire()
            group.create_task(one())
    print(json.dumps({"began": began, "ended": time.time()}), flush=True)
    await client.close()


async def consume(url: str, count: int) -> None:
    """Fetch in batches of 100 and ack each message; print when the last one was acked."""
    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(
        api.StreamConfig(
            name=STREAM, subjects=[SUBJECT], retention=api.RetentionPolicy.WORK_QUEUE, storage=api.StorageType.FILE
        )
    )
    subscription = await stream.pull_subscribe(SUBJECT, durable=DURABLE, stream=STREAM)
    print("ready", flush=True)
    done = 0
    while done < count:
        try:
            messages = await subscription.fetch(BATCH, timeout=1)
        except NothingYet:
            continue
        for message in messages:
            await message.ack()
        done += len(messages)
    await client.flush()
    print(json.dumps({"ended": time.time()}), flush=True)
    await stream.delete_stream(STREAM)
    await client.close()


if __name__ == "__main__":
    role, url, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    run(produce(url, count, b"x" * 600) if role == "produce" else consume(url, count))
