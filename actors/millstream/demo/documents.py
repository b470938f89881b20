"""Which files the demo works on, and how much may be asked of the model about them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from millstream.demo import bundled_texts
from millstream.demo.text import estimate_tokens, outline
from millstream.errors import CallerError

SUFFIXES = (".md", ".markdown", ".txt")
MAX_CHARS = 8_000
"""A longer text is cut before it is sent: the demo's window of context."""
MAX_BYTES = 4 * 1024 * 1024
DEFAULT_MAX_FILES = 40
BROKEN_NAME = "broken.md"

_KINDS = 3
_MINUTES = 1.7
_LONGEST_MINUTES = 3.0
_FEWEST_OF_OUR_OWN = 3
_TOKEN_HEADROOM = 2.0
_BROKEN_BYTES = b"# A note that no handler can read\n\n" + bytes(range(0x80, 0x100)) + b"\x00\xff\xfe\n"


class Unreadable(Exception):
    """A file that holds no text; the message says why."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file to work on."""

    path: Path
    title: str
    tokens: int
    """About how many tokens its text is, as it will be sent."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The files of a run; `found` is how many there were before the cap."""

    documents: tuple[Document, ...]
    source: str
    found: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the shared limit allows, and how often the local model server fails (every K-th call)."""

    calls: int
    requests_per_minute: int
    tokens_per_minute: int
    error_every: int


def read_text(path: Path) -> str:
    """Return the text of a file, cut to MAX_CHARS.

    Raises Unreadable for a file that is missing, too large, empty, or no UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise Unreadable(f"{path.name} is over {MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path.name} is no UTF-8 text: {error.reason} at byte {error.start}") from None
    if "\0" in text:
        raise Unreadable(f"{path.name} is no text: it has a NUL at character {text.index(chr(0))}")
    if not text.strip():
        raise Unreadable(f"{path.name} is empty")
    return text[:MAX_CHARS]


def choose(folder: Path | None, scratch: Path, max_files: int | None, limit: int | None) -> Chosen:
    """The files of `folder`, else of this repository's docs, else the bundled texts (written to `scratch`).

    Without `max_files` there are as many as the limit lets through in a few minutes.
    Raises CallerError for a folder without any Markdown or text file.
    """
    if folder is not None:
        paths, source = _text_files(folder), str(folder)
        if not paths:
            raise CallerError(f"{folder} holds no {', '.join(SUFFIXES)} file")
    else:
        paths, source = _own_documents(scratch)
    cap = max_files if max_files is not None else _cap(limit)
    return Chosen(tuple(_document(path) for path in paths[:cap]), source, len(paths))


def broken_document(scratch: Path) -> Document:
    """Write the file that no handler can read: its bytes are no text in any encoding that notes are read in."""
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / BROKEN_NAME
    path.write_bytes(_BROKEN_BYTES)
    return Document(path, BROKEN_NAME, 0)


def plan(documents: Iterable[Document], limit: int | None) -> Plan:
    """Limits that make these documents wait, though only for a few minutes; `limit` sets calls per minute instead."""
    tokens = [document.tokens + 1_000 for document in documents]  # what is sent beside the text, and the answer
    calls = _KINDS * len(tokens)
    requests = limit if limit is not None else max(2, round(calls / _MINUTES))
    per_call = sum(tokens) / max(len(tokens), 1)
    per_minute = max(per_call * requests * _TOKEN_HEADROOM, 2.0 * max(tokens, default=0))
    return Plan(
        calls=calls,
        requests_per_minute=requests,
        tokens_per_minute=math.ceil(per_minute / 1_000) * 1_000,
        error_every=min(10, max(3, calls // 2)),
    )


def _cap(limit: int | None) -> int:
    if limit is None:
        return DEFAULT_MAX_FILES
    return max(1, min(DEFAULT_MAX_FILES, int(limit * _LONGEST_MINUTES / (_KINDS + 0.5))))


def _own_documents(scratch: Path) -> tuple[list[Path], str]:
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file() and (checkout / "docs").is_dir():
        paths = _text_files(checkout / "docs")
        if len(paths) >= _FEWEST_OF_OUR_OWN:
            return paths, str(checkout / "docs")
    scratch.mkdir(parents=True, exist_ok=True)
    for name, text in bundled_texts().items():
        (scratch / name).write_text(text, encoding="utf-8")
    return [scratch / name for name in bundled_texts()], "the bundled notes"


def _text_files(folder: Path) -> list[Path]:
    """Markdown and text files at any depth, sorted; hidden and empty ones and those of packages are left out."""
    found: list[Path] = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "node_modules")
        paths = (Path(where) / name for name in sorted(names) if not name.startswith("."))
        found += [path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file() and path.stat().st_size]
    return found


def _document(path: Path) -> Document:
    try:
        text = read_text(path)
    except Unreadable:
        return Document(path.absolute(), path.name, 0)  # its task will say what is wrong with it
    titles = outline(text).titles
    return Document(path.absolute(), (titles[0] if titles else path.stem)[:200], estimate_tokens(text))
