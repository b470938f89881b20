"""Texts of strangers made safe to store and to show: cleaned of what JSON cannot hold, and cut."""

import hashlib
import re

MESSAGE_BYTES = 8192
TRACEBACK_BYTES = 16384
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8,}|\d+")


def clean(text: str, limit_bytes: int = MESSAGE_BYTES) -> str:
    """`text` without control characters and lone surrogates, at most `limit_bytes` of UTF-8, with a mark where cut."""
    head = text[: limit_bytes + 1]
    raw = _CONTROL.sub("\ufffd", head).encode("utf-8", "replace")
    if len(raw) <= limit_bytes and len(head) == len(text):
        return raw.decode("utf-8", "replace")
    mark = f"... [cut, {len(text)} characters]".encode()
    return raw[: max(limit_bytes - len(mark), 0)].decode("utf-8", "ignore") + mark.decode()


def fingerprint(error_type: str, message: str, place: str) -> str:
    """16 hex characters that equal errors share: numbers and addresses in the message do not count."""
    essence = _VARIABLE.sub("#", message[:1024])
    joined = f"{error_type}\n{essence}\n{place}".encode("utf-8", "replace")
    return hashlib.sha256(joined).hexdigest()[:16]
