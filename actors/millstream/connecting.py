"""Opens the broker that the settings name: the one place where settings meet the adapter."""

from collections.abc import Callable
from pathlib import Path

from millstream.jetstream.connection import connect
from millstream.ports import Broker
from millstream.settings import Settings


async def open_broker(
    settings: Settings, role: str, *, url: str | None = None, on_closed: Callable[[], None] | None = None
) -> Broker:
    """Connect to the server of the settings (or at `url`); raises BrokerUnreachable and ServerTooOld."""
    nats = settings.nats
    return await connect(
        url or nats.url,
        settings.names,
        client_name=f"millstream-{role}",
        user=nats.user,
        password=nats.password,
        creds_file=None if nats.creds_file is None else Path(nats.creds_file),
        on_closed=on_closed,
        connect_timeout_s=nats.connect_timeout_s,
    )


async def open_control(settings: Settings, *, on_closed: Callable[[], None] | None = None) -> Broker | None:
    """Connect to CONTROL where the settings give it a connection of its own, else None."""
    nats = settings.nats
    if nats.control_url is None:
        return None
    return await connect(
        nats.control_url,
        settings.names,
        client_name="millstream-control",
        user=nats.control_user,
        password=nats.control_password,
        creds_file=None if nats.control_creds_file is None else Path(nats.control_creds_file),
        on_closed=on_closed,
        connect_timeout_s=nats.connect_timeout_s,
    )
