"""What JetStream says on the wire: subjects, header names, status lines, and the cheap reading of them."""

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

API = "$JS.API."
KV_STREAM = "KV_"
KV_SUBJECT = "$KV."
KV_OPERATION = "KV-Operation"
KV_DELETE = "DEL"

ACK = b"+ACK"
NAK = b"-NAK"
PROGRESS = b"+WPI"

NO_RESPONDERS = b"503"
HEARTBEAT = b"100"
TIMED_OUT = b"408"

# Error codes of the JetStream API.
NOT_AVAILABLE = frozenset({10008, 10009, 10167})  # no meta leader for now, too many requests: asking again helps
WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
MESSAGE_NOT_FOUND = 10037
STREAM_NOT_FOUND = 10059
STREAM_EXISTS = 10058
CONSUMER_NOT_FOUND = 10014
NO_STORAGE_LEFT = 10047
SUBJECTS_OVERLAP = 10065

NANOS = 1_000_000_000
_LONGEST_DELAY_S = 365 * 86400.0


class ApiError(msgspec.Struct, frozen=True):
    """The `error` object of an answer."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct, frozen=True):
    """The answer to a stored, or refused, message."""

    seq: int = 0
    duplicate: bool = False
    val: str = ""
    error: ApiError | None = None


class StoredMessage(msgspec.Struct, frozen=True):
    """A message as STREAM.MSG.GET answers it; msgspec decodes the base64 of `hdrs` and `data`."""

    subject: str
    seq: int
    time: datetime
    hdrs: bytes = b""
    data: bytes = b""


class GetAnswer(msgspec.Struct, frozen=True):
    """The answer of STREAM.MSG.GET."""

    message: StoredMessage | None = None
    error: ApiError | None = None


decode_pub_ack = msgspec.json.Decoder(PubAck).decode
decode_get = msgspec.json.Decoder(GetAnswer).decode


class Headers(Mapping[str, str]):
    """Headers of a received message, parsed when first looked at: most are never read."""

    __slots__ = ("_parsed", "_raw")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._parsed: dict[str, str] | None = None

    def _all(self) -> dict[str, str]:
        if self._parsed is None:
            self._parsed = parse_headers(self._raw)
        return self._parsed

    def __getitem__(self, key: str) -> str:
        return self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


EMPTY: Mapping[str, str] = {}


def headers_of(raw: bytes | None) -> Mapping[str, str]:
    """The headers of a received message, lazily."""
    return Headers(raw) if raw else EMPTY


def parse_headers(raw: bytes) -> dict[str, str]:
    """Name to value; values of equal names are joined by commas as in HTTP, bytes that are no UTF-8 are replaced."""
    found: dict[str, str] = {}
    for line in raw.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            key, text = name.decode("utf-8", "replace"), value.strip().decode("utf-8", "replace")
            found[key] = f"{found[key]},{text}" if key in found else text
    return found


def status_of(header: bytes | None) -> bytes | None:
    """The three digits of a status line (`NATS/1.0 408 Request Timeout`), None for ordinary headers."""
    if header is None or header[8:9] != b" ":
        return None
    return header[9:12]


def status_text(header: bytes) -> str:
    """The words after the three digits."""
    return header[13 : header.find(b"\r\n")].decode("utf-8", "replace")


class AckParts(msgspec.Struct, frozen=True, gc=False):
    """What the reply subject of a delivery tells."""

    stream: str
    consumer: str
    delivery: int
    seq: int
    consumer_seq: int
    at: float
    pending: int


def parse_ack_subject(subject: str) -> AckParts:
    """Read `$JS.ACK.…` in the form of nine parts, or the newer one with domain and account hash before them."""
    parts = subject.split(".")
    if len(parts) > 9:
        del parts[2:4]
    return AckParts(
        parts[2], parts[3], int(parts[4]), int(parts[5]), int(parts[6]), int(parts[7]) / NANOS, int(parts[8])
    )


def nak_payload(delay_s: float) -> bytes:
    """A hand-back; a delay that the server could not read would redeliver at once, so it is clamped."""
    if not delay_s > 0:  # NaN too
        return NAK
    nanos = int(min(delay_s, _LONGEST_DELAY_S) * NANOS)
    return b'%b {"delay": %d}' % (NAK, nanos)


def schedule_text(at: float) -> str:
    """`@at` with a time in UTC, rounded up to a millisecond: late by less than one, never early."""
    millis = math.ceil(at * 1000 - 1e-3)
    moment = datetime.fromtimestamp(millis // 1000, tz=UTC)
    return f"@at {moment:%Y-%m-%dT%H:%M:%S}.{millis % 1000:03d}Z"


def unix_seconds(rfc3339: str) -> float:
    """Unix seconds of a server's time stamp; its nanoseconds are cut to microseconds."""
    return msgspec.convert(rfc3339, datetime).timestamp()


def nanos(seconds: float) -> int:
    """Seconds as the nanoseconds of the JetStream API."""
    return round(seconds * NANOS)


def as_json(value: Any) -> bytes:
    """JSON bytes."""
    return msgspec.json.encode(value)
