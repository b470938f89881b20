"""Waiting for something to become true, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, overload

T = TypeVar("T")

_POLL_S = 0.02


def wait_until_sync(predicate: Callable[[], T], description: str, timeout: float = 30.0) -> T:
    """Call `predicate` until it returns something true, and return that.

    `timeout` in seconds is generous on purpose: it is spent only when the test fails.
    Raises AssertionError that names `description` and the last value.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(_late(description, timeout, value))
        time.sleep(_POLL_S)


@overload
async def wait_until(
    predicate: Callable[[], Coroutine[Any, Any, T | None]], description: str, timeout: float = 30.0
) -> T: ...


@overload
async def wait_until(predicate: Callable[[], T], description: str, timeout: float = 30.0) -> T: ...


async def wait_until(predicate: Callable[[], Any], description: str, timeout: float = 30.0) -> Any:
    """Do as `wait_until_sync` does, without blocking the loop; the predicate may be async."""
    deadline = time.monotonic() + timeout
    while True:
        outcome: Any = predicate()
        value: Any = await outcome if inspect.isawaitable(outcome) else outcome
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(_late(description, timeout, value))
        await asyncio.sleep(_POLL_S)


def _late(description: str, timeout: float, value: object) -> str:
    return f"waited {timeout:g} s for: {description} (last seen: {value!r})"
