"""Builds the protocol bytes of a publish: one string for the control line, one for the headers, joined once."""

from __future__ import annotations

import math
import re

from millstream.errors import InvalidName, MessageTooLarge
from millstream.jetstream.protocol import schedule_text
from millstream.ports import Outgoing
from millstream_schemas import names

MAX_SUBJECT_BYTES = 4000
"""The server closes a connection for a control line of 4,096 bytes; nats-py would then never reconnect."""

_BAD_SUBJECT = re.compile(r"[\s\x00]")
_BAD_HEADER_NAME = re.compile(r"[^!#$%&'*+\-.^_`|~0-9A-Za-z]")
_LINE_BREAKS = str.maketrans({"\r": " ", "\n": " "})
_LONGEST_TTL_S = 100 * 365 * 86400


def publish_frame(outgoing: Outgoing, reply: str, max_payload_bytes: int) -> bytes:
    """The bytes that publish `outgoing`; raises MessageTooLarge and InvalidName, so that nothing wrong is ever sent."""
    subject = outgoing.subject
    check_subject(subject)
    body = outgoing.body
    header = _header(outgoing)
    if header is None:
        if len(body) > max_payload_bytes:
            raise MessageTooLarge("the message", len(body), max_payload_bytes)
        return b"%b%b\r\n" % (f"PUB {subject} {reply} {len(body)}\r\n".encode(), body)
    total = len(header) + len(body)
    if total > max_payload_bytes:
        raise MessageTooLarge("the message with its headers", total, max_payload_bytes)
    return b"%b%b%b\r\n" % (f"HPUB {subject} {reply} {len(header)} {total}\r\n".encode(), header, body)


def core_frame(subject: str, reply: str, body: bytes, max_payload_bytes: int) -> bytes:
    """The bytes of a plain message without headers; raises as `publish_frame` does."""
    check_subject(subject)
    if len(body) > max_payload_bytes:
        raise MessageTooLarge("the message", len(body), max_payload_bytes)
    return b"%b%b\r\n" % (f"PUB {subject} {reply} {len(body)}\r\n".encode(), body)


def reply_frame(reply: bytes, body: bytes, max_payload_bytes: int) -> bytes:
    """The bytes of an answer; `reply` is the subject that a request brought. Raises MessageTooLarge."""
    if len(body) > max_payload_bytes:
        raise MessageTooLarge("the answer", len(body), max_payload_bytes)
    return b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body)


def check_subject(subject: str) -> None:
    """Raise InvalidName for what is no subject, and MessageTooLarge for one that is too long."""
    if len(subject) > 1000 and len(subject.encode("utf-8", "replace")) > MAX_SUBJECT_BYTES:
        raise MessageTooLarge("the subject", len(subject.encode("utf-8", "replace")), MAX_SUBJECT_BYTES)
    if not subject or _BAD_SUBJECT.search(subject):
        raise InvalidName("subject", subject)


def _header(outgoing: Outgoing) -> bytes | None:
    lines: list[str] = []
    if outgoing.expect is not None:
        lines.append(
            f"{names.EXPECTED_SEQUENCE}: {outgoing.expect.seq}\r\n{names.EXPECTED_SUBJECT}: {outgoing.expect.filter}\r\n"
        )
    if outgoing.msg_id is not None:
        lines.append(f"{names.MSG_ID}: {_value(outgoing.msg_id)}\r\n")
    if outgoing.ttl_s is not None:
        lines.append(f"{names.TTL}: {min(max(1, math.ceil(outgoing.ttl_s)), _LONGEST_TTL_S)}\r\n")
    if outgoing.increment is not None:
        lines.append(f"{names.INCREMENT}: {outgoing.increment}\r\n")
    if outgoing.schedule is not None:
        lines.append(f"{names.SCHEDULE}: {schedule_text(outgoing.schedule.at)}\r\n")
        lines.append(f"{names.SCHEDULE_TARGET}: {outgoing.schedule.target}\r\n")
    for name, value in outgoing.headers.items():
        if not name or _BAD_HEADER_NAME.search(name):
            raise InvalidName("header", name)
        lines.append(f"{name}: {_value(value)}\r\n")
    if not lines:
        return None
    return f"NATS/1.0\r\n{''.join(lines)}\r\n".encode("utf-8", "replace")


def _value(text: str) -> str:
    return text.translate(_LINE_BREAKS) if "\n" in text or "\r" in text else text
