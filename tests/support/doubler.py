"""A process that sends requests to the governor again: some at once, some seconds late, with none of our code.

`python -m tests.support.doubler URL PREFIX SECONDS` prints `ready`, and at the end how many it sent again.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import TYPE_CHECKING

import nats

if TYPE_CHECKING:
    from nats.aio.msg import Msg

PART = 0.15
LATEST_S = 5.0
VERBS = ("acquire", "settle", "return", "renew", "cancel", "told")


async def _main(url: str, prefix: str, seconds: float) -> None:
    async def quiet(_: Exception) -> None:
        return

    client = await nats.connect(url, max_reconnect_attempts=-1, error_cb=quiet)
    chance = random.Random(1)
    ours: set[tuple[str, bytes]] = set()
    sent = 0
    async with asyncio.TaskGroup() as tasks:

        async def again(message: Msg, after_s: float) -> None:
            nonlocal sent
            await asyncio.sleep(after_s)
            ours.add((message.subject, message.data))
            sent += 1
            await client.publish(message.subject, message.data, reply=message.reply)

        async def heard(message: Msg) -> None:
            if (message.subject, message.data) in ours:
                ours.discard((message.subject, message.data))  # our own copy comes back once
                return
            draw = chance.random()
            if draw < 2 * PART:
                tasks.create_task(again(message, 0.0 if draw < PART else chance.uniform(0.3, LATEST_S)))

        heard_of = [await client.subscribe(f"{prefix}.governor.{verb}", cb=heard) for verb in VERBS]
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.sleep(seconds)
        for subscription in heard_of:
            await subscription.unsubscribe()
    sys.stdout.write(f"{sent}\n")
    await client.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
