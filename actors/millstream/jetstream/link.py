"""One connection to a server: where and as whom, patience at the start, reconnects for ever."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors

from millstream.errors import BrokerUnreachable
from millstream.jetstream.wire import Wire

_PENDING_BYTES = 64 * 1024 * 1024
_log = logging.getLogger("millstream.jetstream")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and as whom to connect. `url` may list several servers, separated by commas."""

    url: str
    client_name: str
    user: str | None = None
    password: str | None = None
    creds_file: Path | None = None
    inbox_prefix: str = "_INBOX"
    ping_interval_s: float = 5.0


async def open_wire(endpoint: Endpoint, timeout_s: float, on_end: Callable[[], None]) -> Wire:
    """Connect a wire that then reconnects for ever; `on_end` is called once it is closed for good.

    Raises BrokerUnreachable after `timeout_s` of trying.
    """
    wire = Wire()
    last: list[Exception] = []

    async def failed(error: Exception) -> None:
        last[:] = [error]
        level = logging.WARNING if "permissions" in str(error) else logging.DEBUG
        _log.log(level, "%s: %s", endpoint.client_name, error or type(error).__name__)

    async def reconnected() -> None:
        wire.after_reconnect()

    async def closed() -> None:
        on_end()

    options: dict[str, Any] = {
        "servers": [part.strip() for part in endpoint.url.split(",")],
        "name": endpoint.client_name,
        "error_cb": failed,
        "reconnected_cb": reconnected,
        "closed_cb": closed,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": 0.2,
        "connect_timeout": 2,
        "ping_interval": endpoint.ping_interval_s,
        "max_outstanding_pings": 2,
        "pending_size": _PENDING_BYTES,
        "user": endpoint.user,
        "password": endpoint.password,
        "user_credentials": endpoint.creds_file,
        "inbox_prefix": endpoint.inbox_prefix,
    }
    try:
        async with asyncio.timeout(timeout_s):
            await wire.client.connect(**options)
    except asyncio.CancelledError:
        wire.abandon()
        raise
    except (TimeoutError, OSError, nats.errors.Error) as error:
        wire.abandon()
        reason = (str(last[0]) or type(last[0]).__name__) if last else (str(error) or "no answer")
        raise BrokerUnreachable(
            f"no NATS server at {shown_url(endpoint.url)} within {timeout_s:g} s: {reason}"
        ) from None
    return wire


def shown_url(url: str) -> str:
    """The address without what may be a password."""
    return re.sub(r"//[^@/,]*@", "//", url)
