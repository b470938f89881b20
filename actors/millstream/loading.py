"""Finds the App that `module:app` names."""

import importlib
import sys
from pathlib import Path

from millstream.app import App
from millstream.errors import AppNotFound


def load_app(path: str) -> App:
    """The App at `module:name` (name defaults to `app`), looked for in the current folder first; raises AppNotFound."""
    module_name, _, name = path.partition(":")
    if not module_name:
        raise AppNotFound(f"Expected `module:app`, got `{path}`")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise AppNotFound(f"the module {module_name!r} cannot be imported: {error}") from error
    found = getattr(module, name or "app", None)
    if not isinstance(found, App):
        what = "nothing" if found is None else f"a {type(found).__name__}"
        raise AppNotFound(f"{path!r} should be an App, but {what} was found there")
    return found
