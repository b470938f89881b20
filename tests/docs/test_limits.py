"""docs/limits.md: its settings are valid, and what it says of `millstream limits` is what that shows."""

from __future__ import annotations

import re
import tomllib
from typing import get_args

from millstream.cli.limits import COLUMNS
from millstream.policy.limits import FIELDS
from millstream.settings import build, load
from millstream_schemas.permits import Operation, OutcomeClass
from tests.support.source import REPOSITORY

PAGE = (REPOSITORY / "docs" / "limits.md").read_text("utf-8")


def test_every_block_of_settings_is_valid() -> None:
    """Each builds settings by itself."""
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        build(tomllib.loads(block))


def test_every_column_class_field_and_operation_is_explained() -> None:
    """What a person meets stands on the page."""
    (shown,) = re.findall(r"^LIMIT .*$", PAGE, re.MULTILINE)
    assert shown.split() == [word for column in COLUMNS for word in column.upper().split()]
    for outcome in set(get_args(OutcomeClass)) - {"ok", "error", "unknown"}:
        assert f"| `{outcome}` |" in PAGE, outcome
    for field in FIELDS:
        assert f"`{field}`" in PAGE, field
    for operation in get_args(Operation):
        assert f"--breaker {operation}`" in PAGE or f"--{operation}`" in PAGE, operation


def test_the_example_asks_for_limits_that_its_settings_hold() -> None:
    """examples/limits.py and limits.toml belong together."""
    settings = load(REPOSITORY / "examples" / "limits.toml", {})
    source = (REPOSITORY / "examples" / "limits.py").read_text("utf-8")
    named = {key for listed in re.findall(r"limits=\[(.*?)\]", source) for key in re.findall(r'"(.*?)"', listed)}
    named |= {key for call in re.findall(r"ctx\.limit\((.*?)\)", source) for key in re.findall(r'"(.*?)"', call)}
    assert named == set(settings.limits)
