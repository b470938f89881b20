"""Serving the application inside the actor's own loop: its socket is bound first, and nothing touches signals."""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from millstream.errors import SettingsError
from millstream.tracker.hub import Hub

GRACE_S = 3
BACKLOG = 512


class _Server(uvicorn.Server):
    """Leaves signals to the supervisor."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises SettingsError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol must be named: asyncio turns Nagle's delay off only for sockets that say they are TCP
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise SettingsError(
            [f"Cannot listen on {host}:{port}: {error.strerror or error} - at `tracker.port`"]
        ) from None
    return bound


def url_of(bound: socket.socket) -> str:
    """Where a client on this machine finds the socket."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(app: ASGIApp, bound: socket.socket, hub: Hub, stop: asyncio.Event) -> None:
    """Serve until `stop`; then streams say good-bye, and open requests get a few seconds."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=64 * 1024,
        ws="none",
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[bound]))
        await stop.wait()
        hub.close()
        server.should_exit = True
