"""docs/http.md names every route of the HTTP surface."""

from __future__ import annotations

import re

from tests.support.source import REPOSITORY


def test_every_route_is_described() -> None:
    """A route that is added without a word here fails."""
    page = (REPOSITORY / "docs" / "http.md").read_text("utf-8")
    source = (REPOSITORY / "actors" / "millstream" / "http" / "app.py").read_text("utf-8")
    routes = re.findall(r"(?:_get|_post|Route)\(\"(/[^\"]+)\"", source)
    assert len(routes) > 15
    shown = [
        path.replace("{ident:path}", "{id}").replace("{key:path}", "{key}")
        for path in routes
        if not path.startswith("/static")
    ]
    assert [path for path in shown if f"{path}`" not in page] == []
