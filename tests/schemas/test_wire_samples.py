"""Golden samples: what stands on the wire for every message, for other languages and for later versions of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from millstream_schemas import codec, events
from millstream_schemas.codec import encode
from millstream_schemas.envelope import Envelope
from millstream_schemas.permits import PERMITS_VERSION
from tests.support import samples

REMEDY = "run `python -m tests.support.samples` and read the difference: is it a change that schemas/README.md allows?"
FOLDERS = sorted(samples.FOLDER.iterdir())
FILES = [path for folder in FOLDERS for path in sorted(folder.glob("*.json"))]
UNIONS = [group for group in samples.GROUPS if get_args(group.type)]


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _decode(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes(), type=samples.group_of(path.name).type)


def test_the_committed_samples_are_those_of_the_contract() -> None:
    """A change on the wire is seen in review, as a changed sample."""
    committed = {path.name: path.read_bytes() for path in samples.CURRENT.glob("*.json")}
    wanted = samples.documents()
    differing = sorted(name for name in committed.keys() | wanted if committed.get(name) != wanted.get(name))
    assert not differing, f"schemas/wire-samples/v1 differs in {', '.join(differing)}\n→ {REMEDY}"


@pytest.mark.parametrize("group", UNIONS, ids=lambda group: group.schema)
def test_every_member_of_every_union_has_a_sample(group: samples.Group) -> None:
    """A new kind of message cannot be added without one."""
    members = {kind.__struct_config__.tag for kind in get_args(group.type)}
    assert {name.partition("-")[0] for name in group.samples} == members


def test_every_field_of_every_message_stands_in_a_sample() -> None:
    """A new field cannot be added without showing what it looks like."""
    shown: dict[type, set[str]] = {}
    for group in samples.GROUPS:
        for message in group.samples.values():
            _collect(message, shown)
    missing = [
        f"{kind.__name__}.{field.name}"
        for kind, names in shown.items()
        for field in msgspec.structs.fields(kind)
        if field.encode_name not in names
    ]
    assert not missing, f"no sample shows {', '.join(missing)}"


def _collect(value: object, shown: dict[type, set[str]]) -> None:
    if isinstance(value, msgspec.Struct):
        shown.setdefault(type(value), set()).update(json.loads(encode(value)))
        if isinstance(value, Envelope):
            shown[Envelope].add("v")  # the producer's field: read, and written only where it is not 1
        for name in value.__struct_fields__:
            _collect(getattr(value, name), shown)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, shown)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_every_sample_still_decodes_and_says_the_same_again(path: Path) -> None:
    """Samples of released versions are read for ever; none loses a field on the way."""
    message = _decode(path)
    again = encode(message)
    assert msgspec.json.decode(again, type=samples.group_of(path.name).type) == message
    if not path.name.startswith("origins-c-"):  # written by hand: they state defaults, which we leave out
        assert json.loads(again) == json.loads(path.read_bytes())


@pytest.mark.parametrize("group", samples.GROUPS, ids=lambda group: group.schema)
def test_every_message_tells_its_version(group: samples.Group) -> None:
    """`v` is never left out, except in an envelope, which belongs to its producer."""
    version = PERMITS_VERSION if group.schema.startswith(("permit-", "governor-")) else 1
    for message in group.samples.values():
        assert isinstance(message, Envelope) or json.loads(encode(message))["v"] == version


@pytest.mark.parametrize("group", UNIONS, ids=lambda group: group.schema)
def test_a_message_of_a_newer_peer_gets_a_field_more_and_is_still_read(group: samples.Group) -> None:
    """The first rule of evolution: readers skip what they do not know."""
    for message in group.samples.values():
        known = json.loads(encode(message))
        grown = json.dumps(known | {"added_later": {"a": [1]}}).encode()
        assert json.loads(encode(msgspec.json.decode(grown, type=group.type))) == known


@pytest.mark.parametrize(
    ("decode", "name"),
    [
        (codec.decode_event, "event.queued.json"),
        (codec.decode_info, "info.duplicate.json"),
        (codec.decode_command, "command.cancel.json"),
        (codec.decode_work_item, "work-item.full.json"),
        (codec.decode_dead_letter, "dead-letter.full.json"),
        (codec.decode_submit_reply, "submit-reply.accepted.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_version_or_kind_is_told_apart_from_what_is_known(decode: Any, name: str) -> None:
    """It was written by a newer peer, so it is never taken for one of ours nor for nonsense of a producer."""
    known = json.loads((samples.CURRENT / name).read_bytes())
    assert encode(decode(json.dumps(known).encode()))
    with pytest.raises(codec.UnknownMessage, match="version 2"):
        decode(json.dumps(known | {"v": 2}).encode())
    tag = next((field for field in ("kind", "verb") if field in known), None)
    if tag is not None:
        with pytest.raises(codec.UnknownMessage):
            decode(json.dumps(known | {tag: "added_later"}).encode())


def test_both_envelopes_of_the_origins_are_valid_as_they_stand() -> None:
    """The wire was made for them; nothing in them is unknown."""
    resume, unknown = codec.decode_envelope((samples.CURRENT / "origins-c-resume.json").read_bytes())
    assert (resume.task_type, resume.payload_ref, unknown) == ("agent.resume", "object://payload/task_01.json", [])
    run, unknown = codec.decode_envelope((samples.CURRENT / "origins-c-run.json").read_bytes())
    assert (run.task_type, run.tenant_id, unknown) == ("agent.run", "t_123", [])
    assert run.budget.max_cost_usd == 0.5
    assert run.retry_policy is not None
    assert run.retry_policy.base_seconds == 5.0
    assert run.trace_context is not None
    assert run.trace_context.parent_span_id == "00f067aa0ba902b7"


def test_raw_json_is_carried_byte_for_byte() -> None:
    """No float is rewritten, no member reordered in what belongs to the user."""
    body = b'{"task_type":"a","payload":{"b":1.0,"a":1e-3,"big":123456789012345678901234567890},"context":null}'
    envelope, _ = codec.decode_envelope(body)
    item = msgspec.structs.replace(samples.ITEM, envelope=envelope)
    carried = codec.decode_work_item(encode(item)).envelope
    assert bytes(carried.payload) == b'{"b":1.0,"a":1e-3,"big":123456789012345678901234567890}'
    assert bytes(carried.context) == b"null"


def test_absent_raw_json_is_left_out_and_null_is_kept() -> None:
    """A handler that returned None has a result; a task without payload has none."""
    without = events.Completed(card=samples.CARD)
    assert "result" not in json.loads(encode(without))
    null = events.Completed(card=samples.CARD, result=msgspec.Raw(b"null"))
    assert json.loads(encode(null))["result"] is None
