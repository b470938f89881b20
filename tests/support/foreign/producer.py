"""A producer that knows nats-py and the wire document, and nothing else of this project.

producer.py NATS_URL SUBJECT HTTP_URL TASK_ID: publishes the envelope of standard input, waits for the task's end and
prints what HTTP says of it.
"""

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import nats

TERMINAL = ("completed", "failed", "cancelled", "expired")


def ask(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return None


async def main(server: str, subject: str, http: str, task_id: str) -> None:
    envelope = sys.stdin.buffer.read()
    client = await nats.connect(server)
    ack = await client.jetstream().publish(subject, envelope)
    assert not ack.duplicate, "a duplicate is not accepted"
    await client.close()
    tenant = subject.split(".")[2]
    deadline = time.monotonic() + 60
    task = None
    while time.monotonic() < deadline:
        task = ask(f"{http}/v1/tasks/{task_id}?tenant={tenant}")
        if task is not None and task["state"] in TERMINAL:
            break
        await asyncio.sleep(0.05)
    print(json.dumps({"seq": ack.seq, "task": task}))


asyncio.run(main(*sys.argv[1:]))
