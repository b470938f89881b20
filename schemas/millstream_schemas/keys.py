"""How a task gets its key: one hash, so that no producer's text reaches a subject, and a redelivery gives the same key."""

import base64
import hashlib
import re
from typing import Literal

import msgspec

KEY = re.compile(r"[a-z2-7]{26}\Z")
Domain = Literal["key", "id", "inbox", "content", "lane", "limit"]


def derive_key(domain: Domain, tenant: str, value: str) -> str:
    """The first 26 base32 characters of sha256 over length-prefixed domain, tenant and value."""
    digest = hashlib.sha256()
    for part in (domain, tenant, value):
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "big"))
        digest.update(raw)
    return base64.b32encode(digest.digest()[:17])[:26].decode().lower()


def is_key(text: str) -> bool:
    """True when `text` has the shape of a derived key."""
    return KEY.match(text) is not None


def canonical_json(raw: bytes) -> bytes:
    """The same bytes for the same JSON value, whatever its spacing and order of members."""
    try:
        return msgspec.json.encode(msgspec.json.decode(raw), order="sorted")
    except (msgspec.MsgspecError, OverflowError, RecursionError, ValueError):
        return raw


def content_hash(*parts: bytes | str | None) -> str:
    """32 hex characters over length-prefixed parts; None differs from empty."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"\xff\xff\xff\xff" if raw is None else len(raw).to_bytes(4, "big"))
        digest.update(raw or b"")
    return digest.hexdigest()[:32]
