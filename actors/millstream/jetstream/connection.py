"""Connecting a broker: credentials, the version check, and what happens at the end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from millstream.errors import ServerTooOld
from millstream.jetstream.broker import JetStreamBroker
from millstream.jetstream.link import Endpoint, open_wire, shown_url
from millstream_schemas.names import Names

MIN_SERVER_VERSION = (2, 14, 3)


async def connect(
    url: str,
    names: Names,
    *,
    client_name: str,
    user: str | None = None,
    password: str | None = None,
    creds_file: Path | None = None,
    inbox_prefix: str = "_INBOX",
    on_closed: Callable[[], None] | None = None,
    connect_timeout_s: float = 30.0,
    publish_timeout_s: float = 5.0,
    ping_interval_s: float = 5.0,
    store_bytes: int | None = None,
) -> JetStreamBroker:
    """Connect a broker; it reconnects for ever, and `on_closed` is called if it is ever closed by anyone but us.

    `store_bytes` is the server's room for streams where it cannot be found out (clusters, shared accounts).
    Raises BrokerUnreachable after `connect_timeout_s` of trying, ServerTooOld.
    """
    endpoint = Endpoint(url, client_name, user, password, creds_file, inbox_prefix, ping_interval_s)
    made: list[JetStreamBroker] = []

    def ended() -> None:
        if made and made[0].end() and on_closed is not None:
            on_closed()

    wire = await open_wire(endpoint, connect_timeout_s, ended)
    version = str(wire.info.get("version", ""))
    if parse_version(version) < MIN_SERVER_VERSION:
        await wire.client.close()
        wanted = ".".join(str(part) for part in MIN_SERVER_VERSION)
        raise ServerTooOld(
            f"the NATS server at {shown_url(url)} is version {version or 'unknown'}, Millstream needs {wanted} or newer"
        )
    broker = JetStreamBroker(wire, names, endpoint, publish_timeout_s=publish_timeout_s, store_bytes=store_bytes)
    made.append(broker)
    return broker


def parse_version(text: str) -> tuple[int, int, int]:
    """Major, minor and patch of `2.15.1-RC.2`; zeros for what is no version."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0)
