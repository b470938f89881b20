"""What `millstream doctor` says of limits."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.cli.doctor_limits import Seen, examine_limits
from millstream.settings import build
from millstream_schemas.commands import HandlerInfo, WorkerInfo
from millstream_schemas.limit_states import LimitState
from millstream_schemas.permits import LimitsListing


def worker(*limits: str, queues: tuple[str, ...] = ("q",), name: str = "w") -> WorkerInfo:
    """A live worker whose handler names these limits."""
    return WorkerInfo(
        worker_id=name,
        queues=list(queues),
        slots=1,
        handlers=[HandlerInfo(task_type="t", queue="q", limits=list(limits))],
    )


def listing(*keys: str, **more: Any) -> LimitsListing:
    """A governor that knows these keys."""
    states = tuple(
        LimitState(key=key, dimensions=(), in_use=0, waiting=0, granted_total=0, throttled_total=0) for key in keys
    )
    return LimitsListing(items=states, epoch=3, **more)


def found(
    layer: dict[str, Any], *workers: WorkerInfo, heard: LimitsListing | None = None, **more: Any
) -> dict[str, tuple[str, str]]:
    """Status and detail by check, the worst of each."""
    seen = Seen(settings=build(layer), workers=workers, listing=heard, **more)
    worst: dict[str, tuple[str, str]] = {}
    for check in sorted(examine_limits(seen), key=lambda each: ("ok", "warn", "fail").index(each.status)):
        assert check.status == "ok" or check.todo
        worst[check.name] = (check.status, check.detail)
    return worst


LLM = {"limits": {"llm": {"requests": "60/min"}}}


def test_a_sane_installation_has_nothing_to_remark() -> None:
    """The governor knows what is configured, and all that is asked for is."""
    told = found(LLM, worker("llm"), heard=listing("llm"), leader="host/1")
    assert told == {
        "governor": ("ok", "it answers, 1 limits, epoch 3, led by host/1"),
        "limits": ("ok", "1 known, all that are asked for among them"),
    }


@pytest.mark.parametrize(
    ("asked", "configured", "known"),
    [
        ("llm", "llm", True),
        ("llm", "other", False),
        ("anthropic/{pins.model}", "anthropic/{pins.model}", True),
        ("anthropic/{pins.model}", "anthropic/claude", True),
        ("anthropic/claude", "anthropic/{pins.model}", True),
        ("openai/{pins.model}", "anthropic/claude", False),
    ],
)
@pytest.mark.parametrize("asker", ["handler", "queue", "task_type", "tenant"])
def test_keys_that_nobody_configured_are_found_whoever_asks_for_them(
    asked: str, configured: str, known: bool, asker: str
) -> None:
    """By name or by template; an unknown key is never granted, so that fails."""
    layer: dict[str, Any] = {"limits": {configured: {"concurrency": 1}}}
    if asker != "handler":
        layer[f"{asker}s"] = {"q": {"limits": [asked]}}
    asking = worker(*([asked] if asker == "handler" else []))
    assert found(layer, asking)["limits"][0] == ("ok" if known else "fail")
    del layer["limits"]  # what the governor lists counts as well: its configuration may be another file
    told = found(layer, asking, heard=listing(configured))
    assert told["limits"][0] == ("ok" if known else "fail")
    assert known or asked in told["limits"][1]


def test_keys_that_held_tasks_wait_for_in_vain_are_found() -> None:
    """A producer's own, which neither a worker nor the configuration names; and both ways to add them."""
    seen = Seen(settings=build(LLM), workers=(worker("llm"),), listing=listing("llm", unknown=("search",)))
    (check,) = [check for check in examine_limits(seen) if check.name == "limits"]
    assert check.status == "fail"
    assert "never granted: search; tasks wait now for search" in check.detail
    assert "to millstream.toml and restart the governor" in check.todo
    assert "`millstream config apply FILE`" in check.todo


def test_a_governor_that_works_by_another_configuration_is_told() -> None:
    """Silent, at fault, behind, or without a limit that stands in the file; a template needs no state of its own."""
    assert found(LLM, heard=None)["governor"][0] == "fail"
    assert found({}, heard=None)["governor"] == ("warn", "no governor answers; no limit needs one")
    assert "Expected" in found(LLM, heard=listing("llm", fault="Expected a rate"))["governor"][1]
    assert found(LLM, heard=listing("llm", revision=3), revision=4)["governor"][0] == "warn"
    assert found(LLM, heard=listing())["governor"][0] == "warn"
    assert found({"limits": {"t/{queue}": {"concurrency": 1}}}, heard=listing())["governor"][0] == "ok"


def test_limits_that_do_not_do_what_they_seem_to_are_told() -> None:
    """Shadow left on, nothing limited, and a safe rate that the fleet together carries over the limit."""
    shadow = {"limits": {"llm": {"requests": "60/min", "shadow": True}}}
    assert "shadow" in found(shadow, heard=listing("llm"))["limits"][1]
    assert "limits nothing" in found({"limits": {"llm": {}}}, heard=listing("llm"))["limits"][1]
    safe = {"limits": {"llm": {"requests": "60/min", "on_governor_down": "safe_rate", "safe_rate": "30/min"}}}
    pair = (worker("llm", name="a"), worker("llm", name="b"))
    assert found(safe, *pair, heard=listing("llm"))["limits"][0] == "ok"
    status, detail = found(safe, *pair, worker("llm", name="c"), heard=listing("llm"))["limits"]
    assert status == "warn"
    assert "3 workers at its `safe_rate` start 1.5 calls a second" in detail


def test_queues_that_nobody_works_on_are_named() -> None:
    """Those of the configuration, and those where tasks are held."""
    layer: dict[str, Any] = {"queues": {"q": {}, "lonely": {}}}
    told = found(layer, worker(), heard=listing(), waiting_queues=frozenset({"q", "deserted"}))
    assert told["workers"] == ("warn", "no live worker serves deserted, lonely")
    assert "workers" not in found(layer, heard=listing())
