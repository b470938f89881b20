"""What operators ask of the dispatcher, and what a validated submit answers."""

from typing import Annotated

import msgspec
from msgspec import Meta

from millstream_schemas.envelope import V1, Name, Token

TaskKey = Annotated[str, Meta(pattern=r"^[a-z2-7]{26}\Z", description="as `derive_key` makes it")]


class Cancel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="verb", tag="cancel"):
    """End a task that has no outcome yet; `key` is preferred where the caller knows it."""

    tenant_id: Token
    task_id: Name
    v: int = V1
    key: TaskKey | None = None
    by: str = ""
    note: str = ""


class Replay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="verb", tag="replay"):
    """Run a dead letter again as a new generation of the same task."""

    tenant_id: Token
    task_id: Name
    v: int = V1
    key: TaskKey | None = None
    by: str = ""
    note: str = ""


Command = Cancel | Replay


class SubmitAccepted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="accepted"):
    """A validated submit is stored; `task_id` and `key` find it again."""

    task_id: str
    key: str
    tenant_id: str
    queue: str
    inbox_seq: int
    v: int = V1
    status_url: str = ""


class SubmitRejected(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="rejected"):
    """A submit that does not fit the contract, with the path of the first fault; nothing was stored."""

    code: str
    message: str
    path: str = "$"
    v: int = V1
    byte_offset: int | None = None


SubmitReply = SubmitAccepted | SubmitRejected


class HandlerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One task type that a worker serves."""

    task_type: str
    queue: str
    limits: list[str] = []
    timeout_s: float | None = None


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's entry in the registry; it expires when its heartbeats end."""

    worker_id: str
    queues: list[str]
    slots: int
    v: int = V1
    handlers: list[HandlerInfo] = []
    running: list[str] = []
    host: str = ""
    pid: int = 0
    version: str = ""
    started_at: float = 0.0
    seen_at: float = 0.0
    draining: bool = False
