"""The JSON Schemas say what the contract says, and are committed as they are generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from millstream_schemas import codec, export
from millstream_schemas.envelope import Envelope
from tests.support import samples

FOLDER = samples.FOLDER.parent / "json-schema"
REMEDY = "run `millstream schema export` (or `python -m millstream_schemas.export`) at the top of the repository"
SAMPLES = [path for folder in sorted(samples.FOLDER.iterdir()) for path in sorted(folder.glob("*.json"))]


def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(export.documents()[f"{name}.json"]))


def test_the_committed_schemas_are_those_of_the_contract() -> None:
    """Whoever changes a message changes its JSON Schema in the same commit."""
    committed = {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
    wanted = export.documents()
    differing = sorted(name for name in committed.keys() | wanted if committed.get(name) != wanted.get(name))
    assert not differing, f"schemas/json-schema differs in {', '.join(differing)}\n→ {REMEDY}"


def test_generating_twice_gives_the_same_bytes() -> None:
    """Otherwise the drift test would fail by chance."""
    assert export.documents() == export.documents()


def test_write_makes_the_folder_hold_exactly_the_documents(tmp_path: Path) -> None:
    """A message that is gone leaves no schema behind; other files stay."""
    (tmp_path / "gone.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("kept")
    written = export.write(tmp_path)
    assert {path.name: path.read_bytes() for path in written} == export.documents()
    assert {path.name for path in tmp_path.iterdir()} == export.documents().keys() | {"notes.txt"}


@pytest.mark.parametrize("name", sorted(export.documents()))
def test_each_document_is_a_schema_with_identity_and_words(name: str) -> None:
    """Draft 2020-12, an id of its own, a title, a description; no pattern that only Python understands."""
    text = export.documents()[name]
    document: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(document)
    assert document["$id"] == f"urn:millstream:schema:v1:{name.removesuffix('.json')}"
    assert document["title"]
    assert document["description"]
    assert rb"\\Z" not in text


def test_every_field_of_the_envelope_is_described() -> None:
    """Producers read the JSON Schema in their editors."""
    assert set(export.ENVELOPE_FIELDS) == set(Envelope.__struct_fields__)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_sample_is_valid_by_its_schema(path: Path) -> None:
    """Samples and schemas come from the same structs by different ways; here they meet."""
    _validator(samples.group_of(path.name).schema).validate(json.loads(path.read_bytes()))


REFUSED_BY_BOTH: dict[str, Any] = {
    "an array": [],
    "null": None,
    "no task_type": {},
    "an empty task_type": {"task_type": ""},
    "129 characters": {"task_type": "a" * 129},
    "a newer version": {"task_type": "a", "v": 2},
    "a tenant with a dot": {"task_type": "a", "tenant_id": "a.b"},
    "an id with a line break": {"task_type": "a", "task_id": "a\nb"},
    "an unknown priority": {"task_type": "a", "priority": "urgent"},
    "a priority that is null": {"task_type": "a", "priority": None},
    "no attempts": {"task_type": "a", "budget": {"max_attempts": 0}},
    "attempts as text": {"task_type": "a", "budget": {"max_attempts": "3"}},
    "a negative delay": {"task_type": "a", "delay_seconds": -1},
    "a delay over the cap": {"task_type": "a", "delay_seconds": 1e308},
    "a factor of zero": {"task_type": "a", "retry_policy": {"factor": 0}},
    "too many tags": {"task_type": "a", "tags": ["a"] * 33},
    "a pin that is no text": {"task_type": "a", "pins": {"model": 1}},
    "a reference that is no URI": {"task_type": "a", "payload_ref": "payload/1.json"},
    "a callback without url": {"task_type": "a", "callback": {}},
}


@pytest.mark.parametrize("value", REFUSED_BY_BOTH.values(), ids=REFUSED_BY_BOTH.keys())
def test_a_producer_that_checks_by_the_schema_learns_what_the_dispatcher_would_say(value: Any) -> None:
    """What the decoder refuses, the schema refuses before it is published."""
    assert not _validator("envelope").is_valid(value)
    with pytest.raises(codec.InvalidEnvelope):
        codec.decode_envelope(json.dumps(value).encode())


@pytest.mark.parametrize(
    "value",
    [
        {"payload": 1, "payload_ref": "s3://b/1"},
        {"payload": None, "payload_ref": "s3://b/1"},
        {"context": {}, "context_ref": "s3://b/1"},
        {"not_before": "2026-05-09T10:00:00Z", "delay_seconds": 1},
    ],
    ids=" and ".join,
)
def test_the_schema_refuses_two_answers_to_one_question(value: dict[str, Any]) -> None:
    """Admission refuses them too; the structs alone cannot say it."""
    assert not _validator("envelope").is_valid({"task_type": "a"} | value)


@pytest.mark.parametrize(
    "value",
    [
        {"payload": 1, "payload_ref": None},
        {"not_before": None, "delay_seconds": 1},
        {"payload": None},
        {"colour": "unknown fields are no fault"},
    ],
    ids=" and ".join,
)
def test_the_schema_takes_what_the_decoder_takes(value: dict[str, Any]) -> None:
    """Null stands for absence where a field may be null; unknown fields are skipped."""
    whole = {"task_type": "a"} | value
    _validator("envelope").validate(whole)
    codec.decode_envelope(json.dumps(whole).encode())
