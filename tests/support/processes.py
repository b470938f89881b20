"""Actors as real processes: started from the command line, killed for real, their logs kept."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from millstream.server import dies_with_parent
from tests.support.waiting import wait_until_sync

REPOSITORY = Path(__file__).resolve().parents[2]


class ActorProcess:
    """One `python -m millstream …` that runs until it is stopped, killed or done."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @property
    def pid(self) -> int:
        """The process id; it stays the same for the life of this object."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the signal's number after a kill, None while it runs."""
        return self._process.poll()

    def log(self) -> str:
        """Return everything the process has printed so far, both channels."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def wait_for_log(self, text: str, timeout: float = 30.0) -> None:
        """Wait until the process has printed `text`; fails at once when it ends without having done so."""

        def seen() -> bool:
            running = self.running
            if text in self.log():
                return True
            assert running, f"{self.name} ended with {self.returncode} before it said {text!r}:\n{self.log()}"
            return False

        wait_until_sync(seen, f"{self.name} says {text!r}", timeout)

    def kill(self) -> None:
        """Kill -9, and wait until the process is gone."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        """Ask the process to drain and end (SIGTERM); returns at once."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Send any signal (SIGSTOP, SIGCONT…); a process that has ended already is left alone."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for the end and return the exit status; TimeoutError says what it printed last."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} still runs after {timeout:g} s:\n{self.log()[-2000:]}") from None


class Processes:
    """Starts actors against one server and ends every one of them at the end of the test."""

    def __init__(self, log_dir: Path, env: Mapping[str, str] | None = None) -> None:
        self._log_dir = log_dir
        self._env = dict(env or {})
        self._started: list[ActorProcess] = []

    def start(
        self, *args: str, name: str | None = None, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY
    ) -> ActorProcess:
        """Run `python -m millstream ARGS`; `env` is laid over the fixture's and this process's environment."""
        return self.start_command([sys.executable, "-m", "millstream", *args], name or args[0], env=env, cwd=cwd)

    def start_command(
        self, argv: list[str], name: str, *, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY
    ) -> ActorProcess:
        """Run any program in the same way, a producer in another language for example."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_path = self._log_dir / f"{len(self._started):02d}-{name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                dies_with_parent(argv),
                cwd=cwd,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self._env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        actor = ActorProcess(name, process, log_path)
        self._started.append(actor)
        return actor

    def run(self, *args: str, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> str:
        """Run a command of ours to its end and return what it printed; fails unless it exits 0."""
        actor = self.start(*args, env=env)
        status = actor.wait(timeout)
        assert status == 0, f"millstream {' '.join(args)} exited {status}:\n{actor.log()}"
        return actor.log()

    def close(self) -> None:
        """Kill what still runs, then print the logs: pytest shows them only for a test that failed."""
        for actor in reversed(self._started):
            actor.send_signal(signal.SIGCONT)
            actor.kill()
        for actor in self._started:
            sys.stdout.write(f"--- {actor.log_path.name} (exit {actor.returncode})\n{actor.log()[-8000:]}\n")
