"""The Node packages of the foreign producer, as its lock file pins them, installed once for an environment."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.tools import npm_command

FOREIGN = Path(__file__).parent / "foreign"
_FILES = ("package.json", "package-lock.json")


def node_modules() -> Path:
    """Return the `node_modules` folder with the pinned packages; installs them into this environment where it is missing."""
    pinned = hashlib.sha256(b"".join((FOREIGN / name).read_bytes() for name in _FILES)).hexdigest()[:16]
    folder = Path(sys.prefix) / f"foreign-node-{pinned}"
    if not folder.exists():
        _install(folder)
    return folder / "node_modules"


def _install(folder: Path) -> None:
    """Install beside the folder, then move: what exists is whole, whoever else installs at the same moment."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".foreign-node-") as made:
        fresh = Path(made) / "fresh"
        fresh.mkdir()
        for name in _FILES:
            shutil.copy(FOREIGN / name, fresh)
        command = [*npm_command(), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=fresh, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"npm ci exited {done.returncode}:\n{done.stderr}"
        try:
            fresh.rename(folder)
        except OSError:
            assert folder.exists()  # another process was faster
