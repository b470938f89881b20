"""Policy modules with one rule changed, to show that the model would notice."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any


def mutant(module: ModuleType, old: str, new: str) -> Any:
    """The functions of `module` with `old`, which its source holds exactly once, replaced by `new`.

    Its classes stay the real ones, so that verdicts still match.
    """
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{module.__name__} holds {source.count(old)} times: {old}"
    tree = ast.parse(source.replace(old, new))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names: dict[str, Any] = dict(vars(module))
    exec(compile(tree, f"<mutant of {module.__name__}>", "exec"), names)
    return SimpleNamespace(**names)
