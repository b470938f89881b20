"""A producer with nothing but nats-py: publishes tasks of `hello.py`, then asks over HTTP what became of one.

Usage: python producer.py [nats://127.0.0.1:4222] [http://127.0.0.1:8420]
"""

import asyncio
import json
import sys
import time
import urllib.request
from typing import Any

import nats

SUBJECT = "mill.submit.acme.default"  # mill.submit.<tenant>.<queue>


async def main(nats_url: str, http_url: str) -> None:
    connection = await nats.connect(nats_url)
    jetstream = connection.jetstream()
    task = {"task_type": "hello.greet", "payload": {"name": "Ada"}, "idempotency_key": "python-producer:ada"}
    ack = await jetstream.publish(SUBJECT, json.dumps(task).encode())  # the PubAck is the acceptance
    await connection.close()
    print(f"accepted as {ack.seq} of {ack.stream}")
    found = await asyncio.to_thread(outcome, http_url, ack.seq)
    print(found["state"], json.dumps(found["result"]))


def outcome(http_url: str, inbox_seq: int) -> dict[str, Any]:
    """The task of a PubAck, once it is over."""
    while True:
        found = get(f"{http_url}/v1/tasks?inbox_seq={inbox_seq}")["items"]
        if found and found[0]["state"] in ("completed", "failed", "cancelled", "expired"):
            return get(f"{http_url}/v1/tasks/{found[0]['task_id']}?tenant=acme")
        time.sleep(0.1)


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


if __name__ == "__main__":
    defaults = ["nats://127.0.0.1:4222", "http://127.0.0.1:8420"]
    asyncio.run(main(*(sys.argv[1:] + defaults[len(sys.argv) - 1 :])))
