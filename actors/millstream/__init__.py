"""Millstream: a task system for slow, costly and flaky work, over NATS JetStream."""

from millstream._version import __version__
from millstream.app import App, Task
from millstream.client import Client, Handle
from millstream.context import Context
from millstream.errors import (
    BudgetExhausted,
    Cancel,
    Fatal,
    LimitReached,
    MillstreamError,
    Retry,
    Snooze,
    Throttled,
)

__all__ = [
    "App",
    "BudgetExhausted",
    "Cancel",
    "Client",
    "Context",
    "Fatal",
    "Handle",
    "LimitReached",
    "MillstreamError",
    "Retry",
    "Snooze",
    "Task",
    "Throttled",
    "__version__",
]
