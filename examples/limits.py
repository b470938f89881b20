"""Calls under limits that the whole fleet shares: one per task by its handler, or each for itself inside of one.

    export OPENAI_BASE_URL=https://api.openai.com/v1 OPENAI_API_KEY=… SEARCH_URL=https://search.example/v1
    millstream --config limits.toml up --app limits:app          # in this folder
    millstream send ask.model '{"question": "Why?"}' --wait      # in another terminal
    millstream limits

`limits.toml` says how fast, and how much money a day. See docs/limits.md.
"""

import os
from typing import Any

import msgspec

from millstream import App, Context

app = App("ask")
MODEL = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")


class Question(msgspec.Struct):
    question: str


@app.task("ask.model", limits=["model"], timeout="2m")
async def ask(ctx: Context, question: Question) -> str:
    """One call for a task: it starts when the limit has room, and is held in fair order until then."""
    answer = await _complete(ctx, question.question)
    used = answer["usage"]
    ctx.usage(tokens_in=used["prompt_tokens"], tokens_out=used["completion_tokens"])
    return str(answer["choices"][0]["message"]["content"])


@app.task("ask.research", timeout="10m")
async def research(ctx: Context, question: Question) -> list[str]:
    """Several calls to different services: each takes a permit of its own, and waits for it here. The dear one is paid
    from its tenant's budget: `model` names the price."""
    found: list[str] = []
    for page in range(3):
        ctx.progress(page / 4, f"page {page + 1}")
        async with ctx.limit("search"):
            results = await ctx.http.get(os.environ["SEARCH_URL"], params={"q": question.question, "page": page})
            results.raise_for_status()  # a 429 pauses `search` for all workers, and puts this task off: no attempt is lost
            found += results.json()["titles"]
    async with ctx.limit("model", "tenant/{tenant_id}", tokens_in=2000, tokens_out=500, model=MODEL) as grant:
        answer = await _complete(ctx, f"{question.question} Choose from: {found}")
        used = answer["usage"]
        grant.usage(tokens_in=used["prompt_tokens"], tokens_out=used["completion_tokens"])
    return [str(answer["choices"][0]["message"]["content"]), *found]


async def _complete(ctx: Context, text: str) -> dict[str, Any]:
    answer = await ctx.http.post(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        headers={"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"},
        json={"model": MODEL, "messages": [{"role": "user", "content": text}]},
        timeout=60,
    )
    answer.raise_for_status()
    body: dict[str, Any] = answer.json()
    return body
