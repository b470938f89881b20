"""What workers ask of the rate-governor, and what it answers: tagged unions over core request/reply.

A permit is *granted*, then *settled* (used) or *returned* (never used). Times are relative, in milliseconds from
receipt, so that no two clocks must agree.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from millstream_schemas.envelope import Name

MAX_KEYS = 32
"""Of one permit: those that the handler names, and as many of the task's own."""
MAX_AMOUNT = 1_000_000_000

Id = Name
LimitKey = Name
LimitKeys = Annotated[tuple[LimitKey, ...], Meta(min_length=1, max_length=MAX_KEYS)]
Amount = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]
Calls = Annotated[int, Meta(ge=1, le=1_000)]
HoldMs = Annotated[int, Meta(ge=0, le=60_000)]
Milliseconds = Annotated[int, Meta(ge=0, le=90 * 86_400_000)]
RetryAfter = Annotated[float, Meta(ge=0, le=86_400, description="seconds")]

VERBS = ("acquire", "settle", "return", "renew", "cancel", "limits")
"""Where requests go, one core subject each, and are answered."""

TOLD = "told"
"""Where any request may be sent that needs no answer: a worker's last words."""

PermitOutcome = Literal["ok", "throttled", "error", "unknown"]
"""How a call ended; `unknown` where the provider may have billed it (a lost connection): its estimate stays charged."""

WaitReason = Literal["requests", "tokens", "concurrency", "paused", "queue_full"]
DenialReason = Literal["unknown_limit", "too_large", "cancelled", "spent", "bad_request"]


class Acquire(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag="acquire"):
    """Ask for one permit on all of `keys` or on none; the same `id` gets the same answer for a minute.

    `requests` calls begin under it at once; `tokens` is the estimate over all of them; `wait_ms` is how long
    the governor may hold the request before it answers `Wait`.
    """

    id: Id
    worker: Id
    keys: LimitKeys
    v: int = 1
    requests: Calls = 1
    tokens: Amount = 0
    wait_ms: HoldMs = 0
    task: Annotated[str, Meta(max_length=512)] = ""


class Settle(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag="settle"):
    """Say what a used permit really cost, once; None keeps what was reserved.

    `throttled` pauses `keys` for the whole fleet; without `keys`, all keys of the permit.
    """

    permit: Id
    outcome: PermitOutcome
    v: int = 1
    requests: Amount | None = None
    tokens: Amount | None = None
    retry_after_s: RetryAfter | None = None
    keys: Annotated[tuple[LimitKey, ...], Meta(max_length=MAX_KEYS)] = ()


class Return(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag="return"):
    """Hand back permits under which no call was begun: all that they reserved is free again."""

    permits: Annotated[tuple[Id, ...], Meta(max_length=1024)]
    v: int = 1


class HeldPermit(msgspec.Struct, frozen=True, kw_only=True):
    """A permit that a worker still uses, with its keys, so that a restarted governor learns of it."""

    permit: Id
    keys: LimitKeys


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag="renew"):
    """Keep the leases of all permits that a worker still uses; one message a worker, every third of a lease."""

    worker: Id
    permits: Annotated[tuple[HeldPermit, ...], Meta(max_length=4096)]
    v: int = 1


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag="cancel"):
    """Give up an acquire by its id: it leaves the queue, and what was granted meanwhile is returned."""

    id: Id
    v: int = 1


class Limits(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag="limits"):
    """List every limit with its state."""

    v: int = 1


PermitRequest = Acquire | Settle | Return | Renew | Cancel | Limits


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="granted"):
    """Begin in `start_in_ms`, at the latest `use_by_ms` after that, else return it; renew within `lease_ms`.

    `held_ms` is how long the governor held the request, so that the asker can tell how old the grant may be.
    """

    permit: Id
    start_in_ms: Milliseconds
    use_by_ms: Milliseconds
    lease_ms: Milliseconds
    epoch: int
    v: int = 1
    held_ms: Milliseconds = 0


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="wait"):
    """No permit now: ask again in `retry_after_ms`; `limiting_key` is the limit that stands in the way longest."""

    retry_after_ms: Milliseconds
    limiting_key: str
    reason: WaitReason
    v: int = 1


class Denied(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="denied"):
    """No permit, and asking again with the same request does not help."""

    reason: DenialReason
    key: str = ""
    v: int = 1


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="settled"):
    """How many permits a settle, return or cancel ended: 0 where they were unknown or had ended before."""

    ended: int
    v: int = 1


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="renewed"):
    """The answer to a renewal: `lost` permits have run out and their place may be taken."""

    lost: tuple[str, ...]
    epoch: int
    v: int = 1


class LimitState(msgspec.Struct, frozen=True, kw_only=True):
    """One limit now: as configured (None = not limited), in use, and counted since the governor began."""

    key: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrency: int | None
    in_use: int
    waiting: int
    effective_per_minute: float | None
    """Requests a minute that the pacing lets through now; 0 while paused; None where requests are not limited."""
    paused_until_s: float | None
    """Seconds from now until the pause ends, or None."""
    granted_total: int
    throttled_total: int


class LimitsListing(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="limits"):
    """All limits by key."""

    items: tuple[LimitState, ...]
    epoch: int
    v: int = 1


PermitReply = Granted | Wait | Denied | Settled | Renewed | LimitsListing
