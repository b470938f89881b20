"""Subjects of the in-memory broker: matching, and an index from subject to sequences that wildcards can search."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

ONE = "*"
REST = ">"


def matches(pattern: str, subject: str) -> bool:
    """True when `subject`, which has no wildcards, falls under `pattern`."""
    for wanted, token in zip_longest(pattern.split("."), subject.split(".")):
        if wanted == REST and token is not None:
            return True
        if wanted is None or token is None or wanted not in (ONE, token):
            return False
    return True


def overlap(a: str, b: str) -> bool:
    """True when some subject falls under both patterns."""
    for left, right in zip_longest(a.split("."), b.split(".")):
        if left is None or right is None:
            return False
        if REST in (left, right):
            return True
        if left != right and ONE not in (left, right):
            return False
    return True


class _Node:
    __slots__ = ("below", "sequences", "subject")

    def __init__(self) -> None:
        self.subject = ""
        self.below: dict[str, _Node] = {}
        self.sequences: dict[int, None] = {}  # a set that keeps its order: ascending


class SubjectIndex:
    """The sequences on each subject, as a tree of tokens; a search visits only branches that can match."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, subject: str, seq: int) -> None:
        """Note that `seq`, higher than all before, lies on `subject`."""
        node = self._root
        for token in subject.split("."):
            node = node.below.setdefault(token, _Node())
        node.sequences[seq] = None
        node.subject = subject

    def remove(self, subject: str, seq: int) -> None:
        """Forget `seq`, and the branches that held nothing else."""
        path = [self._root]
        tokens = subject.split(".")
        for token in tokens:
            path.append(path[-1].below[token])
        del path[-1].sequences[seq]
        for parent, token, node in zip(path[-2::-1], tokens[::-1], path[:0:-1], strict=True):
            if node.below or node.sequences:
                return
            del parent.below[token]

    def last(self, pattern: str) -> int:
        """The highest sequence under `pattern`, 0 where there is none."""
        return max((next(reversed(node.sequences)) for node in self._find(pattern)), default=0)

    def all(self, pattern: str) -> list[int]:
        """The sequences under `pattern`, ascending."""
        return sorted(seq for node in self._find(pattern) for seq in node.sequences)

    def counts(self, pattern: str) -> dict[str, int]:
        """How many sequences each subject under `pattern` has."""
        return {node.subject: len(node.sequences) for node in self._find(pattern)}

    def _find(self, pattern: str) -> Iterator[_Node]:
        return self._walk(self._root, pattern.split("."), 0)

    def _walk(self, node: _Node, tokens: list[str], depth: int) -> Iterator[_Node]:
        if depth == len(tokens):
            if node.sequences:
                yield node
            return
        token = tokens[depth]
        if token == REST:
            for child in node.below.values():
                yield from self._under(child)
        elif token == ONE:
            for child in node.below.values():
                yield from self._walk(child, tokens, depth + 1)
        elif token in node.below:
            yield from self._walk(node.below[token], tokens, depth + 1)

    def _under(self, node: _Node) -> Iterator[_Node]:
        if node.sequences:
            yield node
        for child in node.below.values():
            yield from self._under(child)
