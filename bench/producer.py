"""Submits no-op tasks as a producer of any language would: JSON to a subject, 256 in flight, through our client's publisher."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from bench.loop import run
from millstream.connecting import open_broker
from millstream.ports import Outgoing, Stored
from millstream.settings import from_environment

IN_FLIGHT = 256
BODY_BYTES = 600


def envelope(task_id: str) -> bytes:
    """A task of 600 bytes."""
    empty = {"task_id": task_id, "task_type": "noop", "payload": ""}
    filler = "x" * (BODY_BYTES - len(json.dumps(empty)))
    return json.dumps({**empty, "payload": filler}).encode()


async def flood(prefix: str, count: int) -> None:
    """Submit `count` tasks as fast as they are acknowledged, and print when it began and ended."""
    settings = from_environment()
    broker = await open_broker(settings, "bench")
    subject = settings.names.submit("bench", "bench")
    bodies = [envelope(f"{prefix}-{number}") for number in range(count)]
    began = time.time()
    for start in range(0, count, IN_FLIGHT):
        answers = await broker.publish_all(
            [Outgoing(subject=subject, body=body) for body in bodies[start : start + IN_FLIGHT]]
        )
        assert all(isinstance(answer, Stored) for answer in answers)
    print(json.dumps({"began": began, "ended": time.time()}), flush=True)
    await broker.close()


async def drip(prefix: str, count: int, per_second: float) -> None:
    """Submit at a steady rate, and print the time at which each submit was begun."""
    settings = from_environment()
    broker = await open_broker(settings, "bench")
    subject = settings.names.submit("bench", "bench")
    sent: dict[str, float] = {}
    loop = asyncio.get_running_loop()
    first = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(first + number / per_second - loop.time())
            task_id = f"{prefix}-{number}"
            sent[task_id] = time.time()
            group.create_task(broker.publish(Outgoing(subject=subject, body=envelope(task_id))))
    print(json.dumps(sent), flush=True)
    await broker.close()


if __name__ == "__main__":
    mode, prefix, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    run(flood(prefix, count) if mode == "flood" else drip(prefix, count, float(sys.argv[4])))
