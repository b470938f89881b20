"""How long a provider says to wait: Retry-After in its three forms, RetryInfo, reset headers, and words."""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite

from millstream.providers.reading import Read, objects

DAY_S = 86_400.0
"""The longest wait that is believed: a longer Retry-After is junk and says nothing, all else is cut to it."""

_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,18})?\Z", re.ASCII)
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)(ms|us|µs|ns|d|h|m|s)", re.ASCII)
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}
_IN_WORDS = re.compile(
    r"(?:try again in|retry in|retry after|replenished in)\s+"
    r"(?:(\d{1,3}):(\d\d):(\d\d)|(\d{1,9}(?:\.\d{1,12})?)\s*seconds?|((?:\d{1,12}(?:\.\d{1,12})?(?:ms|d|h|m|s))+))",
    re.ASCII | re.IGNORECASE,
)


def retry_after_s(answer: Read) -> float | None:
    """Seconds until the provider wants to be asked again, above 0 and at most a day; None where it does not say so.

    The body's RetryInfo goes first, then milliseconds, seconds or a date in headers, the reset of what is used up, and
    last the words of the message. What makes no sense is passed over.
    """
    for seconds in _said(answer):
        if seconds is not None and isfinite(seconds) and seconds > 0:
            return min(seconds, DAY_S)
    return None


def _said(answer: Read) -> Iterator[float | None]:
    headers = answer.headers
    for detail in objects(answer.error.get("details")):
        if str(detail.get("@type", "")).endswith("RetryInfo"):
            yield duration_s(str(detail.get("retryDelay", "")))
    for name in ("retry-after-ms", "x-ms-retry-after-ms"):
        milliseconds = number(headers.get(name))
        yield _believed(None if milliseconds is None else milliseconds / 1000)
    given = headers.get("retry-after")
    yield _believed(number(given))
    yield _believed(until_s(given, headers))
    yield _used_up_s(headers)
    yield _in_words_s(f"{answer.error.get('message', '')} {answer.text[:4096]}")


def _believed(seconds: float | None) -> float | None:
    return seconds if seconds is not None and seconds <= DAY_S else None


def number(text: str | None) -> float | None:
    """A plain non-negative number; None for all else."""
    text = (text or "").strip()
    return float(text) if _NUMBER.match(text) else None


def duration_s(text: str) -> float | None:
    """Seconds of a duration such as `20ms`, `6m0s`, `45.837906927s`; None for all else."""
    text = text.strip()
    parts = _PART.findall(text)
    if not parts or "".join(amount + unit for amount, unit in parts) != text:
        return None
    return sum(float(amount) * _UNIT_S[unit] for amount, unit in parts)


def until_s(text: str | None, headers: Mapping[str, str]) -> float | None:
    """Seconds until a moment, by the provider's own clock where its answer shows it; None where it is no moment."""
    moment = _moment(text)
    if moment is None:
        return None
    now = _moment(headers.get("date")) or datetime.now(UTC)
    return (moment - now).total_seconds()


def _moment(text: str | None) -> datetime | None:
    """A date of HTTP, or one of RFC 3339."""
    if not text or len(text) > 64:
        return None
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            moment = parse(text.strip())
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, TypeError, OverflowError, IndexError):
            continue
    return None


def reset_s(text: str | None, headers: Mapping[str, str]) -> float | None:
    """Seconds until a limit is whole again: a duration, a number of seconds, or a moment; within a day."""
    if not text:
        return None
    for seconds in (duration_s(text), number(text), until_s(text, headers)):
        if seconds is not None and isfinite(seconds):
            return min(max(0.0, seconds), DAY_S)
    return None


def _used_up_s(headers: Mapping[str, str]) -> float | None:
    """The longest reset among limits of which nothing is left."""
    found: list[float] = []
    for dimension in ("requests", "tokens"):
        if number(headers.get(f"x-ratelimit-remaining-{dimension}")) == 0:
            seconds = reset_s(headers.get(f"x-ratelimit-reset-{dimension}"), headers)
            found += [] if seconds is None else [seconds]
    return max(found, default=None)


def _in_words_s(message: str) -> float | None:
    found = _IN_WORDS.search(message)
    if found is None:
        return None
    hours, minutes, seconds, plain, duration = found.groups()
    if hours is not None:
        return int(hours) * 3600.0 + int(minutes) * 60.0 + int(seconds)
    return float(plain) if plain is not None else duration_s(duration.lower())
