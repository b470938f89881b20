"""Handlers that call the stub provider (`MILLSTREAM_PROVIDER` is its port): under limits, by `ctx.limit`, or freely."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from millstream import App, Context
from tests.support.calling import Caller

app = App("calls")
QUEUE = "calls"


class Provider:
    """One caller for the process, made when it is first used."""

    def __init__(self) -> None:
        self._caller: Caller | None = None

    def caller(self) -> Caller:
        if self._caller is None:
            self._caller = Caller(int(os.environ["MILLSTREAM_PROVIDER"]))
        return self._caller


provider = Provider()


async def _call(ctx: Context, key: str, payload: dict[str, Any]) -> int:
    """One call that the provider logs, with the tenant as its tag; the status is for the handler to judge."""
    tag = payload.get("tag", ctx.task.tenant_id or "")
    answer = await provider.caller().call(key, tag=tag, tokens=payload.get("tokens", 0), cost=payload.get("cost", 0.0))
    await asyncio.sleep(payload.get("seconds", 0.0))
    return answer.status


@app.task("call", queue=QUEUE, limits=["llm"])
async def call(ctx: Context, payload: dict[str, Any]) -> int:
    return await _call(ctx, "llm", payload)


@app.task("free", queue=QUEUE)
async def free(ctx: Context, payload: dict[str, Any]) -> int:
    return await _call(ctx, "free", payload)


@app.task("billed", queue=QUEUE, limits=["money"])
async def billed(ctx: Context, payload: dict[str, Any]) -> int:
    """Costs what the payload says, whatever was estimated."""
    status = await _call(ctx, "money", payload)
    ctx.usage(cost_usd=payload.get("cost", 0.0))
    return status


@app.task("asked", queue=QUEUE, limits=["llm"])
async def asked(ctx: Context, payload: dict[str, Any]) -> int:
    """Goes through the client that reports by itself; a refusal is an exception of its."""
    url = f"http://127.0.0.1:{os.environ['MILLSTREAM_PROVIDER']}/call"
    answer = await ctx.http.get(url, params={"key": "llm", "tag": ctx.task_id, **payload})
    answer.raise_for_status()
    return answer.status_code


@app.task("spin", queue=QUEUE)
async def spin(ctx: Context, payload: dict[str, Any]) -> int:
    """Makes calls under `ctx.limit`, one after the other, until the time is over."""
    ends, calls = time.monotonic() + payload["seconds"], 0
    while time.monotonic() < ends:
        async with ctx.limit("llm", tokens_in=payload.get("tokens", 0)):
            await provider.caller().call("llm", tag=ctx.task_id, tokens=payload.get("tokens", 0))
        calls += 1
    return calls
