"""Which event loop a process of Millstream runs on."""

import asyncio
import os
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The faster event loop where the extra `fast` is installed, unless MILLSTREAM_LOOP is `asyncio`."""
    if os.environ.get("MILLSTREAM_LOOP") == "asyncio":
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
