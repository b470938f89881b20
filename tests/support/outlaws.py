"""Handlers that no worker wants: they cancel themselves, will not end, or end the loop."""

from __future__ import annotations

import asyncio
import os

from millstream import App, Context
from tests.support.handlers import effect

app = App("outlaws")


@app.task("cancels.itself", queue="agent-run")
async def cancels_itself(ctx: Context) -> None:
    effect(ctx, "start")
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


async def _deaf() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


@app.task("deaf", queue="agent-run")
async def deaf(ctx: Context) -> None:
    effect(ctx, "start")
    await _deaf()


@app.task("deaf.timed", queue="agent-run", timeout="100ms")
async def deaf_timed(ctx: Context) -> None:
    effect(ctx, "start")
    await _deaf()


async def _exit() -> None:
    raise SystemExit(7)


@app.task("exits.aside", queue="agent-run")
async def exits_aside(ctx: Context) -> None:
    effect(ctx, "start")
    stray = asyncio.get_running_loop().create_task(_exit())
    await asyncio.wait([stray], timeout=60)


@app.task("stops.loop", queue="agent-run")
async def stops_loop(ctx: Context) -> None:
    effect(ctx, "start")
    asyncio.get_running_loop().stop()
    await asyncio.sleep(60)


@app.task("kills.worker", queue="agent-run")
async def kills_worker(ctx: Context) -> None:
    effect(ctx, "start")
    os._exit(1)


@app.task("slow", queue="agent-run")
async def slow(ctx: Context) -> None:
    effect(ctx, "start")
    await asyncio.sleep(0.5)
