"""Keys are the same for ever and in every language: what a task is called in streams must not move with a release."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_schemas.keys import Domain, canonical_json, content_hash, derive_key, is_key
from millstream_schemas.names import is_token

# docs/wire.md shows the first of them; other languages may test against all.
GOLDEN: list[tuple[Domain, str, str, str]] = [
    ("key", "acme", "note:42:summary", "o6npj5avzqben7cg6eo2jo5gj2"),
    ("key", "globex", "note:42:summary", "wbyck4iz7aabxtobhvhnrpc4es"),
    ("key", "acme", "note:42:summary ", "lluj3ovyrcs2uxdcqas6kxxb5x"),
    ("key", "acme", "Ünïcödé 🌊", "65qgdhcwjjtkyov4jcmrgoxxqd"),
    ("key", "acme", "", "vssxnhtm2qilfuy5pbx3odm65x"),
    ("key", "t_123", "tenant:user:business_request_hash", "lfnwyn4wquywykizsbicoasw5i"),
    ("key", "acme", "run_01:step_4", "f3uel4vajgucqig2miyrzdhh2k"),
    ("id", "acme", "task-42", "zu47fq7z7shsjnoxzj5v5tmuls"),
    ("inbox", "acme", "MILL_INBOX:1001:1778320800.250000", "ox326yaga4dcnxnexzyaqi2fl5"),
]


@pytest.mark.parametrize(("domain", "tenant", "value", "key"), GOLDEN)
def test_known_keys_stay_what_they_are(domain: Domain, tenant: str, value: str, key: str) -> None:
    """A changed derivation would make every stored task a stranger to its own submit."""
    assert derive_key(domain, tenant, value) == key


@given(tenant=st.text(min_size=1), value=st.text())
def test_the_derivation_is_the_documented_one(tenant: str, value: str) -> None:
    """docs/wire.md describes it in words; this is the same in other words than ours."""
    hashed = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in ("id", tenant, value))
    text = base64.b32encode(hashlib.sha256(hashed).digest()).decode().lower()
    assert derive_key("id", tenant, value) == text[:26]


@given(tenant=st.text(st.characters()), value=st.text(st.characters()))
def test_every_key_may_stand_in_a_subject(tenant: str, value: str) -> None:
    """Whatever text a producer finds, lone surrogates included, 26 safe characters come out."""
    key = derive_key("key", tenant, value)
    assert is_key(key)
    assert is_token(key)


@pytest.mark.parametrize("text", ["", "a" * 25, "a" * 27, "A" * 26, "a" * 25 + "1", "a" * 26 + "\n", "*" * 26])
def test_other_texts_are_no_keys(text: str) -> None:
    """A key from outside is checked before anything is built from it."""
    assert not is_key(text)


def test_moving_a_character_between_parts_gives_another_key() -> None:
    """Lengths stand before the parts, so no two triples are written alike."""
    assert derive_key("key", "ab", "c") != derive_key("key", "a", "bc")
    assert derive_key("key", "acme", "1") != derive_key("id", "acme", "1")
    assert content_hash("ab", "c") != content_hash("a", "bc")
    assert content_hash("a", None) != content_hash("a", "")
    assert content_hash("a") != content_hash("a", None)


@given(st.dictionaries(st.text(), st.integers(-(2**53), 2**53) | st.text() | st.none() | st.booleans()))
def test_spacing_and_order_do_not_make_another_payload(value: dict[str, object]) -> None:
    """Two producers of the same request, in two languages, submit the same task."""
    plain = json.dumps(value).encode()
    turned = json.dumps(dict(reversed(value.items())), indent=3, ensure_ascii=False).encode()
    assert canonical_json(plain) == canonical_json(turned)


@pytest.mark.parametrize(
    "raw",
    [b"", b"1e400", b"nan", b"[" * 5000 + b"]" * 5000, b'"\xff"', b'"\\ud800"', b"1" * 5000],
    ids=lambda raw: repr(raw[:9]),
)
def test_what_cannot_be_read_is_hashed_as_it_stands(raw: bytes) -> None:
    """No payload makes admission fail because of its hash."""
    assert len(content_hash(canonical_json(raw))) == 32
