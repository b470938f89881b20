"""The command `limits`: what each limit allows, what is in effect and in use; and an operator's commands to one of them."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from typing import Final

import click

from millstream.cli import output as out
from millstream.cli.api import Tracker, http_url, open_tracker, quoted
from millstream.cli.output import Json, as_json, inert
from millstream.policy.waiting import UNKNOWN_TODO

COLUMNS: Final = (
    "limit", "of", "configured", "effective", "used", "reserved", "in flight", "waiting", "paused", "breaker", "estimates", "",
)  # fmt: skip
_UNITS: Final = {1: "s", 60: "min", 3600: "h", 86_400: "day"}


@click.command()
@click.argument("key", required=False)
@click.option(
    "--breaker",
    type=click.Choice(["open", "auto", "disable"]),
    help="Force the breaker of KEY open, leave it to itself, or switch it off.",
)
@click.option("--resume", is_flag=True, help="End a pause of KEY, or the belief that its allowance is used up.")
@http_url
@as_json
@click.pass_context
def limits(
    ctx: click.Context, key: str | None, breaker: str | None, resume: bool, http_url: str | None, as_json: bool
) -> None:
    """Show every limit, or KEY alone: configured, effective, used in the last window, who waits, and what stops it.

    `effective` is what the provider's refusals have left of `configured`; `estimates` says how much more (+) or less (-)
    calls take than was reserved for them. docs/limits.md explains each column.
    """
    if breaker is not None and resume:
        raise click.UsageError("--breaker and --resume are two operations: give one of them")
    operation = breaker or ("resume" if resume else None)
    if operation is not None and key is None:
        raise click.UsageError("--breaker and --resume act on one limit: give its KEY")
    with open_tracker(ctx, http_url) as tracker:
        answer = _asked(tracker, key, operation)
    if as_json:
        out.print_json(answer)
        return
    if answer.get("fault"):
        out.note(f"a newer configuration was not taken: {inert(answer['fault'], 500)}")
    if key is None:
        rows = [row for each in answer["items"] for row in _rows(each)]
        out.print_table(COLUMNS, rows, empty="no limits")
        _print_below(answer)
    else:
        _print_one(answer)


def _asked(tracker: Tracker, key: str | None, operation: str | None) -> Json:
    if key is None:
        return tracker.get("/v1/limits")
    path = f"/v1/limits/{quoted(key)}"
    if operation is None:
        return tracker.get(path)
    return tracker.post(f"{path}/operate", {"operation": operation, "by": f"cli:{_who()}"[:128]})


def _who() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container may have no name for its user
        return "unknown"


def _print_one(limit: Json) -> None:
    out.print_fields(
        {
            "limit": limit.get("key"),
            "template": limit.get("template"),
            "in flight": limit.get("in_use"),
            "waiting": limit.get("waiting"),
            "granted": limit.get("granted_total"),
            "throttled": limit.get("throttled_total"),
            "paused": _paused(limit),
            "breaker": _words(limit.get("breaker")),
            "shadow": f"on: {limit.get('would_have_waited', 0)} would have waited" if limit.get("shadow") else "",
            "revision": limit.get("revision"),
            "epoch": limit.get("epoch"),
        }
    )
    columns = ("of", "configured", "effective", "used", "reserved", "estimates")
    out.say("")
    out.print_table(columns, [_dimension(each) for each in limit.get("dimensions", ())], empty="it limits nothing")


def _print_below(listing: Json) -> None:
    """What concerns no single limit: the prices that costs are reckoned by, and keys that are asked for in vain."""
    if listing.get("prices"):
        told = ", ".join(_price(each) for each in listing["prices"])
        out.say(inert(f"prices (revision {listing.get('revision', 0)}): {told}", 4000))
    if listing.get("unknown"):
        out.note(inert(f"asked for and not configured: {', '.join(listing['unknown'])}; add them {UNKNOWN_TODO}", 2000))


def _price(each: Json) -> str:
    version = f" ({each['version']})" if each.get("version") else ""
    return f"{each['model']} {each['tokens_in']:g} in, {each['tokens_out']:g} out USD per million tokens{version}"


def _rows(limit: Json) -> Iterator[tuple[object, ...]]:
    """A line for each dimension; what concerns the whole limit stands in the first."""
    whole: tuple[object, ...] = (
        limit.get("in_use"),
        limit.get("waiting"),
        _paused(limit),
        _words(limit.get("breaker")),
    )
    first, notes = limit.get("key"), _notes(limit)
    for each in limit.get("dimensions") or [{}]:
        name, configured, effective, used, reserved, error = _dimension(each)
        yield (first, name, configured, effective, used, reserved, *whole, error, notes)
        first, notes, whole = "", "", ("",) * len(whole)


def _dimension(each: Json) -> tuple[object, ...]:
    name, error = str(each.get("dimension", "")), each.get("estimate_error")
    return (
        _words(name),
        f"{_amount(name, each.get('configured'))}{_per(each)}",
        _amount(name, each.get("effective")),
        _amount(name, each.get("used")),
        _amount(name, each.get("reserved")),
        "" if error is None else f"{error:+.0%}",
    )


def _amount(dimension: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} USD" if dimension == "cost" else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _per(each: Json) -> str:
    if each.get("period"):
        return f" in {each['period']}"
    window_s = each.get("window_s")
    if window_s is None:
        return ""
    return f"/{_UNITS.get(window_s) or f'{window_s:g}s'}"


def _paused(limit: Json) -> str:
    left, said = limit.get("paused_for_s"), str(limit.get("paused_why") or "")
    if limit.get("breaker") == "forced_open":
        return f"{said or 'forced open by an operator'}, until --breaker auto"
    if left is None:
        return said
    return f"{out.span(left)}: {said}" if said else out.span(left)


def _notes(limit: Json) -> str:
    notes = [f"shadow, {limit.get('would_have_waited', 0)} would have waited"] if limit.get("shadow") else []
    if limit.get("template"):
        notes.append("template" if limit["template"] == limit.get("key") else f"of {limit['template']}")
    return ", ".join(notes)


def _words(name: object) -> str:
    return str(name or "").replace("_", " ")


COMMANDS: tuple[click.Command, ...] = (limits,)
