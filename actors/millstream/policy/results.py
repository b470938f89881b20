"""What a handler's result, or a producer's payload, may hold: JSON without silent loss."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class NotEncodable:
    """A value has no exact JSON form; `path` is where."""

    message: str
    path: str

    def __str__(self) -> str:
        return f"{self.message} - at `{self.path}`"


def encode_strictly(value: Any) -> bytes | NotEncodable:
    """JSON bytes of a value, or where and why JSON would lose or change it.

    Refused are NaN and infinities, integers outside 64 bits, sets, bytes, keys that are no strings, lone
    surrogates, cycles and nesting over 64.
    """
    fault = _fault(value, "$", 0)
    if fault is not None:
        return fault
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return NotEncodable(str(error), "$")


def _fault(value: Any, path: str, depth: int) -> NotEncodable | None:
    if value is None or isinstance(value, bool | str):
        return None
    if isinstance(value, int):
        fits = -(2**63) <= value < 2**64
        return None if fits else NotEncodable("Expected an integer of at most 64 bits", path)
    if isinstance(value, float):
        return None if math.isfinite(value) else NotEncodable(f"Expected a finite number, got {value}", path)
    if isinstance(value, set | frozenset | bytes | bytearray | memoryview):
        return NotEncodable(f"Expected a value with a JSON form, got `{type(value).__name__}`", path)
    if depth >= MAX_DEPTH:
        return NotEncodable(f"Expected at most {MAX_DEPTH} levels of nesting and no cycle", "$")
    for name, member in _members(value):
        if not isinstance(name, str | int):
            return NotEncodable(f"Expected `str` as key, got `{type(name[0]).__name__}`", path)
        fault = _fault(member, f"{path}.{name}" if isinstance(name, str) else f"{path}[{name}]", depth + 1)
        if fault is not None:
            return fault
    return None


def _members(value: Any) -> Iterator[tuple[Any, Any]]:
    """Names and values of what a value holds; nothing for what msgspec encodes as one piece."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield (key if isinstance(key, str) else (key,)), member
    elif isinstance(value, list | tuple):
        yield from enumerate(cast(list[Any], value))
    elif isinstance(value, msgspec.Struct):
        yield from ((name, getattr(value, name)) for name in value.__struct_fields__)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
