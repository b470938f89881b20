"""`millstream limits`: what it shows of each limit, and an operator's hand on one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.fake_tracker import HOSTILE, FakeTracker, page, problem

REQUESTS = {
    "dimension": "requests", "configured": 60.0, "effective": 48.0, "used": 31.0, "window_s": 60.0,
    "reserved": None, "period": None, "estimate_error": None,
}  # fmt: skip
COST = {
    "dimension": "cost", "configured": 50.0, "effective": 50.0, "used": 40.25, "window_s": None,
    "reserved": 0.5, "period": "2026-05-09", "estimate_error": 0.2,
}  # fmt: skip


def limit(key: str = "llm", **more: Any) -> dict[str, Any]:
    """A limit as the tracker shows it."""
    return {
        "key": key, "dimensions": [REQUESTS, COST], "in_use": 2, "waiting": 7, "granted_total": 9, "throttled_total": 3,
        "paused_for_s": None, "paused_until": None, "paused_why": "", "breaker": "closed", "shadow": False,
        "would_have_waited": 0, "template": "", **more,
    }  # fmt: skip


def listing(*items: dict[str, Any], fault: str = "") -> dict[str, Any]:
    return page(items, epoch=3, revision=7, fault=fault)


def test_every_dimension_of_a_limit_has_its_line(tracker: FakeTracker) -> None:
    """Configured and effective, used and reserved, what waits and what stops it; money with its period."""
    paused = limit(
        "tenant/acme", paused_for_s=11.5, paused_why="told to", breaker="half_open", template="tenant/{tenant_id}"
    )
    tracker.on("GET /v1/limits", listing(limit(shadow=True, would_have_waited=12), paused, fault="Expected a rate"))
    result = tracker.run("limits")
    lines = result.stdout.splitlines()
    assert len(lines) == 5
    assert lines[1].split()[:6] == ["llm", "requests", "60/min", "48", "31", "-"]
    for part in ("50.00 USD in 2026-05-09", "40.25 USD", "0.50 USD", "+20%"):
        assert part in lines[2]
    assert "shadow, 12 would have waited" in lines[1]
    for part in ("12s: told to", "half open", "of tenant/{tenant_id}"):
        assert part in lines[3]
    assert "a newer configuration was not taken: Expected a rate" in result.stderr


@pytest.mark.parametrize(
    ("paused_for_s", "why", "shown"),
    [
        (11.5, "the provider asked for 12 s", "12s: the provider asked for 12 s"),
        (4.0, "", "4.0s "),
        (None, "all of the 5.00 USD for the life of the key are spent", "all of the 5.00 USD for the life of the key"),
    ],
)
def test_a_stop_is_told_in_words(tracker: FakeTracker, paused_for_s: float | None, why: str, shown: str) -> None:
    """How long, as far as that is known, and why."""
    tracker.on("GET /v1/limits", listing(limit(paused_for_s=paused_for_s, paused_why=why)))
    assert shown in tracker.run("limits").stdout


@pytest.mark.parametrize("why", ["", "forced open by operator cli:ops"])
def test_a_limit_that_an_operator_closed_says_how_to_open_it(tracker: FakeTracker, why: str) -> None:
    """And who it was, where that was told."""
    tracker.on("GET /v1/limits", listing(limit(breaker="forced_open", paused_why=why)))
    assert f"{why or 'forced open by an operator'}, until --breaker auto" in tracker.run("limits").stdout


def test_prices_and_keys_that_are_asked_for_in_vain_stand_below_the_limits(tracker: FakeTracker) -> None:
    """With the version of each price and the revision of the configuration; how to add a missing key is told."""
    prices = [
        {"model": "claude-big", "tokens_in": 5.0, "tokens_out": 25.0, "version": "2026-05"},
        {"model": HOSTILE, "tokens_in": 1.5, "tokens_out": 2.0, "version": ""},
    ]
    told = listing(limit()) | {"prices": prices, "unknown": ["search"]}
    tracker.on("GET /v1/limits", told)
    result = tracker.run("limits")
    assert "prices (revision 7): claude-big 5 in, 25 out USD per million tokens (2026-05), " in result.stdout
    assert "\x1b" not in result.stdout
    assert "asked for and not configured: search; add them to millstream.toml" in result.stderr
    assert "`millstream config apply FILE`" in result.stderr
    assert json.loads(tracker.run("limits", "--json").stdout)["prices"] == prices


def test_one_limit_is_shown_whole(tracker: FakeTracker) -> None:
    """Its key is quoted in the path; the revision and epoch of the governor stand below it."""
    tracker.on(
        "GET /v1/limits/anthropic%2Fx",
        limit("anthropic/x", revision=7, epoch=3, fault="", paused_why=HOSTILE, paused_for_s=1.0),
    )
    shown = tracker.run("limits", "anthropic/x").stdout
    for part in ("anthropic/x", "revision", "48", "40.25 USD"):
        assert part in shown
    assert "\x1b" not in shown
    assert json.loads(tracker.run("limits", "anthropic/x", "--json").stdout)["dimensions"] == [REQUESTS, COST]
    assert tracker.run("limits", "nothing").exit_code == 2


@pytest.mark.parametrize(
    ("flags", "operation"),
    [
        (["--breaker", "open"], "open"),
        (["--breaker", "auto"], "auto"),
        (["--breaker", "disable"], "disable"),
        (["--resume"], "resume"),
    ],
)
def test_an_operation_is_sent_with_who_asks(tracker: FakeTracker, flags: list[str], operation: str) -> None:
    """The governor's log can say who it was."""
    tracker.on("POST /v1/limits/llm/operate", limit(breaker="forced_open", revision=7, epoch=3, fault=""))
    result = tracker.run("limits", "llm", *flags)
    assert result.exit_code == 0
    assert "forced open" in result.stdout
    (body,) = tracker.bodies("POST /v1/limits/llm/operate")
    assert body["operation"] == operation
    assert body["by"].startswith("cli:")


def test_an_operation_needs_one_key_and_is_one(tracker: FakeTracker) -> None:
    """Wrong use, and nothing was asked."""
    for args in (
        ["--resume"],
        ["--breaker", "open"],
        ["llm", "--resume", "--breaker", "open"],
        ["llm", "--breaker", "no"],
    ):
        assert tracker.run("limits", *args).exit_code == 2
    assert not tracker.asked


def test_what_the_governor_refuses_fails(tracker: FakeTracker) -> None:
    """Exit status 1, with its reason."""
    tracker.on("POST /v1/limits/llm/operate", problem(409, "not_possible", "The governor refused: no breaker"))
    result = tracker.run("limits", "llm", "--resume")
    assert result.exit_code == 1
    assert "no breaker" in result.stderr
