"""The files of deploy/, checked by what can check them without a container engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from millstream.server import find_server_binary

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
DOCKERFILE = DEPLOY / "Dockerfile"

INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "SHELL", "STOPSIGNAL",
    "USER", "VOLUME", "WORKDIR",
}  # fmt: skip  # no ADD: it fetches and unpacks behind one's back


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(COMPOSE)
    return loaded


def _actor_services() -> dict[str, list[str]]:
    services: dict[str, Any] = _compose()["services"]
    return {name: service["command"] for name, service in services.items() if service["image"] == "millstream"}


def _instructions() -> list[tuple[str, str]]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def test_the_server_accepts_its_configuration(tmp_path: Path) -> None:
    """`nats-server -t` reads the file as it is, with the store moved to a folder of this test."""
    text = (DEPLOY / "nats-server.conf").read_text()
    assert 'store_dir: "/data"' in text
    config = tmp_path / "nats-server.conf"
    config.write_text(text.replace('"/data"', json.dumps(str(tmp_path / "store"))))
    checked = subprocess.run(
        [find_server_binary(), "-t", "-c", config], capture_output=True, text=True, check=False, timeout=30
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_server_has_limits_and_the_flag_that_our_client_needs() -> None:
    """Payload, file and memory store are limited, and acks keep the form that nats-py can read."""
    text = (DEPLOY / "nats-server.conf").read_text()
    for setting in ("max_payload:", "max_file_store:", "max_memory_store:", "js_ack_fc_v2: false"):
        assert re.search(rf"^[^#]*{re.escape(setting)}", text, re.MULTILINE), setting


def test_the_compose_file_fits_the_compose_schema() -> None:
    """The published schema of compose files has nothing to object to."""
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_compose_file_mounts_only_what_exists() -> None:
    """Bind mounts name files of this folder, named volumes are declared."""
    compose = _compose()
    for service in compose["services"].values():
        for mount in service.get("volumes", ()):
            source = re.sub(r"^\$\{\w+:-(.*?)\}", r"\1", mount).split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], mount


def test_the_compose_file_publishes_to_this_machine_alone() -> None:
    """Nothing listens on the outside before somebody decides so."""
    ports = [port for service in _compose()["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_actor_runs_in_the_compose_file() -> None:
    """The four actors are services of their own."""
    assert {command[0] for command in _actor_services().values()} == {"dispatcher", "governor", "tracker", "worker"}


@pytest.mark.parametrize("service", ["dispatcher", "governor", "tracker", "worker"])
def test_the_command_of_a_service_is_one_we_have(service: str) -> None:
    """Each command and each of its options is known to our command line."""
    command, *rest = _actor_services()[service]
    shown = subprocess.run(
        [sys.executable, "-m", "millstream", command, "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    unknown = [word for word in rest if word.startswith("--") and word not in shown.stdout]
    assert unknown == []


def test_the_dockerfile_has_known_instructions_in_a_sane_order() -> None:
    """Every line is an instruction; the first chooses an image with a version."""
    instructions = _instructions()
    assert {word for word, _ in instructions} <= INSTRUCTIONS
    assert instructions[0][0] == "FROM"
    images = [rest.split()[0] for word, rest in instructions if word == "FROM"]
    assert all(re.search(r":\d+\.\d+", image) for image in images), images


def test_the_dockerfile_copies_only_what_exists() -> None:
    """A COPY from the checkout names files that are in it."""
    for word, rest in _instructions():
        if word == "COPY" and not rest.startswith("--from="):
            *sources, _ = rest.split()
            assert [source for source in sources if not (REPOSITORY / source).exists()] == []


def test_the_image_runs_without_root_and_gets_its_signals() -> None:
    """The last stage has a user, and an entry point that is no shell, which would swallow SIGTERM."""
    instructions = _instructions()
    last = instructions[max(i for i, (word, _) in enumerate(instructions) if word == "FROM") :]
    settings = dict(last)
    assert settings["USER"] not in ("root", "0")
    assert json.loads(settings["ENTRYPOINT"]) == ["millstream"]


def test_the_shell_of_the_dockerfile_parses() -> None:
    """What RUN hands to the shell is at least valid shell."""
    shell = shutil.which("sh")
    assert shell is not None
    for word, rest in _instructions():
        if word == "RUN":
            subprocess.run([shell, "-n", "-c", rest], check=True, timeout=10)
