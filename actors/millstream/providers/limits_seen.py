"""What the headers of an answer say of the provider's own limits. Junk is left out: they may only tighten ours."""

from collections.abc import Mapping
from typing import NamedTuple

from millstream.providers.waits import number, reset_s
from millstream_schemas.limit_states import Dimension
from millstream_schemas.permits import MAX_AMOUNT, Observed


class _Headers(NamedTuple):
    dimension: Dimension
    limit: str
    remaining: str
    reset: str


def _openai(dimension: Dimension, word: str) -> _Headers:
    return _Headers(dimension, *(f"x-ratelimit-{part}-{word}" for part in ("limit", "remaining", "reset")))


def _anthropic(dimension: Dimension, word: str) -> _Headers:
    return _Headers(dimension, *(f"anthropic-ratelimit-{word}-{part}" for part in ("limit", "remaining", "reset")))


_TABLE = (
    _openai("requests", "requests"),
    _openai("tokens", "tokens"),
    _openai("tokens", "project-tokens"),
    _anthropic("requests", "requests"),
    _anthropic("tokens_in", "input-tokens"),
    _anthropic("tokens_out", "output-tokens"),
)
_TIGHTEST = _anthropic("tokens", "tokens")
"""Anthropic's tightest token limit, whichever that is: it says nothing new where the others are there."""


def observed(headers: Mapping[str, str]) -> tuple[Observed, ...]:
    """The limits that an answer shows, by dimension."""
    found = [seen for names in _TABLE if (seen := _seen(names, headers)) is not None]
    if not any(one.dimension in ("tokens_in", "tokens_out") for one in found):
        tightest = _seen(_TIGHTEST, headers)
        found += [] if tightest is None else [tightest]
    return tuple(found)


def _seen(names: _Headers, headers: Mapping[str, str]) -> Observed | None:
    limit = _amount(headers.get(names.limit))
    if names.limit in headers and not limit:
        return None  # 0, -1 and the like: what stands beside it is no better
    remaining = _amount(headers.get(names.remaining))
    if limit is None and remaining is None:
        return None
    if limit is not None and remaining is not None and remaining > limit:
        remaining = None
    return Observed(
        dimension=names.dimension,
        limit=limit,
        remaining=remaining,
        reset_s=reset_s(headers.get(names.reset), headers),
    )


def _amount(text: str | None) -> int | None:
    value = number(text)
    return int(value) if value is not None and value <= MAX_AMOUNT else None
