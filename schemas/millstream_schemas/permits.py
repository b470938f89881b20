"""What workers ask of the rate-governor, and what it answers: tagged unions over core request/reply.

A permit is *granted*, then *settled* (used) or *returned* (never used). Times are relative, so that no two clocks
must agree. Amounts of money are US dollars.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from millstream_schemas.envelope import MAX_COST_USD, Name
from millstream_schemas.limit_states import Dimension, LimitState, PriceState

PERMITS_VERSION = 2
MAX_KEYS = 32
"""Of one permit: those that the handler names, and as many of the task's own."""
MAX_PERMITS = 64
"""Of one acquire."""
MAX_CALLS = 1_000
"""Of one permit, all begun at once."""
MAX_AMOUNT = 1_000_000_000
MAX_OBSERVED = 8
MAX_RENEWED = 4096
"""Permits in one renewal; a worker that holds more sends several."""
MAX_RETRY_AFTER_S = 86_400
MAX_MS = 90 * 86_400_000

Id = Name
LimitKey = Name
LimitKeys = Annotated[tuple[LimitKey, ...], Meta(min_length=1, max_length=MAX_KEYS)]
SomeKeys = Annotated[tuple[LimitKey, ...], Meta(max_length=MAX_KEYS)]
Amount = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]
Money = Annotated[float, Meta(ge=0, le=MAX_COST_USD)]
Calls = Annotated[int, Meta(ge=1, le=MAX_CALLS)]
Epoch = Annotated[int, Meta(ge=0)]
HoldMs = Annotated[int, Meta(ge=0, le=60_000)]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_MS)]
RetryAfter = Annotated[float, Meta(ge=0, le=MAX_RETRY_AFTER_S, description="seconds")]

VERBS = ("acquire", "settle", "return", "renew", "cancel", "limits", "gates", "operate")
"""Where requests go, one core subject each, and are answered."""

TOLD = "told"
"""Where a request is sent that needs no answer: what a worker says when it stops, a `Report` while a call runs."""

OutcomeClass = Literal[
    "ok", "throttled", "ramp", "quota", "too_large", "overloaded", "fault", "client", "error", "unknown"
]
"""How a call ended.

`throttled`: a rate limit of the provider. `ramp`: use grew too fast for the provider. `quota`: an allowance is used up
and waiting a moment does not help. `too_large`: it can never be allowed. `overloaded`, `fault`: the provider is busy,
or broken. `client`: the request or its credentials are wrong. `error`: the handler failed by itself. `unknown`: the
provider may have billed it (a lost connection), so its estimate stays charged.
"""

WaitReason = Literal[
    "requests",
    "tokens",
    "tokens_in",
    "tokens_out",
    "concurrency",
    "cost",
    "paused",
    "broken",
    "exhausted",
    "retry_budget",
    "learning",
    "queue_full",
]
GATE_REASONS: frozenset[str] = frozenset({"paused", "broken", "exhausted"})
"""Reasons that close a key's gate: they hold up everybody who needs the key."""
DenialReason = Literal["unknown_limit", "too_large", "cancelled", "spent", "bad_request", "budget_exhausted"]
Operation = Literal["open", "auto", "disable", "resume"]


VERSION: int = msgspec.field(default_factory=lambda: PERMITS_VERSION)


class Acquire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="verb", tag="acquire"):
    """Ask for `n` permits, each on all of `keys` or on none; the same `id` gets the same answer for a minute.

    Fewer than `n` are granted where the rest could not begin soon. Under each permit `requests` calls begin at once;
    tokens and cost are the estimate over all of them; `wait_ms` is how long the governor may hold the request before
    it answers `Wait`. `retry` asks for a repeated attempt, which may be rationed.
    """

    id: Id
    worker: Id
    keys: LimitKeys
    v: int = VERSION
    n: Annotated[int, Meta(ge=1, le=MAX_PERMITS)] = 1
    requests: Calls = 1
    tokens_in: Amount = 0
    tokens_out: Amount = 0
    cost_usd: Money = 0.0
    model: Annotated[str, Meta(max_length=128)] = ""
    """Whose prices apply where no cost is given."""
    wait_ms: HoldMs = 0
    task: Annotated[str, Meta(max_length=512)] = ""
    retry: bool = False
    epoch: Epoch = 0
    """Of the governor that is asked, 0 where none is known. A later one answers `Wait` at once: the message may be old."""


class Observed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a provider's answer says of one of its own limits; it can only tighten ours."""

    dimension: Dimension
    limit: Amount | None = None
    remaining: Amount | None = None
    reset_s: RetryAfter | None = None


class Settle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="verb", tag="settle"):
    """Say what a used permit really took, once; None keeps what was reserved.

    `outcome` is about the limits named by `keys`; without `keys`, about all keys of the permit.
    """

    permit: Id
    outcome: OutcomeClass
    v: int = VERSION
    requests: Amount | None = None
    tokens_in: Amount | None = None
    tokens_out: Amount | None = None
    cost_usd: Money | None = None
    model: Annotated[str, Meta(max_length=128)] = ""
    retry_after_s: RetryAfter | None = None
    observed: Annotated[tuple[Observed, ...], Meta(max_length=MAX_OBSERVED)] = ()
    keys: SomeKeys = ()
    reported: bool = False
    """A `Report` has told `outcome` before: only the amounts count here."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="verb", tag="report"):
    """What a provider answered to one call, told at once; it ends no permit."""

    keys: LimitKeys
    outcome: OutcomeClass
    v: int = VERSION
    retry_after_s: RetryAfter | None = None
    observed: Annotated[tuple[Observed, ...], Meta(max_length=MAX_OBSERVED)] = ()
    started_ms_ago: Milliseconds = 0
    """How long ago the call began: a refusal of a call that began before the last slow-down says nothing new."""


class Return(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag="return"):
    """Hand back permits under which no call was begun: all that they reserved is free again."""

    permits: Annotated[tuple[Id, ...], Meta(max_length=1024)]
    v: int = VERSION


class HeldPermit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A permit that a worker still uses, so that a restarted governor learns of it and of what it reserved."""

    permit: Id
    keys: LimitKeys
    cost_usd: Money = 0.0


class Renew(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="verb", tag="renew"):
    """Keep the leases of all permits that a worker still uses; one message a worker, every third of a lease.

    Sent at once, even with no permits, to a governor that has just begun to lead: it learns what is in use.
    """

    worker: Id
    permits: Annotated[tuple[HeldPermit, ...], Meta(max_length=MAX_RENEWED)]
    v: int = VERSION
    epoch: Epoch = 0
    """Of the governor that is told, 0 where none is known. A later governor ignores the message: it may be old."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag="cancel"):
    """Give up an acquire by its id: it leaves the queue, and what was granted meanwhile is returned."""

    id: Id
    v: int = VERSION


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="verb", tag="limits"):
    """List every limit with its state, or those of one key."""

    v: int = VERSION
    key: str | None = None


class Pool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limit keys that some tasks share, with what one of them takes on average."""

    keys: LimitKeys
    tokens_in: Amount = 0
    tokens_out: Amount = 0


class Gates(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag="gates"):
    """Ask how fast tasks of each pool may start now."""

    pools: Annotated[tuple[Pool, ...], Meta(max_length=10_000)]
    v: int = VERSION


class Operate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="verb", tag="operate"):
    """Force a key's breaker open, leave it to itself (`auto`), switch it off; `resume` ends a pause or exhaustion."""

    key: LimitKey
    operation: Operation
    v: int = VERSION
    by: str = ""


PermitRequest = Acquire | Settle | Report | Return | Renew | Cancel | Limits | Gates | Operate


class Lease(msgspec.Struct, frozen=True):
    """One granted permit: begin in `start_in_ms`."""

    permit: Id
    start_in_ms: Milliseconds


class Granted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="granted"):
    """Begin each lease in its `start_in_ms`, at the latest `use_by_ms` after that, else return it; renew within `lease_ms`.

    `held_ms` is how long the governor held the request, so that the asker can tell how old the grant may be.
    """

    leases: tuple[Lease, ...]
    use_by_ms: Milliseconds
    lease_ms: Milliseconds
    epoch: int
    v: int = VERSION
    held_ms: Milliseconds = 0


class Wait(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="wait"):
    """No permit now: ask again in `retry_after_ms`; `limiting_key` is the limit that stands in the way longest."""

    retry_after_ms: Milliseconds
    limiting_key: str
    reason: WaitReason
    epoch: int
    v: int = VERSION


class Denied(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="denied"):
    """No permit, and asking again with the same request does not help, or not before `until_s` seconds have passed."""

    reason: DenialReason
    epoch: int
    key: str = ""
    v: int = VERSION
    until_s: float | None = None
    detail: str = ""


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="settled"):
    """How many permits a settle, return or cancel ended: 0 where they were unknown or had ended before."""

    ended: int
    epoch: int
    v: int = VERSION


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="renewed"):
    """The answer to a renewal: `lost` permits have run out and their place may be taken."""

    lost: tuple[str, ...]
    epoch: int
    v: int = VERSION


class GatePart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one key lets through: a second of each dimension, and `places` in use at once; None means without limit."""

    requests: float | None = None
    tokens: float | None = None
    tokens_in: float | None = None
    tokens_out: float | None = None
    places: int | None = None


class Gate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How fast tasks of one pool may start: not at all for `wait_s` while closed, else by `rate_per_s` and `places`.

    None means without limit. Keys are shared between pools, so who shares them out goes by `parts`.
    """

    keys: LimitKeys
    open: bool
    reason: str = ""
    limiting_key: str = ""
    wait_s: float = 0.0
    rate_per_s: float | None = None
    places: int | None = None
    """How many may be in use at once, over the whole fleet."""
    parts: tuple[GatePart, ...] = ()
    """One for each key, in the order of `keys`; none where a key is unknown."""


class GatesListing(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gates"):
    """The gates in the order of the pools asked for."""

    items: tuple[Gate, ...]
    epoch: int
    v: int = VERSION


class LimitsListing(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="limits"):
    """Limits by key, and the configuration's revision and fault, if any; prices and `unknown` where all were asked for."""

    items: tuple[LimitState, ...]
    epoch: int
    v: int = VERSION
    revision: int = 0
    fault: str = ""
    """Why a newer configuration was not taken; empty where there is none."""
    prices: tuple[PriceState, ...] = ()
    """Those that costs are reckoned by now."""
    unknown: tuple[str, ...] = ()
    """Keys that were asked for in the last minute and are not configured, so that nothing is granted."""


PermitReply = Granted | Wait | Denied | Settled | Renewed | GatesListing | LimitsListing


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Told to everybody: who leads has this epoch, `keys` have changed; `began` asks every worker to renew at once."""

    epoch: int
    v: int = VERSION
    began: bool = False
    keys: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    """Those of `keys` that are closed now: what was granted on them and has not begun is to be returned."""
