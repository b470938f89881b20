"""What a successful answer says that it used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream.providers.reading import Read, mapping
from millstream_schemas.permits import MAX_AMOUNT

_IN = ("prompt_tokens", "input_tokens", "cache_creation_input_tokens", "promptTokenCount", "toolUsePromptTokenCount")
_OUT = ("completion_tokens", "output_tokens", "candidatesTokenCount", "thoughtsTokenCount")
_CACHED = ("cache_read_input_tokens", "cachedContentTokenCount")
_CACHED_WITHIN = ("prompt_tokens_details", "input_tokens_details")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call.

    `tokens_in` is what the provider counts against its limit: with Anthropic, what it read from its cache is not in it.
    `cached` was read from a cache, whether or not that is part of `tokens_in`.
    """

    tokens_in: int
    tokens_out: int
    cached: int = 0


def usage(answer: Read) -> Usage | None:
    """The usage that the body of an answer tells; None where it tells none."""
    body = mapping(answer.body)
    told = mapping(body.get("usage")) or mapping(body.get("usageMetadata"))
    if not any(name in told for name in (*_IN, *_OUT)):
        return None
    cached = _sum(told, _CACHED) + sum(_amount(mapping(told.get(name)).get("cached_tokens")) for name in _CACHED_WITHIN)
    return Usage(_sum(told, _IN), _sum(told, _OUT), cached)


def _sum(told: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return min(MAX_AMOUNT, sum(_amount(told.get(name)) for name in names))


def _amount(value: object) -> int:
    """A plausible number of tokens; all else is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_AMOUNT else 0
