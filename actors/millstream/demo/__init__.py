"""The demo's own parts: text tools, a local model server, a client for it, and bundled notes.

Nothing in the runtime imports this package; it stands beside the actors as a user's application would.
"""

from __future__ import annotations

from importlib import resources

__all__ = ["bundled_texts"]


def bundled_texts() -> dict[str, str]:
    """Return the notes that ship with the package, file name to Markdown, in the order of their names."""
    folder = resources.files(__name__) / "texts"
    notes = (entry for entry in folder.iterdir() if entry.name.endswith(".md"))
    return {entry.name: entry.read_text(encoding="utf-8") for entry in sorted(notes, key=lambda entry: entry.name)}
