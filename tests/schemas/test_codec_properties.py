"""Over arbitrary and mutated bytes, decoding raises its one error, and what it takes survives a round trip."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream_schemas import codec
from millstream_schemas.codec import InvalidEnvelope, UnknownMessage, decode_envelope, encode
from millstream_schemas.envelope import Envelope
from tests.support import samples

ENVELOPES = [content for name, content in samples.documents().items() if name.startswith(("envelope.", "origins-c-"))]
READERS = {
    "event": codec.decode_event,
    "info": codec.decode_info,
    "command": codec.decode_command,
    "work-item": codec.decode_work_item,
    "dead-letter": codec.decode_dead_letter,
    "submit-reply": codec.decode_submit_reply,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
SPICE = st.sampled_from(
    [
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b"\\",
        b"\\ud800",
        b"\xff",
        b"\x00",
        b"NaN",
        b"1e400",
        b"null",
        b",",
        b":",
        b"-",
        b"9" * 50,
    ]
)


@st.composite
def _mutated(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    body = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(body)))
        end = min(len(body), start + draw(st.integers(0, 12)))
        body[start:end] = draw(SPICE | st.binary(max_size=4))
    return bytes(body)


def _outcome(body: bytes) -> Envelope | InvalidEnvelope:
    try:
        envelope, unknown = decode_envelope(body)
    except InvalidEnvelope as error:
        return error
    encode(unknown)  # they are told in an info
    return envelope


def _only_the_one_error(body: bytes) -> None:
    outcome = _outcome(body)
    if isinstance(outcome, InvalidEnvelope):
        assert outcome.path.startswith("$")
        assert outcome.byte_offset is None or 0 <= outcome.byte_offset <= len(body)
        encode(outcome.message)  # it is stored in a dead letter
    else:
        again, unknown = decode_envelope(encode(outcome))
        assert encode(again) == encode(outcome)
        assert unknown == []


@given(st.binary(max_size=300))
@example(b"\xef\xbb\xbf{}")
@example(b'{"task_type":"a"')
def test_arbitrary_bytes_raise_nothing_else(body: bytes) -> None:
    """The dispatcher's loop has one thing to catch."""
    _only_the_one_error(body)


@settings(max_examples=400)
@given(_mutated(ENVELOPES))
def test_mutated_envelopes_raise_nothing_else(body: bytes) -> None:
    """Damage close to what is valid gets furthest into the decoder."""
    _only_the_one_error(body)


@given(st.dictionaries(st.sampled_from(sorted(Envelope.__struct_fields__)) | st.text(), JSON), JSON)
def test_well_formed_json_raises_nothing_else(members: dict[str, Any], payload: Any) -> None:
    """Every field gets values of every shape."""
    body = json.dumps({"task_type": "a"} | members | {"payload": payload}).encode("utf-8", "surrogatepass")
    _only_the_one_error(body)


@given(JSON)
def test_a_payload_arrives_as_it_was_sent(payload: Any) -> None:
    """Through the envelope and a work item, byte for byte."""
    sent = json.dumps(payload, ensure_ascii=False).encode()
    envelope, _ = decode_envelope(b'{"task_type":"a","payload":' + sent + b"}")
    assert bytes(envelope.payload) == sent
    assert bytes(decode_envelope(encode(envelope))[0].payload) == sent


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_damaged_messages_of_ours_raise_unknown_message_alone(name: str, data: st.DataObject) -> None:
    """A reader leaves such a message and reports it; no other exception escapes into its loop."""
    originals = [
        encode(message) for group in samples.GROUPS if group.schema == name for message in group.samples.values()
    ]
    body = data.draw(st.binary(max_size=60) | _mutated(originals))
    try:
        message = READERS[name](body)
    except UnknownMessage:
        return
    assert message.v == 1


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 100_000], ids=lambda body: repr(body[:6])
)
def test_nonsense_in_a_stream_of_ours_is_reported_as_unknown(name: str, body: bytes) -> None:
    """Not even nesting gets past the boundary."""
    with pytest.raises(UnknownMessage):
        READERS[name](body)
