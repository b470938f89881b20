"""The text functions behind the demo's model server."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.demo import bundled_texts
from millstream.demo.text import cosine, embed, estimate_tokens, outline, split_sentences, summarize, term_rarity

NOTE = """\
---
author: nobody
---
# The weir

The weir holds the river back, e.g. in August. It is **old**, and `mill.*` is [its name](https://example.org/a)!
Does the weir leak?

```python
secret = "The weir is a string."
```

## Repairs
* Oak boards go first.
* Stones go last.

| table | of | numbers |
| --- | --- | --- |
<!-- The weir is a comment. -->
> The weir was quoted.
"""


def test_markup_is_removed_and_headings_become_titles() -> None:
    """Code, tables, comments and front matter vanish; headings are titles; what is left reads as plain sentences."""
    assert outline(NOTE).titles == ("The weir", "Repairs")
    assert split_sentences(NOTE) == [
        "The weir holds the river back, e.g. in August.",
        "It is old, and mill.* is its name!",
        "Does the weir leak?",
        "Oak boards go first.",
        "Stones go last.",
        "The weir was quoted.",
    ]


def test_underlined_headings_and_unclosed_fences_are_understood() -> None:
    """A setext heading is a title, and a fence that never closes hides the rest."""
    assert outline("Title\n=====\nProse.\n~~~\ncode\n```\nmore code").titles == ("Title",)
    assert split_sentences("Title\n=====\nProse.\n~~~\ncode\n```\nmore code") == ["Prose."]


@pytest.mark.parametrize("name", sorted(bundled_texts()))
def test_summary_is_title_and_sentences_of_the_text(name: str) -> None:
    """A summary is shorter than its note and made of the note's own sentences, in the note's order."""
    note = bundled_texts()[name]
    summary = summarize(note, sentences=3)
    title = outline(note).titles[0]
    assert summary.startswith(f"{title}: ")
    assert len(summary) < len(note) / 2
    rest = summary.removeprefix(f"{title}: ")
    chosen = [sentence for sentence in split_sentences(note) if sentence in rest]
    assert " ".join(chosen) == rest
    assert len(chosen) == 3


def test_summary_prefers_what_the_text_is_about() -> None:
    """Of three sentences the one that shares its words with the others is worth most."""
    text = "Yesterday was Monday. The mill grinds grain into flour. The mill needs grain and water."
    assert "mill" in summarize(text, sentences=1)


def test_summary_of_text_without_prose_is_never_an_error() -> None:
    """Empty text, headings alone, code alone and one endless line all have a short summary."""
    assert summarize("") == ""
    assert summarize("# Only\n## Headings") == "Only. Headings"
    assert summarize("```\ncode\n```") == "``` code ```"
    assert len(summarize("word " * 100_000)) <= 400
    with pytest.raises(ValueError, match="sentences"):
        summarize("Text.", sentences=0)


def test_embeddings_of_similar_texts_are_closer_than_of_unrelated_ones() -> None:
    """Notes on queues lie nearer to each other than to notes on rivers, and the other way round."""
    notes = bundled_texts()
    rarity = term_rarity(notes.values())
    queue, letters, flood, rights = (
        embed(notes[name], 256, rarity)
        for name in (
            "02-what-a-queue-promises.md",
            "04-poison-and-dead-letters.md",
            "05-rivers-in-flood.md",
            "08-water-rights.md",
        )
    )
    assert cosine(queue, letters) > cosine(queue, flood) + 0.1
    assert cosine(queue, letters) > cosine(letters, rights) + 0.1
    assert cosine(flood, rights) > cosine(flood, letters) + 0.1


def test_embedding_of_a_half_finds_its_other_half() -> None:
    """Each note's first half is nearest to its own second half among all second halves."""
    notes = bundled_texts()
    rarity = term_rarity(notes.values())
    firsts = {name: embed(note[: len(note) // 2], 1024, rarity) for name, note in notes.items()}
    seconds = {name: embed(note[len(note) // 2 :], 1024, rarity) for name, note in notes.items()}
    nearest = {name: max((cosine(first, seconds[other]), other) for other in notes) for name, first in firsts.items()}
    found = sum(other == name for name, (_, other) in nearest.items())
    assert found >= len(notes) - 1


def test_rare_terms_weigh_more_than_common_ones() -> None:
    """A term of every text has weight 1, one of a single text more, and 'the' has none at all."""
    rarity = term_rarity(["the mill wheel", "the mill stone", "the mill race"])
    assert rarity["mill"] == pytest.approx(1.0)
    assert rarity["wheel"] > rarity["mill"]
    assert "the" not in rarity


def test_cosine_knows_same_opposite_and_nothing() -> None:
    """1 for the same direction, -1 for the opposite one, 0 with a zero vector; lengths must agree."""
    assert cosine([1.0, 2.0], [2.0, 4.0]) == pytest.approx(1.0)
    assert cosine([1.0, 0.0], [-3.0, 0.0]) == pytest.approx(-1.0)
    assert cosine([0.0, 0.0], [1.0, 1.0]) == 0.0
    with pytest.raises(ValueError, match="zip"):
        cosine([1.0], [1.0, 2.0])


@given(st.text(max_size=400), st.integers(1, 300))
def test_any_text_has_a_summary_and_a_unit_or_zero_vector(text: str, dims: int) -> None:
    """No text is an error, and the same text gives the same vector."""
    assert isinstance(summarize(text), str)
    vector = embed(text, dims)
    length = math.hypot(*vector)
    assert len(vector) == dims
    assert length == 0.0 or length == pytest.approx(1.0)
    assert vector == embed(text, dims)


@pytest.mark.parametrize("piece", ["![", "<!--", "[a](", "<a", "> ", "- ", "`a", "...", "*_", "#", "a'"])
def test_hostile_text_takes_no_more_than_linear_time(piece: str) -> None:
    """A long run of half-open markup does not send an expression into backtracking."""
    started = time.perf_counter()
    summarize(piece * 50_000)
    assert time.perf_counter() - started < 3.0


def test_tokens_are_estimated_from_bytes() -> None:
    """Four bytes a token, rounded up; no text, no tokens; a lone surrogate is no error."""
    assert [estimate_tokens(text) for text in ("", "a", "abcd", "abcde", "水車", "\ud800")] == [0, 1, 1, 2, 2, 1]


def test_bundled_texts_are_real_notes() -> None:
    """Eight notes ship with the package, each with a heading and 150 to 400 words."""
    notes = bundled_texts()
    assert len(notes) == 8
    for note in notes.values():
        assert note.startswith("# ")
        assert 150 <= len(note.split()) <= 400
