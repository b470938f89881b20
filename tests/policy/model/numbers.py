"""Words and times that the model's rules share."""

from __future__ import annotations

Next = tuple[str, int, int]
"""What an actor does next: (phase, event, sequence)."""
Messages = tuple[tuple[str, int], ...]
"""What follows an event, in order: (what, body) as `steps_common.publish` takes them."""

ACK: Next = ("ack", 0, 0)
COMMITTED: Next = ("committed", 0, 0)
SILENT: Next = ("silent", 0, 0)

INBOX, EVENTS, WORK, CONTROL, HELD = "INBOX", "EVENTS", "WORK", "CONTROL", "HELD"
DECIDED_AT = 2000.0
DEADLINE = 5000.0
