"""Results of handlers: JSON that says the same, or a refusal that names the place; never a silent loss."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.results import MAX_DEPTH, NotEncodable, encode_strictly

words = st.text(st.characters(exclude_categories=["Cs"]))
exact: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | words
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(words, inner),
    max_leaves=20,
)
wild: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.text() | st.integers() | st.floats() | st.binary() | st.sets(st.integers()) | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text(), inner),
    max_leaves=20,
)


class Point(msgspec.Struct):
    """A result as handlers declare them."""

    x: Any


@dataclass
class Place:
    """The same as a dataclass."""

    x: Any


@given(value=exact)
def test_what_json_can_say_comes_back_as_it_was(value: Any) -> None:
    """Numbers, texts, lists and mappings of any shape."""
    encoded = encode_strictly(value)
    assert isinstance(encoded, bytes)
    assert json.loads(encoded) == value


@given(value=wild)
def test_anything_else_is_json_or_refused_with_a_place(value: Any) -> None:
    """No exception of any kind, and no JSON that other parsers refuse."""
    encoded = encode_strictly(value)
    if isinstance(encoded, NotEncodable):
        assert encoded.path.startswith("$")
        assert encoded.message
    else:
        json.loads(encoded)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (math.nan, "$"),
        ({"a": [0, math.inf]}, "$.a[1]"),
        ([-math.inf], "$[0]"),
        ({"n": 2**64}, "$.n"),
        ({"n": -(2**63) - 1}, "$.n"),
        ({"s": {1, 2}}, "$.s"),
        ([b"raw"], "$[0]"),
        ({"m": {1: "one"}}, "$.m"),
        ({"m": {None: "none"}}, "$.m"),
        (Point(x=[math.nan]), "$.x[0]"),
        (Place(x={"y": math.nan}), "$.x.y"),
        ((0, (1, frozenset[int]())), "$[1][1]"),
        ("\ud800", "$"),
        (object(), "$"),
    ],
)
def test_a_refusal_names_the_place(value: Any, path: str) -> None:
    """Where in the value, as a path from `$`."""
    refused = encode_strictly(value)
    assert isinstance(refused, NotEncodable)
    assert refused.path == path
    assert str(refused).endswith(f"at `{path}`")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (2**64 - 1, b"18446744073709551615"),
        (-(2**63), b"-9223372036854775808"),
        (True, b"true"),
        (Point(x=1), b'{"x":1}'),
        (Place(x=(1, 2)), b'{"x":[1,2]}'),
        (datetime(2026, 5, 9, tzinfo=UTC), b'"2026-05-09T00:00:00Z"'),
    ],
)
def test_the_bounds_and_the_types_of_handlers_are_encoded(value: Any, said: bytes) -> None:
    """To the last digit."""
    assert encode_strictly(value) == said


def _nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def test_nesting_ends_at_its_limit_and_a_cycle_is_no_endless_loop() -> None:
    """One level more is refused."""
    assert isinstance(encode_strictly(_nested(MAX_DEPTH)), bytes)
    assert isinstance(encode_strictly(_nested(MAX_DEPTH + 1)), NotEncodable)
    cycle: list[Any] = []
    cycle.append(cycle)
    assert isinstance(encode_strictly(cycle), NotEncodable)
