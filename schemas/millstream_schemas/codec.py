"""Bytes to messages and back. One boundary maps every decoding fault to a typed error with the path of the fault."""

import re
from typing import Any, Final, TypeVar

import msgspec

from millstream_schemas.commands import Command, SubmitReply
from millstream_schemas.envelope import MAX_ENVELOPE_BYTES, MAX_NESTING, Envelope
from millstream_schemas.events import DeadLetter, Deadline, Event, WorkItem
from millstream_schemas.infos import Info

T = TypeVar("T")

_PATH = re.compile(r" - at (?P<key>`key` in )?`(?P<path>[^`]*)`\Z")
_BYTE = re.compile(r" \(byte (?P<offset>\d+)\)\Z")
_LONE_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*(?P<escape>\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])")
# The closing quote is optional and nothing is given back: an unterminated string must not be tried from each of its
# quotes again, which takes minutes for one message.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

MAX_FAULT_CHARS: Final = 512
"""The decoder's messages repeat the value that did not fit, however long it is."""

KNOWN_FIELDS: Final = frozenset(Envelope.__struct_fields__)
VERSION: Final = 1


class InvalidEnvelope(ValueError):
    """A submit does not fit the contract; `path` is the JSON path of the first fault.

    `byte_offset` is set where the JSON itself is broken, or None. `message` is cut and free of control characters.
    """

    code = "invalid_envelope"

    def __init__(self, message: str, path: str = "$", byte_offset: int | None = None) -> None:
        shown = message if len(message) <= MAX_FAULT_CHARS else message[: MAX_FAULT_CHARS - 3] + "..."
        self.message = _CONTROL.sub("\ufffd", shown)
        super().__init__(self.message)
        self.path = path
        self.byte_offset = byte_offset


class UnknownMessage(ValueError):
    """A message of a kind or version that this program does not know: a newer peer may have written it."""


_envelope: Final = msgspec.json.Decoder(Envelope)
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_event: Final = msgspec.json.Decoder(Event)
_info: Final = msgspec.json.Decoder(Info)
_command: Final = msgspec.json.Decoder(Command)
_work_item: Final = msgspec.json.Decoder(WorkItem)
_deadline: Final = msgspec.json.Decoder(Deadline)
_dead_letter: Final = msgspec.json.Decoder(DeadLetter)
_submit_reply: Final = msgspec.json.Decoder(SubmitReply)
_encoder: Final = msgspec.json.Encoder()


def encode(message: Any) -> bytes:
    """JSON bytes of any message of the contract."""
    return _encoder.encode(message)


def decode_envelope(body: bytes) -> tuple[Envelope, list[str]]:
    """The envelope and the names of its unknown fields; raises InvalidEnvelope for anything else, whatever the bytes."""
    if len(body) > MAX_ENVELOPE_BYTES:
        raise InvalidEnvelope(f"Expected at most {MAX_ENVELOPE_BYTES} bytes, got {len(body)}")
    try:
        body.decode("utf-8")  # the decoder skips over raw and unknown members without looking into their strings
        _refuse_deep_nesting(body)
        envelope = _envelope.decode(body)
        unknown = [name for name in _members.decode(body) if name not in KNOWN_FIELDS]
    except InvalidEnvelope:
        raise
    except msgspec.ValidationError as error:
        raise _from_validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _from_malformed(error, body) from None
    except Exception as error:  # noqa: BLE001 - the decoder's other ways to fail: recursion, overflow
        raise InvalidEnvelope(f"Could not be decoded: {type(error).__name__}") from None
    return envelope, unknown


def _refuse_deep_nesting(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_NESTING:
        return
    depth = 0
    for byte in _STRING.sub(b'""', body):
        if byte in b"[{":
            depth += 1
            if depth > MAX_NESTING:
                raise InvalidEnvelope(f"Expected at most {MAX_NESTING} levels of nesting")
        elif byte in b"]}":
            depth -= 1


def _from_validation(error: msgspec.ValidationError) -> InvalidEnvelope:
    text = str(error)
    found = _PATH.search(text)
    if found is None:
        return InvalidEnvelope(text)
    if found["path"] == "$.v":
        return InvalidEnvelope(f"Expected version {VERSION}, the only one that this dispatcher knows", "$.v")
    at = " as a key" if found["key"] else ""
    return InvalidEnvelope(text[: found.start()] + at, found["path"])


def _from_malformed(error: Exception, body: bytes) -> InvalidEnvelope:
    if isinstance(error, UnicodeDecodeError):
        return InvalidEnvelope("Invalid UTF-8", byte_offset=error.start)
    text = str(error)
    found = _BYTE.search(text)
    if found is not None:
        return InvalidEnvelope(text[: found.start()], byte_offset=int(found["offset"]))
    surrogate = _LONE_SURROGATE.search(body)
    if surrogate is not None:  # the decoder calls this truncated input
        return InvalidEnvelope("Lone surrogate escape in a string", byte_offset=surrogate.start("escape"))
    return InvalidEnvelope(text, byte_offset=len(body))


def decode_event(body: bytes) -> Event:
    """A life-cycle event; raises UnknownMessage for a kind or version of a newer peer."""
    return _known(_event, body)


def decode_info(body: bytes) -> Info:
    """An info; raises UnknownMessage for a kind or version of a newer peer."""
    return _known(_info, body)


def decode_command(body: bytes) -> Command:
    """A control command; raises UnknownMessage for a kind or version of a newer peer."""
    return _known(_command, body)


def decode_work_item(body: bytes) -> WorkItem:
    """The body of a WORK message; raises UnknownMessage where it is none that this version knows."""
    return _known(_work_item, body)


def decode_deadline(body: bytes) -> Deadline:
    """The body of an `expire` tick; raises UnknownMessage where it is none that this version knows."""
    return _known(_deadline, body)


def decode_dead_letter(body: bytes) -> DeadLetter:
    """A dead letter; raises UnknownMessage where it is none that this version knows."""
    return _known(_dead_letter, body)


def decode_submit_reply(body: bytes) -> SubmitReply:
    """The answer to a validated submit; raises UnknownMessage where it is none that this version knows."""
    return _known(_submit_reply, body)


def _known(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    try:
        message = decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnknownMessage(str(error)) from None
    if getattr(message, "v", VERSION) != VERSION:
        raise UnknownMessage(f"version {getattr(message, 'v', None)} is not known here")
    return message
