"""Limits as people write them: texts for rates and money, shorter windows, templates, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.policy.limits import (
    Limit,
    Rate,
    Spending,
    compiled,
    faults,
    fill,
    is_template,
    matcher,
    named,
    rate,
    spending,
)
from millstream.policy.metering import lane_of, lane_token, limit_keys
from millstream_schemas.envelope import Envelope
from millstream_schemas.permits import Denied, HeldPermit, Renew
from tests.support.permit_desk import Desk, read, rpm


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("600/min", Rate(600, 60.0)),
        ("50/10s", Rate(50, 10.0)),
        ("2_000_000/min", Rate(2_000_000, 60.0)),
        (" 5 / s ", Rate(5, 1.0)),
        ("100/hour", Rate(100, 3600.0)),
        ("200/day", Rate(200, 86_400.0)),
        ("10/500ms", Rate(10, 0.5)),
        ("7/7d", Rate(7, 604_800.0)),
    ],
)
def test_a_rate_is_an_amount_per_period(text: str, expected: Rate) -> None:
    """Any period from a tenth of a second to a week, by its name or its length."""
    assert rate(text) == expected


@pytest.mark.parametrize(
    "text", ["", "600", "/min", "600/", "0/min", "-5/min", "1.5/min", "5/fortnight", "5/10ms", "5/8d", "9999999999/min"]
)
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    """The message shows what was expected, or the bounds."""
    with pytest.raises(ValueError, match=r"Expected|duration"):
        rate(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50 USD/day@Europe/Zurich", Spending(50.0, "day", "Europe/Zurich")),
        ("900 USD/month", Spending(900.0, "month", "UTC")),
        ("5 USD", Spending(5.0, "total", "UTC")),
        ("0.25USD/day@UTC", Spending(0.25, "day", "UTC")),
        ("1_000 USD / month", Spending(1000.0, "month", "UTC")),
    ],
)
def test_a_budget_is_money_per_period_in_a_zone(text: str, expected: Spending) -> None:
    """Without a period it is for the life of the key, without a zone in UTC."""
    assert spending(text) == expected


@pytest.mark.parametrize(
    "text", ["", "50", "50 EUR/day", "50 USD/week", "-5 USD", "5 USD/day@Nowhere/Land", "5 USD/day@../etc", "5 USD@UTC"]
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    """Other currencies, periods and zones that do not exist."""
    with pytest.raises(ValueError, match="Expected"):
        spending(text)


def test_a_shorter_enforced_window_cuts_the_rate_evenly() -> None:
    """600 a minute that the provider looks at each second are 10 a second; a longer window changes nothing."""
    cut = compiled(Limit(key="llm", requests="600/min", tokens="90_000/min", enforce_window="1s"))
    assert cut.rates == {"requests": Rate(10, 1.0), "tokens": Rate(1500, 1.0)}
    assert compiled(Limit(key="llm", requests="50/10s", enforce_window=60)).rates == {"requests": Rate(50, 10.0)}


@pytest.mark.parametrize(
    ("limit", "where"),
    [
        (Limit(key="llm", requests="6/min", enforce_window="1s"), "limits.llm.enforce_window"),
        (Limit(key="llm", requests="6 per minute"), "limits.llm.requests"),
        (Limit(key="llm", requests="6/min", requests_per_minute=6), "limits.llm.requests_per_minute"),
        (Limit(key="llm", cost="6"), "limits.llm.cost"),
        (Limit(key="llm", on_governor_down="safe_rate"), "limits.llm.safe_rate"),
        (Limit(key="tenant/{tenant}"), "tenant/{tenant}"),
        (Limit(key="tenant/{tenant_id"), "tenant/{tenant_id"),
    ],
)
def test_faults_name_the_place(limit: Limit, where: str) -> None:
    """What decodes and still makes no sense is said with its path."""
    (fault,) = faults([limit])
    assert where in fault


def test_a_table_of_limits_gives_them_their_names() -> None:
    """In a table the key is the name."""
    table = msgspec.json.decode(b'{"a": {"requests": "6/min"}, "b": {"concurrency": 2}}', type=dict[str, Limit])
    assert [limit.key for limit in named(table)] == ["a", "b"]
    assert faults(named(table)) == []


def test_a_template_is_filled_from_the_envelope() -> None:
    """Pins by their name; what is missing leaves a dash, so that nobody shares a limit by accident."""
    envelope = Envelope(queue="agents", task_type="plan", tenant_id="acme", pins={"model": "large"}, limits=["extra"])
    keys = limit_keys(envelope, ["anthropic/{pins.model}", "tenant/{tenant_id}", "run/{run_id}", "extra"])
    assert keys == ("anthropic/large", "extra", "run/-", "tenant/acme")
    assert fill("plain", {}) == "plain"
    assert is_template("tenant/{tenant_id}")
    assert not is_template("tenant/acme")


@given(st.dictionaries(st.sampled_from(["tenant_id", "queue", "pins.model"]), st.text(max_size=300)))
def test_a_filled_template_matches_itself_and_is_no_template_of_a_limit(fields: dict[str, str]) -> None:
    """Whatever a producer puts into a field, the key belongs to its template and fits the contract."""
    key = fill("t/{tenant_id}/{queue}/{pins.model}", fields)
    assert len(key) <= 128
    if len(key) < 128:
        assert matcher("t/{tenant_id}/{queue}/{pins.model}")(key)


def test_lanes_differ_by_tenant_and_pool() -> None:
    """What ran before waits in a lane of its own that goes first."""
    assert lane_of("acme", ["a", "b"]) == lane_of("acme", ["a", "b"])
    assert len({lane_of("acme", ["a", "b"]), lane_of("acme", ["ab"]), lane_of("other", ["a", "b"])}) == 3
    lane = lane_of("acme", [])
    assert lane_token(lane, again=True) != lane_token(lane, again=False) == lane


# --- keys from templates in the governor -------------------------------------------------------------


def test_each_key_of_a_template_has_a_limit_of_its_own() -> None:
    """One tenant's use does not touch another's, and the listing says where a key comes from."""
    desk = Desk(Limit(key="tenant/{tenant_id}", requests="6/min"))
    desk.granted(desk.acquire("tenant/a"))
    desk.waits(desk.acquire("tenant/a"))
    desk.granted(desk.acquire("tenant/b"))
    assert desk.limit("tenant/a").template == "tenant/{tenant_id}"
    assert desk.limit("tenant/{tenant_id}").dimensions[0].configured == 6


def test_an_exact_key_goes_before_templates_and_these_in_their_order() -> None:
    """A tenant may have a limit of its own beside the one for all others."""
    desk = Desk(
        Limit(key="llm/{pins.model}", requests="60/min"),
        Limit(key="llm/{queue}", requests="6/min"),
        Limit(key="llm/large", requests="600/min"),
    )
    assert desk.limit("llm/large").dimensions[0].configured == 600
    desk.acquire("llm/small")
    assert desk.limit("llm/small").dimensions[0].configured == 60


def test_a_template_itself_is_no_key() -> None:
    """Nobody can be granted anything on `tenant/{tenant_id}`, nor on what no template matches."""
    desk = Desk(Limit(key="tenant/{tenant_id}", requests="6/min"))
    for key in ("tenant/{tenant_id}", "tenant/", "x/tenant/a"):
        assert desk.answers[desk.acquire(key)] == Denied(reason="unknown_limit", key=key, epoch=1)


def test_a_new_configuration_reaches_keys_that_were_made_before() -> None:
    """Debt is kept when a template changes; a tenant that gets a limit of its own keeps its history as well."""
    desk = Desk(Limit(key="tenant/{tenant_id}", requests="60/min"))
    desk.acquire("tenant/a")
    desk.governor.configure(read([Limit(key="tenant/{tenant_id}", requests="6/min")]), {}, desk.now)
    assert desk.limit("tenant/a").dimensions[0].configured == 6
    assert 800 <= desk.waits(desk.acquire("tenant/a")).retry_after_ms <= 1010
    desk.governor.configure(read([rpm("tenant/a", 600)]), {}, desk.now)
    assert desk.limit("tenant/a").template == ""
    assert desk.answers[desk.acquire("tenant/b")] == Denied(reason="unknown_limit", key="tenant/b", epoch=1)


def test_those_who_wait_follow_a_new_configuration() -> None:
    """More places, a limit more, a limit less: who waits is served by what holds now."""
    desk = Desk(Limit(key="tool", concurrency=1))
    desk.granted(desk.acquire("tool"))
    waiting = [desk.acquire("tool", wait_s=30) for _ in range(3)]
    desk.governor.configure(read([Limit(key="tool", concurrency=3, requests="600/min")]), {}, desk.now)
    desk.wake()
    assert [name in desk.answers for name in waiting] == [True, True, False]
    for name in waiting[:2]:
        desk.settle(name)
    desk.granted(waiting[2])


def test_another_period_keeps_what_was_used() -> None:
    """Going from a minute to an hour does not hand out the hour's amount on top."""
    desk = Desk(Limit(key="llm", requests="10/min"))
    for _ in range(5):
        desk.granted(desk.acquire("llm", wait_s=10))
        desk.advance(6.1)
    desk.governor.configure(read([Limit(key="llm", requests="10/hour")]), {}, desk.now)
    (state,) = desk.limit("llm").dimensions
    assert (state.window_s, state.used) == (3600.0, 5)


def test_idle_keys_of_templates_are_forgotten() -> None:
    """A hundred thousand tenants of yesterday cost nothing today; one that is in use stays."""
    desk = Desk(Limit(key="tenant/{tenant_id}", requests="600/min", concurrency=2))
    names = [desk.acquire(f"tenant/{number}") for number in range(50)]
    for name in names[1:]:
        desk.settle(name)
    for _ in range(20):
        desk.advance(8)
        held = HeldPermit(permit=desk.permit(names[0]), keys=("tenant/0",))
        desk.send(Renew(worker="w", permits=(held,)))
    assert [state.key for state in desk.governor._holdings.table.all()] == ["tenant/0"]
    desk.settle(names[0])
    for _ in range(80):
        desk.advance(1)
        desk.wake()
    assert not list(desk.governor._holdings.table.all())
    desk.granted(desk.acquire("tenant/0"))


@pytest.mark.parametrize(
    ("template", "key", "fits"),
    [
        ("tenant/{tenant_id}", "tenant/acme", True),
        ("tenant/{tenant_id}", "tenant/", False),
        ("{queue}/{pins.model}", "a/b", True),
        ("{queue}/{pins.model}", "/b", False),
        ("x/{queue}/{step}/end", "x/a/b/end", True),
        ("x/{queue}/{step}/end", "x/a/end", False),
        ("x/{tenant_id}/{queue}/{task_type}/{step}/end", "x/" + "/" * 120 + "enx", False),
        ("a{step}" * 12 + "X", "a" * 128, False),
        ("a{step}" * 12 + "X", "ab" * 12 + "X", True),
    ],
)
def test_a_template_is_compared_in_the_time_that_the_key_takes(template: str, key: str, fits: bool) -> None:
    """Producers choose keys: none of them may keep the governor busy."""
    assert matcher(template)(key) is fits


def test_a_key_that_no_permit_could_carry_is_a_fault() -> None:
    """It would stand in the governor's snapshot, which a successor could not read."""
    assert [fault[:26] for fault in faults([Limit(key="k" * 129), Limit(key="")])] == [
        "Expected `str` of length <",
        "Expected `str` of length >",
    ]
