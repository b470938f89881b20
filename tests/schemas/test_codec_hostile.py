"""Whatever bytes a producer publishes, the answer is an envelope or one typed error with the place of the first fault."""

from __future__ import annotations

import json
import pickle
import time
from contextlib import suppress

import pytest

from millstream_schemas.codec import InvalidEnvelope, decode_envelope
from millstream_schemas.envelope import MAX_ENVELOPE_BYTES, MAX_NESTING

BOM = "\ufeff".encode()


def _with(members: str | bytes) -> bytes:
    raw = members.encode() if isinstance(members, str) else members
    return b'{"task_type":"a",' + raw + b"}"


def _refused(body: bytes) -> InvalidEnvelope:
    with pytest.raises(InvalidEnvelope) as caught:
        decode_envelope(body)
    assert caught.value.code == "invalid_envelope"
    assert caught.value.message
    assert caught.value.path.startswith("$")
    return caught.value


# Broken as JSON: the path is the whole, the byte is that of the fault.
MALFORMED: dict[str, tuple[bytes, int]] = {
    "empty body": (b"", 0),
    "spaces": (b"  ", 2),
    "NUL": (b"\x00", 0),
    "cut off": (b'{"task_type":"a"', 16),
    "trailing text": (b'{"task_type":"a"} x', 18),
    "a second value": (b'{"task_type":"a"}{}', 17),
    "byte order mark": (BOM + b'{"task_type":"a"}', 0),
    "UTF-16": ('{"task_type":"a"}'.encode("utf-16"), 0),
    "pickle": (pickle.dumps({"task_type": "a"}), 0),
    "invalid UTF-8": (b'{"task_type":"\xff"}', 14),
    "invalid UTF-8 in the payload": (_with(b'"payload":{"a":"\xc3\x28"}'), 33),
    "invalid UTF-8 in an unknown field": (_with(b'"colour":"\xff"'), 27),
    "invalid UTF-8 in an unknown name": (_with(b'"\xff":1'), 18),
    "surrogate as UTF-8": (b'{"task_type":"\xed\xa0\x80"}', 14),
    "lone surrogate escape": (b'{"task_type":"\\ud800"}', 14),
    "lone surrogate escape in the payload": (_with(rb'"payload":"\ud800"'), 28),
    "lone surrogate escape after an escaped one": (_with(rb'"title":"\\ud800","step":"\ud800"'), 43),
    "NaN": (_with('"delay_seconds":NaN'), 33),
    "Infinity": (_with('"delay_seconds":Infinity'), 33),
    "NaN in the payload": (_with('"payload":[NaN]'), 28),
    "control character in a string": (_with('"title":"a\nb"'), 27),
    "single quotes": (b"{'task_type':'a'}", 1),
    "a comment": (b'{"task_type":"a"/**/}', 16),
    "trailing comma": (b'{"task_type":"a",}', 17),
}


@pytest.mark.parametrize(("body", "at"), MALFORMED.values(), ids=MALFORMED.keys())
def test_broken_json_is_refused_with_the_byte_of_the_fault(body: bytes, at: int) -> None:
    """The producer's author finds the place without a debugger."""
    error = _refused(body)
    assert error.path == "$"
    assert error.byte_offset is not None
    assert abs(error.byte_offset - at) <= 1  # the decoder names the fault or the byte after it
    assert 0 <= error.byte_offset <= len(body)


# Good JSON that is no envelope: the path names the first fault.
MISFITS: dict[str, tuple[bytes, str]] = {
    "an array": (b"[]", "$"),
    "null": (b"null", "$"),
    "a number": (b"1", "$"),
    "no task_type": (b"{}", "$"),
    "an empty task_type": (b'{"task_type":""}', "$.task_type"),
    "129 characters": (json.dumps({"task_type": "a" * 129}).encode(), "$.task_type"),
    "version 0": (_with('"v":0'), "$.v"),
    "version 2": (_with('"v":2'), "$.v"),
    "version as text": (_with('"v":"1"'), "$.v"),
    "1e400": (_with('"delay_seconds":1e400'), "$.delay_seconds"),
    "-1e400": (_with('"delay_seconds":-1e400'), "$.delay_seconds"),
    "1e308 seconds": (_with('"delay_seconds":1e308'), "$.delay_seconds"),
    "negative delay": (_with('"delay_seconds":-1'), "$.delay_seconds"),
    "delay as text": (_with('"delay_seconds":"30s"'), "$.delay_seconds"),
    "2**70 attempts": (_with(f'"budget":{{"max_attempts":{2**70}}}'), "$.budget.max_attempts"),
    "an integer of 5,000 digits": (_with(f'"budget":{{"max_attempts":{"1" * 5000}}}'), "$.budget.max_attempts"),
    "-1 attempts": (_with('"budget":{"max_attempts":-1}'), "$.budget.max_attempts"),
    "0 attempts": (_with('"budget":{"max_attempts":0}'), "$.budget.max_attempts"),
    "true attempts": (_with('"budget":{"max_attempts":true}'), "$.budget.max_attempts"),
    "2**70 as priority": (_with(f'"priority":{2**70}'), "$.priority"),
    "unknown priority": (_with('"priority":"urgent"'), "$.priority"),
    "2**70 tokens": (_with(f'"usage_estimate":{{"tokens_in":{2**70}}}'), "$.usage_estimate.tokens_in"),
    "cost as text": (_with('"budget":{"max_cost_usd":"0.5"}'), "$.budget.max_cost_usd"),
    "factor 0": (_with('"retry_policy":{"factor":0}'), "$.retry_policy.factor"),
    "negative factor": (_with('"retry_policy":{"factor":-1}'), "$.retry_policy.factor"),
    "factor out of range": (_with('"retry_policy":{"factor":1e400}'), "$.retry_policy.factor"),
    "an empty class in retry_on": (_with('"retry_policy":{"retry_on":["a",""]}'), "$.retry_policy.retry_on[1]"),
    "deadline without zone": (_with('"deadline_at":"2026-05-09T10:05:00"'), "$.deadline_at"),
    "deadline in zone +25:00": (_with('"deadline_at":"2026-05-09T10:05:00+25:00"'), "$.deadline_at"),
    "second 60": (_with('"deadline_at":"2026-12-31T23:59:60Z"'), "$.deadline_at"),
    "month 13": (_with('"deadline_at":"2026-13-01T00:00:00Z"'), "$.deadline_at"),
    "deadline as a number": (_with('"deadline_at":1778321100'), "$.deadline_at"),
    "tenant *": (_with('"tenant_id":"*"'), "$.tenant_id"),
    "tenant with a line break": (_with(r'"tenant_id":"a\n"'), "$.tenant_id"),
    "queue >": (_with('"queue":">"'), "$.queue"),
    "queue with a dot": (_with('"queue":"a.b"'), "$.queue"),
    "queue with NUL": (_with(r'"queue":"a\u0000"'), "$.queue"),
    "queue in emoji": (_with('"queue":"🌊"'), "$.queue"),
    "queue of 5,000 bytes": (_with(f'"queue":"{"a" * 5000}"'), "$.queue"),
    "id with NUL": (_with(r'"task_id":"a\u0000b"'), "$.task_id"),
    "id that ends in a line break": (_with(r'"task_id":"a\n"'), "$.task_id"),
    "key of 10 kB": (_with(f'"idempotency_key":"{"k" * 10_000}"'), "$.idempotency_key"),
    "tag that is no text": (_with('"tags":["a",1]'), "$.tags[1]"),
    "33 tags": (_with(f'"tags":{json.dumps(["a"] * 33)}'), "$.tags"),
    "pin that is no text": (_with('"pins":{"model":1}'), "$.pins[...]"),
    "pin whose name is no name": (_with(r'"pins":{"\u0000":"a"}'), "$.pins"),
    "reference that is no URI": (_with('"payload_ref":"a b"'), "$.payload_ref"),
    "callback without url": (_with('"callback":{}'), "$.callback"),
    "budget that is an array": (_with('"budget":[]'), "$.budget"),
}


@pytest.mark.parametrize(("body", "path"), MISFITS.values(), ids=MISFITS.keys())
def test_good_json_that_is_no_envelope_is_refused_with_its_path(body: bytes, path: str) -> None:
    """The path names the first fault, in the way that JSON tools write it."""
    error = _refused(body)
    assert error.path == path
    assert error.byte_offset is None
    assert " - at " not in error.message


@pytest.mark.parametrize("depth", [1_000, 100_000, 250_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b"[", b""), (b'{"a":[', b"]}")])
@pytest.mark.parametrize("inside", [b"%s", b'{"task_type":"a","payload":%s}', b'{"task_type":"a","colour":%s}'])
def test_deep_nesting_is_refused_and_nothing_overflows(
    depth: int, opening: bytes, closing: bytes, inside: bytes
) -> None:
    """Neither the decoder's recursion nor ours is left to find out how deep it goes."""
    body = inside.replace(b"%s", opening * depth + b"1" + closing * depth)
    error = _refused(body)
    assert error.path == "$"


def test_nesting_is_counted_to_the_limit_and_not_in_strings() -> None:
    """The envelope itself is one level; brackets in text are text."""
    levels = MAX_NESTING - 1
    decode_envelope(_with(b'"payload":' + b"[" * levels + b"]" * levels))
    _refused(_with(b'"payload":' + b"[" * (levels + 1) + b"]" * (levels + 1)))
    decode_envelope(
        _with(b'"payload":' + b"[" * levels + b"]" * levels + b',"context":' + b"[" * levels + b"]" * levels)
    )
    decode_envelope(_with('"title":"' + "[{" * 200 + '"'))
    decode_envelope(_with('"title":"\\"' + "[{" * 200 + '"'))
    decode_envelope(_with('"payload":"' + "\\\\" * 9 + '","title":"' + "[" * 200 + '"'))


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 65 + b'"' + b'\\"' * 120_000,
        b'{"task_type":"a","payload":[' + b"[]," * 80_000 + b"1]}",
        b"[" * 65 + b'"a' * 80_000,
        b"[" * 65 + b'"' + b"\\" * 200_000,
        _with(rb'"title":"' + b"\\\\" * 120_000 + rb'\ud800"'),
        _with(b",".join(b'"k%d":1' % i for i in range(20_000))),
    ],
    ids=["unterminated string", "many brackets", "many strings", "backslashes", "escapes before a fault", "many names"],
)
def test_no_body_of_permitted_size_takes_long(body: bytes) -> None:
    """One message must not hold up the queue: the work is proportional to its size."""
    assert len(body) <= MAX_ENVELOPE_BYTES
    started = time.process_time()
    with suppress(InvalidEnvelope):
        decode_envelope(body)
    assert time.process_time() - started < 2.0  # measured: milliseconds; what it guards against took minutes


@pytest.mark.parametrize(("size", "fits"), [(-1, True), (0, True), (1, False)])
def test_the_size_limit_is_exact(size: int, fits: bool) -> None:
    """The last permitted byte is permitted."""
    frame = b'{"task_type":"a","payload":""}'
    body = frame[:-2] + b"x" * (MAX_ENVELOPE_BYTES + size - len(frame)) + frame[-2:]
    assert len(body) == MAX_ENVELOPE_BYTES + size
    if fits:
        decode_envelope(body)
    else:
        assert str(MAX_ENVELOPE_BYTES) in _refused(body).message


@pytest.mark.parametrize(
    ("field", "longest"),
    [
        ("task_type", 128),
        ("task_id", 128),
        ("idempotency_key", 512),
        ("ordering_key", 256),
        ("queue", 64),
        ("title", 1024),
    ],
)
def test_texts_are_permitted_to_their_limit(field: str, longest: int) -> None:
    """Limits count characters, not bytes."""
    letter = "a" if field == "queue" else "ü"
    decode_envelope(json.dumps({"task_type": "a"} | {field: letter * longest}, ensure_ascii=False).encode())
    body = json.dumps({"task_type": "a"} | {field: letter * (longest + 1)}, ensure_ascii=False).encode()
    assert _refused(body).path == f"$.{field}"


def test_a_newer_version_is_refused_in_plain_words() -> None:
    """Its producer must learn that the dispatcher is older, not that some field is odd."""
    error = _refused(b'{"v":2,"task_type":"a"}')
    assert (error.path, error.message) == ("$.v", "Expected version 1, the only one that this dispatcher knows")


def test_unknown_fields_are_named_and_no_fault() -> None:
    """A newer producer's field, or a misspelt one, shows up in an info of the task."""
    envelope, unknown = decode_envelope(b'{"task_type":"a","Task_Id":"b","colour":{"r":1},"queue":"q"}')
    assert unknown == ["Task_Id", "colour"]
    assert (envelope.queue, envelope.task_id) == ("q", None)


def test_attempts_over_the_cap_pass_here() -> None:
    """A thousand million attempts are clamped at admission, which tells so; they are no fault of form."""
    envelope, _ = decode_envelope(_with('"budget":{"max_attempts":1000000000}'))
    assert envelope.budget.max_attempts == 10**9


def test_good_text_in_any_script_passes() -> None:
    """Only what could break a line or a terminal is kept out of names; people write as they like."""
    body = json.dumps({"task_type": "résumé.解析", "title": "מגדל 🌊", "tags": ["a/../b", "<b>"]}).encode()
    envelope, _ = decode_envelope(body)
    assert envelope.title == "מגדל 🌊"
