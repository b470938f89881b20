"""One line of the report of `millstream doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at and how it is; `todo` says what to do about what is not ok."""

    name: str
    status: Status
    detail: str
    todo: str = ""
