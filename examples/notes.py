"""The app of `millstream demo`, for a worker of your own: your notes, your model, your limit.

    export OPENAI_BASE_URL=https://api.openai.com/v1 OPENAI_API_KEY=…
    millstream --config millstream.toml up --app notes:app      # in this folder
    python notes.py ~/notes                                      # in another terminal

`millstream.toml` says how fast it may go, for all workers together:

    [limits.llm]
    requests = "60/min"
    tokens = "40_000/min"
"""

import asyncio
import sys
from pathlib import Path

from millstream import Client
from millstream.demo.documents import choose
from millstream.demo.notes import QUEUE, SUMMARIZE, Note, estimate, from_environment


async def submit(folder: Path) -> None:
    """One task for each file; `notes.embed` and `notes.relate` follow from it. Submitting again changes nothing."""
    chosen = choose(folder, folder, max_files=10_000, limit=None)
    async with Client.open(name="notes") as client:
        for document in chosen.documents:
            handle = await client.send(
                SUMMARIZE,
                Note(path=str(document.path), title=document.title),
                queue=QUEUE,
                idempotency_key=f"note:{document.path}:{document.path.stat().st_mtime_ns}",
                title=document.title,
                usage_estimate=estimate(document.tokens),
            )
            print(handle.task_id, document.title)


if __name__ == "__main__":
    asyncio.run(submit(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
else:
    app = from_environment()
