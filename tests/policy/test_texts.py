"""Texts of strangers: whatever comes in, what goes out can be stored, sent and shown."""

from __future__ import annotations

import re
import unicodedata

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.texts import MESSAGE_BYTES, clean, fingerprint

anything = st.text(st.characters(), max_size=400)  # lone surrogates and control characters included
KEPT = "\t\n\r"


@given(text=anything, limit=st.integers(64, 600))
def test_a_clean_text_is_short_harmless_and_json(text: str, limit: int) -> None:
    """At most the limit in UTF-8, no lone surrogate, no control character but tabs and line ends."""
    cleaned = clean(text, limit)
    assert len(cleaned.encode()) <= limit
    assert [c for c in cleaned if ord(c) < 0x80 and unicodedata.category(c) == "Cc" and c not in KEPT] == []
    assert msgspec.json.decode(msgspec.json.encode(cleaned)) == cleaned


@given(text=anything)
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    """A text that is clean stays as it is."""
    cleaned = clean(text)
    assert clean(cleaned) == cleaned


@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=100))
def test_a_harmless_text_is_kept_as_it_is(text: str) -> None:
    """Nobody's words are changed without need, in any script."""
    assert clean(text) == text


@pytest.mark.parametrize("letter", ["x", "é", "漢", "😀", "\x00", "\ud800"])
def test_a_long_text_says_that_it_was_cut_and_how_long_it_was(letter: str) -> None:
    """It is cut between characters, never within one."""
    cleaned = clean(letter * 20_000)
    assert cleaned.endswith("... [cut, 20000 characters]")
    assert MESSAGE_BYTES - 4 < len(cleaned.encode()) <= MESSAGE_BYTES
    assert len(set(cleaned.removesuffix("... [cut, 20000 characters]"))) == 1


@pytest.mark.parametrize(("length", "cut"), [(MESSAGE_BYTES, False), (MESSAGE_BYTES + 1, True)])
def test_a_text_of_just_the_limit_is_whole(length: int, cut: bool) -> None:
    """One byte more is cut."""
    assert ("[cut" in clean("x" * length)) is cut


@given(kind=anything, message=anything, place=anything)
def test_every_error_has_a_fingerprint(kind: str, message: str, place: str) -> None:
    """16 hex characters, the same each time."""
    mark = fingerprint(kind, message, place)
    assert re.fullmatch("[0-9a-f]{16}", mark)
    assert fingerprint(kind, message, place) == mark


@given(one=st.integers(0), other=st.integers(0))
def test_numbers_and_addresses_do_not_tell_errors_apart(one: int, other: int) -> None:
    """The same fault at another address, of another order."""
    first = fingerprint("KeyError", f"order {one} at {one:#x}", "app.py:check")
    assert first == fingerprint("KeyError", f"order {other} at {other:#x}", "app.py:check")


@pytest.mark.parametrize(
    "other", [("ValueError", "no order", "here"), ("KeyError", "no offer", "here"), ("KeyError", "no order", "there")]
)
def test_type_words_and_place_tell_errors_apart(other: tuple[str, str, str]) -> None:
    """Each of the three alone."""
    assert fingerprint("KeyError", "no order", "here") != fingerprint(*other)
