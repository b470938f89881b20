"""What `millstream doctor` checks of limits: are they known, sane and enforced, and does anybody serve what waits for them?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from millstream.cli.checks import Check
from millstream.cli.output import inert
from millstream.policy.limits import Compiled, compiled, is_template, matcher, named
from millstream.policy.waiting import UNKNOWN_TODO
from millstream.settings import Settings
from millstream_schemas.commands import WorkerInfo
from millstream_schemas.permits import LimitsListing

APPLY: Final = "change millstream.toml, or store a configuration with `millstream config apply`"


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found out: the settings in effect, the live workers, and what the governor listed (None: silence)."""

    settings: Settings
    workers: Sequence[WorkerInfo]
    listing: LimitsListing | None
    revision: int = 0
    """Of the configuration that is stored in the server; 0 for none."""
    leader: str = ""
    waiting_queues: frozenset[str] = frozenset()
    """Queues with tasks in HELD."""


def examine_limits(seen: Seen) -> list[Check]:
    """The checks on limits; where all is well there is one that says so for each thing looked at."""
    return [*_governor(seen), *_configured(seen), *_queues(seen)]


def remarks(settings: Settings) -> list[str]:
    """What of a configuration's limits is allowed, but probably not meant; looked at without any server."""
    alone = Seen(settings=settings, workers=(), listing=None)
    return [check.detail for check in _configured(alone) if check.status != "ok"]


def _governor(seen: Seen) -> list[Check]:
    listing = seen.listing
    if listing is None:
        needed = bool(_asked(seen) or seen.settings.limits)
        said = "no governor answers" + ("" if needed else "; no limit needs one")
        return [Check("governor", "fail" if needed else "warn", said, "start one: `millstream governor`")]
    if listing.fault:
        detail = f"it did not take a newer configuration: {inert(listing.fault, 500)}"
        return [Check("governor", "fail", detail, "store a good one: `millstream config apply FILE`")]
    if listing.revision != seen.revision:
        detail = f"it works by revision {listing.revision} of the configuration, {seen.revision} is stored"
        return [Check("governor", "warn", detail, "look again in a few seconds; if it stays so, look at its log")]
    known = {state.key for state in listing.items}
    stale = sorted(key for key in set(seen.settings.limits) - known if not is_template(key))
    if stale:
        detail = f"it does not know {_names(stale)}"
        return [
            Check(
                "governor",
                "warn",
                detail,
                "restart it with this configuration, or store it for all: `millstream config apply FILE`",
            )
        ]
    leads = f", led by {inert(seen.leader, 100)}" if seen.leader else ""
    return [Check("governor", "ok", f"it answers, {len(known)} limits, epoch {listing.epoch}{leads}")]


def _configured(seen: Seen) -> list[Check]:
    found: list[Check] = []
    known = (
        {*seen.settings.limits, *(state.key for state in seen.listing.items)}
        if seen.listing
        else set(seen.settings.limits)
    )
    awaited = (
        set(seen.listing.unknown) if seen.listing else set[str]()
    )  # by held tasks and by workers that have one in hand
    unknown = sorted(awaited | {key for key in _asked(seen) if not _is_known(key, known)})
    if unknown:
        waits = f"; tasks wait now for {_names(awaited)}" if awaited else ""
        detail = f"unknown limits are asked for, and never granted: {_names(unknown)}{waits}"
        found.append(Check("limits", "fail", detail, f"add them under `[limits.NAME]` {UNKNOWN_TODO}"))
    shadow = sorted(key for key, limit in seen.settings.limits.items() if limit.shadow)
    if shadow:
        detail = f"in shadow mode, so that they hold nothing up: {_names(shadow)}"
        found.append(Check("limits", "warn", detail, f"take `shadow` away once they are right: {APPLY}"))
    for limit in named(seen.settings.limits):
        found += _sane(compiled(limit), len(seen.workers))
    return found or [Check("limits", "ok", f"{len(known)} known, all that are asked for among them")]


def _sane(limit: Compiled, workers: int) -> list[Check]:
    key = inert(limit.key, 100)
    if not limit.rates and limit.concurrency is None and limit.cost is None:
        return [Check("limits", "warn", f"`{key}` limits nothing", f"give it a bound: {APPLY}")]
    requests = limit.rates.get("requests")
    if limit.safe_rate is None or requests is None or limit.limit.on_governor_down != "safe_rate":
        return []
    together = max(workers, 1) * limit.safe_rate.amount / limit.safe_rate.window_s
    allowed = requests.amount / requests.window_s
    if together <= allowed:
        return []
    detail = (
        f"`{key}`: {max(workers, 1)} workers at its `safe_rate` start {together:.3g} calls a second while no governor "
        f"answers, it allows {allowed:.3g}"
    )
    return [
        Check(
            "limits",
            "warn",
            detail,
            f"lower `safe_rate` to {limit.safe_rate.window_s * allowed / max(workers, 1):.3g} or less",
        )
    ]


def _queues(seen: Seen) -> list[Check]:
    served = {queue for worker in seen.workers for queue in worker.queues}
    lonely = sorted((set(seen.settings.queues) | seen.waiting_queues) - served)
    if not lonely or not seen.workers:  # that there is no worker at all is said by another check
        return []
    detail = f"no live worker serves {_names(lonely)}"
    return [Check("workers", "warn", detail, "start one: `millstream worker module:app --queues NAME`")]


def _asked(seen: Seen) -> set[str]:
    """Every key or template that handlers and the configuration ask for."""
    keys = {key for worker in seen.workers for info in worker.handlers for key in info.limits}
    settings = seen.settings
    for table in (settings.queues, settings.task_types, settings.tenants):
        for each in table.values():
            keys |= set(each.limits)
    return keys


def _is_known(asked: str, configured: set[str]) -> bool:
    """Whether a limit is there for what is asked for: by its name, or because one is a template that the other fits."""
    if asked in configured:
        return True
    if any(is_template(key) and matcher(key)(asked) for key in configured):
        return True
    return is_template(asked) and any(matcher(asked)(key) for key in configured if not is_template(key))


def _names(names: Iterable[str]) -> str:
    return inert(", ".join(sorted(names)), 300)
