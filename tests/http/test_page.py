"""The page in a real browser: live rows, inert texts, no errors, narrow screens, light and dark."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from millstream.clock import SystemClock
from millstream.memory import MemoryServer
from millstream_schemas.events import Completed, Queued, TaskInfo
from millstream_schemas.infos import Progress
from tests.http.harness import Running, running
from tests.tracker.histories import Stream, card

pytest.importorskip("playwright", reason="page tests need the extra `dev`")

from playwright.async_api import Page, async_playwright

pytestmark = pytest.mark.page

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
MARKUP = '"><img src=x onerror="alert(1)"><script>alert(2)</script>{{7*7}}<b>x</b>'


class Trouble(list[str]):
    """Console errors, page errors, dialogs and requests to elsewhere, as they came."""


@asynccontextmanager
async def opened(chromium: str, mill: Running, path: str = "/", **context: Any) -> AsyncGenerator[tuple[Page, Trouble]]:
    """A page on the tracker, with whatever went wrong on it."""
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        try:
            page = await browser.new_page(**context)
            trouble = Trouble()
            base = str(mill.client.base_url).rstrip("/")

            def heard(message: Any) -> None:
                if message.type in ("error", "warning"):
                    trouble.append(f"console: {message.text}")

            def asked(request: Any) -> None:
                if not request.url.startswith(base):
                    trouble.append(f"request: {request.url}")

            async def dismiss(dialog: Any) -> None:
                trouble.append(f"dialog: {dialog.message}")
                await dialog.dismiss()

            page.on("console", heard)
            page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
            page.on("request", asked)
            page.on("dialog", dismiss)
            await page.goto(base + path)
            yield page, trouble
        finally:
            await browser.close()


async def test_rows_come_and_change_live(chromium: str, mill: Running) -> None:
    """Two tasks that are submitted after the page was opened appear and reach their states by themselves."""
    async with opened(chromium, mill) as (page, trouble):
        await page.get_by_text("live", exact=True).wait_for()
        one, two = card("one"), card("two", inbox_seq=2)
        for of, title in ((one, "First note"), (two, "Second note")):
            mill.stream.add(Queued(card=of, task=TaskInfo(title=title)), of)
        await mill.tell()
        await page.locator("tr", has_text="First note").wait_for()
        await page.locator("tr", has_text="Second note").wait_for()
        mill.stream.started(one)
        mill.stream.add(Progress(key=one.key, fraction=0.4, message="half way"), one)
        await mill.tell()
        await page.locator("tr", has_text="First note").get_by_text("40% half way").wait_for()
        mill.stream.add(Completed(card=one), one)
        await mill.tell()
        await page.locator("tr", has_text="First note").locator(".state[data-state=completed]").wait_for()
        await page.locator(".card", has_text="notes").get_by_text("1 of 2").wait_for()
        assert await page.locator(".tasks tbody tr").count() == 2
        await page.get_by_role("link", name="First note").click()
        await page.get_by_role("heading", name="Timeline").wait_for()
        await page.get_by_text("It completed in attempt 1").wait_for()
        assert trouble == []


async def test_texts_of_producers_and_handlers_stay_texts(chromium: str, mill: Running) -> None:
    """Markup in every field that people see: no dialog, no element, no error, on every view."""
    of = card(MARKUP, task_type=MARKUP, trace_id=MARKUP)
    mill.stream.failed(of, MARKUP, title=MARKUP, tags=[MARKUP], run_id=MARKUP)
    shown = card("shown", task_type=MARKUP)
    mill.stream.add(Queued(card=shown, task=TaskInfo(title=MARKUP)), shown)
    mill.stream.started(shown)
    mill.stream.add(Progress(key=shown.key, fraction=0.1, message=MARKUP), shown)
    done = card("done")
    mill.stream.completed(done, MARKUP, title="Done")
    await mill.tell()
    async with opened(chromium, mill) as (page, trouble):
        await page.locator("tr", has_text="<script>").first.wait_for()
        for view in (
            f"#/task/{of.key}",
            f"#/task/{shown.key}",
            f"#/task/{done.key}",
            "#/dlq",
            f"#/task/{MARKUP}",
            "#/nothing",
        ):
            await page.evaluate("where => { location.hash = where }", view)
            await page.locator("main > *").first.wait_for()
            await page.wait_for_load_state("networkidle") if view == "#/dlq" else None
            assert await page.locator("main script, main b[onerror], main img").count() == 0
        found = [each for each in trouble if "404" not in each]  # the task that does not exist
        assert found == []


async def test_a_dead_letter_can_be_replayed_from_its_row(chromium: str, mill: Running) -> None:
    """The button asks once more, then the command is sent."""
    mill.stream.failed(card("bad"), title="Bad note")
    await mill.tell()
    async with opened(chromium, mill, "/#/dlq") as (page, trouble):
        row = page.locator("tr", has_text="Bad note")
        await row.get_by_role("button", name="Replay").click()
        await row.get_by_role("button", name="Sure?").click()
        await page.get_by_text("Replay was sent").wait_for()
        info = await mill.broker.stream_info(mill.names.control_stream)
        assert info is not None
        assert info.last_seq == 1
        assert trouble == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_narrow_screen_needs_no_sideways_scrolling(
    chromium: str, mill: Running, scheme: str, tmp_path: Path
) -> None:
    """360 pixels wide, in both schemes: the list and one task fit."""
    stream: Stream = mill.stream
    of = card("bad")
    stream.failed(of, "it broke " * 40, attempts=3, title="A title that is rather long for a narrow screen " * 3)
    stream.completed(card("good"), {"summary": "x" * 500}, title="Good note")
    await mill.tell()
    viewport = {"width": 360, "height": 740}
    async with opened(chromium, mill, viewport=viewport, color_scheme=scheme) as (page, trouble):
        await page.locator("tr", has_text="Good note").wait_for()
        for view in ("#/", f"#/task/{of.key}"):
            await page.evaluate("where => { location.hash = where }", view)
            await page.locator("main h2").first.wait_for()
            assert await page.evaluate("document.documentElement.scrollWidth") <= 360
            await page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(16, 20, 19)") == (scheme == "dark")
        assert trouble == []


async def test_the_page_goes_on_after_the_tracker_was_restarted(chromium: str, tmp_path: Path) -> None:
    """The browser reconnects and resumes by the last id; what happened meanwhile is there."""
    server = MemoryServer(SystemClock())
    async with running(tmp_path, server) as first:
        port = first.client.base_url.port or 0
        async with opened(chromium, first) as (page, _):
            await page.get_by_text("live", exact=True).wait_for()
            first.stream.add(Queued(card=card("t"), task=TaskInfo(title="The note")), card("t"))
            await first.tell()
            await page.locator("tr", has_text="The note").wait_for()
            await first.stop()
            async with running(tmp_path, server, port=port) as second:
                second.stream, second.told = first.stream, first.told
                second.stream.started(card("t"))
                await second.tell()
                row = page.locator("tr", has_text="The note")
                await row.locator(".state[data-state=processing]").wait_for()
                await page.get_by_text("live", exact=True).wait_for()
