"""All problems of a configuration file at once, each with its path."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from millstream import settings as configuration
from millstream.errors import SettingsError
from millstream.settings import Settings

Layer = dict[str, Any]


def all_problems(layer: object, first: SettingsError) -> list[str]:
    """Every problem of `layer`, of which `first` is what was found by decoding it as a whole.

    That stops at the first value that does not fit, so each value is tried by itself here. Problems between two values
    can be found only once each of them fits.
    """
    if not isinstance(layer, dict):
        return first.problems
    found: list[str] = []
    for where, value in _leaves(cast("Layer", layer), ()):
        try:
            configuration.build(_nested(where, value))
        except SettingsError as error:
            fits = error.__context__ is None
            found += [
                each if fits else _placed(each, where) for each in error.problems if not fits or _alone(each, where)
            ]
    return list(dict.fromkeys(found)) or first.problems


def _placed(problem: str, where: tuple[str, ...]) -> str:
    """The problem of one value, with its whole path: decoding knows no names of tables."""
    return f"{problem.partition(' - at ')[0]} - at `{'.'.join(where)}`"


def _alone(problem: str, where: tuple[str, ...]) -> bool:
    """Whether the problem concerns this value and no other setting, which was left out here."""
    named = set(re.findall(r"`([a-z_]+)`", problem)) & set(Settings.__struct_fields__)
    return named <= {where[0]}


def _leaves(layer: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in layer.items():
        if isinstance(value, dict) and value:
            yield from _leaves(cast("Layer", value), (*above, name))
        else:
            yield (*above, name), value


def _nested(where: tuple[str, ...], value: Any) -> Layer:
    for name in reversed(where):
        value = {name: value}
    return cast("Layer", value)
