"""docs/wire.md is what producers in other languages build on, so it is checked like code."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import msgspec

from millstream_schemas.codec import decode_envelope
from millstream_schemas.commands import SubmitReply
from millstream_schemas.envelope import MAX_ENVELOPE_BYTES, MAX_NESTING, MAX_WAIT_S, Envelope
from millstream_schemas.keys import derive_key
from tests.support import samples

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def _table(heading: str) -> list[list[str]]:
    section = TEXT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def test_the_table_names_every_field_of_the_envelope_and_no_other() -> None:
    """A field that is not in the table does not exist for a producer."""
    named = [name for row in _table("The envelope") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(Envelope.__struct_fields__)


def test_every_json_block_is_what_it_is_shown_as() -> None:
    """An envelope decodes without unknown fields, a reply as a reply."""
    blocks = _blocks("json")
    assert len(blocks) == 4
    for block in blocks:
        if "kind" in json.loads(block):
            msgspec.json.decode(block, type=SubmitReply)
        else:
            assert decode_envelope(block.encode())[1] == []


def test_the_envelope_of_the_origins_stands_there_as_it_is() -> None:
    """The example that readers copy is the one that runs end to end."""
    assert samples.ORIGINS_C_RUN in _blocks("json")


def test_the_worked_example_of_a_key_is_right() -> None:
    """Every line of it, since others compare theirs with each."""
    found = re.search(r"^hashed +(.*)$\n.*\n^SHA-256 +(\w+)$\n^key +(\w+)$", TEXT, re.MULTILINE)
    assert found is not None
    hashed = bytes.fromhex(found[1].replace(" ", ""))
    assert hashlib.sha256(hashed).hexdigest() == found[2]
    assert derive_key("key", "acme", "note:42:summary") == found[3]


def test_the_limits_are_those_of_the_contract() -> None:
    """Numbers in prose are the first to become wrong."""
    assert MAX_ENVELOPE_BYTES == 262_144
    assert "**At most 256 KiB** (262 144 bytes)" in TEXT
    assert f"**{MAX_NESTING} levels** of nesting" in TEXT
    assert MAX_WAIT_S == 7_776_000
    assert "0 to 7 776 000 (90 days)" in TEXT


def test_the_python_example_is_python() -> None:
    """It is run end to end elsewhere; here it must at least parse."""
    for block in _blocks("python"):
        compile(block, "docs/wire.md", "exec")
