"""Whether a task is metered, by which limits, and in which lane it waits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from millstream.policy.limits import fill
from millstream_schemas.envelope import Envelope
from millstream_schemas.events import HeldReason
from millstream_schemas.keys import derive_key

AGAIN = "-again"
"""Ends the lane of what ran or waited before: it goes before the rest of its lane."""


class Metered(msgspec.Struct, frozen=True, kw_only=True):
    """What configuration says of the tasks of one kind: the limit keys (or templates) to add, and fairness.

    One is made from the queue's settings, the task type's, the tenant's and what live workers announced.
    """

    limits: tuple[str, ...] = ()
    fair: bool = False


@dataclass(frozen=True, slots=True)
class Metering:
    """A metered task: its pool of limit keys (may be empty), its lane, and why it is held."""

    limits: tuple[str, ...]
    lane: str
    reason: HeldReason


def limit_keys(envelope: Envelope, templates: Iterable[str]) -> tuple[str, ...]:
    """The limit keys of a task, its own included, each once; the same for every order of the same templates."""
    fields = fields_of(envelope)
    return tuple(sorted({fill(template, fields) for template in (*templates, *envelope.limits)}))


def fields_of(envelope: Envelope) -> Mapping[str, str | None]:
    """What templates may name of an envelope, pins as `pins.<name>`."""
    fields: dict[str, str | None] = {
        "tenant_id": envelope.tenant_id,
        "queue": envelope.queue,
        "task_type": envelope.task_type,
        "run_id": envelope.run_id,
        "session_id": envelope.session_id,
        "parent_id": envelope.parent_id,
        "step": envelope.step,
        "priority": envelope.priority,
        "mode": envelope.mode,
    }
    for name, value in (envelope.pins or {}).items():
        fields[f"pins.{name}"] = value
    return fields


def metering(envelope: Envelope, kinds: Iterable[Metered]) -> Metering | None:
    """How a task (defaults filled in) is metered; None for a plain one, which goes to WORK at once."""
    templates: list[str] = []
    fair = False
    for kind in kinds:
        templates += kind.limits
        fair = fair or kind.fair
    limits = limit_keys(envelope, templates)
    if not limits and not fair:
        return None
    return Metering(limits, lane_of(envelope.tenant_id or "", limits), "limits" if limits else "fairness")


def lane_of(tenant: str, limits: Iterable[str]) -> str:
    """The lane of a tenant's tasks with one pool: 26 characters that may stand in a subject."""
    return derive_key("lane", tenant, "".join(f"{len(key)}:{key}" for key in limits))


def lane_token(lane: str, *, again: bool) -> str:
    """The last token of a HELD subject."""
    return lane + AGAIN if again else lane
