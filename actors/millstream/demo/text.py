"""Plain functions on text: what the demo's model server calls a model.

Summaries are extractive, so every sentence in one can be found in its source. Embeddings are hashed term
frequencies weighted by rarity. Everything is deterministic: the same text gives the same answer in any process.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

DEFAULT_DIMS = 256
_MAX_SENTENCE_CHARS = 400
_SHORT_SENTENCE_WORDS = 8
_BYTES_PER_TOKEN = 4

_COMMON = """
    a about above after again all also am an and any are as at be because been before being below between both but
    by can cannot could did do does doing down during each either even ever every few for from further get had has
    have having he her here him his how i if in into is it its itself just least less let like made make many may me
    might more most much must my neither no nor not now of off often on once one only or other our out over own per
    rather same she should since so some still such than that the their them then there these they this those through
    thus to too under until up upon us very was we were what when where whether which while who whom whose why will
    with within without would yet you your
"""
_STOP_WORDS = frozenset(_COMMON.split())
_ABBREVIATIONS = frozenset(
    ("e.g.", "i.e.", "etc.", "vs.", "cf.", "dr.", "mr.", "mrs.", "ms.", "st.", "fig.", "approx.")
)

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(\S.*)")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$")
_LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])[ \t]+(?:\[[ xX]\][ \t]+)?")
_QUOTE = re.compile(r"(?:[ \t]{0,3}>[ \t]?)+")
_IMAGE = re.compile(r"!\[[^\[\]\n]*\]\([^()\s]*(?:\s[^()\n]*)?\)")
_LINK = re.compile(r"\[([^\[\]\n]+)\](?:\([^()\s]*(?:\s[^()\n]*)?\)|\[[^\[\]\n]*\])")
_TAG = re.compile(r"</?[A-Za-z][^<>\n]{0,200}>")
_CODE = re.compile(r"`([^`\n]+)`")
_EMPHASIS = re.compile(r"\*{1,3}|~~|`+|(?<!\w)_{1,3}(?=\S)|(?<=\S)_{1,3}(?!\w)")
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’)\]]*\s+(?=[\"'“‘(\[]*[^\W_a-z])|[。！？]+")


@dataclass(frozen=True, slots=True)
class Outline:
    """A Markdown text taken apart: its headings, and its prose as one string per paragraph or list item."""

    titles: tuple[str, ...]
    paragraphs: tuple[str, ...]


def outline(text: str) -> Outline:
    """Separate headings from prose; code blocks, tables, rules, front matter and comments are dropped."""
    titles: list[str] = []
    paragraphs: list[str] = []
    open_lines: list[str] = []

    def close() -> None:
        if paragraph := _inline(" ".join(open_lines)):
            paragraphs.append(paragraph)
        open_lines.clear()

    for raw in _lines_outside_blocks(text):
        line = raw[quote.end() :] if (quote := _QUOTE.match(raw)) else raw
        if heading := _HEADING.match(line):
            close()
            titles.append(_inline(heading[1].rstrip().rstrip("#")))
        elif open_lines and _SETEXT.match(line):
            titles.append(_inline(" ".join(open_lines)))
            open_lines.clear()
        elif not line.strip() or line.lstrip().startswith("|") or _RULE.match(line):
            close()
        elif marker := _LIST_ITEM.match(line):
            close()
            open_lines.append(line[marker.end() :])
        else:
            open_lines.append(line.strip())
    close()
    return Outline(tuple(title for title in titles if title), tuple(paragraphs))


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a Markdown text's prose, markup removed, in order."""
    return [sentence for paragraph in outline(text).paragraphs for sentence in _sentences(paragraph)]


def summarize(text: str, sentences: int = 3) -> str:
    """Return the text's first heading and its most telling sentences, in their own order.

    Sentences are chosen by the frequency of their words, each choice lowering the worth of the words it used, so
    that the second does not repeat the first. A text without prose gives its headings; an empty one gives "".

    Raises:
        ValueError: `sentences` is below 1.
    """
    if sentences < 1:
        raise ValueError(f"Expected `sentences` >= 1, got {sentences}")
    parts = outline(text)
    found = [sentence for paragraph in parts.paragraphs for sentence in _sentences(paragraph)]
    if not found:
        return _cut(". ".join(parts.titles) or " ".join(text.split()))
    candidates = [s for s in found if len(s) <= _MAX_SENTENCE_CHARS] or [_cut(s) for s in found]
    title = parts.titles[0] if parts.titles else ""
    body = " ".join(candidates[i] for i in _choose(candidates, title, sentences))
    return f"{title.rstrip('.:')}: {body}" if title else body


def embed(text: str, dims: int = DEFAULT_DIMS, rarity: Mapping[str, float] | None = None) -> list[float]:
    """Return a vector of length 1 (all zeros where the text has no words): hashed terms, log frequency x rarity.

    `rarity` comes from `term_rarity`; without it every term weighs the same. Code blocks do not count, headings do.

    Raises:
        ValueError: `dims` is below 1.
    """
    if dims < 1:
        raise ValueError(f"Expected `dims` >= 1, got {dims}")
    weights = rarity or {}
    unseen = max(weights.values(), default=1.0)
    vector = [0.0] * dims
    for term, count in Counter(_document_terms(text)).items():
        bits = zlib.crc32(term.encode())
        # The sign, taken from a bit that does not choose the slot, lets collisions cancel out instead of adding up.
        sign = 1.0 if bits >> 31 else -1.0
        vector[(bits & 0x7FFF_FFFF) % dims] += sign * (1.0 + math.log(count)) * weights.get(term, unseen)
    norm = math.hypot(*vector)
    return [value / norm for value in vector] if norm else vector


def term_rarity(texts: Iterable[str]) -> dict[str, float]:
    """Return the inverse document frequency of a corpus's terms: 1 where all texts share one, more for rare ones."""
    documents = [set(_document_terms(text)) for text in texts]
    counts = Counter(term for document in documents for term in document)
    return {term: 1.0 + math.log((1 + len(documents)) / (1 + count)) for term, count in counts.items()}


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors, 0 where one of them is all zeros.

    Raises:
        ValueError: the vectors differ in length.
    """
    norms = math.hypot(*a) * math.hypot(*b)
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / norms if norms else 0.0


def estimate_tokens(text: str) -> int:
    """Return roughly how many tokens a model would count: one for every four bytes of UTF-8, rounded up."""
    return -(-len(text.encode("utf-8", errors="replace")) // _BYTES_PER_TOKEN)


def _lines_outside_blocks(text: str) -> Iterable[str]:
    """Yield the lines that are not in a code fence, a comment or the front matter; an open fence lasts to the end."""
    lines = _without_comments(text).splitlines()
    if lines and lines[0].rstrip() == "---" and "---" in (line.rstrip() for line in lines[1:]):
        lines = lines[[line.rstrip() for line in lines].index("---", 1) + 1 :]
    fence = ""
    for line in lines:
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line[mark.end() :].strip():
                fence = ""
                yield ""
        elif mark:
            fence = mark[1]
            yield ""
        else:
            yield line


def _without_comments(text: str) -> str:
    """Remove HTML comments, in time linear in the text even where thousands are opened and none is closed."""
    kept: list[str] = []
    start = 0
    while (opened := text.find("<!--", start)) >= 0 and (closed := text.find("-->", opened)) >= 0:
        kept.append(text[start:opened])
        start = closed + len("-->")
    return "".join(kept) + text[start:]


def _inline(text: str) -> str:
    """Remove inline markup and fold white space."""
    text = _LINK.sub(r"\1", _IMAGE.sub(" ", text))
    # Every second piece was inside a code span, where a star is a star.
    pieces = [piece if i % 2 else _EMPHASIS.sub("", _TAG.sub(" ", piece)) for i, piece in enumerate(_CODE.split(text))]
    return " ".join("".join(pieces).split())


def _sentences(paragraph: str) -> list[str]:
    found: list[str] = []
    start = 0
    for end in _SENTENCE_END.finditer(paragraph):
        sentence = paragraph[start : end.end()].strip()
        if sentence.lower().rpartition(" ")[2].lstrip("([\"'") not in _ABBREVIATIONS:
            found.append(sentence)
            start = end.end()
    if rest := paragraph[start:].strip():
        found.append(rest)
    return found


def _choose(sentences: Sequence[str], title: str, count: int) -> list[int]:
    """Return the positions of the `count` sentences worth most, in order of position."""
    terms = [_terms(sentence) for sentence in sentences]
    worth: dict[str, float] = dict(Counter(term for words in terms for term in words))
    total = sum(worth.values()) or 1.0
    in_title = set(_terms(title))
    worth = {term: min(1.0, n / total * (2.0 if term in in_title else 1.0)) for term, n in worth.items()}

    def score(i: int) -> float:
        words = terms[i]
        mean = sum(worth[word] for word in words) / max(len(words), _SHORT_SENTENCE_WORDS)
        return mean * (1.2 if i == 0 else 1.0) * (0.5 if sentences[i].endswith(":") else 1.0)

    left = list(range(len(sentences)))
    chosen: list[int] = []
    while left and len(chosen) < count:
        best = max(left, key=lambda i: (score(i), -i))
        left.remove(best)
        chosen.append(best)
        for word in set(terms[best]):
            worth[word] *= worth[word]
    return sorted(chosen)


def _document_terms(text: str) -> list[str]:
    parts = outline(text)
    return _terms("\n".join((*parts.titles, *parts.paragraphs))) or _terms(text)


def _terms(text: str) -> list[str]:
    """Return the words that carry meaning, lower case and without the commonest English endings."""
    words = (word.lower().replace("’", "'") for word in _WORD.findall(text))
    return [_stem(word) for word in words if len(word) > 1 and word not in _STOP_WORDS]


def _stem(word: str) -> str:
    word = word.removesuffix("'s")
    for ending, replacement in (("ies", "y"), ("sses", "ss"), ("ing", ""), ("ed", ""), ("s", "")):
        stem = word[: len(word) - len(ending)]
        if word.endswith(ending) and len(stem) >= 3 and not word.endswith(("ss", "us", "is")):
            return stem + replacement
    return word


def _cut(sentence: str) -> str:
    if len(sentence) <= _MAX_SENTENCE_CHARS:
        return sentence
    return sentence[: _MAX_SENTENCE_CHARS - 1].rstrip() + "…"
