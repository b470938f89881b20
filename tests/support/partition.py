"""A TCP proxy as a process of its own: stop the process (SIGSTOP) and the network is cut with all connections open.

`python -m tests.support.partition PORT` prints `{"port": …}`. Continued (SIGCONT), it delivers late what was sent meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.processes import ActorProcess, Processes

LIFE_S = 900.0


def start(processes: Processes, port: int, name: str = "partition") -> tuple[ActorProcess, str]:
    """Start one before a server's port; returns the process to stop and continue, and the address to use instead."""
    process = processes.start_command([sys.executable, "-m", "tests.support.partition", str(port)], name)
    process.wait_for_log('"port"')
    return process, f"nats://127.0.0.1:{json.loads(process.log().splitlines()[0])['port']}"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(port: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, there_writer))
            group.create_task(_copy(there_reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    sys.stdout.write(json.dumps({"port": server.sockets[0].getsockname()[1]}) + "\n")
    sys.stdout.flush()
    await asyncio.sleep(LIFE_S)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
