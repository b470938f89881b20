"""docs/configuration.md names every setting and every variable, and its file is valid."""

from __future__ import annotations

import re
import tomllib

import msgspec
import pytest

from millstream import settings
from millstream.configuration import SECTIONS
from millstream.errors import SettingsError
from millstream.policy import limits
from millstream.settings import build
from tests.support.source import REPOSITORY

PAGE = (REPOSITORY / "docs" / "configuration.md").read_text("utf-8")


def test_the_example_is_valid_and_shows_the_defaults() -> None:
    """What the page shows builds settings, and what it calls a default is one."""
    shown = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    built = settings.build(tomllib.loads(shown[1]))
    plain = settings.build({})
    shared: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    assert msgspec.structs.replace(built, **shared) == plain
    assert built.queue("agent-run") == plain.queue("anything")


def test_the_other_name_of_a_setting_stands_for_it() -> None:
    """`max_throttle_seconds`, as it is called elsewhere; both at once are a fault with its path."""
    assert build({"max_throttle_seconds": "2h"}).max_throttle_s == 7200.0
    assert "`max_throttle_seconds`" in PAGE
    with pytest.raises(SettingsError, match="set one of them - at `max_throttle_seconds`"):
        build({"max_throttle_seconds": "2h", "max_throttle_s": "1h"})


def test_every_setting_is_named() -> None:
    """No member of the settings is missing on the page."""
    structs = (
        settings.Settings,
        settings.NatsSettings,
        settings.QueueSettings,
        settings.TaskTypeSettings,
        settings.TenantSettings,
        limits.Limit,
        limits.Adaptive,
        limits.BreakerRules,
        limits.Price,
        settings.TrackerSettings,
        settings.WorkerSettings,
    )
    missing = [name for struct in structs for name in struct.__struct_fields__ if not re.search(rf"\b{name}\b", PAGE)]
    assert not missing


def test_defaults_of_limits_are_the_ones_in_the_code() -> None:
    """What the table of members says of adaptation and breakers."""
    adaptive, breaker = limits.Adaptive(), limits.BreakerRules()
    for rules, left_out in ((adaptive, {"ramp"}), (breaker, set[str]())):
        for name in set(rules.__struct_fields__) - left_out:
            assert f"`{name}` {getattr(rules, name):g}" in PAGE, name
    assert f"| `soft` | {limits.Limit().soft:g} |" in PAGE


def test_every_variable_is_named() -> None:
    """No variable that is read is missing on the page."""
    read = {
        name
        for path in (REPOSITORY / "actors" / "millstream").rglob("*.py")
        for name in re.findall(r'"(MILLSTREAM_[A-Z_]+)"', path.read_text("utf-8"))
    }
    assert [name for name in sorted(read) if f"`{name}`" not in PAGE] == []
