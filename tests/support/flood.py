"""A producer process of its own: publishes one envelope many times at once, with none of our code.

`python -m tests.support.flood URL SUBJECT COUNT ENVELOPE GATE`: connects, says `ready`, waits for the file GATE, sends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import nats


async def _flood(url: str, subject: str, count: int, envelope: str, gate: Path) -> None:
    client = await nats.connect(url)
    try:
        stream = client.jetstream()
        print("ready", flush=True)
        while not gate.exists():
            time.sleep(0.005)
        acks = await asyncio.gather(*(stream.publish(subject, envelope.encode()) for _ in range(count)))
        print(json.dumps({"stored": [ack.seq for ack in acks if not ack.duplicate]}), flush=True)
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(_flood(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])))
