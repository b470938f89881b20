"""How long to wait before the next attempt, and whether an error is worth one."""

import math
from collections.abc import Iterable

from millstream_schemas.envelope import RetryPolicy

ASKED = "millstream.Retry"
"""The class of an error that a handler raised in order to be run again."""


def delay_s(policy: RetryPolicy, attempt: int, uniform: float, retry_after_s: float | None = None) -> float:
    """Seconds to wait after `attempt` (from 1) failed; never above `max_seconds` unless `retry_after_s` asks for more.

    `uniform` in [0, 1) draws the jitter: between half of the delay and the whole of it.
    """
    if policy.strategy == "none":
        raw = 0.0
    elif policy.strategy == "fixed":
        raw = policy.base_seconds
    elif policy.strategy == "linear":
        raw = policy.base_seconds * attempt
    else:
        raw = _exponential(policy.base_seconds, policy.factor, attempt, policy.max_seconds)
    capped = min(raw, policy.max_seconds)
    jittered = capped * (0.5 + uniform / 2) if policy.jitter else capped
    return max(jittered, retry_after_s or 0.0)


def _exponential(base: float, factor: float, attempt: int, cap: float) -> float:
    """base * factor ** (attempt - 1), compared by logarithms first, so that no power overflows."""
    if base <= 0 or cap <= 0:
        return 0.0
    exponent = (attempt - 1) * math.log(factor) + math.log(base)
    return cap if exponent >= math.log(cap) else math.exp(exponent)


def is_retryable(policy: RetryPolicy, classes: Iterable[str]) -> bool:
    """Whether the error classes of a failure deserve another attempt: `fatal_on` wins, then `retry_on` if given.

    A handler that raised `Retry` has said so itself: `retry_on` classifies only what was not raised on purpose.
    """
    named = {name.lower() for name in classes}
    if policy.fatal_on is not None and any(name.lower() in named for name in policy.fatal_on):
        return False
    if policy.retry_on is not None:
        return ASKED.lower() in named or any(name.lower() in named for name in policy.retry_on)
    return policy.strategy != "none"


def names_refusal(policy: RetryPolicy | None, status: str, classes: Iterable[str]) -> bool:
    """Whether a task's own policy says what a refusal with `status` (`http_429`) is: then it counts as an error.

    `retry_on` has to name the status itself, `fatal_on` any of the error's classes.
    """
    if policy is None:
        return False
    retried = {name.lower() for name in policy.retry_on or ()}
    fatal = {name.lower() for name in policy.fatal_on or ()}
    return status.lower() in retried or any(name.lower() in fatal for name in classes)
