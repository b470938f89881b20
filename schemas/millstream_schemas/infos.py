"""What is told about a task beside its life: infos move nothing and may be lost. A tagged union, each with version `v`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from millstream_schemas.envelope import V1


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="progress"):
    """What a running handler says of itself."""

    key: str
    fraction: Annotated[float, Meta(ge=0, le=1)]
    v: int = V1
    message: str = ""
    attempt: int = 1


class Duplicate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="duplicate"):
    """A second submit of the same task was dropped."""

    key: str
    inbox_seq: int
    v: int = V1


class Conflict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="conflict"):
    """A submit named an existing task with another payload and was dropped."""

    key: str
    inbox_seq: int
    v: int = V1
    detail: str = ""


class StaleOutcome(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="stale_outcome"
):
    """An execution that no longer held the task ended; its result was dropped."""

    key: str
    execution_id: str
    outcome: str
    v: int = V1


class UnknownFields(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="unknown_fields"
):
    """The submit held fields that this version does not know, or values it clamped."""

    key: str
    names: list[str]
    v: int = V1
    clamped: list[str] = []


class BudgetWarning(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="budget_warning"
):
    """A budget passed its soft threshold while this task was being paid from it; amounts in USD."""

    key: str
    budget: str
    """The limit's key."""
    period: str
    spent: float
    hard: float
    v: int = V1
    price_version: str = ""
    """Of the price list that the cost of this task was reckoned by; empty where it has none, or a cost was told."""


Info = Progress | Duplicate | Conflict | StaleOutcome | UnknownFields | BudgetWarning
