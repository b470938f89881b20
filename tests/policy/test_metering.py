"""Metering: which tasks are held, by which limits and in which lane, whatever the order of what asks for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.metering import Metered, lane_of, lane_token, limit_keys, metering
from millstream.settings import build
from millstream_schemas.codec import decode_envelope
from millstream_schemas.envelope import Envelope
from millstream_schemas.names import Names

NAMES = Names()


def task(**fields: Any) -> Envelope:
    """A task with its defaults filled in, as admission hands it over."""
    envelope, _ = decode_envelope(msgspec.json.encode({"task_type": "agent.run", **fields}))
    return msgspec.structs.replace(envelope, tenant_id="acme", queue="agent-run")


def test_a_task_that_nothing_asks_limits_or_fairness_for_is_plain() -> None:
    """Kinds that say nothing make no difference."""
    assert metering(task(), ()) is None
    assert metering(task(), (Metered(), Metered())) is None


def test_limits_of_the_envelope_of_configuration_and_of_workers_add_up_to_one_pool() -> None:
    """Each once, in one order."""
    found = metering(task(limits=["b", "a"]), (Metered(limits=("c", "a")), Metered(limits=("b",), fair=True)))
    assert found is not None
    assert (found.limits, found.reason) == (("a", "b", "c"), "limits")


def test_a_fair_queue_holds_without_limits() -> None:
    """The lane is then the tenant's alone."""
    found = metering(task(), (Metered(fair=True),))
    assert found is not None
    assert (found.limits, found.reason, found.lane) == ((), "fairness", lane_of("acme", ()))


@pytest.mark.parametrize(
    ("template", "key"),
    [
        ("tenant/{tenant_id}", "tenant/acme"),
        ("{queue}/{task_type}", "agent-run/agent.run"),
        ("anthropic/{pins.model}", "anthropic/claude"),
        ("run/{run_id}", "run/-"),
        ("plain", "plain"),
    ],
)
def test_templates_are_filled_from_the_envelope(template: str, key: str) -> None:
    """What the task does not have stands as a dash."""
    assert limit_keys(task(pins={"model": "claude"}), [template]) == (key,)


@given(st.permutations(["a", "b", "{tenant_id}", "c/{queue}"]), st.permutations(["x", "y", "z"]))
def test_the_order_of_limits_makes_no_other_lane(templates: list[str], own: list[str]) -> None:
    """Nor does the place where each of them was asked for."""
    found = metering(task(limits=own), [Metered(limits=(template,)) for template in templates])
    given_once = metering(task(limits=sorted(own)), [Metered(limits=("a", "b", "{tenant_id}", "c/{queue}"))])
    assert found == given_once


@given(st.lists(st.text(max_size=20), max_size=5), st.text(max_size=20))
def test_a_lane_may_stand_in_a_subject_whatever_its_limits_are_called(limits: list[str], tenant: str) -> None:
    """Both lanes of it: the plain one and that of what waited before."""
    lane = lane_of(tenant, limits)
    for again in (False, True):
        token = lane_token(lane, again=again)
        assert NAMES.parse_held(NAMES.held("q", "normal", token)).lane == token


def test_lanes_differ_by_tenant_and_by_pool() -> None:
    """One tenant's wait is not another's, nor one model's another model's."""
    lanes = {lane_of(tenant, pool) for tenant in ("a", "b") for pool in ((), ("x",), ("y",), ("x", "y"))}
    assert len(lanes) == 8


def test_a_limit_that_looks_like_two_makes_a_lane_of_its_own() -> None:
    """A pin may hold any text: its task must not come into the pool of others."""
    pools = (("a", "b"), ("a\nb",), ("ab",), ("1:a1:b",), ("a1:b",))
    assert len({lane_of("acme", pool) for pool in pools}) == len(pools)


def test_settings_ask_by_queue_task_type_and_tenant() -> None:
    """With `default` for tenants that are not named."""
    settings = build(
        {
            "queues": {"agent-run": {"limits": ["of-queue"], "fair": True}},
            "task_types": {"agent.run": {"limits": ["of-type"]}},
            "tenants": {"acme": {"limits": ["of-tenant"]}, "default": {"limits": ["of-others"]}},
        }
    )
    found = metering(task(), settings.metered("agent-run", "agent.run", "acme"))
    assert found is not None
    assert found.limits == ("of-queue", "of-tenant", "of-type")
    other = metering(task(), settings.metered("elsewhere", "other", "nobody"))
    assert other is not None
    assert other.limits == ("of-others",)
    assert metering(task(), build({}).metered("agent-run", "agent.run", "acme")) is None
