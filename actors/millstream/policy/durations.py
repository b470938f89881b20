"""Durations as people write them, as seconds."""

import re
from datetime import timedelta

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

Duration = float | int | str | timedelta

LONGEST_S = 10 * 365 * 86400.0
"""Ten years: far more than any wait that is allowed."""


def seconds(value: Duration) -> float:
    """Seconds of a number, a timedelta, or a text such as "30s", "1h30m", "500ms"; raises ValueError for all else."""
    if isinstance(value, timedelta):
        return _finite(value.total_seconds(), value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value, value)
    text = str(value).strip().lower()
    parts = _PART.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return _finite(sum(float(number) * _UNIT_S[unit] for number, unit in parts), value)
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"Expected a duration such as 30, `30s`, `5m` or `1h30m`, got `{shown(value)}`") from None
    return _finite(number, value)


def duration(seconds: float) -> str:
    """A length of time for people: `3.2 s`, `4 min 5 s`, `2 h 3 min`, `5 d 1 h`."""
    seconds = max(seconds, 0.0)
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def shown(value: object) -> str:
    """The start of a value, for a message."""
    return repr(value)[:80] if not isinstance(value, str) else value[:80]


def _finite(number: float, value: object) -> float:
    if not 0 <= number <= LONGEST_S:  # nor is what is not a number
        raise ValueError(f"Expected a duration from 0 to {LONGEST_S:.0f} seconds, got `{shown(value)}`")
    return float(number)
