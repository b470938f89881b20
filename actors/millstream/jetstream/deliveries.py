"""Deliveries as the port knows them, and what is sent back about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.jetstream.protocol import ACK, headers_of, nak_payload, parse_ack_subject
from millstream.ports import Delivery

Raw = tuple[bytes, bytes, "bytes | None", bytes]
"""Subject, reply subject, header block and body, as they came."""


def delivery_of(raw: Raw) -> Delivery:
    """Read a message that came with an ack subject."""
    subject, reply, header, body = raw
    token = reply.decode()
    parts = parse_ack_subject(token)
    return Delivery(
        subject=subject.decode("utf-8", "replace"),
        body=body,
        headers=headers_of(header),
        stream=parts.stream,
        consumer=parts.consumer,
        seq=parts.seq,
        delivery=parts.delivery,
        at=parts.at,
        pending=parts.pending,
        token=token,
    )


def ack_frames(deliveries: Sequence[Delivery]) -> bytes:
    """The bytes that acknowledge all of `deliveries`."""
    return b"".join([b"PUB %b %d\r\n%b\r\n" % (one.token.encode(), len(ACK), ACK) for one in deliveries])


def nak_frames(tokens: Iterable[bytes], delay_s: float = 0.0) -> bytes:
    """The bytes that hand back the deliveries of `tokens`."""
    payload = nak_payload(delay_s)
    return b"".join([b"PUB %b %d\r\n%b\r\n" % (token, len(payload), payload) for token in tokens])
