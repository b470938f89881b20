"""Reading our own source for the architecture tests: modules, what they import, how long they are."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = {"actors": "millstream", "schemas": "millstream_schemas"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One Python file of ours, by its import name."""

    name: str
    path: Path

    @property
    def where(self) -> str:
        """The path from the top of the repository."""
        return self.path.relative_to(REPOSITORY).as_posix()

    @cached_property
    def text(self) -> str:
        """The file as it is."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The file parsed."""
        return ast.parse(self.text, filename=self.where)

    def inside(self, *packages: str) -> bool:
        """Whether this is one of `packages` or lies in one."""
        return any(self.name == package or self.name.startswith(package + ".") for package in packages)

    def imports(self) -> Iterator[tuple[int, str]]:
        """Yield line and full name of everything imported, wherever in the file; `from a import b` is `a.b`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"

    def functions(self) -> Iterator[tuple[Function, int]]:
        """Yield every function and its length in lines, docstring and decorators not counted."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                last = node.end_lineno or node.lineno
                yield node, last - node.lineno + 1 - _docstring_lines(node)

    def strings(self) -> Iterator[tuple[int, str]]:
        """Yield line and value of every string that is not a docstring, the fixed parts of f-strings included."""
        docstrings = {id(doc) for node in ast.walk(self.tree) if (doc := _docstring(node)) is not None}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.lineno, node.value

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        package = parts if self.path.name == "__init__.py" else parts[:-1]
        kept = package[: len(package) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])


@lru_cache(maxsize=1)
def modules() -> tuple[Module, ...]:
    """Return every module under the two source roots."""
    found: list[Module] = []
    for root in ROOTS:
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            parts = list(path.relative_to(REPOSITORY / root).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found.append(Module(".".join(parts), path))
    return tuple(found)


@lru_cache(maxsize=1)
def repository_files() -> tuple[Path, ...]:
    """Return every file that belongs to the project: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    ).stdout.decode()
    return tuple(path for name in listed.split("\0") if name and (path := REPOSITORY / name).is_file())


def _docstring(node: ast.AST) -> ast.Constant | None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return None
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value
    return None


def _docstring_lines(node: Function) -> int:
    doc = _docstring(node)
    return 0 if doc is None else (doc.end_lineno or doc.lineno) - doc.lineno + 1
