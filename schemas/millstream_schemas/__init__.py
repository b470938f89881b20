"""The contract of Millstream: envelope, events, commands and permits, names, topology and life cycle.

Imports nothing but the standard library and msgspec, so that any service may depend on it alone.
"""

from millstream_schemas.codec import InvalidEnvelope, UnknownMessage, decode_envelope
from millstream_schemas.envelope import Budget, Envelope, RetryPolicy, TraceContext
from millstream_schemas.events import DeadLetter, Event, WorkItem
from millstream_schemas.infos import Info
from millstream_schemas.names import Names

__all__ = [
    "Budget",
    "DeadLetter",
    "Envelope",
    "Event",
    "Info",
    "InvalidEnvelope",
    "Names",
    "RetryPolicy",
    "TraceContext",
    "UnknownMessage",
    "WorkItem",
    "decode_envelope",
]
