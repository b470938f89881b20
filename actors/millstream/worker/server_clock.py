"""The server's time on a worker's machine: due times and deadlines follow one clock, however wrong the others are."""

from millstream.errors import BrokerClosed, BrokerError
from millstream.ports import Broker, Clock

NOTICEABLE_S = 0.05


class ServerClock:
    """The machine's clock, set right by what the server says. `monotonic` is the machine's own."""

    def __init__(self, clock: Clock, broker: Broker, stream: str) -> None:
        self._clock = clock
        self._broker = broker
        self._stream = stream
        self._offset_s = 0.0

    def now(self) -> float:
        """Unix seconds of the server, as far as it was asked."""
        return self._clock.now() + self._offset_s

    def monotonic(self) -> float:
        """Seconds that never step back."""
        return self._clock.monotonic()

    async def measure(self) -> None:
        """Ask the server for its time; without an answer all stays as it is. What the way may explain is no offset."""
        asked_at = self._clock.now()
        try:
            info = await self._broker.stream_info(self._stream)
        except BrokerClosed:
            raise
        except BrokerError:
            return
        heard_at = self._clock.now()
        way_s = heard_at - asked_at
        if info is None or not info.told_at or not 0 <= way_s < 1:
            return
        offset_s = info.told_at - (asked_at + heard_at) / 2
        self._offset_s = offset_s if abs(offset_s) > max(NOTICEABLE_S, way_s) else 0.0
