"""Notices what somebody deletes on the server while actors run: a consumer is declared anew, a lost stream ends the process."""

import asyncio
from collections.abc import Sequence

from millstream.errors import BrokerClosed, BrokerError, StreamLost
from millstream.ports import Broker
from millstream.telemetry.events import Telemetry
from millstream_schemas.topology import ConsumerSpec, Topology

LOOK_EVERY_S = 2.0
LOOKS_THAT_COUNT = 2
"""A stream must be found missing so often in a row: a server that is starting may not know it yet."""


class TopologyWatch:
    """Looks at the declared streams and consumers every few seconds; what belongs to one worker's queues is the worker's."""

    def __init__(self, broker: Broker, topology: Topology, telemetry: Telemetry) -> None:
        self._broker = broker
        self._topology = topology
        self._telemetry = telemetry
        self._made_at: dict[str, float] = {}
        self._missed: dict[str, int] = {}

    async def run(self) -> None:
        """Look until cancelled. Raises StreamLost: positions, fences and buffers of this process mean nothing any more."""
        while True:
            try:
                await self._look()
            except StreamLost:
                raise
            except BrokerClosed:
                return  # whoever closed it knows
            except BrokerError:
                pass  # an outage is not a loss
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        for spec in self._topology.streams:
            await self._look_at(spec.name)
        for stream in {spec.stream for spec in self._topology.consumers}:
            await self._mend(stream, [spec for spec in self._topology.consumers if spec.stream == stream])

    async def _look_at(self, stream: str) -> None:
        info = await self._broker.stream_info(stream)
        if info is None:
            self._missed[stream] = self._missed.get(stream, 0) + 1
            if self._missed[stream] >= LOOKS_THAT_COUNT:
                raise StreamLost(stream, "is gone")
            return
        self._missed[stream] = 0
        if self._made_at.setdefault(stream, info.created_at) != info.created_at:
            raise StreamLost(stream, "was deleted and made anew")

    async def _mend(self, stream: str, specs: Sequence[ConsumerSpec]) -> None:
        if self._missed.get(stream):
            return
        there = {consumer.name for consumer in await self._broker.consumers(stream)}
        for spec in specs:
            if spec.durable not in there:
                await self._broker.declare_consumer(spec)
                self._telemetry.emit("consumer.redeclared", consumer=spec.durable, stream=stream)
