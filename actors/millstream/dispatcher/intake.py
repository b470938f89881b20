"""Takes submits in while the store has room for what becomes of them."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from millstream.dispatcher.context import Context
from millstream.errors import BrokerClosed, BrokerError
from millstream.policy.room import may_take_in
from millstream.ports import Mailbox

LOOK_EVERY_S = 0.25


@dataclass
class Intake:
    """The mailbox of INBOX, open while there is room. What it pulled and did not serve is handed back when it closes."""

    context: Context
    credit: int
    serve: Callable[[Mailbox], Coroutine[Any, Any, None]]
    taking: bool = True

    async def run(self, stop: asyncio.Event) -> None:
        """Serve INBOX until `stop`; what was taken is finished."""
        names = self.context.names
        while await self._until(stop, room=True):
            mailbox = await self.context.broker.mailbox(names.inbox_stream, names.inbox_consumer, self.credit)
            async with asyncio.TaskGroup() as group:
                group.create_task(self.serve(mailbox))
                await self._until(stop, room=False)
                await mailbox.close()

    async def _until(self, stop: asyncio.Event, *, room: bool) -> bool:
        """Wait until there is room, or none; False once `stop` is set."""
        while not stop.is_set():
            await self._look()
            if self.taking is room:
                return True
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await stop.wait()
        return False

    async def _look(self) -> None:
        """See how full the store is; where that cannot be told, all stays as it is."""
        broker = self.context.broker
        try:
            server = await broker.server_info()
            inbox = await broker.stream_info(self.context.names.inbox_stream)
        except BrokerClosed:
            raise
        except BrokerError:
            return
        used, store = server.store_used_bytes, server.store_bytes
        taking = may_take_in(used, inbox.bytes if inbox else 0, store, self.taking)
        if taking is not self.taking:
            name = "intake.resumed" if taking else "intake.paused"
            self.context.telemetry.emit(name, used_bytes=used, store_bytes=store)
        self.taking = taking
