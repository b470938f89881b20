"""What the parts of a worker share."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from millstream.app import App
from millstream.calls import Permits
from millstream.context import HandleLike
from millstream.journal import Journal
from millstream.ports import Broker, Clock, Heart, Ids
from millstream.settings import Settings
from millstream.telemetry.events import Telemetry
from millstream.telemetry.otel import Spans
from millstream_schemas.names import Names

Send = Callable[..., Awaitable[HandleLike]]


@dataclass(frozen=True)
class Bench:
    """Resources of one worker, passed to its parts."""

    app: App
    broker: Broker
    journal: Journal
    names: Names
    settings: Settings
    """Those that this process began with; what the fleet shares may have changed since, see `configured`."""
    configured: Callable[[], Settings]
    """Returns the settings with what is configured for the fleet at that moment."""
    clock: Clock
    ids: Ids
    telemetry: Telemetry
    permits: Permits
    heart: Heart
    send: Send
    worker_id: str
    spans: Spans
