"""What users install: the wheel, built from the sdist as a release is, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.source import REPOSITORY, ROOTS

# Imports every module of both packages, with extras and development tools out of reach, and tells where they came from.
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(["uvloop", "opentelemetry.exporter", "pytest", "hypothesis", "playwright", "ruamel"]))
for name in ("millstream", "millstream_schemas"):
    package = importlib.import_module(name)
    print(package.__file__)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the sdist, without fetching anything."""
    out = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(REPOSITORY)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a throw-away environment that has the wheel and, from here, its dependencies alone."""
    home = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        check=True,
    )
    return python


def _run(python: Path, *args: str, cwd: Path | str = "/") -> str:
    # Path files are not read in folders named by PYTHONPATH, so the editable install does not come along.
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run([str(python), *args], env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    """Two names reach site-packages; every file beside the source is in, licence and markers included."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {*ROOTS.values(), "millstream-0.1.0.dist-info"}
    expected = {
        path.relative_to(REPOSITORY / root).as_posix()
        for root, package in ROOTS.items()
        for path in (REPOSITORY / root / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert sorted(expected - names) == []
    assert "millstream-0.1.0.dist-info/licenses/LICENSE" in names


def test_every_module_of_the_installed_wheel_imports(installed: Path) -> None:
    """No module needs the checkout, a development tool or an extra to be imported."""
    origins = _run(installed, "-c", IMPORT_ALL).split()
    assert all(Path(origin).is_relative_to(installed.parents[1]) for origin in origins), origins


def test_the_installed_command_runs(installed: Path) -> None:
    """The script of the wheel starts from any folder and names its commands."""
    assert "worker" in _run(installed, str(installed.parent / "millstream"), "--help")


def test_the_installed_demo_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """Without a checkout around it, the demo takes the notes of the wheel through all actors, and its figures add up."""
    printed = _run(installed, "-m", "millstream", "demo", "--limit", "600", "--max-files", "2", "--json", cwd=tmp_path)
    origin, notes = _run(
        installed,
        "-c",
        "import json, millstream.demo as d; print(d.__file__); print(json.dumps(list(d.bundled_texts())))",
    ).splitlines()
    assert Path(origin).is_relative_to(installed.parents[1])
    found = json.loads(printed.splitlines()[-1])
    assert (found["submitted"], found["completed"], found["failed"]) == (7, 6, 1)
    assert [Path(note["path"]).name for note in found["notes"]] == sorted(json.loads(notes)[:2])
    assert list(tmp_path.iterdir()) == []
